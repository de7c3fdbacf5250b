"""Batches around links that are made together are those that come without."""

import pytest
import torch
from torch_geometric.sampler import NegativeSampling

from pyg_direct import LinkNeighborLoader
from pyg_direct.sampler import NeighborSampler
from pyg_direct.sampler.link_seeds import CapturedLinks
from pyg_direct.sampling.hetero_plan import GeneralPlan
from tests.batches import make_data
from tests.hetero_data import make_hetero
from tests.hetero_graphs import make_parts
from tests.loader.prefetch.batch_groups.test_together import list_epoch
from tests.plans import ON_GPU_PLANS
from tests.sampler.test_link_seeds import CITES, WRITES, make_links

OPTIONS = {
    "binary": {"neg_sampling_ratio": 1.0},
    "no negatives": {},
    "disjoint": {"disjoint": True, "neg_sampling_ratio": 0.5},
    "triplets": {"neg_sampling": NegativeSampling("triplet", 2)},
    "strict": {"neg_sampling_ratio": 1.0, "strict_negatives": True, "exclude_target_edges": True},
    "induced": {"subgraph_type": "induced"},
}


def make_typed(device, option, edge_type=WRITES, **options):
    links = make_links(40, 25 if edge_type == WRITES else 40, 40)
    common = {"batch_size": 7, "shuffle": True, "seed": 3, "device": device, **OPTIONS[option]}
    return LinkNeighborLoader(make_hetero(), [3, 2], (edge_type, links), **common | options)


@pytest.mark.parametrize("edge_type", [WRITES, CITES])
@pytest.mark.parametrize("option", OPTIONS)
def test_batches_are_those_that_come_without(real_device, option, edge_type):
    expected = list_epoch(make_typed("cpu", option, edge_type))

    got = list_epoch(make_typed(real_device, option, edge_type, super_batch=4))

    assert len(got) == 6
    assert got == expected


@ON_GPU_PLANS
@pytest.mark.parametrize("option", ["binary", "disjoint", "triplets", "weighted"])
def test_kernels_place_links_as_steps_do(device, option, monkeypatch):
    weights = NegativeSampling("binary", 1.5, src_weight=torch.arange(40.0), dst_weight=torch.arange(40.0))
    options = {"neg_sampling": weights} if option == "weighted" else OPTIONS[option]
    edge_type = CITES if option in ("disjoint", "weighted") else WRITES
    links = make_links(6, 40 if edge_type == CITES else 25, 40)

    def make():
        return list_epoch(LinkNeighborLoader(make_hetero(), [1], (edge_type, links), batch_size=4, seed=3,
                                             device=device, **options))  # fmt: skip

    got = make()
    monkeypatch.setattr(CapturedLinks, "fits", lambda *_: False)

    assert got == make()


@ON_GPU_PLANS
@pytest.mark.parametrize(("option", "edge_type"), [("binary", CITES), ("triplets", WRITES), ("disjoint", CITES)])
def test_kernels_leave_out_edges_of_links_as_steps_do(device, option, edge_type, monkeypatch):
    graph = make_parts()
    edges = graph.edges[edge_type]
    # A link twice, one with its reverse, one without an edge, and more edges than links.
    turned = [edges[0][::-1]] if edge_type == CITES else []
    links = [*edges[:2], edges[0], *turned, (24, 39), edges[5]]
    graph.edges[edge_type] = [*edges, *edges[:2] * 6]

    def make(exclude_target_edges="reverse", **more):
        return list_epoch(LinkNeighborLoader(make_hetero(graph), [-1], (edge_type, torch.tensor(links).t()), seed=3,
                                             batch_size=5, device=device, exclude_target_edges=exclude_target_edges,
                                             **OPTIONS[option] | more))  # fmt: skip

    def fail(*_):
        raise AssertionError("pairs are not sorted by steps")

    with monkeypatch.context() as patch:
        patch.setattr(GeneralPlan, "_sort_excluded", fail)
        alone, together = make(), make(super_batch=2)
    monkeypatch.setattr(CapturedLinks, "fits", lambda *_: False)

    assert alone == together == make() != make(exclude_target_edges=False)


@ON_GPU_PLANS
@pytest.mark.filterwarnings("ignore:strict_negatives")
@pytest.mark.parametrize(("mode", "times"), [("binary", ""), ("triplet", ""), ("binary", "node")])
def test_kernels_draw_strict_negatives_as_steps_do(device, mode, times, monkeypatch):
    graph = make_parts(times=times)
    # Most pairs are edges, so that negatives are drawn several times, and some links are none.
    graph.edges[CITES] = [(source, target) for source in range(40) for target in range(40) if (source + target) % 9]
    graph.edge_time, graph.edges = {}, {CITES: graph.edges[CITES]}
    links = torch.tensor([[3, 0, 3], [7, 9, 6]])
    more = {"edge_label_time": torch.arange(3) + 4, "time_attr": "time"} if times else {}

    def make():
        sampling = NegativeSampling(mode, 3, src_weight=torch.arange(40.0) if times else None)
        return list_epoch(LinkNeighborLoader(make_hetero(graph), [1], (CITES, links), neg_sampling=sampling, seed=3,
                                             strict_negatives=True, batch_size=2, device=device, **more))  # fmt: skip

    with monkeypatch.context() as patch:
        patch.setattr(NeighborSampler, "_open_links", lambda *_: pytest.fail("negatives are not drawn by steps"))
        got = make()
    monkeypatch.setattr(CapturedLinks, "fits", lambda *_: False)

    assert got == make()


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_links_with_times_too(real_device, mode):
    def make(device, **options):
        return LinkNeighborLoader(make_hetero(make_parts(times="node")), [3, 2], (CITES, make_links(40, 40, 40)),
                                  edge_label_time=torch.arange(40) % 9 + 3, time_attr="time", batch_size=7, seed=3,
                                  neg_sampling=NegativeSampling(mode), device=device, **options)  # fmt: skip

    assert list_epoch(make(real_device, super_batch=3)) == list_epoch(make("cpu"))


@pytest.mark.parametrize("mode", ["binary", "triplet"])
def test_each_link_has_a_window(real_device, mode):
    def make(device, **options):
        return LinkNeighborLoader(make_hetero(make_parts(times="node")), [3, 2], (CITES, make_links(40, 40, 40)),
                                  time_attr="time", batch_size=7, seed=3, neg_sampling=NegativeSampling(mode),
                                  device=device, **options)  # fmt: skip

    end = torch.arange(40) % 9 + 3
    start = end - torch.arange(40) % 5

    batches = list(make(real_device, input_start_time=start, input_end_time=end, super_batch=3))

    assert list_epoch(batches) == list_epoch(make("cpu", input_start_time=start, input_end_time=end))
    for batch in batches:
        papers, part = batch["paper"], batch[CITES]
        begin, until = (papers.seed_start_time, papers.seed_time) if mode == "triplet" else (
            part.edge_label_start_time, part.edge_label_time)  # fmt: skip
        assert begin[: part.input_id.numel()].tolist() == start[part.input_id.cpu()].tolist()
        sources, targets = part.edge_index
        met, owner = papers.time[sources], papers.batch[targets]
        assert bool(((begin[owner] <= met) & (met <= until[owner])).all())
    # Windows of one length are one of all.
    equal = list(make(real_device, input_start_time=end - 3, input_end_time=end))
    other = list(make("cpu", edge_label_time=end, time_window=4))
    assert [batch[CITES].e_id.tolist() for batch in equal] == [batch[CITES].e_id.tolist() for batch in other]


@pytest.mark.parametrize("options", [{"disjoint": True}, {"weight_attr": "edge_attr"}, {}])
def test_a_graph_without_types_too(real_device, options):
    def make(device, **more):
        data = make_data()
        data.edge_attr = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
        return LinkNeighborLoader(data, [3, 2], make_links(), neg_sampling_ratio=1.0, batch_size=7, seed=3,
                                  device=device, **options, **more)  # fmt: skip

    assert list_epoch(make(real_device, super_batch=3)) == list_epoch(make("cpu"))


@pytest.mark.parametrize(("option", "sizes"), [("binary", [4, 2]), ("strict", [4, 2])])
def test_they_are_sampled_in_one_call(monkeypatch, option, sizes):
    loader, seen = make_typed("cpu", option, super_batch=4), []
    ask = GeneralPlan.submit_together
    note = lambda plan, requests, *rest, **more: seen.append(len(requests)) or ask(plan, requests, *rest, **more)  # noqa: E731
    monkeypatch.setattr(GeneralPlan, "submit_together", note)

    list(loader)

    assert seen == sizes


def test_a_sampler_that_draws_its_own_way_is_asked_for_each():
    class Other(NeighborSampler):
        def sample_from_edges(self, index, neg_sampling=None, **options):
            asked.append(index.row.numel())
            return super().sample_from_edges(index, neg_sampling, **options)

    asked = []
    sampler = Other(make_hetero(), [3, 2], device="cpu", seed=3)

    list(make_typed("cpu", "binary", neighbor_sampler=sampler, super_batch=4))

    assert asked == [7] * 5 + [5]

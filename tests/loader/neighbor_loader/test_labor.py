"""`sampling="labor"` through the loader."""

import pytest
import torch
from torch_geometric.sampler import NodeSamplerInput

from pyg_direct import LinkNeighborLoader, NodeLoader
from pyg_direct.errors import ArgumentError
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.sampler import NeighborSampler
from pyg_direct.sampling.random_key import batch_key
from tests.batches import check_contract, make_data
from tests.hetero_data import make_hetero
from tests.hetero_graphs import make_parts
from tests.reference.bidirectional import make_bidirectional
from tests.reference.general import Options, Parts, sample as sample_general
from tests.reference.sample import sample

LABOR = {"sampling": "labor"}


@pytest.mark.parametrize("layer_dependency", [False, True])
def test_batches_are_those_of_the_reference(device, layer_dependency):
    data = make_data()
    graph = (*_rows_of(data),)
    loader = NeighborLoader(data, [3, 2], batch_size=16, seed=3, device=device, sampling="labor",
                            layer_dependency=layer_dependency)  # fmt: skip

    for number, batch in enumerate(loader):
        seeds = list(range(70))[16 * number : 16 * number + 16]
        expected = sample(graph, seeds, [3, 2], batch_key(3, 0, number), sampling="labor",
                          layer_dependency=layer_dependency)  # fmt: skip
        assert batch.n_id.tolist() == expected.n_id
        assert batch.edge_index.tolist() == expected.edge_index
        check_contract(data, batch, seeds, [3, 2])


@pytest.mark.parametrize("layer_dependency", [False, True])
def test_a_given_sampler_draws_as_the_loaders_own(device, layer_dependency):
    data, options = make_data(), {"sampling": "labor", "layer_dependency": layer_dependency, "device": device}
    own = {"batch_size": 16, "seed": 3}

    got = list(NodeLoader(data, NeighborSampler(data, [3, 2], **options), **own))

    for batch, other in zip(got, NeighborLoader(data, [3, 2], **options, **own), strict=True):
        assert [*batch.to_dict()] == [*other.to_dict()]
        assert torch.equal(batch.n_id, other.n_id)
        assert torch.equal(batch.e_id, other.e_id)


def test_a_sampler_whose_options_change_goes_on_with_labor(device):
    data, seeds = make_data(), [3, 9, 3]
    sampler = NeighborSampler(data, [3, 2], sampling="labor", device=device)

    sampler.disjoint = True
    out = sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor(seeds)), key=5)

    graph = Parts({"n": 70}, {("n", "to", "n"): data.edge_index.t().tolist()})
    expected = sample_general(graph, {"n": seeds}, {("n", "to", "n"): [3, 2]}, 5, Options(disjoint=True, **LABOR))
    assert out.node.tolist() == expected.node["n"]
    assert out.batch.tolist() == expected.batch["n"]
    assert out.edge.tolist() == expected.edge["n", "to", "n"]


@pytest.mark.parametrize("options", [
    {"prefetch": 0}, {"prefetch": 2, "super_batch": 3}, {"layer_dependency": True, "super_batch": 2},
    {"subgraph_type": "bidirectional"}, {"subgraph_type": "induced", "disjoint": True},
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_batches_with_types_are_those_of_the_reference(device, options):
    graph = make_parts()
    fanouts = {edge_type: [3, 2] for edge_type in graph.edges}
    loader = NeighborLoader(make_hetero(graph), fanouts, "paper", batch_size=8, seed=3, device=device,
                            **LABOR, **options)  # fmt: skip

    named = {name: value for name, value in options.items() if name in vars(Options())}
    is_turned = named.get("subgraph_type") == "bidirectional"
    own = Options(**{**named, "subgraph_type": "directional"} if is_turned else named, **LABOR)
    for number, batch in enumerate(loader):
        seeds = {"paper": list(range(8 * number, 8 * number + 8))}
        expected = sample_general(graph, seeds, fanouts, batch_key(3, 0, number), own)
        expected = make_bidirectional(expected, False) if is_turned else expected
        check_rows_of(batch, expected)
    assert number == 4


@pytest.mark.parametrize("times", ["node", "edge"])
def test_batches_by_time_are_those_of_the_reference(device, times):
    graph = make_parts(times=times)
    fanouts, when = {edge_type: [4, 3] for edge_type in graph.edges}, [number % 11 for number in range(40)]
    loader = NeighborLoader(make_hetero(graph), fanouts, "paper", torch.tensor(when), time_attr="time", time_window=6,
                            batch_size=16, seed=3, device=device, super_batch=2, **LABOR)  # fmt: skip

    for number, batch in enumerate(loader):
        seeds = list(range(40))[16 * number : 16 * number + 16]
        until = {"paper": [when[seed] for seed in seeds]}
        expected = sample_general(graph, {"paper": seeds}, fanouts, batch_key(3, 0, number),
                                  Options(time_window=6, **LABOR), until)  # fmt: skip
        check_rows_of(batch, expected)


def check_rows_of(batch, expected):
    """Check nodes, edges and trees of a batch."""
    for kind, ids in expected.node.items():
        assert batch[kind].n_id.tolist() == ids
        if expected.batch is not None and ids:
            assert batch[kind].batch.tolist() == expected.batch[kind]
    for edge_type, ids in expected.edge.items():
        assert batch[edge_type].edge_index.tolist() == [expected.row[edge_type], expected.col[edge_type]]
        if ids is not None:
            assert batch[edge_type].e_id.tolist() == ids


@pytest.mark.parametrize("exclude", [False, True])
def test_links_with_types_share_their_picks(device, exclude):
    data, kind = make_hetero(), ("author", "writes", "paper")
    links = data[kind].edge_index[:, :64]
    options = {"edge_label_index": (kind, links), "batch_size": 16, "seed": 1, "device": device,
               "neg_sampling": "binary", "exclude_target_edges": exclude}  # fmt: skip

    labor = list(LinkNeighborLoader(data, [3, 3], **options, **LABOR))
    sampler = NeighborSampler(data, [3, 3], exclude_target_edges=exclude, device=device, **LABOR)
    given = {name: value for name, value in options.items() if name not in ("exclude_target_edges", "device")}
    uniform = list(LinkNeighborLoader(data, [3, 3], **options))

    for batch, other in zip(labor, LinkNeighborLoader(data, [3, 3], neighbor_sampler=sampler, **given), strict=True):
        assert torch.equal(batch["author"].n_id, other["author"].n_id)
        ends = {tuple(pair) for pair in batch[kind].edge_label_index[:, :16].t().tolist()}
        picked = {tuple(pair) for pair in batch[kind].edge_index.t().tolist()}
        assert not exclude or not ends & picked
    assert sum(batch.num_nodes for batch in labor) < sum(batch.num_nodes for batch in uniform)


def test_links_are_sampled_by_labor_too(device):
    data = make_data()
    samplers = [NeighborSampler(data, [3, 3], sampling=way, device=device) for way in ("labor", "uniform")]

    sizes = [sum(batch.num_nodes for batch in LinkNeighborLoader(
        data, [3, 3], data.edge_index[:, :64], neighbor_sampler=sampler, batch_size=16, seed=1))
        for sampler in samplers]  # fmt: skip

    assert sizes[0] < sizes[1]


def _rows_of(data):
    from tests.graphs import Graph

    return Graph(data.edge_index, data.num_nodes).in_rows()


def test_batches_have_fewer_nodes_than_uniform_ones(device):
    data = make_data()
    options = {"num_neighbors": [4, 4], "batch_size": 8, "seed": 1, "device": device}

    sizes = {
        (sampling, dependent): sum(batch.num_nodes for batch in NeighborLoader(
            data, **options, sampling=sampling, layer_dependency=dependent))
        for sampling, dependent in [("uniform", False), ("labor", False), ("labor", True)]
    }  # fmt: skip

    assert sizes["labor", True] < sizes["labor", False] < sizes["uniform", False]


@pytest.mark.parametrize(("options", "words"), [
    ({"sampling": "ladies"}, "sampling must be one of uniform, labor, got 'ladies'"),
    ({"sampling": "labor", "replace": True}, "replace must be False with sampling='labor', got True"),
    ({"layer_dependency": True}, "layer_dependency must be False with sampling='uniform', got True"),
    ({"sampling": "labor", "weight_attr": "w"}, "weight_attr must be None with sampling='labor', got 'w': leave it"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        NeighborLoader(make_data(w=torch.ones(600)), [2], device="cpu", **options)

"""Loaders of a graph in parts, in several processes, give the batches of one machine, bit for bit."""

import copy
import gc
import itertools
import pickle
import sys
import warnings
from functools import partial

import pytest
import torch
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput

from pyg_direct import LinkNeighborLoader, NeighborLoader, Producers
from pyg_direct.distributed.dist_loader import (
    DistLinkNeighborLoader,
    DistNeighborLoader,
    DistSubGraphLoader,
    _DistLoader,
)
from pyg_direct.distributed.dist_neighbor_sampler import DistNeighborSampler
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.distributed.row_exchange import RowExchange
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, LoaderWarning
from pyg_direct.loader.prefetch.lockstep_ranks import Overlap, _Step
from pyg_direct.runtime.comm.communicator import Communicator
from tests.distributed.ranks import COMMON, as_dict, assert_equal, assert_in_turn, make_data, open_graph, write_data
from tests.hetero_data import make_hetero
from tests.hetero_graphs import make_parts
from tests.processes import run_ranks


def copy_output(out):
    """What a transform may give back: an output of its own."""
    return SamplerOutput(out.node, out.row, out.col, out.edge, out.batch, metadata=out.metadata)


NODE_CASES = {
    "plain": {},
    "replace": {"replace": True},
    "disjoint": {"disjoint": True},
    "weights": {"weight_attr": "weight"},
    "times": {"time_attr": "time"},
    "last times": {"time_attr": "time", "temporal_strategy": "last", "time_window": 20},
    "time windows": {
        "time_attr": "time",
        "input_start_time": torch.arange(100) % 9,
        "input_end_time": torch.arange(100) % 50,
    },
    "induced": {"subgraph_type": "induced"},
    "bidirectional": {"subgraph_type": "bidirectional"},
    "transformed": {"subgraph_type": "bidirectional", "transform_sampler_output": copy_output},
}
LINK_CASES = {
    "links": {},
    "binary": {"neg_sampling": "binary"},
    "triplet": {"neg_sampling": "triplet"},
    "timed links": {"neg_sampling": "binary", "time_attr": "time", "edge_label_time": torch.arange(90) % 50},
    "timed link windows": {
        "neg_sampling": "binary",
        "time_attr": "time",
        "input_start_time": torch.arange(90) % 9,
        "input_end_time": torch.arange(90) % 50,
    },
    "strict": {"neg_sampling": "binary", "strict_negatives": True, "exclude_target_edges": "reverse"},
    "strict by time": {
        "neg_sampling": "triplet",
        "strict_negatives": True,
        "time_attr": "time",
        "edge_label_time": torch.arange(90) % 50,
    },
    "excluded": {"exclude_target_edges": True},
    "excluded by weight": {"exclude_target_edges": True, "weight_attr": "weight"},
    "excluded, induced": {"exclude_target_edges": "reverse", "subgraph_type": "induced"},
    "both directions": {"subgraph_type": "bidirectional", "exclude_target_edges": True},
}


def make_loader(name, source, make_nodes, make_links):
    seeds = torch.arange(0, 300, 3)
    if name in NODE_CASES:
        return make_nodes(source, [4, -1, 2], seeds, **NODE_CASES[name], **COMMON)
    links = make_data().edge_index[:, :90]
    if name == "strict":
        # Some are held out, and are no strict negatives either.
        links = torch.cat([links, torch.randint(0, 300, (2, 400), generator=torch.Generator().manual_seed(7))], 1)
    return make_links(source, [4, 3], links, **LINK_CASES[name], **{**COMMON, "batch_size": 10})


def run_cases(rank, folders, cases, options):
    found = {}
    for folder, names in zip(folders, cases, strict=True):
        graph = open_graph(folder, **options)
        for name in names:
            loader = make_loader(name, graph, DistNeighborLoader, DistLinkNeighborLoader)
            loader.record()
            found[name] = [[as_dict(batch) for batch in loader] for _ in range(2)]
            report = loader.report()
            assert report.num_timed == sum(map(len, found[name]))
            # Batches of a group are timed together. Here the second epoch has one: after two steps of one batch.
            has_group = loader._groups() and len(loader) > 3
            assert (len(report.seconds("fetch")) < report.num_timed) == has_group
            assert report.features["x"].num_read > 0
            assert "rows of other parts: 0 fetched" not in str(report)
        graph.close()
    return found


def run_all(rank, folder, count):
    """Batches of cases, of three processes those of some and what they do that have different numbers of them."""
    names = [*NODE_CASES, *LINK_CASES] if count == 2 else ["plain", "times", "binary", "bidirectional"]
    is_timed = {name: "time" in name or "weight" in name for name in names}
    cases = [[name for name in names if is_timed[name] == timed] for timed in (False, True)]
    found = run_cases(rank, [folder / "p", folder / "timed"], cases, {} if count == 2 else {"replicas": "30%"})
    return found, load_overlapped(rank, folder / "p") if count == 2 else run_uneven(rank, folder / "p")


def load_overlapped(rank, folder):
    """Batches that overlap as on GPUs: of two epochs, of a loop that rank 0 leaves, and of unequal numbers of seeds."""
    with pytest.MonkeyPatch.context() as patch, open_graph(folder) as graph:
        patch.setattr(_DistLoader, "_overlaps", lambda loader: True)
        loader = make_loader("plain", graph, DistNeighborLoader, DistLinkNeighborLoader)
        found = [[as_dict(batch) for batch in loader] for _ in range(2)]
        left = len(list(itertools.islice(loader, 2 if rank == 0 else None)))
        own = DistNeighborLoader(graph, [4, 2], torch.arange(20 + 40 * rank), ranks="own", uneven="keep", **COMMON)
        return found, left, len(list(own))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("parts"), make_data()
    write_data(folder / "p", data, request.param)
    write_data(folder / "timed", data, request.param, times=True, weights=True)
    return run_ranks(run_all, request.param, folder, request.param)


def test_batches_are_those_of_one_machine(ranks):
    data, ranks = make_data(), [found for found, _ in ranks]

    for name in ranks[0]:
        alone = make_loader(name, data, NeighborLoader, LinkNeighborLoader)
        for epoch in range(2):
            own = [found[name][epoch] for found in ranks]
            assert set(map(len, own)) == {-(-len(alone) // len(own))}
            assert_in_turn(own, alone)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_batches_that_overlap_are_those_of_one_machine(ranks):
    data, ranks = make_data(), [overlapped for _, overlapped in ranks]

    alone = make_loader("plain", data, NeighborLoader, LinkNeighborLoader)
    for epoch in range(2):
        assert_in_turn([found[epoch] for found, *_ in ranks], alone)
    assert [left for _, left, _ in ranks] == [2, len(ranks[1][0][0])]
    assert [own for *_, own in ranks] == [2, 4]


def make_typed_loaders(source, make_nodes, make_links):
    """Around nodes of a graph with types, and around links."""
    fanouts = {kind: [3, 2] for kind in source.edge_types}
    ends = ("author", "writes", "paper"), torch.arange(20).repeat(2, 1)
    return (make_nodes(source, fanouts, ("paper", torch.arange(40)), batch_size=7, seed=1),
            make_links(source, fanouts, ends, neg_sampling="triplet", strict_negatives=True,
                       exclude_target_edges="reverse", batch_size=6, seed=1))  # fmt: skip


def write_types(folder, num_parts):
    """Partition a graph with types, which is returned."""
    data = make_hetero(make_parts())
    rows = {kind: {"x": data[kind].x} for kind in data.node_types if "x" in data[kind]}
    partition_graph(folder, {kind: data[kind].edge_index for kind in data.edge_types}, num_parts,
                    num_nodes={kind: data[kind].num_nodes for kind in data.node_types}, node_rows=rows,
                    edge_rows={kind: {"edge_attr": data[kind].edge_attr} for kind in data.edge_types})  # fmt: skip
    return data


def assert_typed(data, ranks):
    """That ranks have the batches that one machine makes of a graph with types."""
    for place, loader in enumerate(make_typed_loaders(data, NeighborLoader, LinkNeighborLoader)):
        for number, batch in enumerate(loader):
            expected = {k: v for k, v in to_cpu(as_dict(batch)).items() if k[1] != "num_nodes"}
            unknown = [k for k in as_dict(batch) if k[1] == "num_nodes"]
            assert_equal(ranks[number % len(ranks)][place][number // len(ranks)], expected,
                         drop=unknown + [(kind, "num_nodes") for kind in data.node_types])  # fmt: skip


def to_cpu(batch):
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def run_hetero(rank, folder):
    found = []
    for options in ({}, {"share_rows": True}, {"share_graph": True}):
        with open_graph(folder, **options) as graph:
            loaders = make_typed_loaders(graph, DistNeighborLoader, DistLinkNeighborLoader)
            found.append([[as_dict(batch) for batch in loader] for loader in loaders])
    return found


def test_batches_of_graphs_with_types(tmp_path):
    data = write_types(tmp_path / "p", 2)

    ranks = run_ranks(run_hetero, 2, tmp_path / "p")

    for found in zip(*ranks, strict=True):
        assert_typed(data, found)


def run_alone(rank, folder):
    """Batches of a process that has no other one to exchange with, and could not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "swap", None)
        with open_graph(folder, share_graph=False) as graph:
            loaders = [make_loader(name, graph, DistNeighborLoader, DistLinkNeighborLoader) for name in ALONE]
            return [[as_dict(batch) for batch in loader] for loader in loaders]


ALONE = ("times", "strict")


def test_a_graph_of_one_process_is_never_exchanged(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 1, times=True, weights=True)

    (found,) = run_ranks(run_alone, 1, tmp_path / "p")

    for name, batches in zip(ALONE, found, strict=True):
        for batch, other in zip(batches, make_loader(name, data, NeighborLoader, LinkNeighborLoader), strict=True):
            assert_equal(batch, as_dict(other))


def run_without_a_seed(rank, folder):
    """Epochs of loaders that share the graph's memory or not, with nodes shared out or of the process's own."""
    found = {}
    for shared in (False, True):
        with open_graph(folder, share_graph=shared) as graph:
            for ranks in ("auto", "own"):
                before = torch.get_rng_state()
                loader = DistNeighborLoader(graph, [4, 2], torch.arange(60), batch_size=10, shuffle=True, ranks=ranks)
                assert torch.equal(torch.get_rng_state(), before)
                epochs = []
                for seed in (5, 5, 6):
                    # Only that of rank 0 counts where batches are shared out.
                    torch.manual_seed(seed + (7 * len(epochs) + rank if rank > 0 and ranks == "auto" else 0))
                    epochs.append([as_dict(batch) for batch in loader])
                found[shared, ranks] = epochs
    return found


def test_without_a_seed_epochs_follow_the_generator_of_rank_0(tmp_path):
    data = make_data()
    write_data(tmp_path / "p", data, 2)

    ranks = run_ranks(run_without_a_seed, 2, tmp_path / "p")

    alone = NeighborLoader(data, [4, 2], torch.arange(60), batch_size=10, shuffle=True, device="cpu")
    for place, seed in enumerate((5, 5, 6)):
        torch.manual_seed(seed)
        batches = list(alone)
        for shared in (False, True):
            assert_in_turn([found[shared, "auto"][place] for found in ranks], batches)
    for found, shared in itertools.product(ranks, (False, True)):
        first, again, other = [[batch["e_id"].tolist() for batch in epoch] for epoch in found[shared, "own"]]
        assert first == again != other
    # Of equal generators too.
    assert str(ranks[0][False, "own"]) != str(ranks[1][False, "own"])


def run_uneven(rank, folder):
    graph = open_graph(folder)
    # Different numbers of batches, none at all, and one who stops early.
    seeds = torch.arange(rank * 30)
    own = DistNeighborLoader(graph, [3, 2], seeds, batch_size=10, ranks="own", uneven="keep", seed=1)
    counts = [len(list(own)), len(list(own))]
    every = DistNeighborLoader(graph, [3], batch_size=10, uneven="keep", seed=1)
    for number, _ in enumerate(every):
        if number == 2 and rank == 1:
            break
    counts.append(number)
    # What comes after is in step again.
    last = DistSubGraphLoader(graph, [2], torch.arange(20), batch_size=20, uneven="keep", seed=2)
    counts.append([as_dict(batch) for batch in last])
    graph.close()
    return counts


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_uneven_ranks_never_wait_for_each_other(ranks):
    ranks = [counts for _, counts in ranks]

    assert [found[:2] for found in ranks] == [[0, 0], [3, 3], [6, 6]]
    assert [found[2] for found in ranks] == [9, 2, 9]
    assert [len(found[3]) for found in ranks] == [1, 0, 0]
    (alone,) = NeighborLoader(make_data(), [2], torch.arange(20), batch_size=20, seed=2, device="cpu",
                              subgraph_type="induced")  # fmt: skip
    assert_equal(ranks[0][3][0], as_dict(alone))


def run_overlapped(rank, folder):
    """Batches made alone, and in steps that sample one while rows of another come; ranks have 2, 5 and 12 of them."""
    found = []
    with open_graph(folder) as graph, pytest.MonkeyPatch.context() as patch:
        for overlaps in (False, True):
            patch.setattr(_DistLoader, "_overlaps", lambda self, overlaps=overlaps: overlaps)
            loader = DistNeighborLoader(graph, [3, 2], torch.arange((20, 50, 120)[rank]), batch_size=10, ranks="own",
                                        uneven="keep", seed=1, prefetch=2 if overlaps else 0)  # fmt: skip
            found.append([[as_dict(batch) for batch in loader] for _ in range(2)])
            found.append(loader._group.most)
    return found


def test_steps_of_several_batches_with_an_exchange_each(tmp_path):
    write_data(tmp_path / "p", make_data(), 3)

    for rank, (alone, one, steps, several) in enumerate(run_ranks(run_overlapped, 3, tmp_path / "p")):
        assert (one, several) == (1, 8)
        assert [len(epoch) for epoch in steps] == [(2, 5, 12)[rank]] * 2
        for got, expected in zip(itertools.chain(*steps), itertools.chain(*alone), strict=True):
            assert_equal(got, expected)


class Noted:
    """A loader, the stages of its batches, and a batch on its way, which note the exchanges that processes enqueue."""

    def __init__(self):
        self.exchanges = []

    def _submit_together(self, positions, keys):
        return self.submit(keys[0], None)

    def submit(self, number, seeds):
        self.exchanges.append("sample")
        return self

    def finish(self, *_):
        # Sampled again, as a message was too short.
        self.exchanges.append("sample again")
        return [self]

    def fetch(self, *_):
        self.exchanges.append("rows")

    def _build_for_others(self, out):
        self.fetch()

    def _find_plain(self):
        return None

    def make(self, counts):
        """Make so many batches of steps of three."""
        overlap = Overlap(*(partial(stage, self, self) for stage in (
            _DistLoader._begin, _DistLoader._finish_begun, _DistLoader._build_begun)))  # fmt: skip
        ended = []
        for count in counts:
            overlap.make(_Step([(number, None) for number in range(count)]), 3, ended.append)
        overlap.flush(ended.append)
        return [len(step.made) for step in ended]


@pytest.mark.parametrize("counts", [[3, 0], [3, 1], [2, 2]])
def test_processes_with_fewer_batches_exchange_in_one_order_with_the_others(counts):
    few, most = Noted(), Noted()

    assert few.make(counts) == [count for count in counts if count]
    assert most.make([3, 3]) == [3, 3]

    assert few.exchanges == most.exchanges
    assert len(few.exchanges) == 18


def run_own(rank, folder):
    """Batches of nodes and of links that rank 0 has one of and rank 1 four, in two epochs; and what is refused."""
    found, refused = {}, []
    for whole in (False, True):
        with open_graph(folder, share_graph=whole) as graph:
            seeds = torch.arange(10 + 25 * rank)
            for uneven in ("pad", "drop", "keep"):
                options = {"batch_size": 10, "ranks": "own", "uneven": uneven, "seed": 1}
                loaders = [DistNeighborLoader(graph, [3, 2], seeds, **options),
                           DistLinkNeighborLoader(graph, [3, 2], seeds.repeat(2, 1), **options)]  # fmt: skip
                found[whole, uneven] = [[len(loader), *(batch.input_id.tolist() for _ in range(2) for batch in loader)]
                                        for loader in loaders]  # fmt: skip
            # A sampler of the program's is begun anew, by default.
            ordered = {"batch_size": 10, "ranks": "own", "seed": 1, "sampler": list(range(len(seeds)))[::-1]}
            for key, more in (("ordered", {}), ("cut", {"uneven": "drop"})):
                loader = DistNeighborLoader(graph, [3, 2], seeds, **ordered, **more)
                found[whole, key] = [len(loader), *(batch.input_id.tolist() for _ in range(2) for batch in loader)]
            for nodes, more in ((seeds[: 10 * rank], {}), (seeds, {"sampler": iter([0, 1])})):
                with pytest.raises(ArgumentError) as error:
                    DistNeighborLoader(graph, [3], nodes, ranks="own", seed=1, **more)
                refused.append(str(error.value))
    return found, refused


def test_ranks_with_seeds_of_their_own_have_equally_many_batches(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)

    ranks = run_ranks(run_own, 2, tmp_path / "p")

    cut = [list(range(35))[start : start + 10] for start in range(0, 35, 10)]
    for whole in (False, True):
        for place in range(2):
            own = [{uneven: found[whole, uneven][place] for uneven in ("pad", "drop", "keep")} for found, _ in ranks]
            assert own[0] == {"pad": [4, *cut[:1] * 8], "drop": [1, *cut[:1] * 2], "keep": [1, *cut[:1] * 2]}
            assert own[1] == {"pad": [4, *cut, *cut], "drop": [1, *cut[:1] * 2], "keep": [4, *cut, *cut]}
        for rank, (found, _) in enumerate(ranks):
            order = list(range(10 + 25 * rank))[::-1]
            parts = [order[start : start + 10] for start in range(0, len(order), 10)]
            assert found[whole, "ordered"] == [4, *parts * (2 if rank else 8)]
            assert found[whole, "cut"] == [1, *parts[:1] * 2]
    for _, refused in ranks:
        for none, length in zip(refused[::2], refused[1::2], strict=True):
            assert none.startswith("input_nodes, or links, must give each process a batch with ranks='own' and "
                                   "uneven='pad', got none on rank 0: ")  # fmt: skip
            assert length.startswith("sampler and batch_sampler must have a length with ranks='own', got one without")


def sample_amid(rank, folder):
    data, wrong = make_data(), 0
    with open_graph(folder) as graph:
        loader = DistNeighborLoader(graph, [4, 3], torch.arange(100), prefetch=4, batch_size=5, seed=1)
        sampler, index = DistNeighborSampler(graph, [3, 2]), NodeSamplerInput(None, torch.arange(9) + rank)
        links = EdgeSamplerInput(None, torch.arange(9), torch.arange(9) + rank)
        nodes, ends = sampler.sample_from_nodes(index, key=7).node, sampler.sample_from_edges(links, key=7).node
        found = []
        for batch in loader:
            found.append(as_dict(batch))
            wrong += not torch.equal(graph.times_of("nodes", torch.arange(50)), data.time[:50])
            wrong += not torch.equal(sampler.sample_from_nodes(index, key=7).node, nodes)
            wrong += not torch.equal(sampler.sample_from_edges(links, key=7).node, ends)
    return found, wrong


def test_times_and_samples_are_asked_for_while_batches_are_made_ahead(folder, data):
    ranks = run_ranks(sample_amid, 2, folder)

    alone = NeighborLoader(data, [4, 3], torch.arange(100), batch_size=5, seed=1, device="cpu")
    assert [wrong for _, wrong in ranks] == [0, 0]
    assert_in_turn([found for found, _ in ranks], alone)


def sample_wrongly(rank, folder):
    with open_graph(folder) as graph:
        sampler = DistNeighborSampler(graph, [3, 2])
        with pytest.raises(IdError, match=r"seeds must lie in \[0, 300\), got 1000"):
            sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1000])))
        return len(list(DistNeighborLoader(graph, [2], torch.arange(10), batch_size=5, seed=1)))


def test_a_process_alone_goes_on_after_ids_that_are_refused(tmp_path):
    write_data(tmp_path / "one", make_data(), 1)

    assert run_ranks(sample_wrongly, 1, tmp_path / "one") == [2]


def send(rank, folder):
    found = []
    with open_graph(folder) as graph:
        loader = DistNeighborLoader(graph, [2], batch_size=5)
        for call in (lambda: pickle.dumps(graph), lambda: pickle.dumps(DistNeighborSampler(graph, [2])),
                     lambda: copy.deepcopy(loader), lambda: next(iter(Producers(loader, device="cpu")))):  # fmt: skip
            with pytest.raises(ArgumentTypeError) as caught:
                call()
            found.append(str(caught.value))
    return found


def test_a_graph_in_parts_cannot_be_sent(tmp_path):
    write_data(tmp_path / "one", make_data(), 1)

    (told,) = run_ranks(send, 1, tmp_path / "one")

    why = "a DistGraph belongs to the process that made it and cannot be sent or copied: make one in each process"
    assert told == [why] * 4


def make_unlike(rank, folder):
    found = []
    for share in (False, True):
        with open_graph(folder, share_graph=share) as graph:
            for own in ({"num_neighbors": [3, 2 + rank]}, {"input_nodes": torch.arange(9) + rank}, {"seed": rank},
                        {"batch_size": 1 + rank}, {"shuffle": rank == 0}, {"replace": rank == 0}):  # fmt: skip
                for ranks in ("auto", "own"):
                    try:
                        DistNeighborLoader(graph, **{"num_neighbors": [3], "seed": 1, "ranks": ranks, **own})
                        found.append("")
                    except ArgumentError as error:
                        found.append(str(error))
    return found


def test_processes_that_are_given_something_else_are_told(folder):
    first, second = run_ranks(make_unlike, 2, folder)

    how = "num_neighbors and other options of sampling must be equal in all processes, got others on rank 1 than on"
    what = "seeds, and seed, batch_size, shuffle and drop_last, must be equal in all processes"
    exchanging = [how, how, what, "", what, "", what, "", what, "", how, how]
    # There each samples alone, in a graph that all see.
    alone = ["", "", what, "", what, "", what, "", what, "", "", ""]
    assert first == second
    assert [bool(text) for text in first] == [bool(words) for words in exchanging + alone]
    assert all(words in text for text, words in zip(first, exchanging + alone, strict=True))


def close_early(rank, folder):
    ignored = []
    sys.unraisablehook = lambda failure: ignored.append(str(failure.exc_value))
    with open_graph(folder) as graph:
        batches = iter(DistNeighborLoader(graph, [3, 2], torch.arange(100), batch_size=10, seed=1))
        count = 1 + len(list(batches)) if next(batches) and rank == 1 else 1
    said = ""
    if rank == 0:
        try:
            next(batches)
        except ArgumentError as error:
            said = str(error)
    del batches
    gc.collect()
    return count, said, ignored


def test_a_rank_that_closes_the_graph_in_an_epoch_serves_the_others(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)

    first, second = run_ranks(close_early, 2, tmp_path / "p")

    assert first == (1, "the graph must be open until the last batch of an epoch, got a closed one", [])
    assert second == (5, "", [])


def test_a_part_holds_no_more_than_its_share(tmp_path):
    data, sizes = make_data(4000, 40_000), {}
    for count in (1, 2):
        write_data(tmp_path / str(count), data, count)
        parts = [GraphPart(tmp_path / str(count), part, device=torch.device("cpu")) for part in range(count)]
        for part in parts:
            part.place()
        sizes[count] = [part.num_bytes for part in parts]

    assert max(sizes[2]) <= 0.6 * sizes[1][0]


def run_errors(rank, folder):
    graph = open_graph(folder)
    found = []
    for arguments in ({"ranks": 3}, {"num_workers": 2}, {"time_attr": "time"}, {"weight_attr": "w"}, {"num": 1}):
        try:
            DistNeighborLoader(graph, [3], **arguments)
        except (ArgumentError, TypeError) as error:
            found.append(str(error))
    for links, options in ((None, {}), (torch.zeros(2, 1).long(), {"exclude_target_edges": "both"})):
        try:
            DistLinkNeighborLoader(graph, [3], links, **options)
        except ArgumentError as error:
            found.append(str(error))
    for path, options in ((folder, {"silence": 0}), (folder.parent / "three", {})):
        try:
            open_graph(path, **options)
        except ArgumentError as error:
            found.append(str(error))
    return found


def test_errors_name_the_argument(tmp_path):
    write_data(tmp_path / "p", make_data(), 2)
    write_data(tmp_path / "three", make_data(), 3)

    found, _ = run_ranks(run_errors, 2, tmp_path / "p")

    words = ["ranks must be", "num_workers must be 0", "time_attr must be None", "weight_attr must be None", "num",
             "edge_label_index must hold links", "exclude_target_edges must be",
             "silence must be above 0", "folder must hold a part for each of the 2 processes"]  # fmt: skip
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text


def test_types_that_are_equal_once_joined_have_rows_of_their_own(tmp_path):
    """Also times, whose name inside is none that an attribute has."""
    pair = torch.arange(6).repeat(2, 1)
    first, second = ("a", "b to", "c"), ("a b", "to", "c")
    values = {kind: torch.full((6,), number) for number, kind in enumerate((first, second, "a", "a.b"))}
    partition_graph(tmp_path / "p", {first: pair, second: pair, ("a.b", "in", "c"): pair}, 2, progress=False,
                    edge_rows={first: {"edge_attr": values[first]}, second: {"edge_attr": values[second]}},
                    node_rows={"a": dict.fromkeys(("b.x", "../x", ":time"), values["a"]), "a.b": {"x": values["a.b"]}},
                    node_time={"a": torch.arange(6)})  # fmt: skip

    part = GraphPart(tmp_path / "p", 1, device=torch.device("cpu"))
    rows = RowExchange(part, None)

    for kind, key in ((first, "edge_attr"), (second, "edge_attr"), ("a", "b.x"), ("a.b", "x"), ("a", ":time")):
        assert (part.tables[kind].rows[key] == values[kind][0]).all()
        assert torch.equal(rows.features[kind][key][torch.arange(1)].cpu(), values[kind][:1])
    assert len(rows.describe()) == 6


def write_late(rank, folder, share_graph):
    """How often a loader tells writes to own rows, and what it says of a seed that is written through NumPy."""
    graph, said = open_graph(folder, share_graph=share_graph), []
    loader = DistNeighborLoader(graph, [4, 3], torch.arange(64), time_attr="time", batch_size=8, seed=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LoaderWarning)
        list(loader)
        said.append(len(told))
        for _ in loader:
            graph.own_rows("x").add_(1)
        list(loader)
        said += [str(one.message) for one in told]
    weight = torch.eye(300)[1].clone()
    links = DistLinkNeighborLoader(graph, [2], torch.arange(64).repeat(2, 1), batch_size=8, seed=1,
                                   neg_sampling=NegativeSampling("triplet", dst_weight=weight))  # fmt: skip
    for node in (1, 7):
        weight.numpy()[:] = torch.eye(300)[node].numpy()
        said.append({*torch.cat([batch.n_id[batch.dst_neg_index] for batch in links]).tolist()})
    loader.input_data.node.numpy()[:] = 10**7
    try:
        list(loader)
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("share_graph", [False, "auto"])
def test_rows_that_are_written_are_told_once_and_wrong_seeds_are_named(tmp_path, share_graph):
    write_data(tmp_path / "p", make_data(), 2, times=True)

    ranks = run_ranks(write_late, 2, tmp_path / "p", share_graph)

    for num_before, words, *negatives, error in ranks:
        assert num_before == 0
        assert negatives == [{1}, {7}]
        assert "own_rows" in words
        assert "DistFeature" in words
        # Each process finds its own, or hears of another's.
        assert "IdError: seeds must lie in [0, 300), got 10000000" in error

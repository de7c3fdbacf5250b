"""Samples around the links of a graph in parts are those of the whole graph, on every rank, with every option."""

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling, NodeSamplerInput

from pyg_direct.distributed.dist_neighbor_sampler import DistNeighborSampler
from pyg_direct.errors import ArgumentError
from pyg_direct.sampler import NeighborSampler
from tests.distributed.lockstep import LockstepGraph, run_lockstep
from tests.distributed.ranks import make_data, write_data
from tests.distributed.test_part_plan import write
from tests.hetero_graphs import make_parts
from tests.plans import KEY, ON_GPU_PLANS

FANOUTS = [3, 2]
TRIPLET = NegativeSampling("triplet", amount=2)
OPTIONS = {
    "plain": ({}, None),
    "binary": ({}, "binary"),
    "triplet": ({"replace": True}, TRIPLET),
    "trees": ({"disjoint": True}, "binary"),
    "weights": ({"weight_attr": "weight"}, "binary"),
    "times": ({"time_attr": "time", "temporal_strategy": "last"}, "binary"),
    "window": ({"time_attr": "time", "time_window": 20}, TRIPLET),
    "windows": ({"time_attr": "time"}, "triplet"),
    "excluded": ({"exclude_target_edges": True}, "binary"),
    "both ways": ({"exclude_target_edges": True, "subgraph_type": "bidirectional"}, None),
    "induced": ({"subgraph_type": "induced", "exclude_target_edges": "reverse"}, "binary"),
    "strict": ({"strict_negatives": True}, "binary"),
    "strict triplets": ({"strict_negatives": True, "exclude_target_edges": True}, TRIPLET),
}


def list_links(edge_index, count, edge_type=None, times=None):
    """Links of each of so many batches; the last one has none."""
    sizes = [7, 5, 6, 1, 0][-count:]
    found, first = [], 0
    for size in sizes:
        at = slice(first, first + size)
        found.append(EdgeSamplerInput(torch.arange(size), *edge_index[:, at].clone(), input_type=edge_type,
                                      time=None if times is None else times[at]))  # fmt: skip
        first += size
    return found


def as_lists(out):
    """A sample in lists, with its metadata."""

    def listed(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: listed(part) for key, part in value.items()}
        return [listed(part) for part in value] if isinstance(value, tuple) else value

    names = ("node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges", "metadata")
    return {name: listed(getattr(out, name)) for name in names}


def sample_in_parts(folder, batches, options, negatives, device, num_parts=2):
    """For each batch, which the ranks take in turn: its sample and the number of exchanges that it took."""

    def run(transport):
        graph, found = LockstepGraph(folder, transport, device), []
        sampler = DistNeighborSampler(graph, FANOUTS, **options)
        for number in range(transport.rank, len(batches), num_parts):
            before = transport.num_exchanges
            out = sampler.sample_from_edges(batches[number], negatives, key=KEY + number)
            found.append((as_lists(out), transport.num_exchanges - before))
        return found

    ranks = run_lockstep(run, num_parts)
    return [ranks[number % num_parts][number // num_parts] for number in range(len(batches))]


@ON_GPU_PLANS
@pytest.mark.parametrize("name", OPTIONS)
def test_links_of_a_graph_without_types(tmp_path, device, name):
    options, negatives = OPTIONS[name]
    data = make_data(40, 160)
    timed, weighted = "time_attr" in options, "weight_attr" in options
    write_data(tmp_path / "p", data, 2, times=timed, weights=weighted)
    times = data.time[data.edge_index].amax(0) if timed else None
    if name == "windows":
        times = torch.stack([times - 25, times], 1)
    batches = list_links(data.edge_index, 4, times=times)

    got = sample_in_parts(tmp_path / "p", batches, options, negatives, device)

    alone = NeighborSampler(data, FANOUTS, device="cpu", **options)
    for number, (links, (found, _)) in enumerate(zip(batches, got, strict=True)):
        assert found == as_lists(alone.sample_from_edges(links, negatives, key=KEY + number))


def write_typed(folder):
    """Write two parts of a graph with types; its relations as PyG has them."""
    graph, data = make_parts(), HeteroData()
    write(folder, graph, 2)
    for kind, count in graph.num_nodes.items():
        data[kind].num_nodes = count
    for kind, pairs in graph.edges.items():
        data[kind].edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
    return data


@ON_GPU_PLANS
@pytest.mark.parametrize("edge_type", [("author", "writes", "paper"), ("paper", "cites", "paper")], ids="_".join)
@pytest.mark.parametrize(("options", "negatives"), [({}, "binary"), ({"exclude_target_edges": True}, TRIPLET)], ids=str)
def test_links_of_a_graph_with_types(tmp_path, device, edge_type, options, negatives):
    data = write_typed(tmp_path / "p")
    batches = list_links(data[edge_type].edge_index, 4, edge_type)

    got = sample_in_parts(tmp_path / "p", batches, options, negatives, device)

    alone = NeighborSampler(data, FANOUTS, device="cpu", **options)
    for number, (links, (found, _)) in enumerate(zip(batches, got, strict=True)):
        assert found == as_lists(alone.sample_from_edges(links, negatives, key=KEY + number))


@ON_GPU_PLANS
@pytest.mark.filterwarnings("ignore:.*exclude_target_edges")
def test_links_of_no_relation_of_the_graph_take_equal_exchanges_on_all_ranks(tmp_path, device):
    data = write_typed(tmp_path / "p")
    # The last rank has no links at last.
    batches = list_links(data["author", "writes", "paper"].edge_index, 4, ("author", "likes", "paper"))

    got = sample_in_parts(tmp_path / "p", batches, {"exclude_target_edges": True}, None, device)

    alone = NeighborSampler(data, FANOUTS, device="cpu", exclude_target_edges=True)
    for number, (links, (found, _)) in enumerate(zip(batches, got, strict=True)):
        assert found == as_lists(alone.sample_from_edges(links, None, key=KEY + number))


@ON_GPU_PLANS
def test_links_with_negatives_take_the_exchanges_of_their_hops(tmp_path, device):
    data = make_data(40, 160)
    write_data(tmp_path / "p", data, 2)
    (links, *_), options = list_links(data.edge_index, 4), {"replace": True}
    batches = [links] * 6

    got = sample_in_parts(tmp_path / "p", batches, options, "binary", device)

    # Two a hop and one at the end, once the segments have room.
    assert [count for _, count in got[-2:]] == [2 * len(FANOUTS) + 1] * 2


@ON_GPU_PLANS
@pytest.mark.filterwarnings("ignore:strict_negatives")
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("negatives", [NegativeSampling("binary", amount=3), TRIPLET], ids=["binary", "triplet"])
def test_strict_negatives_of_a_dense_graph_are_drawn_until_none_is_left(tmp_path, device, negatives, timed):
    data = make_data(6, 90)
    # Nodes 0 and 1 have edges to all.
    ends = torch.cartesian_prod(torch.arange(2), torch.arange(6)).t()
    data.edge_index[:, : ends.shape[1]] = ends
    write_data(tmp_path / "p", data, 2, times=timed)
    times = data.time[data.edge_index].amax(0) if timed else None
    options = {"strict_negatives": True} | ({"time_attr": "time"} if timed else {})
    batches = list_links(data.edge_index, 4, times=times)

    got = sample_in_parts(tmp_path / "p", batches, options, negatives, device)

    alone = NeighborSampler(data, FANOUTS, device="cpu", **options)
    for number, (links, (found, _)) in enumerate(zip(batches, got, strict=True)):
        assert found == as_lists(alone.sample_from_edges(links, negatives, key=KEY + number))


@ON_GPU_PLANS
def test_strict_negatives_take_two_exchanges_and_none_of_the_host(tmp_path, device):
    data = make_data(40, 160)
    write_data(tmp_path / "p", data, 2)
    links = list_links(data.edge_index, 4)
    # Links that kernels do not read are brought to them.
    links[0].row = links[0].row.int()
    alone = NeighborSampler(data, FANOUTS, device="cpu", strict_negatives=True)

    def run(transport):
        graph, counts = LockstepGraph(tmp_path / "p", transport, device), []
        sampler = DistNeighborSampler(graph, FANOUTS, strict_negatives=True)
        own = links[-1 if transport.rank else 0]
        for _ in range(6):
            before = transport.num_exchanges
            out = sampler.sample_from_edges(own, "binary", key=KEY)
            counts.append(transport.num_exchanges - before)
            # Asked once: whether all edges go both ways.
            graph.communicator.exchange = None
        return as_lists(out), counts[-1]

    (first, count), (second, count_of_none) = run_lockstep(run, 2)

    assert count == count_of_none == 2 * len(FANOUTS) + 1 + 2
    assert first == as_lists(alone.sample_from_edges(links[0], "binary", key=KEY))
    assert second["node"] == []


@ON_GPU_PLANS
@pytest.mark.parametrize("edge_type", [("author", "writes", "paper"), ("paper", "cites", "paper")], ids="_".join)
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"exclude_target_edges": True}], ids=str)
def test_strict_negatives_of_a_graph_with_types(tmp_path, device, edge_type, options):
    data = write_typed(tmp_path / "p")
    batches, options = list_links(data[edge_type].edge_index, 4, edge_type), options | {"strict_negatives": True}

    got = sample_in_parts(tmp_path / "p", batches, options, "binary", device)

    alone = NeighborSampler(data, FANOUTS, device="cpu", **options)
    for number, (links, (found, _)) in enumerate(zip(batches, got, strict=True)):
        assert found == as_lists(alone.sample_from_edges(links, "binary", key=KEY + number))


@ON_GPU_PLANS
def test_times_that_are_not_given_are_those_of_nodes_and_missing_for_links(tmp_path, device):
    data = make_data(40, 160)
    write_data(tmp_path / "p", data, 2, times=True)
    seeds = [NodeSamplerInput(None, torch.tensor(nodes)) for nodes in ([3, 7, 3], [], [39])]

    def run(transport):
        sampler = DistNeighborSampler(LockstepGraph(tmp_path / "p", transport, device), FANOUTS, time_attr="time")
        # All ranks raise it before they exchange.
        with pytest.raises(ArgumentError, match="time must be given for links of a graph in parts"):
            sampler.sample_from_edges(list_links(data.edge_index, 4)[0], "binary", key=KEY)
        outs = sampler.submit_together(seeds, [KEY, KEY + 1, KEY + 2]).finish()
        return list(map(as_lists, outs))

    alone = NeighborSampler(data, FANOUTS, time_attr="time", device="cpu")
    expected = [as_lists(alone.sample_from_nodes(own, key=KEY + number)) for number, own in enumerate(seeds)]
    assert run_lockstep(run, 2) == [expected] * 2


@ON_GPU_PLANS
def test_labor_is_refused_before_ranks_exchange(tmp_path, device):
    data = write_typed(tmp_path / "p")

    def run(transport):
        sampler = DistNeighborSampler(LockstepGraph(tmp_path / "p", transport, device), FANOUTS)
        sampler.sampling = "labor"
        with pytest.raises(ArgumentError, match="sampling must be 'uniform' for a graph in parts, got 'labor'"):
            sampler.sample_from_nodes(NodeSamplerInput(None, torch.arange(3), input_type="paper"), key=KEY)
        return data.num_nodes

    assert run_lockstep(run, 2) == [69, 69]

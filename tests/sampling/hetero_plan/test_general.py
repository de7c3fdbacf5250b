"""The general plan gives the batch of the reference, bit for bit, with every option and on every device."""

import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, LoaderWarning
from pyg_direct.graph import hetero_topo
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import LINKS, NODES, HeteroTopo
from pyg_direct.kernels.sampling.worklist import COLUMNS, RELATION
from pyg_direct.ops import run_kernel
from pyg_direct.ops.sampling import sample_hetero as ops
from pyg_direct.sampling import hetero_gpu, hetero_plan as general, local_ids
from pyg_direct.sampling.hetero_plan import GeneralPlan, list_work
from pyg_direct.sampling.sampling_options import GeneralRecipe, Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import GRAPHS, make_random_graph
from tests.hetero_graphs import make_parts, make_topo, odd_parts, odd_requests
from tests.poison import poisoned_memory
from tests.reference.general import Options, Output, Parts, sample

KEY = 2**63 + 11
LINK = ("node", "to", "node")


def make_plan(graph, device, fanouts, options):
    return GeneralPlan(make_topo(graph).place("auto", device), GeneralRecipe(fanouts, **asdict(options)))


def as_tensors(parts, device):
    return {kind: torch.tensor(values, dtype=torch.int64, device=device) for kind, values in parts.items()}


def assert_equal(got, expected):
    for name, value in vars(expected).items():
        found = getattr(got, name)
        if isinstance(found, dict):
            found = {kind: part if isinstance(part, list) else part.tolist() for kind, part in found.items()}
        assert found == value, name
    for parts in (got.node, got.row, got.col, got.edge, got.batch or {}):
        assert {part.dtype for part in parts.values()} <= {torch.int64}


SEEDS = {"paper": [39, 0, 7, 0], "author": [3, 24]}
SEED_TIME = {"paper": [3, 11, 0, 7], "author": [5, -9]}
OPTIONS = {
    "uniform": Options(),
    "replace": Options(replace=True),
    "disjoint": Options(disjoint=True),
    "last": Options(temporal_strategy="last"),
    "last with replacement": Options(temporal_strategy="last", replace=True),
    "before": Options(time_comparison="<"),
    "window": Options(time_window=4),
    "last before within a window": Options(temporal_strategy="last", time_comparison="<", time_window=5),
    "induced": Options(subgraph_type="induced"),
    "disjoint induced": Options(disjoint=True, subgraph_type="induced", time_window=6),
}


@pytest.mark.parametrize("direction", ["in", pytest.param("out", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("times", ["", "node", "edge"], ids=["no times", "node times", "edge times"])
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name in ("replace", "before", "window", "induced") else ())
    for name in OPTIONS
])  # fmt: skip
def test_batch_matches_reference(device, name, times, weighted, direction):
    graph = make_parts(times=times, weighted=weighted, direction=direction)
    fanouts = {edge_type: [4 - number, 2, -1 if number == 2 else 3] for number, edge_type in enumerate(graph.edges)}
    plan = make_plan(graph, device, fanouts, OPTIONS[name])

    with poisoned_memory():
        got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=as_tensors(SEED_TIME, device))

    assert_equal(got, sample(graph, SEEDS, fanouts, KEY, OPTIONS[name], SEED_TIME))


@given(data=st.data(), replace=st.booleans(), disjoint=st.booleans(), induced=st.booleans(), last=st.booleans(),
       strict=st.booleans(), window=st.none() | st.integers(0, 4) | st.just(2**63 - 1), weighted=st.booleans(),
       key=st.integers(0, 2**64 - 1))  # fmt: skip
def test_batch_matches_reference_on_any_graph(device, data, replace, disjoint, induced, last, strict, window, weighted,
                                              key):  # fmt: skip
    graph = data.draw(odd_parts(weighted))
    seeds, seed_time, fanouts = data.draw(odd_requests(graph))
    options = Options(replace, disjoint, "induced" if induced else "directional", "last" if last else "uniform",
                      "<" if strict else "<=", window)  # fmt: skip
    plan = make_plan(graph, device, fanouts, options)

    got = plan.sample(as_tensors(seeds, device), key, seed_time=as_tensors(seed_time, device))

    assert_equal(got, sample(graph, seeds, fanouts, key, options, seed_time))


@pytest.mark.parametrize("name", ["random", "hub", "parallel", "isolated", "empty"])
@pytest.mark.parametrize("recipe", [Recipe((3, 2)), Recipe((2, 3), replace=True), Recipe((-1, 0, 2)), Recipe(()),
                                    Recipe((80,))])  # fmt: skip
def test_one_relation_draws_as_the_plans_for_it(device, name, recipe):
    graph = GRAPHS[name]
    seeds = torch.tensor([graph.num_nodes - 1, 0, 2, 0] if graph.num_nodes else [], dtype=torch.int64, device=device)
    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    expected = open_plan(topo.place("auto", device), recipe).sample(seeds, KEY)

    placed = HeteroTopo(graph.num_nodes, topo).place("auto", device)
    got = GeneralPlan(placed, GeneralRecipe(recipe.fanouts, recipe.replace)).sample(seeds, KEY)

    assert torch.equal(got.node[NODES], expected.n_id)
    assert torch.equal(torch.stack([got.row[LINKS], got.col[LINKS]]), expected.edge_index)
    assert torch.equal(got.edge[LINKS], expected.e_id)
    assert got.num_sampled_nodes[NODES] == expected.num_sampled_nodes
    assert got.num_sampled_edges[LINKS] == expected.num_sampled_edges


WINDOWS = {"paper": [[3, 9], [11, 11], [-5, 12], [8, 2]], "author": [[-(2**63), 2**63 - 1], [0, 5]]}


@pytest.mark.parametrize("options", [
    Options(seed_windows=True), Options(seed_windows=True, temporal_strategy="last", time_comparison="<"),
    Options(seed_windows=True, subgraph_type="induced", replace=True),
])  # fmt: skip
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("times", ["node", "edge"])
def test_each_seed_has_a_window_of_its_own(device, times, weighted, options):
    graph = make_parts(times=times, weighted=weighted)
    plan = make_plan(graph, device, [4, 3], options)
    request = as_tensors(SEEDS, device), as_tensors(WINDOWS, device)

    got = [plan.sample(request[0], KEY, seed_time=request[1]), *plan.sample_together([request] * 2, [KEY, 7])]

    fanouts = {edge_type: [4, 3] for edge_type in graph.edges}
    for batch, key in zip(got, (KEY, KEY, 7), strict=True):
        assert_equal(batch, sample(graph, SEEDS, fanouts, key, options, WINDOWS))
    with pytest.raises(ArgumentError, match="seed_time must be given where each seed has a window"):
        plan.sample(request[0], KEY)
    with pytest.raises(ArgumentError, match=r"seed_time must have shape \(4, 2\), got \(4,\)"):
        plan.sample(request[0], KEY, seed_time=as_tensors(SEED_TIME, device))


@pytest.mark.slow
@pytest.mark.parametrize("fanouts", [(15, 10, 5), (1300,), (-1, -1)])
@pytest.mark.parametrize("disjoint", [False, True])
def test_large_batch_matches_reference(device, fanouts, disjoint):
    graph = make_parts()
    seeds, options = {"paper": list(range(40)), "author": list(range(25))}, Options(disjoint=disjoint)
    by_relation = {edge_type: list(fanouts) for edge_type in graph.edges}

    got = make_plan(graph, device, list(fanouts), options).sample(as_tensors(seeds, device), KEY)

    assert_equal(got, sample(graph, seeds, by_relation, KEY, options))


@pytest.mark.parametrize("limit", ["table", "bound", "times", "one thread"])
def test_batch_does_not_depend_on_the_way_it_is_made(device, monkeypatch, limit):
    graph = make_parts(times="node" if limit == "times" else "")
    fanouts = {edge_type: [4, 3] for edge_type in graph.edges}
    if limit == "table":
        for module in (general, hetero_gpu):
            monkeypatch.setattr(module, "fits_table", lambda *_: False)
    elif limit == "one thread":
        monkeypatch.setattr(run_kernel, "FEW_ITEMS", 10**6)
    elif limit == "bound":
        monkeypatch.setattr(ops, "_LARGE_BOUND", 10)
    else:
        monkeypatch.setattr(hetero_topo, "_MOST_COPIED_TIMES", 0)
    times = SEED_TIME if limit == "times" else None

    plan = make_plan(graph, device, fanouts, Options())
    got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=None if times is None else as_tensors(times, device))

    assert_equal(got, sample(graph, SEEDS, fanouts, KEY, Options(), times))


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_sources_that_torch_sorts_give_the_batch_of_the_reference(monkeypatch, kind, disjoint):
    # As on a GPU for graphs in parts.
    monkeypatch.setattr(general, "runs_on_gpu", lambda _: True)
    monkeypatch.setattr(GeneralPlan, "is_captured", False)
    graph, options = make_parts(times="edge" if disjoint else ""), Options(disjoint=disjoint, subgraph_type=kind)
    plan = make_plan(graph, torch.device("cpu"), [4, 0, 3], options)

    got = plan.sample(as_tensors(SEEDS, "cpu"), KEY, seed_time=as_tensors(SEED_TIME, "cpu"))

    assert_equal(got, sample(graph, SEEDS, {kind: [4, 0, 3] for kind in graph.edges}, KEY, options, SEED_TIME))


@pytest.mark.parametrize("disjoint", [False, True])
def test_more_types_than_a_block_has_threads_match_reference(device, disjoint):
    kinds = [f"t{number}" for number in range(12)]
    edges = {(a, "to", b): [(0, 1), (1, 1), (2, 0)] for a, b in zip(kinds, [*kinds[1:], kinds[0]], strict=True)}
    graph, options = Parts(dict.fromkeys(kinds, 3), edges), Options(disjoint=disjoint)
    seeds = {kind: [1] for kind in kinds}

    got = make_plan(graph, device, [2, 2], options).sample(as_tensors(seeds, device), KEY)

    assert_equal(got, sample(graph, seeds, {edge_type: [2, 2] for edge_type in edges}, KEY, options))


def test_the_number_of_kernels_does_not_grow_with_the_relations(device, monkeypatch):
    launched = []
    for module, name in ((ops, "run_cpu"), (ops, "run_gpu"), (local_ids, "run_cpu"), (hetero_gpu, "run_gpu")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda kernel, *args, real=real, **stream: (
            launched.append(1), real(kernel, *args, **stream)))  # fmt: skip

    def count_kernels(num_relations):
        pairs = [(node, (node * 7) % 20) for node in range(20)]
        graph = Parts({"a": 20, "b": 20}, {("a", f"r{n}", "ab"[n % 2]): pairs for n in range(num_relations)})
        plan = make_plan(graph, device, [2, 2], Options())
        launched.clear()
        plan.sample(as_tensors({"a": [1, 2], "b": [3]}, device), KEY)
        return len(launched)

    assert count_kernels(40) == count_kernels(3) > 0


def test_a_plan_serves_one_batch_after_the_other(device):
    graph = make_parts()
    fanouts = {edge_type: [3, 3] for edge_type in graph.edges}
    plan = make_plan(graph, device, fanouts, Options())

    batches = [plan.sample(as_tensors({"paper": [n]}, device), n) for n in range(4)]

    for n, batch in enumerate(batches):
        assert_equal(batch, sample(graph, {"paper": [n]}, fanouts, n))


def test_seeds_have_their_own_times(device):
    graph = make_parts(times="node")
    fanouts = {edge_type: [4, 4] for edge_type in graph.edges}

    got = make_plan(graph, device, fanouts, Options()).sample(as_tensors({"paper": [5, 6]}, device), KEY)

    assert_equal(got, sample(graph, {"paper": [5, 6]}, fanouts, KEY))


def test_batch_is_made_bidirectional_as_pyg_makes_it(device):
    graph = make_parts()
    directed = make_plan(graph, device, [4, 3], Options()).sample(as_tensors(SEEDS, device), KEY)
    parts = (directed.node, directed.row, directed.col, directed.edge)

    with pytest.warns(LoaderWarning, match="no reverse relation"):
        got = make_plan(graph, device, [4, 3], Options(subgraph_type="bidirectional")).sample(
            as_tensors(SEEDS, device), KEY)  # fmt: skip

    with pytest.warns(UserWarning, match="reverse edge type"):
        expected = HeteroSamplerOutput(*parts).to_bidirectional()
    for edge_type in graph.edges:
        assert torch.equal(got.row[edge_type], expected.row[edge_type])
        assert torch.equal(got.col[edge_type], expected.col[edge_type])
        assert (got.edge[edge_type] is None) == (expected.edge[edge_type] is None)
    assert got.num_sampled_nodes is expected.num_sampled_nodes is None


def test_bidirectional_edges_of_one_relation_keep_their_ids(device):
    graph = make_random_graph(30, 200)
    placed = HeteroTopo(30, graph.edge_index).place("auto", device)
    seeds = torch.tensor([3, 4], device=device)
    directed = GeneralPlan(placed, GeneralRecipe([4, 3])).sample(seeds, KEY)

    got = GeneralPlan(placed, GeneralRecipe([4, 3], subgraph_type="bidirectional")).sample(seeds, KEY)

    expected = SamplerOutput(directed.node[NODES], directed.row[LINKS], directed.col[LINKS],
                             directed.edge[LINKS]).to_bidirectional()  # fmt: skip
    row, col, n_id = got.row[LINKS].cpu(), got.col[LINKS].cpu(), got.node[NODES].cpu()
    assert row.tolist() == expected.row.tolist()
    assert col.tolist() == expected.col.tolist()
    ends = graph.edge_index[:, got.edge[LINKS].cpu()].sort(dim=0).values
    assert torch.equal(ends, torch.stack([n_id[row], n_id[col]]).sort(dim=0).values)
    # It would be sent with a sample, and stay with it.
    assert got.sampled is None


@pytest.mark.sparse
@pytest.mark.parametrize("directed", [True, False], ids=["directional", "induced"])
def test_all_neighbors_are_those_of_torch_sparse(directed):
    import torch_sparse  # noqa: F401

    graph = make_parts()
    topo = make_topo(graph)
    seeds = as_tensors({"paper": [3, 17], "author": [2]}, "cpu")
    colptr, row, perm = {}, {}, {}
    for edge_type, pairs in graph.edges.items():
        source, target = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()
        order = target.sort(stable=True).indices
        counts = torch.bincount(target, minlength=graph.num_nodes[edge_type[2]])
        name = "__".join(edge_type)
        colptr[name] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        row[name], perm[name] = source[order], order
    fanouts = {name: [-1, -1] for name in row}

    node, rows, cols, edges = torch.ops.torch_sparse.hetero_neighbor_sample(
        list(graph.num_nodes), list(graph.edges), colptr, row, seeds, fanouts, 2, False, directed
    )

    recipe = GeneralRecipe([-1, -1], subgraph_type="directional" if directed else "induced")
    got = GeneralPlan(topo.place(device="cpu"), recipe).sample(seeds, KEY)
    for kind, ids in node.items():
        assert sorted(got.node[kind].tolist()) == sorted(ids.tolist())
    for edge_type in graph.edges:
        name, (source, _, target) = "__".join(edge_type), edge_type
        expected = zip(node[source][rows[name]].tolist(), node[target][cols[name]].tolist(),
                       perm[name][edges[name]].tolist(), strict=True)  # fmt: skip
        found = zip(got.node[source][got.row[edge_type]].tolist(), got.node[target][got.col[edge_type]].tolist(),
                    got.edge[edge_type].tolist(), strict=True)  # fmt: skip
        assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("fanouts", "message"), [
    ([2, -2], "must hold values of at least -1"),
    ({("a", "r", "b"): [1]}, "must name known relations"),
    ({("author", "writes", "paper"): [1]}, "must name every relation"),
    ([1] * 32, "must have at most 31 hops"),
])  # fmt: skip
def test_fanouts_that_do_not_fit_are_refused(fanouts, message):
    with pytest.raises(ArgumentError, match=message):
        make_plan(make_parts(), "cpu", fanouts, Options())


def test_relations_with_different_hops_are_refused():
    graph = make_parts()
    fanouts = {edge_type: [1] * (1 + number) for number, edge_type in enumerate(graph.edges)}

    with pytest.raises(ArgumentError, match="the same number of hops"):
        make_plan(graph, "cpu", fanouts, Options())


@pytest.mark.parametrize(("options", "message"), [
    ({"subgraph_type": "round"}, "subgraph_type must be one of directional, bidirectional, induced, got 'round'"),
    ({"temporal_strategy": "first"}, "temporal_strategy must be one of uniform, last, got 'first'"),
    ({"time_comparison": ">"}, "time_comparison must be one of <=, <, got '>'"),
    ({"time_window": -1}, "time_window must be None or an integer"),
])  # fmt: skip
def test_unknown_options_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        GeneralRecipe([1], **options)


@pytest.mark.parametrize(("seeds", "seed_time", "error", "message"), [
    ({"paper": torch.tensor([40])}, None, IdError, r"seeds\['paper'\] must lie in \[0, 40\), got 40"),
    ({"paper": torch.tensor([0.5])}, None, ArgumentTypeError, "must have dtype int64 or int32"),
    ({"planet": torch.tensor([0])}, None, ArgumentError, "must name known node types"),
    (torch.tensor([0]), None, ArgumentTypeError, "must map node types to tensors"),
    ({"author": torch.tensor([0])}, None, ArgumentError, "must be given for seeds without times"),
    ({"paper": torch.tensor([0])}, {"paper": torch.tensor([0, 1])}, ArgumentError, "seed_time must have shape"),
    ({"paper": torch.tensor([0])}, {"paper": torch.tensor([0.5])}, ArgumentTypeError, "seed_time must hold integers"),
    ({"paper": torch.tensor([0])}, {"author": torch.tensor([0])}, ArgumentError, "seed_time must have the types"),
])  # fmt: skip
def test_bad_seeds_are_refused(seeds, seed_time, error, message):
    plan = make_plan(make_parts(times="node"), "cpu", [2], Options())

    with pytest.raises(error, match=message):
        plan.sample(seeds, KEY, seed_time=seed_time)


def test_times_of_edges_need_times_of_seeds():
    plan = make_plan(make_parts(times="edge"), "cpu", [2], Options())

    with pytest.raises(ArgumentError, match=r"seed_time \(a loader's input_time\) must be given for a graph"):
        plan.sample({"paper": torch.tensor([0])}, KEY)


def test_more_trees_than_an_integer_numbers_are_refused(monkeypatch):
    monkeypatch.setattr("pyg_direct.sampling.seeds._IDENTITY_BITS", 10)
    graph = make_parts()
    plan = make_plan(graph, torch.device("cpu"), [1], Options(disjoint=True))

    with pytest.raises(ArgumentError, match="seeds must be fewer for disjoint trees over so many nodes, got 9"):
        plan.sample({"paper": torch.arange(9)}, KEY)


def test_edges_of_a_hop_are_bounded_by_fanouts():
    topo = make_topo(make_parts())
    counts, fanouts = np.array([5, 2, 0, 1]), np.array([9, 2, 3, 4, 1])
    _, work = list_work(topo, np.zeros(5, np.int64), fanouts, counts, np.zeros(4, np.int64), topo.type_starts, 0)
    relations = work.reshape(-1, COLUMNS)[:-1, RELATION]

    assert ops._bound_edges(work) == (counts[topo.expanded[relations]] * fanouts[relations]).sum()
    # Of all neighbors there is no bound.
    _, work = list_work(topo, np.zeros(5, np.int64), -fanouts // fanouts, counts, np.zeros(4, np.int64),
                        topo.type_starts, 0)  # fmt: skip
    assert ops._bound_edges(work) is None


def choose_pairs(graph, rng, share):
    """Pairs of each relation, as tensors and as sets, most of them edges."""
    chosen = {kind: [pair for pair in pairs if rng.random() < share] for kind, pairs in graph.edges.items()}
    chosen["paper", "cites", "paper"] += [(0, 0), (0, 39), (0, 39)]
    given = {kind: torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t() for kind, pairs in chosen.items()}
    return given, {kind: set(pairs) for kind, pairs in chosen.items()}


EXCLUSIONS = ["uniform", "replace", "disjoint", "last", "last with replacement", "window", "induced"]


@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("times", ["", "edge"], ids=["no times", "edge times"])
@pytest.mark.parametrize("name", EXCLUSIONS)
def test_excluded_edges_are_sampled_as_if_the_graph_had_none(device, name, times, weighted):
    graph = make_parts(times=times, weighted=weighted, direction="out" if name == "disjoint" else "in")
    fanouts = {kind: [4 - number, 2, -1 if number == 2 else 3] for number, kind in enumerate(graph.edges)}
    plan = make_plan(graph, device, fanouts, OPTIONS[name])
    excluded, graph.excluded = choose_pairs(graph, random.Random(1), 0.4)

    with poisoned_memory():
        got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=as_tensors(SEED_TIME, device), excluded=excluded)

    assert_equal(got, sample(graph, SEEDS, fanouts, KEY, OPTIONS[name], SEED_TIME))


@pytest.mark.parametrize("name", ["uniform", "last", "induced"])
def test_batches_made_together_exclude_edges_of_their_own(device, name):
    graph = make_parts(times="edge" if name == "last" else "", weighted=True)
    fanouts = {kind: [3, 2] for kind in graph.edges}
    plan = make_plan(graph, device, fanouts, OPTIONS[name])
    rng = random.Random(2)
    excluded = [choose_pairs(graph, rng, share)[0] for share in (0.5, 0.0, 0.9)]
    requests = [(as_tensors(SEEDS, device), as_tensors(SEED_TIME, device))] * 3

    together = plan.sample_together(requests, [KEY, 7, 8], excluded)

    for got, own, key in zip(together, excluded, [KEY, 7, 8], strict=True):
        alone = plan.sample(*requests[0][:1], key, seed_time=requests[0][1], excluded=own)
        assert_equal(got, Output(**{name: to_lists(getattr(alone, name)) for name in Output.__annotations__}))


def to_lists(parts):
    return parts and {kind: part if isinstance(part, list) else part.tolist() for kind, part in parts.items()}


@pytest.mark.parametrize("replace", [False, True])
def test_a_hub_is_picked_among_the_edges_that_are_left(device, replace):
    weights = [1.0 + number % 3 for number in range(3000)]
    graph = Parts({"node": 3001}, {LINK: [(number + 1, 0) for number in range(3000)]}, edge_weight={LINK: weights})
    plan = make_plan(graph, device, {LINK: [40]}, Options(replace=replace))
    left = [7, 1500, 1501, 2999] if replace else range(0, 3000, 4)
    gone = sorted(set(range(3000)) - set(left))
    excluded = {LINK: torch.stack([torch.tensor(gone) + 1, torch.zeros(len(gone), dtype=torch.int64)])}
    graph.excluded = {LINK: {(number + 1, 0) for number in gone}}

    got = plan.sample({"node": torch.tensor([0], device=device)}, KEY, excluded=excluded)

    assert_equal(got, sample(graph, {"node": [0]}, {LINK: [40]}, KEY, Options(replace=replace)))

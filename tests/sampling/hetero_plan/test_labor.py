"""LABOR with types, times and trees gives the batch of the reference on every device. Keys are fixed."""

from dataclasses import replace as replace_fields

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import LINKS, NODES, HeteroTopo
from pyg_direct.kernels.sampling.labor import BLOCK_CANDIDATES, CANDIDATES, LONG_ROW
from pyg_direct.ops.sampling.sample_hetero import Frontier, pick_edges
from pyg_direct.sampling.hetero_plan import GeneralPlan, list_work
from pyg_direct.sampling.sampling_options import GeneralRecipe, Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import GRAPHS
from tests.hetero_graphs import make_parts, odd_parts, odd_requests
from tests.poison import poisoned_memory
from tests.reference.general import Options, Parts, pick_edges as pick_by_reference, sample
from tests.sampling.hetero_plan.test_general import KEY, SEED_TIME, SEEDS, as_tensors, assert_equal, make_plan


def for_all(graph, fanouts):
    """The same fanouts for each relation."""
    return dict.fromkeys(graph.edges, fanouts)


LABOR = Options(sampling="labor")
OPTIONS = {
    "plain": LABOR,
    "same keys in all hops": replace_fields(LABOR, layer_dependency=True),
    "disjoint": replace_fields(LABOR, disjoint=True),
    "last": replace_fields(LABOR, temporal_strategy="last"),
    "window": replace_fields(LABOR, time_window=4, time_comparison="<", layer_dependency=True),
    "induced": replace_fields(LABOR, subgraph_type="induced"),
}


@pytest.mark.parametrize("times", ["", "node", "edge"], ids=["no times", "node times", "edge times"])
@pytest.mark.parametrize("name", OPTIONS)
def test_batch_matches_reference(device, name, times):
    graph = make_parts(times=times)
    fanouts = {edge_type: [4 - number, 2, -1 if number == 2 else 3] for number, edge_type in enumerate(graph.edges)}
    plan = make_plan(graph, device, fanouts, OPTIONS[name])

    with poisoned_memory():
        got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=as_tensors(SEED_TIME, device))

    assert_equal(got, sample(graph, SEEDS, fanouts, KEY, OPTIONS[name], SEED_TIME))


@given(data=st.data(), disjoint=st.booleans(), induced=st.booleans(), last=st.booleans(), dependent=st.booleans(),
       window=st.none() | st.integers(0, 4), key=st.integers(0, 2**64 - 1))  # fmt: skip
def test_batch_matches_reference_on_any_graph(device, data, disjoint, induced, last, dependent, window, key):
    graph = data.draw(odd_parts())
    seeds, seed_time, fanouts = data.draw(odd_requests(graph))
    options = Options(False, disjoint, "induced" if induced else "directional", "last" if last else "uniform", "<=",
                      window, sampling="labor", layer_dependency=dependent)  # fmt: skip
    plan = make_plan(graph, device, fanouts, options)

    got = plan.sample(as_tensors(seeds, device), key, seed_time=as_tensors(seed_time, device))

    assert_equal(got, sample(graph, seeds, fanouts, key, options, seed_time))


@pytest.mark.parametrize("name", ["random", "hub", "parallel", "isolated", "empty"])
@pytest.mark.parametrize("recipe", [Recipe((3, 2), sampling="labor"), Recipe((-1, 0, 2), sampling="labor"),
                                    Recipe((2, 4), sampling="labor", layer_dependency=True),
                                    Recipe((80,), sampling="labor")])  # fmt: skip
def test_one_relation_draws_as_the_plans_for_it(device, name, recipe):
    graph = GRAPHS[name]
    seeds = torch.tensor([graph.num_nodes - 1, 0, 2, 0] if graph.num_nodes else [], dtype=torch.int64, device=device)
    topo = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    expected = open_plan(topo.place("auto", device), recipe).sample(seeds, KEY)

    own = GeneralRecipe(recipe.fanouts, sampling="labor", layer_dependency=recipe.layer_dependency)
    got = GeneralPlan(HeteroTopo(graph.num_nodes, topo).place("auto", device), own).sample(seeds, KEY)

    assert torch.equal(got.node[NODES], expected.n_id)
    assert torch.equal(torch.stack([got.row[LINKS], got.col[LINKS]]), expected.edge_index)
    assert torch.equal(got.edge[LINKS], expected.e_id)


def test_a_hop_over_a_list_of_the_host_picks_the_same(device):
    graph, fanouts = make_parts(), [2, 0, 3, -1, 2]
    plan = make_plan(graph, device, {kind: [own] for kind, own in zip(graph.edges, fanouts, strict=True)}, LABOR)
    topo, counts = plan.topology.topo, np.array([*graph.num_nodes.values()])
    nodes = torch.cat([torch.arange(count, device=device) for count in counts.tolist()])
    _, work = list_work(topo, plan.flags, plan.fanouts[0], counts, np.zeros_like(counts), topo.type_starts, KEY)

    picked = pick_edges(plan.rows, work, Frontier(nodes, nodes[:0], nodes[:0], 0), plan.rules, hop=0)

    expected = [edge for kind, own in zip(graph.edges, fanouts, strict=True) for node in range(graph.num_nodes[kind[2]])
                for _, edge in pick_by_reference(graph, kind, node, None, own, KEY, 0, None, LABOR)]  # fmt: skip
    assert picked.ids[: picked.ends[-1]].tolist() == expected


def make_hubs(num_sources):
    """Hubs of two types with rows of any length; with few sources, most edges are parallel."""
    lengths = [LONG_ROW, LONG_ROW + 1, 0, BLOCK_CANDIDATES + 5, CANDIDATES + 1, 2, 2 * LONG_ROW + 3]
    pairs = [(7919 * place % num_sources, hub) for hub, length in enumerate(lengths) for place in range(length)]
    return Parts({"other": 3, "leaf": num_sources, "hub": len(lengths), "group": 1}, {
        ("other", "to", "hub"): [(place % 3, hub) for hub in range(len(lengths)) for place in range(5)],
        ("leaf", "to", "hub"): pairs, ("leaf", "in", "group"): [(leaf, 0) for leaf, _ in pairs]})  # fmt: skip


# Rows of one source many times have equal keys, which no bound parts.
@pytest.mark.parametrize(("num_sources", "fanout"), [
    (5000, 1), (5000, 5), (5000, CANDIDATES - 1), (5000, BLOCK_CANDIDATES + 3), (1, 4), (3, 5), (3, CANDIDATES - 1),
])  # fmt: skip
def test_rows_of_any_length_match_reference(device, num_sources, fanout):
    graph, seeds = make_hubs(num_sources), {"hub": [6, 3, 0, 1, 2, 5, 4], "group": [0]}
    plan = make_plan(graph, device, [fanout], LABOR)

    got = plan.sample(as_tensors(seeds, device), KEY)

    assert_equal(got, sample(graph, seeds, for_all(graph, [fanout]), KEY, LABOR))


def test_rows_of_all_relations_and_trees_pick_the_same_sources(device):
    leaves = list(range(60))
    graph = Parts({"leaf": 60, "a": 2, "b": 2}, {
        ("leaf", "to", "a"): [(leaf, own) for own in range(2) for leaf in leaves],
        ("leaf", "to", "b"): [(leaf, own) for own in range(2) for leaf in reversed(leaves)]})  # fmt: skip
    seeds = {"a": [0, 1], "b": [1, 0]}

    options = [LABOR, replace_fields(LABOR, disjoint=True)]
    alone, by_tree = (make_plan(graph, device, [7], own).sample(as_tensors(seeds, device), KEY) for own in options)

    assert len(alone.node["leaf"]) == 7
    assert (by_tree.node["leaf"].reshape(4, 7) == alone.node["leaf"]).all()


@pytest.mark.parametrize("disjoint", [False, True])
def test_batches_of_a_group_have_keys_of_their_own(device, disjoint):
    graph, options = make_parts(), replace_fields(LABOR, disjoint=disjoint)
    plan = make_plan(graph, device, [3, 2], options)
    requests = [{"paper": [number, 3, 7], "author": [2 * number]} for number in range(3)]

    got = plan.sample_together([(as_tensors(seeds, device), None) for seeds in requests], [KEY, 5, KEY])

    for sampled, seeds, key in zip(got, requests, [KEY, 5, KEY], strict=True):
        assert_equal(sampled, sample(graph, seeds, for_all(graph, [3, 2]), key, options))


@pytest.mark.parametrize("times", ["", "edge"], ids=["no times", "edge times"])
def test_excluded_edges_are_not_picked(device, times):
    graph = make_parts(times=times)
    writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
    graph.excluded = {writes: graph.edges[writes][::3], cites: graph.edges[cites][::4]}
    plan = make_plan(graph, device, [3, 2], LABOR)
    excluded = {edge_type: torch.tensor(pairs, device=device).t() for edge_type, pairs in graph.excluded.items()}

    got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=as_tensors(SEED_TIME, device),
                      excluded=excluded)  # fmt: skip

    assert_equal(got, sample(graph, SEEDS, for_all(graph, [3, 2]), KEY, LABOR, SEED_TIME))


def test_excluded_edges_of_long_rows_are_not_picked(device):
    graph, seeds = make_hubs(5000), {"hub": [6, 3, 0, 1, 4], "group": [0]}
    kind = ("leaf", "to", "hub")
    graph.excluded = {kind: [*set(graph.edges[kind][:: LONG_ROW // 8])]}
    plan = make_plan(graph, device, [5], LABOR)

    got = plan.sample(as_tensors(seeds, device), KEY,
                      excluded={kind: torch.tensor(graph.excluded[kind], device=device).t()})  # fmt: skip

    assert_equal(got, sample(graph, seeds, for_all(graph, [5]), KEY, LABOR))

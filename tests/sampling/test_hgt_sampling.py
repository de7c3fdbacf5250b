import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.sampling.hgt_sampling import HgtPlan
from tests.hetero_graphs import make_parts, make_topo, odd_parts
from tests.reference import hgt as reference
from tests.reference.general import Parts

NUM_SAMPLES = {"paper": [4, 3], "author": [3, 5], "venue": [1, 1]}


def place(graph, device):
    return make_topo(graph).place(device=device)


def edges_of(sample):
    return {kind: sorted((int(sample.node[kind[0]][row]), int(col), int(ids)) for row, col, ids
                         in zip(sample.row[kind], sample.col[kind], sample.edge[kind], strict=True))
            for kind in sample.row}  # fmt: skip


@pytest.mark.parametrize("key", [0, 7])
def test_matches_reference(device, key):
    graph = make_parts()
    seeds = {"paper": [3, 17, 3], "author": [0]}
    nodes, edges = reference.sample(graph, seeds, NUM_SAMPLES, key)

    got = HgtPlan(place(graph, device), NUM_SAMPLES).sample({k: torch.tensor(v) for k, v in seeds.items()}, key)

    assert {kind: ids.tolist() for kind, ids in got.node.items()} == nodes
    assert edges_of(got) == {kind: sorted(pairs) for kind, pairs in edges.items()}


def test_matches_reference_where_a_node_lists_thousands(real_device):
    # More than a table of budgets begins with; both layers leave some of equal budgets.
    pairs = [(source, 0) for source in range(1, 2500)] + [(source, 1) for source in range(500, 900)]
    graph = Parts({"a": 2500}, {("a", "to", "a"): pairs})
    nodes, edges = reference.sample(graph, {"a": [1, 0]}, {"a": [900, 7]}, 5)
    topo = HeteroTopo({"a": 2500}, {("a", "to", "a"): torch.tensor(pairs).t()}).place(device=real_device)

    got = HgtPlan(topo, {"a": [900, 7]}, -1).sample({"a": torch.tensor([1, 0])}, 5)

    assert {kind: ids.tolist() for kind, ids in got.node.items()} == nodes
    assert edges_of(got) == {kind: sorted(pairs) for kind, pairs in edges.items()}


@settings(max_examples=20)
@given(graph=odd_parts(), key=st.integers(0, 2**64 - 1), data=st.data())
def test_matches_reference_on_odd_graphs(graph, key, data):
    graph = Parts(graph.num_nodes, graph.edges)
    seeds = {kind: data.draw(st.lists(st.integers(0, size - 1), max_size=3))
             for kind, size in graph.num_nodes.items() if size}  # fmt: skip
    wanted = {kind: data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) for kind in graph.num_nodes}
    nodes, edges = reference.sample(graph, seeds, wanted, key)

    plan = HgtPlan(place(graph, torch.device("cpu")), wanted)
    got = plan.sample({k: torch.tensor(v, dtype=torch.int64) for k, v in seeds.items()}, key)

    assert {kind: ids.tolist() for kind, ids in got.node.items()} == nodes
    assert edges_of(got) == {kind: sorted(pairs) for kind, pairs in edges.items()}


def test_chances_grow_with_the_square_of_the_budget():
    # Two targets list node 0, one of them also node 1: budgets 1 + 1/2 and 1/2, chances 9 to 1.
    pairs = torch.tensor([[0, 0, 1], [0, 1, 1]])
    topo = HeteroTopo({"a": 2, "b": 2}, {("a", "to", "b"): pairs}).place(device="cpu")
    plan = HgtPlan(topo, {"a": [1]})

    first = [int(plan.sample({"b": torch.tensor([0, 1])}, key).node["a"][0]) for key in range(2000)]

    assert np.mean(first) == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 2000) ** 0.5)


def test_a_hub_is_looked_at_in_part():
    pairs = torch.stack([torch.arange(1, 201), torch.zeros(200, dtype=torch.int64)])
    topo = HeteroTopo({"a": 201}, {("a", "to", "a"): pairs}).place(device="cpu")
    seeds = {"a": torch.tensor([0])}

    few = HgtPlan(topo, {"a": [500]}).sample(seeds, 1)
    all_of_them = HgtPlan(topo, {"a": [500]}, most_neighbors=-1).sample(seeds, 1)

    assert few.node["a"].numel() == 51
    assert all_of_them.node["a"].numel() == 201
    assert all_of_them.row["a", "to", "a"].numel() == 200


def test_no_seeds_give_an_empty_sample(device):
    got = HgtPlan(place(make_parts(), device), NUM_SAMPLES).sample({}, 0)

    assert all(ids.numel() == 0 for ids in [*got.node.values(), *got.row.values()])


@pytest.mark.parametrize(("wanted", "words"), [({"nope": [1]}, "nope"), ({"paper": [-1]}, "at least 0")])
def test_refuses_unknown_types_and_negative_numbers(wanted, words):
    with pytest.raises(ArgumentError, match=words):
        HgtPlan(place(make_parts(), torch.device("cpu")), wanted)


def test_refuses_seeds_outside_the_graph():
    with pytest.raises(IdError, match="seeds"):
        HgtPlan(place(make_parts(), torch.device("cpu")), NUM_SAMPLES).sample({"paper": torch.tensor([40])}, 0)

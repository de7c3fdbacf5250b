"""Neighborhoods by personalised PageRank: walk by walk those of the reference, and close to the exact values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch_geometric.utils import get_ppr, ppr

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.sampling.random_walks import PPRRecipe, score_nodes
from tests.graphs import make_random_graph
from tests.reference.ppr import find_neighbors, find_pagerank


def place_rows(rows, device="cpu", dtype=torch.int64):
    indptr = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    neighbors = torch.tensor([node for row in rows for node in row], dtype=dtype)
    return NeighborLists(indptr.to(device), neighbors.to(device), neighbors[:0].to(device))


def make_rows(num_nodes=40, num_edges=300):
    source, target = make_random_graph(num_nodes, num_edges).edge_index
    return [source[target == node].tolist() for node in range(num_nodes)]


def list_pairs(lists, seeds, recipe, key):
    nodes, scores = score_nodes(lists, torch.tensor(seeds, dtype=torch.int64, device=lists.indptr.device), recipe,
                                key=key)  # fmt: skip
    assert nodes.shape == scores.shape == (len(seeds), recipe.num_neighbors + 1)
    assert torch.equal(nodes < 0, scores < 0)
    pairs = [list(zip(*both, strict=True)) for both in zip(nodes.tolist(), scores.tolist(), strict=True)]
    return [[pair for pair in row if pair[0] >= 0] for row in pairs]


CASES = {
    "random": (make_rows(), [3, 0, 39, 7]),
    "one seed twice": (make_rows(), [5, 5, 1]),
    "no neighbors": ([[], [], [1]], [0, 2, 1]),
    "self loops": ([[0], [1, 0], [2, 2, 1]], [0, 1, 2]),
    "parallel edges": ([[1, 1, 1, 2], [0], [0]], [0, 1, 2]),
    "hub": ([list(range(1, 200)), *[[0]] * 199], [0, 5, 7]),
    "no seeds": (make_rows(), []),
    "one node": ([[]], [0]),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_neighborhoods_are_those_of_the_reference(real_device, name, dtype):
    rows, seeds = CASES[name]
    lists = place_rows(rows, real_device, dtype)

    for recipe in (PPRRecipe(5, 0.2, 16, 6), PPRRecipe(1, 0.5, 1, 1), PPRRecipe(300, 0.01, 7, 3)):
        expected = find_neighbors(rows, seeds, recipe.num_neighbors, recipe.alpha, recipe.num_walks,
                                  recipe.walk_length, key=9)  # fmt: skip
        assert list_pairs(lists, seeds, recipe, key=9) == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_neighborhoods_of_random_graphs_are_those_of_the_reference(data):
    num_nodes = data.draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    rows = data.draw(st.lists(st.lists(node, max_size=4), min_size=num_nodes, max_size=num_nodes))
    seeds = data.draw(st.lists(node, max_size=4))
    recipe = PPRRecipe(data.draw(st.integers(1, 6)), data.draw(st.floats(0.05, 0.95)), data.draw(st.integers(1, 6)),
                       data.draw(st.integers(1, 5)))  # fmt: skip
    key = data.draw(st.integers(0, 2**64 - 1))

    assert list_pairs(place_rows(rows), seeds, recipe, key) == find_neighbors(rows, seeds, *recipe, key)


def test_without_a_wait_neighborhoods_are_the_same(monkeypatch):
    """The way of a GPU, whose number of nodes is not waited for, on a CPU."""
    import pyg_direct.sampling.random_walks as module

    lists, recipe = place_rows(make_rows()), PPRRecipe(5, 0.2, 16, 6)
    expected = list_pairs(lists, [3, 0, 39, 3], recipe, key=9)
    compress = []
    monkeypatch.setattr(module, "_drop_repeats", lambda *parts: compress.append(1) or module._mask_repeats(*parts))

    assert list_pairs(lists, [3, 0, 39, 3], recipe, key=9) == expected
    assert compress


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_weights_are_near_the_exact_ones(alpha):
    rows, recipe = make_rows(), PPRRecipe(40, alpha, 60_000, 12)

    (pairs,) = list_pairs(place_rows(rows), [7], recipe, key=4)

    exact = find_pagerank(rows, 7, alpha, length=12)
    got = np.zeros(40)
    for node, score in pairs:
        got[node] = score / recipe.total
    # A walk counts at most 1 for a node, so that one estimate is off by 0.5 / sqrt(walks) or less as a rule.
    assert np.abs(got - exact).max() < 5 * 0.5 / np.sqrt(recipe.num_walks)
    assert sum(score for _, score in pairs) == recipe.total


def test_weights_are_near_those_of_pygs_forward_push(monkeypatch):
    # Numba would compile it for eight seconds.
    monkeypatch.setattr(ppr, "_get_ppr_numba", ppr._get_ppr)
    graph, alpha = make_random_graph(40, 400), 0.3
    source, target = graph.edge_index
    rows = [source[target == node].tolist() for node in range(40)]
    # PyG's goes along edges.
    pushed, weight = get_ppr(graph.edge_index.flip(0), alpha, 1e-7, torch.tensor([7]), num_nodes=40)

    (pairs,) = list_pairs(place_rows(rows), [7], PPRRecipe(40, alpha, 60_000, 30), key=4)

    own = pushed[0] == 7
    expected = dict(zip(pushed[1][own].tolist(), weight[own].tolist(), strict=True))
    assert max(abs(score / (60_000 << 20) - expected.get(node, 0)) for node, score in pairs) < 0.015
    best = [node for node, _ in sorted(expected.items(), key=lambda pair: -pair[1])]
    assert best[0] == pairs[0][0] == 7
    assert len({node for node, _ in pairs[:11]} & set(best[:11])) >= 9


def test_chances_of_steps_add_up():
    for alpha in (1e-9, 0.2, 0.999):
        for length in (1, 10, 1024):
            chances = PPRRecipe(1, alpha, 1, length).list_chances()
            assert sum(chances) == 2**20
            assert len(chances) == length + 1
            assert min(chances) >= 0


def test_what_cannot_be_numbered_and_nodes_that_are_none_are_named():
    lists = place_rows([[0]])
    with pytest.raises(ArgumentError, match="batch_size must be smaller"):
        score_nodes(lists._replace(indptr=torch.zeros(1).expand(2**62)), torch.zeros(9, dtype=torch.int64),
                    PPRRecipe(1, 0.2, 1, 1), key=1)  # fmt: skip
    with pytest.raises(IdError, match="start must"):
        score_nodes(lists, torch.tensor([3]), PPRRecipe(1, 0.2, 1, 1), key=1)

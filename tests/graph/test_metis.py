"""METIS gives every node a part and leaves none empty; halving again and again is another way."""

import numpy as np
import pytest

from pyg_direct.graph.metis import assign_by_metis


@pytest.mark.parametrize("num_parts", [40, 50])
def test_metis_gives_each_node_a_part_where_there_are_enough(num_parts):
    edges = np.random.default_rng(0).integers(0, 40, (2, 300))

    parts = assign_by_metis(lambda: iter([tuple(edges)]), 40, num_parts)

    assert np.bincount(parts).max() == 1


@pytest.mark.parametrize(("num_nodes", "num_parts"), [(60, 30), (60, 45), (600, 300)])
def test_metis_leaves_no_part_empty_where_nodes_are_few(num_nodes, num_parts):
    edges = np.random.default_rng(0).integers(0, num_nodes, (2, 5 * num_nodes))

    parts = assign_by_metis(lambda: iter([tuple(edges)]), num_nodes, num_parts)

    counts = np.bincount(parts, minlength=num_parts)
    assert counts.min() >= 1
    assert counts.max() <= 4


def test_parts_that_are_halved_again_and_again_cut_few_edges_too():
    # Four cliques in a ring, in an order that carries no information.
    order = np.random.default_rng(1).permutation(80)
    within = [(a, b) for c in range(4) for a in range(20 * c, 20 * c + 20) for b in range(20 * c, a)]
    between = [(20 * c, (20 * c + 20) % 80) for c in range(4)]
    edges = order[np.array([*within, *between]).T]

    ways = [assign_by_metis(lambda: iter([tuple(edges)]), 80, 4, recursive=recursive) for recursive in (False, True)]

    for parts in ways:
        assert np.bincount(parts).tolist() == [20] * 4
        assert (parts[edges[0]] != parts[edges[1]]).sum() == 4


def test_a_graph_without_edges_is_cut_evenly():
    none = np.empty(0, np.int64)

    assert np.bincount(assign_by_metis(lambda: iter([(none, none)]), 9, 3)).tolist() == [3, 3, 3]

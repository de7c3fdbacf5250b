"""Parts that METIS and a stream deal nodes out to are of equal size, whatever the edges."""

import tracemalloc

import numpy as np
import pytest

from pyg_direct.distributed.partitioning.partition_graph import assign_by_stream


def draw_edges(num_nodes, num_edges, *, share=0.8, groups=50, ordered=False):
    """Edges of which a share lies within groups that ids do not tell."""
    generator = np.random.default_rng(0)
    group = generator.integers(0, groups, num_nodes)
    members = [np.flatnonzero(group == number) for number in range(groups)]
    ends = generator.integers(0, num_nodes, (2, num_edges))
    for at in np.flatnonzero(generator.random(num_edges) < share):
        ends[1, at] = generator.choice(members[group[ends[0, at]]])
    return ends[:, np.argsort(ends[1], kind="stable")] if ordered else ends


def assign(edges, num_nodes, num_parts):
    return assign_by_stream(lambda: iter([tuple(edges)]), num_nodes, edges.shape[1], num_parts)


@pytest.mark.parametrize(("num_edges", "ordered"), [(20_000, False), (20_000, True), (100_000, False), (400_000, True)])
@pytest.mark.full
def test_parts_of_a_stream_are_equal_however_many_edges_nodes_have(num_edges, ordered):
    edges = draw_edges(2000, num_edges, ordered=ordered)

    parts = assign(edges, 2000, 4)

    assert np.bincount(parts, minlength=4).max() <= 1.1 * 500 + 1
    # By chance three in four are.
    assert (parts[edges[0]] != parts[edges[1]]).mean() < 0.72


def test_communities_that_are_still_too_large_are_cut_without_more_memory():
    # Two nodes that have nearly all edges, and a path through the others.
    num_nodes = 200_000
    path, pair = np.stack([np.arange(2, num_nodes - 1), np.arange(3, num_nodes)]), np.array([[0], [1]])
    edges = np.concatenate([path, np.repeat(pair, 40 * num_nodes, axis=1)], axis=1)
    parts = assign(edges, num_nodes, 4)

    tracemalloc.start()
    again = assign(edges, num_nodes, 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert np.array_equal(parts, again)
    assert np.bincount(parts, minlength=4).max() <= 1.1 * num_nodes / 4 + 1
    # Neighbors stay together.
    assert (parts[path[0]] != parts[path[1]]).sum() < 100
    assert peak < 32 * num_nodes + 1_000_000

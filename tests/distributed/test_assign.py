"""What the streaming partitioner keeps in memory, and what it assigns."""

import tracemalloc

import numpy as np
import pytest

from pyg_direct.distributed.assign import assign_by_stream

NODES, PARTS = 200_000, 4


# With few edges nearly each node is a community of its own.
@pytest.mark.parametrize(("num_edges", "most"), [(1_000, NODES), (NODES // 2, NODES), (10 * NODES, NODES // 50)])
def test_streaming_takes_32_bytes_a_node_and_its_ties(num_edges, most):
    generator = np.random.default_rng(0)
    targets = generator.integers(0, NODES, num_edges)
    # Mostly within groups of 50 nodes.
    sources = np.where(generator.random(num_edges) < 0.8, targets // 50 * 50 + generator.integers(0, 50, num_edges),
                       generator.integers(0, NODES, num_edges))  # fmt: skip

    def stream():
        return iter([(sources, targets)])

    # Its kernels are there, and communities are counted.
    parts = assign_by_stream(stream, NODES, num_edges, PARTS)
    tracemalloc.start()
    again = assign_by_stream(stream, NODES, num_edges, PARTS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert np.array_equal(parts, again)
    assert np.bincount(parts, minlength=PARTS).max() <= 1.04 * NODES / PARTS
    assert peak < 32 * NODES + 8 * most * (PARTS + 4) + 1_000_000


def test_nodes_without_edges_fill_parts():
    def stream():
        return iter([(np.array([0, 1, 2]), np.array([1, 2, 0]))])

    parts = assign_by_stream(stream, 20, 3, 2)

    assert np.bincount(parts).tolist() == [10, 10]
    assert len(set(parts[:3].tolist())) == 1

"""What partitioning keeps in memory: so much a node, and none by the number of edges."""

import tracemalloc

import numpy as np
import pytest

from pyg_direct.distributed.partitioning.partition_graph import assign_by_stream, partition_graph

NODES, PARTS = 200_000, 4


# With few edges nearly each node is a community of its own.
@pytest.mark.parametrize(("num_edges", "most"), [(1_000, NODES), (NODES // 2, NODES), (10 * NODES, NODES // 50)])
@pytest.mark.full
def test_streaming_takes_32_bytes_a_node_and_its_ties(num_edges, most):
    generator = np.random.default_rng(0)
    targets = generator.integers(0, NODES, num_edges)
    # Mostly within groups of 50 nodes.
    sources = np.where(generator.random(num_edges) < 0.8, targets // 50 * 50 + generator.integers(0, 50, num_edges),
                       generator.integers(0, NODES, num_edges))  # fmt: skip

    def stream():
        return iter([(sources, targets)])

    # Its kernels are there.
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


def test_rows_of_edges_take_no_more_memory_of_more_edges(tmp_path):
    generator, peaks = np.random.default_rng(0), []
    for num_edges in (1_000_000, 5_000_000):
        files = [tmp_path / f"{name}-{num_edges}.npy" for name in ("edges", "rows")]
        np.save(files[0], generator.integers(0, 1000, (2, num_edges), np.int32))
        np.save(files[1], np.arange(num_edges, dtype=np.int16))
        tracemalloc.start()
        partition_graph(tmp_path / str(num_edges), files[0], 2, num_nodes=1000, edge_rows={"e": files[1]}, memory="16M")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    base = tmp_path / "5000000" / "part-00001"
    ids, rows = (np.load(base / f"edge-0.{name}.npy") for name in ("sorted", "rows-0"))

    assert peaks[1] < peaks[0] + 4_000_000
    assert ids.dtype == np.int64
    assert np.array_equal(rows, ids.astype(np.int16))
    assert np.array_equal(ids, np.sort(np.load(base / "edge-0.ids.npy")))

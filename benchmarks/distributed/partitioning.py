"""Partitioning of a graph's file: time and memory, beside a copy of the file; and cut edges, beside pymetis."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import partition_graph
from pyg_direct.distributed.partitioning.manifest import Manifest

NUM_EDGES = 100_000_000
_EDGES_OF_A_NODE, _PARTS, _CHUNK = 30, 4, 1 << 22


def measure_partitioning(scale: float) -> Iterator[Row]:
    """Measure seconds and memory of a process that partitions 100 M edges in a file by hash.

    Args:
        scale: Factor on the edges and nodes.
    """
    num_edges = max(1, int(NUM_EDGES * scale))
    num_nodes = -(-num_edges // _EDGES_OF_A_NODE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "edges.npy"
        _write_edges(file, num_edges, num_nodes)
        begin = time.perf_counter()
        shutil.copyfile(file, Path(folder) / "copy.npy")
        copy_seconds = time.perf_counter() - begin
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        process = context.Process(target=_partition, args=(file, Path(folder) / "parts", num_nodes, answers))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"the process that partitions ended with {process.exitcode}")
        seconds, busy, peak = answers.get()
    case, note = f"partition/{num_edges} edges/hash", f"{_PARTS} parts; {busy:.1f} s of processor time"
    yield Row.of(case, "time", "s", [seconds], copy_seconds, "a copy of the file", note)
    if peak:
        yield Row.of(case, "peak memory of the process", "GB", [peak / 1e9], note="pages of mapped files included")


def measure_cuts(graph: NodeDataset, counts: tuple[int, ...] = (2, 4, 8)) -> Iterator[Row]:
    """Measure edges between parts, and the largest part as a share of equal parts, for each method that reads edges.

    Beside pymetis called directly; no rows without pymetis.
    """
    if importlib.util.find_spec("pymetis") is None:
        return
    import pymetis

    edges = graph.edge_index.long().numpy()
    kept = edges[:, edges[0] != edges[1]]
    ends = np.unique(np.concatenate([kept[0] * graph.num_nodes + kept[1], kept[1] * graph.num_nodes + kept[0]]))
    offsets = np.searchsorted(ends, np.arange(graph.num_nodes + 1) * graph.num_nodes)
    adjacency = pymetis.CSRAdjacency(offsets, ends % graph.num_nodes)
    for count in counts:
        direct = np.asarray(pymetis.part_graph(count, adjacency)[1])
        least = float((direct[edges[0]] != direct[edges[1]]).sum())
        for method in ("metis", "streaming"):
            with tempfile.TemporaryDirectory() as folder:
                partition_graph(f"{folder}/p", graph.edge_index, count, num_nodes=graph.num_nodes, method=method)
                manifest = Manifest.read(f"{folder}/p")
            case, largest = f"partition/{graph.name}/{method}/{count}", max(map(sum, manifest.part_nodes))
            yield Row.of(case, "edges between parts", "edges", [float(manifest.num_cut)], least,
                         "pymetis called directly", f"of {graph.num_edges} edges")  # fmt: skip
            yield Row.of(case, "largest part over equal parts", "x", [largest * count / graph.num_nodes])


def _write_edges(file: Path, num_edges: int, num_nodes: int) -> None:
    edges = open_memmap(file, "w+", np.int32, (2, num_edges))
    generator = np.random.default_rng(0)
    for begin in range(0, num_edges, _CHUNK):
        count = min(_CHUNK, num_edges - begin)
        # Skewed sources, as in social and web graphs.
        edges[0, begin : begin + count] = generator.random(count) ** 3 * num_nodes
        edges[1, begin : begin + count] = generator.integers(0, num_nodes, count)
    edges.flush()


def _partition(file: Path, folder: Path, num_nodes: int, answers: Any) -> None:
    begin, busy = time.perf_counter(), time.process_time()
    partition_graph(folder, file, _PARTS, num_nodes=num_nodes, method="hash")
    answers.put((time.perf_counter() - begin, time.process_time() - busy, _peak_bytes()))


def _peak_bytes() -> int:
    """Return the peak memory of this process; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    # In kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

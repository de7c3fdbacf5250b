"""Graphs larger than the memory left to them, beside the same graph in memory and beside the disk's own rate.

The system forgets the files before each measurement.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from benchmarks.features.disk import forget
from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.loader import train
from pyg_direct.bench.result_row import Row
from pyg_direct.features import range_reader
from pyg_direct.features.disk_rates import measure_disk
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.features.hot_rows import expected_reads
from pyg_direct.features.packed_rows import pack_rows
from pyg_direct.features.row_files import RowFile, save_rows
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.inference import infer
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.row_order import order_by_reads
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampler.graph_store import GraphStore

_FANOUTS = [10, 5]
# Memory for planned rows, as shares of the table. The smallest is the memory left for a table 8 times as large.
_SHARES = (0.125, 0.25, 1.0)
_LEFT = 0.125
# Parts of the measurement.
PARTS = ("reads", "lists", "epochs", "inference")
# Rows that are packed by `order_by_reads` for the epoch that is measured.
_BY_READS = "ordered"
_FEW_BATCHES = 16
_REPEATS = 3 if torch.cuda.is_available() else 2
# Pages that are looked up after a file was dropped from the page cache.
_PROBES = 64
# Seconds between two looks at the memory of a process.
_LOOK = 0.002


@dataclass
class Files:
    """A table in its own order and in others, and the neighbor lists of its graph.

    Attributes:
        packed: The table in the order of hotness; None if no part of a measurement reads it.
        lists: Likewise; empty then.
        most_kept: Largest share of a file that the system kept in memory although it was told to drop it.
        ordered: The table in the order of the reads of an epoch; None if there is none yet.
    """

    plain: Path
    packed: Path | None = None
    lists: Sequence[Path] = ()
    most_kept: float = 0.0
    ordered: Path | None = None

    def path_of(self, order: str) -> Path:
        """Return the file of the table in an order: "plain", "packed" or "ordered"."""
        path = {"plain": self.plain, "packed": self.packed, _BY_READS: self.ordered}[order]
        assert path is not None
        return path

    def forget(self) -> None:
        """Drop the system's cache of all files."""
        # Maps of earlier features would keep their pages.
        gc.collect()
        for path in (self.plain, self.packed, *self.lists, self.ordered):
            if path is None:
                continue
            file = RowFile(path)
            forget(file)
            count = file.layout.shape[0]
            probes = range(0, count, max(1, count // _PROBES))
            self.most_kept = max(self.most_kept, sum(file.is_cached([row]) for row in probes) / len(probes))


class Seeds(NamedTuple):
    """Nodes to train on, and how many a batch has."""

    nodes: Tensor
    batch_size: int


def add_files(files: Files, topology: CSRTopo, seeds: Seeds, parts: Collection[str]) -> None:
    """Write the files that parts of the measurement need beside the table in its own order."""
    if "reads" in parts or "epochs" in parts:
        scores = expected_reads(topology.indptr, topology.indices, seeds.nodes, _FANOUTS, seeds.batch_size)
        files.packed = pack_rows(files.plain, files.plain.with_name("packed.safetensors"),
                                 scores.cpu().argsort(descending=True, stable=True))  # fmt: skip
    if "lists" in parts:
        files.lists = [save_rows(files.plain.with_name(f"{name}.npy"), getattr(topology, name).cpu())
                       for name in ("indptr", "indices", "eid")]  # fmt: skip


def open_loader(rows: Any, graph: Any, seeds: Seeds, ahead: int | str | None) -> NeighborLoader:
    """Open a loader over rows of nodes and a graph."""
    store = FeatureStore()
    if rows is not None:
        store.put_tensor(rows, group_name=None, attr_name="x", index=None)
    return NeighborLoader((store, graph), _FANOUTS, seeds.nodes, batch_size=seeds.batch_size, shuffle=True, seed=0,
                          ahead=ahead)  # fmt: skip


def measure_larger_than_memory(data: Data, train_idx: Tensor, num_classes: int, name: str, batch_size: int,
                               num_rows_held: int, folder: str | None = None, *,
                               parts: Collection[str] = PARTS) -> Iterator[Row]:  # fmt: skip
    """Measure pages that are read for planned batches, epochs, inference and lists, and the memory that is held.

    Rows come as soon as they are measured, what users get by default first.

    Args:
        parts: What is measured: "reads" of windows, neighbor "lists" with the memory of rows, "epochs" or "inference".
        num_rows_held: Rows of the table whose host memory is measured: so many that compiled loops and threads hardly
            count.
    """
    assert data.x is not None
    with tempfile.TemporaryDirectory(dir=folder) as place:
        seeds, case = Seeds(train_idx, min(batch_size, len(train_idx))), f"disk/{name}/larger than memory"
        files = Files(save_rows(Path(place) / "x.npy", data.x))
        yield from _measure_disk(files, case)
        if "inference" in parts:
            yield from _measure_inference(files, data, num_classes, case)
        if set(parts) != {"inference"}:
            # Loaders share the lists, which are sorted once.
            topology = CSRTopo(data.edge_index, num_nodes=data.num_nodes)
            add_files(files, topology, seeds, parts)
            graph = GraphStore(topology)
        if "reads" in parts:
            yield from _measure_pages(files, graph, seeds, case)
        if "lists" in parts:
            yield from _measure_lists(files, topology, seeds, case)
            yield measure_host_memory(num_rows_held, case, place)
        # A CPU trains on some of the nodes, which take as long as all of the other measurements.
        some = seeds if torch.cuda.is_available() else Seeds(train_idx[: _FEW_BATCHES * seeds.batch_size], seeds[1])
        if "epochs" in parts:
            yield from _measure_epochs(files, data, graph, some, num_classes, case)
        yield Row.of(case, "pages that stayed in the page cache, at most", "%", [100 * files.most_kept])


def _measure_disk(files: Files, case: str) -> Iterator[Row]:
    """Measure the disk itself, past the page cache."""
    in_order, at_random = zip(*(measure_disk(RowFile(files.plain)) for _ in range(_REPEATS)), strict=True)
    yield Row.of(case, "disk, 1 MB at a time in order", "GB/s", [rate / 1e9 for rate in in_order])
    yield Row.of(case, "disk, pages of 4 KB at random", "GB/s", [rate * 4096 / 1e9 for rate in at_random])


@contextmanager
def leave_memory(num_bytes: int) -> Iterator[None]:
    """Let readers of files believe that so much host memory is free: they then do not count on the page cache, which
    holds all files of a measurement otherwise.
    """
    with patch.object(range_reader, "available_bytes", lambda: num_bytes):
        yield


@contextmanager
def leave_no_device_memory() -> Iterator[None]:
    """Let rows of files have no memory of a GPU: host memory alone holds them."""
    with patch.dict(os.environ, {"PYG_DIRECT_AHEAD_GPU": "0"}):
        yield


def _find_rooms() -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return the memory that rows of files may have beside that of the host, by words for rows."""
    if not torch.cuda.is_available():
        return {"": nullcontext}
    return {"": nullcontext, ", none in GPU memory": leave_no_device_memory}


def _show_pass(files: Files, rate: float) -> str:
    """Tell the time in which the disk gives the whole table in order."""
    num_bytes = RowFile(files.plain).layout.num_bytes
    return f"one pass over the file takes {num_bytes / rate:.3f} s at {rate / 1e9:.3f} GB/s"


def _size_of(path: Path, share: float) -> str:
    return f"{int(share * RowFile(path).layout.num_bytes)}B"


def _measure_pages(files: Files, graph: GraphStore, seeds: Seeds, case: str) -> Iterator[Row]:
    """Measure the bytes that are read over the bytes of the rows of each window, in one epoch."""
    for room, leaves in _find_rooms().items():
        # With memory of a GPU, windows hold the same rows for any share of the host.
        shares = _SHARES if room or len(_find_rooms()) == 1 else _SHARES[:1]
        with leaves():
            for share in shares:
                # With memory for all rows, no order reads fewer pages.
                for order in ("plain", "packed", *([_BY_READS] if share < 1 else [])):
                    yield from _measure_way(files, graph, seeds, case, order, share, room)


def _measure_way(files: Files, graph: GraphStore, seeds: Seeds, case: str, order: str, share: float, room: str
                 ) -> Iterator[Row]:  # fmt: skip
    """Measure the bytes that are read in an epoch over a file in some order."""
    if order == _BY_READS:
        seconds_before = _pack_for_epoch(files, graph, seeds, share)
        for what, took in zip(("order", "packing"), seconds_before, strict=True):
            yield Row.of(case, f"{what} of rows by the reads of an epoch, memory for {share:.1%}{room}", "s", [took])
    path = files.path_of(order)
    # It replaces the one before, whose map would keep its pages.
    loader = open_loader(Feature().from_file(path), graph, seeds, _size_of(path, share))
    files.forget()
    begin = time.perf_counter()
    with leave_memory(int(share * RowFile(path).layout.num_bytes)):
        for _ in loader:
            pass
    wait_for_gpu()
    seconds = time.perf_counter() - begin
    (reads,) = loader.tell().disk
    assert reads.disk_rate is not None
    needed = reads.num_rows * reads.row_bytes / reads.disk_rate
    yield Row.of(case, f"bytes read over bytes of rows, {order}, memory for {share:.1%}{room}", "times",
                 [reads.read_ratio], 1.0, "each row of a window alone",
                 f"{reads.num_pages} pages, {reads.num_again} of them again, at {reads.rate / 1e9:.3f} GB/s "
                 f"beside {reads.disk_rate / 1e9:.3f} in order")  # fmt: skip
    yield Row.of(case, f"epoch without training, {order}, memory for {share:.1%}{room}", "s", [seconds], needed,
                 "the disk gives the bytes of the rows in order",
                 f"{reads.num_rows} rows read for {reads.num_asked}")  # fmt: skip


def _pack_for_epoch(files: Files, graph: GraphStore, seeds: Seeds, share: float) -> tuple[float, float]:
    """Pack the table for the first epoch of a loader; returns the seconds of its order and of packing."""
    rows, memory = Feature().from_file(files.plain), _size_of(files.plain, share)
    loader = open_loader(rows, graph, seeds, memory)
    begin = time.perf_counter()
    order = order_by_reads(loader, rows)
    seconds = time.perf_counter() - begin
    target = files.plain.with_name("epoch.safetensors")
    target.unlink(missing_ok=True)
    files.ordered = None
    del loader, rows
    files.forget()
    begin = time.perf_counter()
    pack_rows(files.plain, target, order, memory=memory)
    packed = time.perf_counter() - begin
    files.ordered = target
    return seconds, packed


def _time(work: Callable[[], object], files: Files) -> float:
    files.forget()
    wait_for_gpu()
    begin = time.perf_counter()
    work()
    wait_for_gpu()
    return time.perf_counter() - begin


def _measure_epochs(files: Files, data: Data, graph: GraphStore, seeds: Seeds, num_classes: int, case: str
                    ) -> Iterator[Row]:  # fmt: skip
    """Measure epochs of training with rows in files that are 8 times as large as the memory left for them."""
    device = resolve_device(None)
    y = data.y.to(device)
    model = GraphSAGE(data.num_node_features, 256 if device.type == "cuda" else 32, 2, num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def run(loader: NeighborLoader) -> None:
        with leave_memory(int(_LEFT * RowFile(files.plain).layout.num_bytes)):
            for batch in loader:
                batch.y = y[batch.n_id[: batch.batch_size]]
                train(model, optimizer, batch)

    def open_epoch(kind: str) -> NeighborLoader:
        # A loader of its own: later epochs of one find rows in memory.
        if kind == "memory":
            return open_loader(in_memory, graph, seeds, 0)
        path = files.path_of(kind)
        return open_loader(Feature().from_file(path), graph, seeds, _size_of(path, _LEFT))

    in_memory = Feature().from_cpu_tensor(data.x.clone())
    run(open_epoch("memory"))
    in_host = [_time(partial(run, open_epoch("memory")), files) for _ in range(_REPEATS)]
    yield Row.of(case, "epoch, rows in host memory", "s", in_host)
    rate = measure_disk(RowFile(files.plain)).in_order
    for room, leaves in _find_rooms().items():
        for kind in ("plain", "packed", _BY_READS):
            times = []
            with leaves():
                if kind == _BY_READS:
                    _pack_for_epoch(files, graph, seeds, _LEFT)
                # Epochs that wait for the disk alone are long, and measured once.
                for _ in range(1 if room else _REPEATS):
                    loader = open_epoch(kind)
                    times.append(_time(partial(run, loader), files))
            (reads,) = loader.tell().disk
            yield Row.of(case, f"epoch, {kind} rows in a file 8 times as large as the memory for them{room}", "s",
                         times, median(in_host), "rows in host memory",
                         f"{reads.num_pages * reads.page_bytes / 1e9:.3f} GB read at {reads.rate / 1e9:.3f} GB/s; "
                         f"{_show_pass(files, rate)}")  # fmt: skip


def _measure_inference(files: Files, data: Data, num_classes: int, case: str) -> Iterator[Row]:
    """Measure layer-wise inference with rows in a file, and with the rows of layers in files too."""
    device = resolve_device(None)
    model = GraphSAGE(data.num_node_features, 256 if device.type == "cuda" else 32, 2, num_classes).to(device).eval()
    graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
    ahead, out = _size_of(files.plain, 0.25), files.plain.with_name("out.safetensors")
    ways: dict[str, Callable[[], object]] = {
        "rows in host memory": lambda: infer(model, graph, x=data.x),
        "rows in a file": lambda: infer(model, graph, x=Feature().from_file(files.plain), ahead=ahead),
        "rows and layers in files": lambda: infer(model, graph, x=Feature().from_file(files.plain), ahead=ahead,
                                                  out=out),
    }  # fmt: skip
    ways["rows in host memory"]()
    in_host = [_time(ways["rows in host memory"], files) for _ in range(_REPEATS)]
    yield Row.of(case, "infer, rows in host memory", "s", in_host)
    rate = measure_disk(RowFile(files.plain)).in_order
    for room, leaves in _find_rooms().items():
        for way in tuple(ways)[1:]:
            with leaves():
                # Without memory of a GPU a table is read once for each batch; it is measured last, and once.
                times = [_time(ways[way], files) for _ in range(1 if room else _REPEATS)]
            yield Row.of(case, f"infer, {way}, memory for 25.0%{room}", "s", times, median(in_host),
                         "rows in host memory", _show_pass(files, rate))  # fmt: skip


def _measure_lists(files: Files, topology: CSRTopo, seeds: Seeds, case: str) -> Iterator[Row]:
    """Measure epochs with neighbor lists in a file, of which an eighth fits the memory left for them."""
    seconds: dict[str, list[float]] = {"memory": [], "file": []}
    # The first one loads loops.
    for _ in range(1 + _REPEATS):
        for kind, times in seconds.items():
            own = topology
            if kind == "file":
                own = CSRTopo.from_file(*files.lists, host_cache_size=f"{100 * _LEFT:g}%")
            loader = open_loader(None, GraphStore(own), seeds, None)
            times.append(_time(lambda loader=loader: [None for _ in loader], files))  # type: ignore[misc]
    in_memory, in_file = seconds["memory"][1:], seconds["file"][1:]
    reads = loader.tell().disk[0]
    yield Row.of(case, "epoch of samples, lists in a file 8 times as large as the memory for them", "s",
                 in_file, median(in_memory), "lists in host memory",
                 f"{reads.num_pages} pages, {reads.num_again} of them again, for {reads.num_asked} edges")  # fmt: skip


def measure_host_memory(num_rows: int, case: str, folder: str | Path) -> Row:
    """Measure the host memory that rows of a file take in a loader, over the memory that it asked for.

    It is the peak of a process, less the peak of one that has all rows in memory, without those: such a process holds
    as many batches and lists. Each asks for an eighth of the table for hot rows, and for as much for planned ones.
    """
    path = Path(folder) / "rows.npy"
    save_rows(path, torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, 128))
    part, context = int(RowFile(path).layout.num_bytes * _LEFT), multiprocessing.get_context("spawn")
    peaks = []
    for is_filed in (False, True):
        queue = context.SimpleQueue()
        process = context.Process(target=_find_peak, args=(queue, path, is_filed, part))
        process.start()
        peaks.append(queue.get())
        process.join()
    path.unlink()
    held = peaks[1] - peaks[0]
    return Row.of(case, "host memory for rows of a file, over what was asked for", "times", [held / (2 * part)], 1.0,
                  "the memory asked for", f"{held} bytes for {2 * part}, {num_rows} rows of 512 bytes")  # fmt: skip


def _find_peak(queue: Any, path: Path, is_filed: bool, part: int) -> None:
    """Report the peak of the memory of two epochs with rows in a file, or with all rows in memory and without them."""
    num_rows = len(RowFile(path).rows)
    edges = torch.randint(num_rows, (2, 5 * num_rows), generator=torch.Generator().manual_seed(0))
    graph, seeds = Data(edge_index=edges, num_nodes=num_rows), Seeds(torch.arange(0, num_rows, 100), 64)
    before = count_private_bytes()
    # All rows may be a map, which belongs to the file.
    rows = Feature(host_cache_size=f"{part}B" if is_filed else "100%").from_file(path)
    own = 0 if is_filed else count_private_bytes() - before
    forget(RowFile(path))
    loader = open_loader(rows, graph, seeds, f"{part}B" if is_filed else 0)
    peak, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK):
            peak[0] = max(peak[0], count_private_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(2):
        for _ in loader:
            pass
    is_over.set()
    thread.join()
    queue.put(peak[0] - own)


def count_private_bytes() -> int:
    """Count the host memory of this process that belongs to no file; page-locked memory included."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(1024 * int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssShmem:"))

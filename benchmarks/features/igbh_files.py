"""R-GAT of MLPerf Training over a graph of IGBH's shape with rows in files, beside rows in host memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from benchmarks.features.disk import forget
from benchmarks.features.larger_than_memory import leave_memory
from benchmarks.nn.rgat import FANOUTS, RGAT, make_step
from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.igbh import synthetic_igbh
from pyg_direct.features.disk_rates import measure_disk
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.features.row_files import RowFile, save_pieces
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.runtime.cuda.device import resolve_device

# Host memory for planned rows, as a share of all rows.
_SHARE = 0.25
# Rows that are written at a time.
_ROWS_OF_PIECE = 1 << 16
# Batches before a measurement, in which passes are recorded.
_WARM_UP = 12


def measure_igbh_files(scale: float, name: str, *, batch_size: int = 512, batches: int = 480,
                       folder: str | None = None) -> Iterator[Row]:  # fmt: skip
    """Measure training steps with the rows of all types in files that the system has forgotten.

    An epoch waits for its first step, for which most pages of the files are read. The other rows are read during the
    steps after it. Once memory holds all of them, steps are alike. So a whole epoch is computed from the first step,
    the other steps of the first half, and a step of the second half. Rows go to the disk while passes are recorded, as
    both take long.

    Args:
        scale: Factor on IGBH-Full.
        name: Name of the graph.
        batch_size: Seeds of a batch.
        batches: Batches that are measured, of rows in files. A fifth is measured of rows in host memory.
        folder: Folder for the files; they take 35 GB times 32 times `scale`.
    """
    device = resolve_device(None)
    num_features, num_classes = (1024, 2983) if device.type == "cuda" else (32, 19)
    data = synthetic_igbh(scale, device=device, dtype=torch.bfloat16, num_features=num_features,
                          num_classes=num_classes)  # fmt: skip
    model = RGAT(data, num_classes, *(() if device.type == "cuda" else (32,))).to(device)
    accelerate(model)
    step = make_step(model)
    seeds, y = data["paper"].train_idx.cpu(), data["paper"].y
    num_in_epoch = max(1, len(seeds) // batch_size)
    # Any seeds of the graph, always the same.
    chosen = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))[: batches * batch_size]
    seeds = seeds[chosen]
    rows = {kind: data[kind].x for kind in data.node_types}
    graph = HeteroData({kind: {"edge_index": data[kind].edge_index} for kind in data.edge_types})
    for kind in data.node_types:
        graph[kind].num_nodes = data[kind].num_nodes
    del data
    num_bytes = sum(part.numel() * part.element_size() for part in rows.values())

    def open_loader(features: dict[str, Feature], ahead: int | str) -> NeighborLoader:
        store = FeatureStore()
        for kind, feature in features.items():
            store[kind, "x", None] = feature
        store["paper", "y", None] = y
        return NeighborLoader((store, graph), FANOUTS, ("paper", seeds), batch_size=batch_size, shuffle=True,
                              drop_last=True, seed=0, ahead=ahead)  # fmt: skip

    def run(loader: NeighborLoader, count: int) -> Iterator[tuple[float, int]]:
        """Train on batches; yields (seconds, steps) of the first step, of the rest of the first half, and of the other
        half.
        """
        wait_for_gpu()
        begin = time.perf_counter()
        steps = iter(loader)
        for part in (1, max(1, count // 2 - 1), max(1, count - count // 2)):
            made = 0
            for batch in islice(steps, part):
                step(batch)
                made += 1
            wait_for_gpu()
            now = time.perf_counter()
            yield now - begin, max(1, made)
            begin = now

    case = f"disk/{name}/R-GAT step, {batch_size} seeds"
    with tempfile.TemporaryDirectory(dir=folder) as place, ThreadPoolExecutor(1) as writer:
        written = writer.submit(_write_files, rows, place)
        # A feature takes the memory of its tensor over, and the rows of the device are still being written.
        in_memory = {kind: Feature().from_cpu_tensor(part.to("cpu", copy=True)) for kind, part in rows.items()}
        loader = open_loader(in_memory, 0)
        for _, batch in zip(range(_WARM_UP), loader, strict=False):
            step(batch)
        files = written.result()
        del rows
        parts = [*run(loader, max(4, batches // 5))]
        held = parts[-1][0] / parts[-1][1]
        yield Row.of(case, "rows in host memory", "ms", [1e3 * held])
        del loader, in_memory
        rate = measure_disk(RowFile(files["paper"])).in_order
        yield Row.of(case, "disk, 1 MB at a time in order", "GB/s", [rate / 1e9])
        loader = open_loader({kind: Feature().from_file(path) for kind, path in files.items()},
                             f"{int(_SHARE * num_bytes)}B")  # fmt: skip
        num_kept = 0
        for path in files.values():
            file = RowFile(path)
            forget(file)
            num_kept += file.is_cached([len(file.rows) // 2])
        way = f"rows in files, host memory for {_SHARE:.0%}"
        with leave_memory(int(_SHARE * num_bytes)):
            steps = run(loader, batches)
            first, _ = next(steps)
            yield Row.of(case, f"{way}, first step", "s", [first], num_bytes / rate, "one pass over the files",
                         f"{_tell(loader)}; {num_kept} files kept by the system")  # fmt: skip
            early, num_early = next(steps)
            yield Row.of(case, f"{way}, steps 2 to {num_early + 1}", "ms", [1e3 * early / num_early], 1e3 * held,
                         "rows in host memory", _tell(loader))  # fmt: skip
            late, num_late = next(steps)
        yield Row.of(case, f"{way}, steps after", "ms", [1e3 * late / num_late], 1e3 * held, "rows in host memory",
                     _tell(loader))  # fmt: skip
        # Both without the steps in which passes are recorded.
        whole = first + early + (num_in_epoch - 1 - num_early) * late / num_late
        yield Row.of(case, f"{way}, epoch of {num_in_epoch} steps by these", "s", [whole],
                     num_in_epoch * held, "rows in host memory")  # fmt: skip


def _write_files(rows: dict[str, Tensor], folder: str) -> dict[str, Path]:
    """Write the rows of each type, which a GPU gives piece by piece."""
    files = {kind: Path(folder) / f"{kind}.safetensors" for kind in rows}
    for kind, part in rows.items():
        save_pieces(files[kind], part, (piece.cpu() for piece in part.split(_ROWS_OF_PIECE)), is_shown=False)
    return files


def _tell(loader: NeighborLoader) -> str:
    """Tell the bytes that were read, in words."""
    reads = loader.tell().disk
    read, held = (sum(own.num_pages * own.page_bytes for own in reads),
                  sum(own.num_claimed * own.row_bytes for own in reads))  # fmt: skip
    spent = sum(own.seconds for own in reads)
    return (f"{read / 1e9:.2f} GB read, {read / max(1, held):.2f} times the rows of windows, at "
            f"{read / max(spent, 1e-9) / 1e9:.2f} GB/s")  # fmt: skip

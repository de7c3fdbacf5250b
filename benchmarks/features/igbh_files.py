"""R-GAT of MLPerf Training over a graph of IGBH's shape with rows in files, beside rows in host memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
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
from pyg_direct.features.row_files import RowFile, save_rows
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.runtime.cuda.device import resolve_device

# Memory for planned rows, as shares of all rows.
_SHARES = (0.5, 0.25)
_REPEATS = 2
# Batches before a measurement, in which passes are recorded.
_WARM_UP = 12


def measure_igbh_files(scale: float, name: str, *, batch_size: int = 512, batches: int = 48,
                       folder: str | None = None) -> Iterator[Row]:  # fmt: skip
    """Measure training steps with the rows of all types in files that the system has forgotten.

    Args:
        scale: Factor on IGBH-Full.
        name: Name of the graph.
        batch_size: Seeds of a batch.
        batches: Batches of an epoch.
        folder: Folder for the files; they take 35 GB times 32 times `scale`.
    """
    device = resolve_device(None)
    num_features, num_classes = (1024, 2983) if device.type == "cuda" else (32, 19)
    data = synthetic_igbh(scale, device=device, dtype=torch.bfloat16, num_features=num_features,
                          num_classes=num_classes)  # fmt: skip
    model = RGAT(data, num_classes, *(() if device.type == "cuda" else (32,))).to(device)
    accelerate(model)
    step = make_step(model)
    seeds = data["paper"].train_idx.cpu()
    # Any seeds of the graph, always the same.
    chosen = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))[: batches * batch_size]
    seeds, y = seeds[chosen], data["paper"].y
    rows = {kind: data[kind].x.cpu() for kind in data.node_types}
    graph = HeteroData({kind: {"edge_index": data[kind].edge_index} for kind in data.edge_types})
    for kind in data.node_types:
        graph[kind].num_nodes = data[kind].num_nodes
    del data
    num_bytes = sum(part.numel() * part.element_size() for part in rows.values())

    with tempfile.TemporaryDirectory(dir=folder) as place:
        files = {kind: save_rows(Path(place) / f"{kind}.safetensors", part) for kind, part in rows.items()}
        in_memory = {kind: Feature().from_cpu_tensor(part) for kind, part in rows.items()}
        del rows

        def open_loader(features: dict[str, Feature], ahead: int | str) -> NeighborLoader:
            store = FeatureStore()
            for kind, feature in features.items():
                store[kind, "x", None] = feature
            store["paper", "y", None] = y
            return NeighborLoader((store, graph), FANOUTS, ("paper", seeds), batch_size=batch_size, shuffle=True,
                                  drop_last=True, seed=0, ahead=ahead)  # fmt: skip

        def run(loader: NeighborLoader) -> float:
            """Train an epoch; returns milliseconds a step."""
            wait_for_gpu()
            begin, count = time.perf_counter(), 0
            for batch in loader:
                step(batch)
                count += 1
            wait_for_gpu()
            return 1e3 * (time.perf_counter() - begin) / count

        case = f"disk/{name}/R-GAT step, {batch_size} seeds"
        loader = open_loader(in_memory, 0)
        for _, batch in zip(range(_WARM_UP), loader, strict=False):
            step(batch)
        seconds = [run(loader) for _ in range(_REPEATS)]
        limit = median(seconds)
        yield Row.of(case, "rows in host memory", "ms", seconds)
        del loader, in_memory
        yield Row.of(
            case, "disk, 1 MB at a time in order", "GB/s", [measure_disk(RowFile(files["paper"])).in_order / 1e9]
        )
        for share in _SHARES:
            seconds, kept = [], 0
            for _ in range(_REPEATS):
                # A loader of its own: later epochs of one find rows in memory.
                loader = open_loader({kind: Feature().from_file(path) for kind, path in files.items()},
                                     f"{int(share * num_bytes)}B")  # fmt: skip
                for path in files.values():
                    file = RowFile(path)
                    forget(file)
                    kept += file.is_cached([len(file.rows) // 2])
                with leave_memory(int(share * num_bytes)):
                    seconds.append(run(loader))
            reads = loader.tell().disk
            read, held = (
                sum(numbers)
                for numbers in zip(
                    *((own.num_pages * own.page_bytes, own.num_claimed * own.row_bytes) for own in reads), strict=True
                )
            )
            spent = sum(own.seconds for own in reads)
            yield Row.of(case, f"rows in files, memory for {share:.0%}", "ms", seconds, limit, "rows in host memory",
                         f"{read / 1e9:.2f} GB read, {read / max(1, held):.2f} times the rows of windows, at "
                         f"{read / max(spent, 1e-9) / 1e9:.2f} GB/s; {kept} files kept by the system")  # fmt: skip

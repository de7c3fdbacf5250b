"""Rows in files: beside a thread that reads the same rows in order, and during training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct.bench.limits import time_on_clock, wait_for_gpu
from pyg_direct.bench.loader import run_steps, train, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.features.row_files import RowFile, save_rows
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.disk import DiskTier
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.ops.rows.gather_rows import rows_in_units
from pyg_direct.runtime.cuda.device import resolve_device

# Rows per read.
_BATCH = 1 << 17
# Shares of a table per read: either the system waits for each row, or it reads ahead from one to the next.
_SHARES = (0.005, 0.05, 0.5)
_FIRST_STEPS, _COLD_STEPS = 6, 12
_EPOCHS = 3
# Memory for planned rows, as a share of the table.
_AHEAD_SHARES = (1.0, 0.25)
# Rows to test if the system has dropped its cache.
_PROBES = 256


def forget(file: RowFile) -> None:
    """Drop the system's cache of a file."""
    file.forget()
    handle = os.open(file.path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _read_in_order(file: RowFile, ids: Tensor, out: Tensor) -> float:
    """Measure the seconds of this thread for rows of ascending ids, one by one; only the system reads ahead."""
    numbers, places, target = ids.numpy(), torch.arange(len(ids)).numpy(), rows_in_units(out, torch.uint8).numpy()
    begin = time.perf_counter()
    file.read_rows(numbers, places, target)
    return time.perf_counter() - begin


def measure_disk_rows(num_rows: int, row_bytes: int = 512, folder: str | None = None) -> Iterator[Row]:
    """Measure random rows of a file, in the page cache and outside of it, in turns with a thread that reads them in
    order.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        table = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, row_bytes // 4)
        tier = DiskTier(RowFile(save_rows(Path(place) / "rows.safetensors", table)))
        for share in _SHARES:
            span = min(num_rows, int(_BATCH / share))
            ids = (
                torch.randperm(span, generator=torch.Generator().manual_seed(0))[: max(1, int(span * share))]
                .sort()
                .values
            )
            for is_cold in (True, False):
                yield _measure_rows(tier, ids, row_bytes, f"{row_bytes} B, {100 * share:g} % of the rows", is_cold)


def _measure_rows(tier: DiskTier, ids: Tensor, row_bytes: int, name: str, is_cold: bool) -> Row:
    out = torch.empty(len(ids), row_bytes // 4)

    def read() -> float:
        begin = time.perf_counter()
        tier.read(ids, out)
        return time.perf_counter() - begin

    num_left, rates = 0, ([], [])  # type: tuple[int, tuple[list[float], list[float]]]
    ways = (lambda: _read_in_order(tier.file, ids, out)), read
    for repeat in range((7 if is_cold else 10) + 1):
        # The first of both may get more from a disk.
        for number in (0, 1) if repeat % 2 else (1, 0):
            if is_cold:
                forget(tier.file)
                num_left += sum(tier.file.is_cached([row]) for row in ids[:: max(1, len(ids) // _PROBES)].tolist())
            seconds = ways[number]()
            assert torch.equal(out[:, 0].long(), ids)
            out.zero_()
            if repeat > 0:
                rates[number].append(len(ids) * row_bytes / seconds / 1e9)
    note = f"the system had not forgotten {num_left} rows of those looked for" if num_left else ""
    return Row.of(f"disk/{name}, {'not ' if is_cold else ''}in the page cache", "rate", "GB/s", rates[1],
                  median(rates[0]), "one thread reads these rows in order", note)  # fmt: skip


def measure_disk_feature(x: Tensor, n_ids: list[Tensor], name: str, folder: str | None = None) -> Iterator[Row]:
    """Measure rows of training batches from a file with a tenth in memory, beside host memory."""
    device = resolve_device(None)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = save_rows(Path(place) / "x.npy", x)
        options = {"device_cache_size": "10%"} if device.type == "cuda" else {"host_cache_size": "10%"}
        counts = torch.bincount(torch.cat([ids.cpu() for ids in n_ids]), minlength=len(x))
        on_disk = Feature(hotness=counts, **options).from_file(path)  # type: ignore[arg-type]
        in_memory = Feature().from_cpu_tensor(x)
        seconds = []
        for feature in (in_memory, on_disk):
            times = time_on_clock(lambda feature=feature: [feature[ids] for ids in n_ids], 3, 1)  # type: ignore[misc]
            seconds.append([1e3 * s / len(n_ids) for s in times])
        assert torch.equal(on_disk[n_ids[0]], in_memory[n_ids[0]])
        spilled = on_disk.stored
        assert isinstance(spilled, SpilledRows)
        yield Row.of(
            f"disk/{name}, 10 % in memory",
            "rows of a batch",
            "ms",
            seconds[1],
            sorted(seconds[0])[1],
            "from host memory",
            f"{spilled.num_missed / spilled.num_read:.0%} of the rows from the file",
        )


def measure_disk_training(data: Data, train_idx: Tensor, num_classes: int, name: str, batches: int = 48,
                          folder: str | None = None) -> Iterator[Row]:  # fmt: skip
    """Measure training steps of a GraphSAGE with features in a file, a tenth of them in memory, beside host memory.

    Once with the system's cache of the file, and a few steps with its pages dropped at every step. The latter are
    compared with the time in which one thread reads the missing rows of such a step.
    """
    device = resolve_device(None)
    x, y, size = data.x, data.y.to(device), min(1024, len(train_idx))
    topology = CSRTopo(data.edge_index, num_nodes=data.num_nodes)
    model = GraphSAGE(x.shape[1], 256, 2, num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        batch.y = y[batch.n_id[: batch.batch_size]]
        train(model, optimizer, batch)

    def open_loader(feature: Feature, ahead: int | str | None) -> NeighborLoader:
        rows = FeatureStore()
        rows.put_tensor(feature, group_name=None, attr_name="x", index=None)
        graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
        return NeighborLoader((rows, graph), [10, 5], train_idx, batch_size=size, shuffle=True, drop_last=True, seed=0,
                              ahead=ahead)  # fmt: skip

    def load(feature: Feature) -> Iterator[Any]:
        return without_end(open_loader(feature, 0))

    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = save_rows(Path(place) / "x.npy", x)
        share = {"device_cache_size" if device.type == "cuda" else "host_cache_size": "10%"}
        on_disk = Feature(csr_topo=topology, **share).from_file(path)  # type: ignore[arg-type]
        spilled = on_disk.stored
        assert isinstance(spilled, SpilledRows)
        disk = getattr(spilled.tier, "source", spilled.tier)
        assert isinstance(disk, DiskTier)
        file = disk.file
        assert spilled.locate is not None
        case, in_file = f"disk/{name}/training", "a file, 10 % in memory"
        in_memory = Feature().from_cpu_tensor(x)
        # The first one would be slower.
        run_steps(load(in_memory), step, _FIRST_STEPS)
        limit = run_steps(load(in_memory), step, batches)
        yield Row.of(case, "step, features in host memory", "ms", limit)
        times = run_steps(load(on_disk), step, batches)
        yield Row.of(case, f"step, features in {in_file}", "ms", times, median(limit),
                     "features in host memory")  # fmt: skip

        def step_anew(batch: Any) -> None:
            forget(file)
            step(batch)

        times = run_steps(load(on_disk), step_anew, _COLD_STEPS)
        n_ids, in_order = [batch.n_id for batch in islice(load(on_disk), 3)], []
        for n_id in n_ids:
            missed = n_id[spilled.locate(n_id) < 0].cpu().sort().values
            forget(file)
            in_order.append(1e3 * _read_in_order(file, missed, torch.empty(len(missed), *x.shape[1:], dtype=x.dtype)))
        name_of_cold = f"step, features in {in_file}, forgotten at every step"
        yield Row.of(case, name_of_cold, "ms", times, sorted(in_order)[1],
                     "one thread reads the rows of a batch that are in the file alone",
                     f"{len(missed)} rows of {len(n_id)} from the file")  # fmt: skip
        for part in _AHEAD_SHARES:
            memory = f"{int(part * x.numel() * x.element_size())}B"
            times = []
            for _ in range(_EPOCHS):
                # A loader of its own: later epochs of one find rows in memory.
                ahead = open_loader(on_disk, memory)
                forget(file)
                begin = time.perf_counter()
                for batch in ahead:
                    step_anew(batch)
                wait_for_gpu()
                times.append(1e3 * (time.perf_counter() - begin) / len(ahead))
            (reads,) = ahead.tell().disk
            assert reads.disk_rate is not None
            needed = 1e3 * reads.num_rows * reads.row_bytes / reads.disk_rate / len(ahead)
            num_bytes = reads.num_pages * reads.page_bytes
            planned = f"{name_of_cold}, planned ahead in memory for {part:.0%}, whole epoch"
            yield Row.of(case, planned, "ms", times, needed,
                         "the disk gives the bytes of the rows that were read, in order",
                         f"{reads.num_rows} rows read for {reads.num_asked}; {num_bytes} bytes "
                         f"at {reads.rate / 1e9:.2f} GB/s beside {reads.disk_rate / 1e9:.2f}")  # fmt: skip

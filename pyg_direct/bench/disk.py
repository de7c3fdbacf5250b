"""Rows in files: beside a thread that reads the same rows in order, and under a training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct.bench.loader import run_steps, without_end
from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import time_on_clock
from pyg_direct.features.disk import DiskTier
from pyg_direct.features.feature import Feature
from pyg_direct.features.rowfile import RowFile
from pyg_direct.features.save import save_rows
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.loader.neighbor import NeighborLoader
from pyg_direct.loader.rows import FeatureStore
from pyg_direct.runtime.device import resolve_device

_BATCH = 1 << 17


def _forget(path: Path, file: RowFile) -> None:
    """Have the system forget what it keeps of a file."""
    file.forget()
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def measure_disk_rows(num_rows: int, row_bytes: int = 512, folder: str | None = None) -> Iterator[Row]:
    """Random rows of a file, in the page cache and out of it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        table = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, row_bytes // 4)
        path = save_rows(Path(place) / "rows.safetensors", table)
        tier = DiskTier(RowFile(path))
        ids = torch.randperm(num_rows)[: min(_BATCH, num_rows // 2)].sort().values
        out = torch.empty(len(ids), row_bytes // 4)
        for state in ("not in the page cache", "in the page cache"):
            cold = state.startswith("not")

            def read(cold: bool = cold) -> float:
                if cold:
                    _forget(path, tier.file)
                begin = time.perf_counter()
                tier.read(ids, out)
                return time.perf_counter() - begin

            def read_in_order(cold: bool = cold) -> float:
                if cold:
                    _forget(path, tier.file)
                handle, offset = os.open(path, os.O_RDONLY), tier.file.layout.offset
                rows, places = memoryview(out.view(-1).view(torch.uint8).numpy().data), ids.tolist()
                begin = time.perf_counter()
                for i, item in enumerate(places):
                    os.preadv(handle, [rows[i * row_bytes : (i + 1) * row_bytes]], offset + item * row_bytes)
                seconds = time.perf_counter() - begin
                os.close(handle)
                return seconds

            limit = sorted(read_in_order() for _ in range(3))[1]
            read()
            assert torch.equal(out[:, 0].long(), ids)
            values = [read() for _ in range(3 if cold else 10)]
            num_bytes = len(ids) * row_bytes
            yield Row.of(f"disk/{row_bytes} B, {state}", "rate", "GB/s", [num_bytes / s / 1e9 for s in values],
                         num_bytes / limit / 1e9, "one thread reads these rows in order")  # fmt: skip


def measure_disk_feature(x: Tensor, n_ids: list[Tensor], name: str, folder: str | None = None) -> Iterator[Row]:
    """Rows of the batches of a training from a file with a tenth in memory, beside host memory."""
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
        spilled = on_disk._spilled
        assert spilled is not None
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
    """Training steps of a GraphSAGE whose features lie in a file, a tenth of them in memory, beside host memory.

    Once as the system caches the file, and once with its pages forgotten at every step.
    """
    device = resolve_device(None)
    x, y, size = data.x, data.y.to(device), min(1024, len(train_idx))
    topology = CSRTopo(data.edge_index, num_nodes=data.num_nodes)
    model = GraphSAGE(x.shape[1], 256, 2, num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        out = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=batch.num_sampled_nodes,
                    num_sampled_edges_per_hop=batch.num_sampled_edges)[: batch.batch_size]  # fmt: skip
        F.cross_entropy(out, y[batch.n_id[: batch.batch_size]].long()).backward()
        optimizer.step()

    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = save_rows(Path(place) / "x.npy", x)
        share = {"device_cache_size" if device.type == "cuda" else "host_cache_size": "10%"}
        on_disk = Feature(csr_topo=topology, **share).from_file(path)  # type: ignore[arg-type]
        file = on_disk._file
        assert file is not None

        def step_anew(batch: Any) -> None:
            _forget(path, file)
            step(batch)

        limit: float | None = None
        anew = "a file, 10 % in memory, forgotten at every step"
        for way, feature in (("host memory", Feature().from_cpu_tensor(x)), ("a file, 10 % in memory", on_disk),
                             (anew, on_disk)):  # fmt: skip
            rows = FeatureStore()
            rows.put_tensor(feature, group_name=None, attr_name="x", index=None)
            graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
            loader = NeighborLoader((rows, graph), [10, 5], train_idx, batch_size=size, shuffle=True, drop_last=True,
                                    seed=0)  # fmt: skip
            times = run_steps(without_end(loader), step_anew if way == anew else step, batches)
            name_of_limit = "" if limit is None else "features in host memory"
            yield Row.of(f"disk/{name}/training", f"step, features in {way}", "ms", times, limit, name_of_limit)
            limit = sorted(times)[len(times) // 2] if limit is None else limit

"""Batches with rows divided over the processes, beside one copy shared by all processes of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch_geometric.data import Data

from benchmarks.distributed.exchange import BATCH, FANOUTS, run_processes
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.loader.neighbor_loader import NeighborLoader

_BATCHES = 12
# Names of the ways, and the options of their loaders.
_WAYS: dict[str, dict[str, Any]] = {
    "one copy that all share": {"cold_policy": "pinned"},
    "rows shared out": {"cold_policy": "shard"},
    "rows shared out, copies of 20 %": {"cold_policy": "shard", "feature_cache": "20%"},
}


def measure_sharded(graph: NodeDataset, name: str, device: str, count: int) -> Iterator[Row]:
    """Measure batches a second of all processes, and the bytes of rows that each holds and sends.

    Args:
        graph: A graph with features, on the CPU.
        name: Name of the rows.
        device: `cpu` or `cuda`.
        count: Processes; on GPUs each has its own GPU.
    """
    assert graph.x is not None
    found = run_processes(_measure, count, device, graph.edge_index, graph.x)
    case, (shared, *_) = f"distributed/{name}/{device}/{count}/rows", (rates for rates, *_ in found.values())
    for way, (rates, num_bytes, held) in found.items():
        yield Row.of(case, f"batches, {way}", "1/s", rates, median(shared), "one copy that all share",
                     f"{BATCH} seeds, {FANOUTS}, without training")  # fmt: skip
        if num_bytes > 0:
            yield Row.of(case, f"row bytes sent a batch, {way}", "KB", [num_bytes / 1e3])
        yield Row.of(case, f"rows in host memory, {way}", "MB", [held / 1e6])


def _measure(rank: int, count: int, device: torch.device, edge_index: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    found = {}
    for way, options in _WAYS.items():
        data, num_nodes = Data(x=x.clone(), edge_index=edge_index, num_nodes=len(x)), len(x)
        seeds = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(1))[: BATCH * _BATCHES * count]
        common: dict[str, Any] = {"ranks": "auto", "cache_policy": "device_replicate", "prefetch": 2}
        loader = NeighborLoader(data, FANOUTS, seeds, batch_size=BATCH, seed=1, device=device, **common, **options)
        rates = [_run_epoch(loader, count) for _ in range(4)][1:]
        feature = loader._list_places()[1]["x"]
        row_bytes, rows = x[0].numel() * x.element_size(), feature.stored
        held, num_bytes = num_nodes * row_bytes, 0.0
        if feature.placement == "sharded":
            held = sum(tier.num_rows for tier in feature.tell().tiers if "host" in tier.name) * row_bytes
            num_bytes = rows.tier.num_remote * row_bytes / (4 * len(loader))
        found[way] = rates, num_bytes, held
    return found


def _run_epoch(loader: NeighborLoader, count: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for batch in loader:
        del batch
    if loader.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return count * len(loader) / (time.perf_counter() - begin)

"""Worker mode with a graph in parts that processes of one host keep in one memory, on GPUs in the peer memory of a
clique.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from benchmarks.distributed.exchange import BATCH, FANOUTS, run_processes
from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph
from pyg_direct.loader.neighbor_loader import NeighborLoader

# Batches of each process per epoch, enough to hide its start; and epochs, of which the first only warms up.
_BATCHES, _EPOCHS = 96, 5
# Global batches to compare.
_COMPARED = 8


def measure_clique(graph: NodeDataset, name: str, device: str, counts: list[int]) -> Iterator[Row]:
    """Measure edges a second of batches with their rows, by number of processes, beside `NeighborLoader` in one.

    Args:
        graph: A graph with features, on the CPU.
        name: Name of the rows.
        device: `cpu` or `cuda`.
        counts: Numbers of processes; on GPUs each has its own GPU.

    Raises:
        AssertionError: the batches of several processes differ from the batches of one.
    """
    assert graph.x is not None
    seeds = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    seeds = seeds[: BATCH * _BATCHES * max(counts)]
    alone = NeighborLoader(Data(x=graph.x.clone(), edge_index=graph.edge_index), FANOUTS, seeds, batch_size=BATCH,
                           seed=1, prefetch=2, device=device)  # fmt: skip
    wanted, limit = _hash(alone, 0, 1), median(_run(alone))
    del alone
    rates: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / str(count)
            partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes, node_rows={"x": graph.x})
            found = run_processes(_measure, count, device, str(path), seeds.tolist())
            assert found["hash"] == wanted, f"batches of {count} processes are not those of one"
            rates[count] = found["rates"]
            case = f"clique/{name}/{device}/{count}"
            note = f"{BATCH} seeds, {FANOUTS}, with rows of {graph.x.shape[1]} numbers, no training; {found['placed']}"
            yield Row.of(case, "edges of all processes", "M/s", [rate / 1e6 for rate in rates[count]],
                         count * limit / 1e6, "as many NeighborLoaders of one process", note)  # fmt: skip
            if 1 in rates:
                one = median(rates[1])
                yield Row.of(f"{case}/speed-up", name, "x", [rate / one for rate in rates[count]], count,
                             "as many processes", curve="speed-up of worker mode", at=count,
                             at_name="processes")  # fmt: skip


def _measure(rank: int, count: int, device: torch.device, folder: str, seeds: list[int]) -> dict[str, Any]:
    with DistGraph(folder, device=device, device_cache_size="100%", share_graph=True) as graph:
        loader = DistNeighborLoader(graph, FANOUTS, torch.tensor(seeds), batch_size=BATCH, seed=1, prefetch=2)
        own = _hash(loader, rank, count)
        total = sum(graph.communicator.run(graph.communicator.agree, own)) % 2**59
        assert graph.whole is not None
        placed = f"neighbors in {graph.whole.place_plain().placement}, rows in {graph.rows.describe()['x'].placement}"
        return {"hash": total, "rates": _run(loader, graph), "placed": placed}


def _run(loader: Any, graph: DistGraph | None = None) -> list[float]:
    """Measure edges a second over all processes, epoch by epoch."""
    rates = []
    for _ in range(_EPOCHS + 1):
        _meet(graph)
        edges, begin = 0, time.perf_counter()
        for _, batch in zip(range(_BATCHES), loader, strict=False):
            edges += batch.edge_index.shape[1]
        _meet(graph)
        rates.append((1 if graph is None else graph.communicator.size) * edges / (time.perf_counter() - begin))
    return rates[1:]


def _meet(graph: DistGraph | None) -> None:
    """Wait for this process's GPU, and for the other processes."""
    wait_for_gpu()
    if graph is not None:
        graph.communicator.run(graph.communicator.agree, 0)


def _hash(loader: Any, rank: int, count: int) -> int:
    """Hash this process's share of the next epoch's first global batches to a number below 2**59."""
    total = torch.zeros((), dtype=torch.int64)
    for step, batch in zip(range(_COMPARED // count), loader, strict=False):
        weights = torch.arange(1, batch.e_id.numel() + 1, device=batch.e_id.device)
        own: Tensor = (weights * (batch.e_id + 1)).sum() + (batch.x.double() * 1024).long().sum() + batch.n_id.sum()
        total += (rank + step * count + 1) * own.cpu()
    return int(total) % 2**59

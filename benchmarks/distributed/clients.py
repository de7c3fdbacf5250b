"""Server-client mode beside worker mode, with equal numbers of servers, clients and ranks on this host."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed.exchange import BATCH, FANOUTS, run_processes
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph
from pyg_direct.distributed.server.client_graph import ClientGraph
from pyg_direct.errors import needs_extra
from pyg_direct.runtime.comm.host_group import gather

_BATCHES, _EPOCHS = 12, 5


def measure_clients(graph: NodeDataset, name: str, count: int = 2) -> Iterator[Row]:
    """Measure batches a second of all clients beside all ranks, on the CPU; no rows without Ray.

    Args:
        graph: A graph with features, on the CPU.
        name: Name of the rows.
        count: Ranks, and servers and clients.
    """
    if importlib.util.find_spec("ray") is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "parts")
        partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes, node_rows={"x": graph.x})
        rates = run_processes(_load, count, "cpu", path, graph.num_nodes, threads=1)
    case = f"distributed/{name}/cpu/{count}"
    ranks = sorted(rates["worker"])[_EPOCHS // 2]
    yield Row.of(case, "batches of all ranks", "1/s", rates["worker"], note=f"{BATCH} seeds, {FANOUTS}, no training")
    yield Row.of(case, "batches of all clients of Ray's servers", "1/s", rates["client"], ranks, "batches of all ranks",
                 f"{count} servers and {count} clients, a thread each, in turn with ranks")  # fmt: skip


def open_mode(mode: str, rank: int, count: int, folder: str, **options: Any) -> tuple[Any, Any]:
    """Open (the graph of a rank or a client, the object to close after it); collective."""
    if mode == "worker":
        return DistGraph(folder, device="cpu", share_graph=False, **options), None
    known: list[Any] = [None, None]
    if rank == 0:
        with needs_extra("servers of Ray", "ray"):
            import ray

        from pyg_direct.distributed.server.ray_servers import serve

        servers = serve(folder, "bench", num_cpus=0.5)
        # A Ray that was started here has a token, which other processes use if the variable is set.
        known = [ray.get_runtime_context().gcs_address, os.environ.get("RAY_AUTH_MODE")]
    known = gather(known)[0]
    if rank > 0:
        if known[1] is not None:
            os.environ["RAY_AUTH_MODE"] = known[1]
        # Imported late: Ray reads the variable at its import.
        from pyg_direct.distributed.server.ray_servers import connect

        servers = connect(count, "bench", address=known[0])
    return ClientGraph(servers, device="cpu", client=(rank, count)), servers if rank == 0 else None


def _load(rank: int, count: int, device: torch.device, folder: str, num_nodes: int) -> dict[str, Any]:
    """Measure batches a second of both modes in alternating epochs, so that other load affects both."""
    modes = ("worker", "client")
    opened = {mode: open_mode(mode, rank, count, folder) for mode in modes}
    rates: dict[str, list[float]] = {mode: [] for mode in modes}
    for epoch in range(_EPOCHS + 1):
        order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(epoch))
        for mode, (graph, _) in opened.items():
            loader = DistNeighborLoader(graph, FANOUTS, order[: BATCH * _BATCHES * count], batch_size=BATCH, prefetch=2,
                                        seed=1)  # fmt: skip
            dist.barrier()
            begin = time.perf_counter()
            for _ in loader:
                pass
            dist.barrier()
            rates[mode].append(_BATCHES * count / (time.perf_counter() - begin))
    for graph, _ in opened.values():
        graph.close()
    dist.barrier()
    for _, servers in opened.values():
        if servers is not None:
            servers.close()
    # The first epoch compiles.
    return {mode: own[1:] for mode, own in rates.items()}

"""Loading a graph in parts from several processes of this host, and the bytes that they exchange."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pyg_direct.bench.row import Row
from pyg_direct.bench.scaling import model_scaling
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph
from pyg_direct.distributed.communicator import Communicator

FANOUTS, BATCH = [15, 10, 5], 512
_BATCHES, _EXCHANGES = 12, 20
_BIG = 1 << 22


def measure_distributed(graph: NodeDataset, name: str, device: str, counts: list[int]) -> Iterator[Row]:
    """Edges, rows and bytes for each number of processes; what copies of others' rows and prefetching save.

    Args:
        graph: With features, on the CPU.
        name: Of the rows.
        device: `cpu` or `cuda`.
        counts: Numbers of processes; on GPUs each has one of its own.
    """
    assert graph.x is not None
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / str(count)
            partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes, node_rows={"x": graph.x})
            found[count] = run_processes(_measure, count, device, str(path), graph.num_nodes)
    for count, result in found.items():
        case = f"distributed/{name}/{device}/{count}"
        yield Row.of(case, "edges of all processes", "M/s", [v / 1e6 for v in result["edges"]],
                     note=f"{BATCH} seeds a batch, {FANOUTS}, batches without training")  # fmt: skip
        yield Row.of(case, "rows of all processes", "M/s", [v / 1e6 for v in result["rows"]])
        if count == 1:
            continue
        yield (
            Row.of(case, "speed beside one process", "x", [_median(result["edges"]) / _median(found[1]["edges"])])
            if 1 in found
            else Row.of(case, "edges", "M/s", [_median(result["edges"]) / 1e6])
        )
        yield Row.of(case, "row bytes sent a batch", "KB", [result["row_bytes"] / 1e3], result["least_bytes"] / 1e3,
                     "distinct rows of other parts")  # fmt: skip
        yield Row.of(case, "ids and edges sent a batch", "KB", [result["other_bytes"] / 1e3])
        yield Row.of(case, "row bytes with copies of 20 %", "KB", [result["kept_bytes"] / 1e3],
                     result["least_bytes"] / 1e3, "distinct rows of other parts")  # fmt: skip
        yield Row.of(case, "loading hidden by prefetching", "%", [100 * result["hidden"]],
                     note="behind steps that take 1.3 times as long and leave the processors free")  # fmt: skip
        yield Row.of(case, "exchange of nothing", "us", [1e6 * t for t in result["empty"]])
        yield Row.of(case, "exchange of 4 MiB with each", "GB/s", [v / 1e9 for v in result["bandwidth"]])
    if 1 in found and len(found) > 1:
        yield from model_scaling(found, f"distributed/{name}/{device}", shares_cores=device == "cpu")


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run_processes(work: Any, count: int, device: str, *args: Any) -> dict[str, Any]:
    """What rank 0 of `count` processes of one group measures."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, args=(work, count, device, folder, args), nprocs=count)  # type: ignore[attr-defined]
        result: dict[str, Any] = json.loads((Path(folder) / "result").read_text())
        return result


def _enter(rank: int, work: Any, count: int, device: str, folder: str, args: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    share = max(1, (os.cpu_count() or 1) // count)
    torch.set_num_threads(share)
    # Numba has not started yet.
    os.environ["NUMBA_NUM_THREADS"] = str(share)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/group",
                            rank=rank, world_size=count)  # fmt: skip
    result = work(rank, count, torch.device(device, rank if device == "cuda" else 0), *args)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.destroy_process_group()


def _measure(rank: int, count: int, device: torch.device, folder: str, num_nodes: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with DistGraph(folder, device=device, device_cache_size="100%") as graph:
        rates = [_run_epoch(graph, num_nodes, epoch) for epoch in range(4)][1:]
        result["edges"], result["rows"] = ([rate[name] for rate in rates] for name in ("edges", "rows"))
        result |= {key: rates[-1][key] for key in ("row_bytes", "least_bytes", "other_bytes")}
        seconds = [rate["seconds"] for rate in rates]
        result["seconds"] = _median(seconds)
        if count > 1:
            result["hidden"] = _measure_hidden(graph, num_nodes)
            result |= _measure_exchange(graph.communicator)
    if count > 1:
        with DistGraph(folder, device=device, device_cache_size="100%", replicas="20%") as graph:
            result["kept_bytes"] = _run_epoch(graph, num_nodes, 0)["row_bytes"]
    return result


def _make_loader(graph: DistGraph, num_nodes: int, prefetch: int, seed: int) -> DistNeighborLoader:
    count = min(num_nodes, BATCH * _BATCHES * graph.communicator.size)
    seeds = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))[:count]
    return DistNeighborLoader(graph, FANOUTS, seeds, batch_size=BATCH, prefetch=prefetch, seed=1)


def _run_epoch(graph: DistGraph, num_nodes: int, epoch: int) -> dict[str, float]:
    """Rates over all processes, and bytes that this one sent, a batch."""
    loader = _make_loader(graph, num_nodes, 2, epoch)
    sent, remote = graph.communicator.sent.copy(), graph.rows.num_remote
    edges = rows = batches = 0
    _synchronize(graph)
    begin = time.perf_counter()
    for batch in loader:
        edges, rows, batches = edges + batch.edge_index.shape[1], rows + batch.n_id.numel(), batches + 1
    _synchronize(graph)
    seconds = time.perf_counter() - begin
    size, new = graph.communicator.size, graph.communicator.sent - sent
    row_bytes = sum(feature.shape[1:].numel() * feature.dtype.itemsize for feature in graph.rows.describe().values())
    return {"seconds": seconds / batches, "edges": size * edges / seconds, "rows": size * rows / seconds,
            "row_bytes": new["rows"] / batches, "least_bytes": (graph.rows.num_remote - remote) * row_bytes / batches,
            "other_bytes": sum(n for what, n in new.items() if what != "rows") / batches}  # fmt: skip


def _synchronize(graph: DistGraph) -> None:
    graph.communicator.run(graph.communicator.agree, 0)


def _measure_hidden(graph: DistGraph, num_nodes: int) -> float:
    """Share of the time of loading that steps of 1.3 times its length hide."""

    def run(prefetch: int, step: float) -> float:
        _synchronize(graph)
        begin = time.perf_counter()
        for _ in _make_loader(graph, num_nodes, prefetch, 7):
            time.sleep(step)
        _synchronize(graph)
        return (time.perf_counter() - begin) / _BATCHES

    loading = run(0, 0.0)
    step = 1.3 * loading
    return 1 - (run(2, step) - step) / loading


def _measure_exchange(communicator: Communicator) -> dict[str, list[float]]:
    def run(size: int) -> list[float]:
        parts = [torch.zeros(size, dtype=torch.uint8, device=communicator.device)] * communicator.size
        times = []
        for _ in range(_EXCHANGES):
            begin = time.perf_counter()
            communicator.exchange(parts, "test")
            if communicator.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return times[1:]

    empty = communicator.run(run, 0)
    big = communicator.run(run, _BIG)
    return {"empty": empty, "bandwidth": [(communicator.size - 1) * _BIG / t for t in big]}

"""Loading a graph in parts from several processes of this host, and the bytes that they exchange."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch_geometric.data import Data

from benchmarks.distributed.scale_model import HOSTS, find_contention, model_scaling
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph
from pyg_direct.graph.metis import assign_by_metis
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.comm.formation import stay_on_host
from pyg_direct.runtime.comm.nccl_segments import Transport
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
from pyg_direct.runtime.cuda.launch import on_raw_stream

FANOUTS, BATCH = [15, 10, 5], 512
# Seeds of a batch whose parts are exchanged.
_SEEDS = {"cpu": BATCH, "cuda": 1024}
_BATCHES, _EXCHANGES = 12, 20
# Batches per process of an epoch, if a loader has several epochs; a GPU makes them so fast that fewer would mostly
# measure how an epoch begins and ends.
_MORE_BATCHES = {"cpu": 48, "cuda": 480}
_BIG = 1 << 22
# Bytes a pair of NCCL's exchanges, and runs of several of them.
_SEGMENTS, _RUNS = (8, 1 << 18, 1 << 24), 5
# File with the whole graph, for the loader that one process would use without parts.
_WHOLE = "whole.pt"
# Batches of foresight.
_AHEAD = 16
# With a host's name for each rank, NCCL exchanges over sockets as between hosts.
_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}


def measure_distributed(graph: NodeDataset, name: str, device: str, counts: list[int]) -> Iterator[Row]:
    """Measure edges, rows and bytes by number of processes, and the savings of copied rows and of prefetching.

    Args:
        graph: A graph with features, on the CPU.
        name: Name of the rows.
        device: `cpu` or `cuda`.
        counts: Numbers of processes; on GPUs each has its own GPU.
    """
    assert graph.x is not None
    found: dict[int, dict[str, Any]] = {}
    # One core per process if there are enough, also for a single process.
    cores = os.cpu_count() or 1
    threads = max(1, cores // max(counts))
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path = Path(folder) / str(count)
            partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes, node_rows={"x": graph.x})
            if count == 1:
                torch.save({"x": graph.x, "edge_index": graph.edge_index}, Path(folder) / _WHOLE)
            found[count] = run_processes(_measure, count, device, str(path), graph.num_nodes, threads=threads)
    if 1 in found:
        yield Row.of(f"distributed/{name}/{device}/1", "DistNeighborLoader over NeighborLoader, time of a batch", "x",
                     found[1]["over_own"], note="one process with one part that has all; epochs in turns")  # fmt: skip
        yield Row.of(f"distributed/{name}/{device}/1", "batch grouped, packed and joined as by several", "ms",
                     [1e3 * found[1]["shared_seconds"]], 1e3 * found[1]["seconds"], "batch of one process")  # fmt: skip
    for count, result in found.items():
        case = f"distributed/{name}/{device}/{count}"
        crowded = f" on {cores} cores" if device == "cpu" and count * threads > cores else ""
        yield Row.of(case, "edges of all processes", "M/s", [v / 1e6 for v in result["edges"]],
                     note=f"{_SEEDS[device]} seeds a batch, {FANOUTS}, without training, {threads} threads each"
                          f"{crowded}")  # fmt: skip
        yield Row.of(case, "rows of all processes", "M/s", [v / 1e6 for v in result["rows"]])
        yield from _describe_whole(found, count, case)
        if count == 1:
            continue
        if 1 in found:
            yield Row.of(case, "speed beside one process", "x",
                         [median(result["edges"]) / median(found[1]["edges"])])  # fmt: skip
        yield Row.of(case, "row bytes sent a batch", "KB", [result["row_bytes"] / 1e3], result["least_bytes"] / 1e3,
                     "distinct rows of other parts")  # fmt: skip
        if "shared_edges" in result:
            yield Row.of(case, "edges of all processes, rows read in place", "M/s",
                         [v / 1e6 for v in result["shared_edges"]], median(result["edges"]) / 1e6,
                         "rows exchanged", "rows in memory that the processes share")  # fmt: skip
        yield Row.of(case, "ids and edges sent a batch", "KB", [result["other_bytes"] / 1e3])
        yield Row.of(case, "row bytes with copies of 20 %", "KB", [result["kept_bytes"] / 1e3],
                     result["least_bytes"] / 1e3, "distinct rows of other parts")  # fmt: skip
        yield Row.of(case, "edges of all processes, copies of 20 %", "M/s", [v / 1e6 for v in result["kept_edges"]],
                     median(result["edges"]) / 1e6, "without copies")  # fmt: skip
        if "planned_bytes" in result:
            yield from describe_ahead(result, case)
        yield Row.of(case, "loading hidden by prefetching", "%", [100 * result["hidden"]],
                     note="behind steps that take 1.3 times as long and leave the processors free")  # fmt: skip
        yield Row.of(case, "exchange of nothing", "us", [1e6 * t for t in result["empty"]])
        yield Row.of(case, "exchange of 4 MiB with each", "GB/s", [v / 1e9 for v in result["bandwidth"]])
        if "segment_seconds" in result:
            yield from _describe_segments(result, case)
            if 1 in found:
                yield _compare_with_rate(result, case, found[1]["seconds"])
    cut = measure_cut(graph.edge_index, graph.num_nodes, HOSTS[1:])
    yield from describe_cut(cut, name)
    if 1 in found and len(found) > 1:
        yield from model_scaling(
            found, f"distributed/{name}/{device}", cut=cut,
            crowding=lambda count: max(1.0, count * threads / cores) if device == "cpu" else 1.0,
            contention=lambda count: find_contention(found, count) if device == "cpu" else None)  # fmt: skip


def _describe_segments(result: Mapping[str, Any], case: str) -> Iterator[Row]:
    """Describe the result of `measure_segments`."""
    yield Row.of(case, "NCCL's all-to-all of 8 bytes a pair", "us", [1e6 * t for t in result["least_seconds"]],
                 note="in a captured graph, as a batch has them")  # fmt: skip
    yield Row.of(case, "NCCL's all-to-all of 256 KiB a pair", "us", [1e6 * t for t in result["segment_seconds"]])
    yield Row.of(case, "NCCL's all-to-all of 16 MiB a pair", "GB/s", [v / 1e9 for v in result["segment_rate"]],
                 note="out of each GPU, without the time of a small one")  # fmt: skip


def _compare_with_rate(result: Mapping[str, Any], case: str, alone: float = 0.0) -> Row:
    """Compare a batch with its bytes at NCCL's rate, or with `alone` if that is longer: seconds of a batch of one GPU
    that holds all.
    """
    sent = result["row_bytes"] + result["other_bytes"]
    seconds = sent / median(result["segment_rate"])
    limit = "its bytes at NCCL's rate" + (", or a batch of one GPU that holds all" if alone else "")
    return Row.of(case, "batch over the least that it can take", "x", [result["seconds"] / max(seconds, alone)],
                  1.0, limit, note=f"{sent / 1e6:.1f} MB out of each GPU")  # fmt: skip


def measure_hosts(graph: NodeDataset, name: str, counts: Sequence[int]) -> Iterator[Row]:
    """Measure GPUs of this host as hosts of their own, which exchange over sockets of the loopback.

    Args:
        graph, name: See `measure_distributed`.
        counts: Numbers of hosts with a GPU each, above 1.
    """
    assert graph.x is not None
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            path, case = Path(folder) / str(count), f"distributed/{name}/sockets/{count}"
            partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes, node_rows={"x": graph.x})
            result = run_processes(_measure_host, count, "cuda", str(path), graph.num_nodes)
            yield Row.of(case, "edges of all processes", "M/s", [v / 1e6 for v in result["edges"]],
                         note=f"{_SEEDS['cuda']} seeds a batch, {FANOUTS}; peer and shared memory off")  # fmt: skip
            yield from _describe_segments(result, case)
            yield _compare_with_rate(result, case)


def _measure_host(rank: int, count: int, device: torch.device, folder: str, num_nodes: int) -> dict[str, Any]:
    # NCCL reads them at its first exchange.
    os.environ |= {"NCCL_HOSTID": str(rank), **_SOCKETS}
    with DistGraph(folder, device=device, device_cache_size="100%", share_graph=False) as graph:
        loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES["cpu"])
        rates = [_run_epoch(graph, num_nodes, loader) for _ in range(4)][1:]
        result = {"edges": [rate["edges"] for rate in rates], "seconds": median([rate["seconds"] for rate in rates])}
        result |= {key: rates[-1][key] for key in ("row_bytes", "other_bytes")}
        return result | measure_segments(graph.communicator)


def _describe_whole(found: Mapping[int, Mapping[str, Any]], count: int, case: str) -> Iterator[Row]:
    """Describe rows of processes with the graph in one memory, if that is possible."""
    result = found[count]
    if "whole" not in result:
        return
    yield Row.of(case, "edges of all processes, graph in one memory", "M/s", [v / 1e6 for v in result["whole"]],
                 median(result["edges"]) / 1e6, "exchanged" if count > 1 else "a part of its own",
                 "each process samples and reads alone")  # fmt: skip
    if count > 1 and "whole" in found.get(1, {}):
        yield Row.of(case, "speed beside one process, graph in one memory", "x",
                     [median(result["whole"]) / median(found[1]["whole"])])  # fmt: skip
        yield Row.of(case, "share of the graph that a process has", "%",
                     [100 * result["held"] / found[1]["held"]], 100 / count, "an equal share")  # fmt: skip


def describe_ahead(result: Mapping[str, Any], case: str) -> Iterator[Row]:
    """Describe the result of `measure_ahead`."""
    yield Row.of(case, f"row bytes, rows of {_AHEAD} batches known", "KB", [result["planned_bytes"] / 1e3],
                 result["read_bytes"] / 1e3, "distinct remote rows of each batch",
                 note="a batch, mean of all processes; counted")  # fmt: skip


def describe_cut(cut: Mapping[int, float], name: str) -> Iterator[Row]:
    """Describe the result of `measure_cut`, beside parts by a hash."""
    case = f"distributed/{name}"
    for count, share in cut.items():
        common: dict[str, Any] = {"curve": f"nodes of other parts in {name}", "at": count, "at_name": "parts"}
        yield Row.of(f"{case}/cut/hash/{count}", "parts by hash, seeds of all parts", "%", [100 * (1 - 1 / count)],
                     **common)  # fmt: skip
        yield Row.of(f"{case}/cut/METIS/{count}", "parts by METIS, seeds of the own part", "%", [100 * share],
                     note=f"{BATCH} seeds a batch, {FANOUTS}; mean of three parts", **common)  # fmt: skip


def measure_cut(edge_index: torch.Tensor, num_nodes: int, hosts: Sequence[int]) -> dict[int, float]:
    """Measure the share of a batch's nodes that lie in other parts, for parts by METIS and seeds of the own part.

    Only for numbers of hosts with enough seeds per host for a batch.
    """
    if importlib.util.find_spec("pymetis") is None:
        return {}
    data, found = Data(edge_index=edge_index, num_nodes=num_nodes), {}
    ends = edge_index.numpy()
    for count in (n for n in hosts if num_nodes // n >= BATCH):
        parts = torch.from_numpy(assign_by_metis(lambda: iter([(ends[0], ends[1])]), num_nodes, count))
        shares = []
        for part in sorted({0, count // 2, count - 1}):
            own = (parts == part).nonzero().view(-1)
            batch = next(iter(NeighborLoader(data, FANOUTS, own, batch_size=BATCH, shuffle=True, seed=1, device="cpu")))
            shares.append(float((parts[batch.n_id] != part).float().mean()))
        found[count] = sum(shares) / len(shares)
    return found


def run_processes(work: Any, count: int, device: str, *args: Any, threads: int | None = None) -> dict[str, Any]:
    """Run `work` in `count` processes of one group, by default with equal shares of the cores; return rank 0's
    result.
    """
    with tempfile.TemporaryDirectory() as folder:
        share = threads or max(1, (os.cpu_count() or 1) // count)
        # Numba reads the variable at its import.
        before = os.environ.get("NUMBA_NUM_THREADS")
        os.environ["NUMBA_NUM_THREADS"] = str(share)
        context = spawn(_enter, args=(work, count, device, folder, share, args), nprocs=count, join=False)
        try:
            while not context.join():
                pass
        finally:
            end_processes(context)
            del os.environ["NUMBA_NUM_THREADS"]
            if before is not None:
                os.environ["NUMBA_NUM_THREADS"] = before
        result: dict[str, Any] = json.loads((Path(folder) / "result").read_text())
        return result


def end_processes(context: Any) -> None:
    """Kill running processes of a `spawn`, for example after Ctrl-C: they would hold GPUs, and block this process's
    exit.
    """
    for process in context.processes:
        if process.is_alive():
            process.kill()
        process.join()


def _enter(rank: int, work: Any, count: int, device: str, folder: str, share: int, args: tuple[Any, ...]) -> None:
    stay_on_host()
    torch.set_num_threads(share)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/group",
                            rank=rank, world_size=count)  # fmt: skip
    result = work(rank, count, torch.device(device, rank if device == "cuda" else 0), *args)
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    dist.destroy_process_group()


class Itself:
    """A `Transport` of the only rank, which exchanges with itself.

    Args:
        has_beside: True if rows travel beside the hops of the next batch, as those of several ranks.
    """

    is_captured = True

    def __init__(self, device: torch.device, *, has_beside: bool = True) -> None:
        self._device = device
        self.beside = Itself(device, has_beside=False) if has_beside else None

    def exchange(self, to_send: torch.Tensor, received: torch.Tensor, stream: int) -> None:
        """Copy the segment."""
        with on_raw_stream(stream, self._device) if self._device.type == "cuda" else nullcontext():
            received.copy_(to_send)

    def exchange_with_others(self, to_send: torch.Tensor, received: torch.Tensor, stream: int) -> None:
        """Do nothing: there are no others."""

    def follow(self, event: Any) -> None:
        """Do nothing: no rank is gone."""

    def wait(self, event: Any) -> None:
        """Wait for an event."""
        event.synchronize()

    def hold(self, holder: Any) -> None:
        """Do nothing: no group ends before the graphs."""


class _Exchanging(DistGraph):
    """A graph whose only process exchanges with itself."""

    def _find_obstacle(self, *_: Any) -> str:
        if self.communicator.captured:
            own: Any = Itself(self.device)
            self.communicator.open_segments = lambda: own  # type: ignore[method-assign]
        return "it is measured"


def _measure(rank: int, count: int, device: torch.device, folder: str, num_nodes: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with DistGraph(folder, device=device, device_cache_size="100%", share_graph=False) as graph:
        loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES[device.type])
        rates = [_run_epoch(graph, num_nodes, loader) for _ in range(4)][1:]
        if graph.whole is None:
            result["group"] = _count_in_group(loader)
        result["edges"], result["rows"] = ([rate[name] for rate in rates] for name in ("edges", "rows"))
        result |= {key: rates[-1][key] for key in ("row_bytes", "least_bytes", "other_bytes")}
        seconds = [rate["seconds"] for rate in rates]
        result["seconds"], result["spread"] = median(seconds), rates[-1]["spread"]
        if count == 1:
            result["over_own"] = _measure_beside_own(graph, loader, Path(folder).parent / _WHOLE)
            # As in several processes, for the model of several.
            with _Exchanging(folder, device=device, device_cache_size="100%") as own:
                loader = _make_loader(own, num_nodes, 2, 0, _MORE_BATCHES[device.type])
                result["shared_seconds"] = median([_run_epoch(own, num_nodes, loader)["seconds"] for _ in range(4)][1:])
        if count > 1:
            result["hidden"] = _measure_hidden(graph, num_nodes)
            result |= _measure_exchange(graph.communicator)
            if graph.communicator.captured:
                result |= measure_segments(graph.communicator)
    if count > 1:
        with DistGraph(folder, device=device, device_cache_size="100%", replicas="20%", share_graph=False) as graph:
            # Groups of batches have their size from the second epoch on, as above.
            loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES[device.type])
            kept = [_run_epoch(graph, num_nodes, loader) for _ in range(3)][1:]
            result |= {"kept_bytes": kept[-1]["row_bytes"], "kept_edges": [own["edges"] for own in kept]}
    if count > 1 and device.type == "cpu":
        result |= measure_ahead(rank, count, device, folder, num_nodes)
    with DistGraph(folder, device=device, device_cache_size="100%") as graph:
        if graph.whole is not None:
            loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES[device.type])
            speeds = [_run_epoch(graph, num_nodes, loader)["edges"] for _ in range(4)]
            result |= {"whole": speeds[1:], "held": graph.num_bytes}
    if count > 1 and device.type == "cpu":
        with DistGraph(folder, device=device, share_rows=True, share_graph=False) as graph:
            loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES[device.type])
            result["shared_edges"] = [_run_epoch(graph, num_nodes, loader)["edges"] for _ in range(4)][1:]
    return result


def _measure_beside_own(graph: DistGraph, loader: DistNeighborLoader, file: Path) -> list[float]:
    """Measure a loader of one part beside `NeighborLoader`, in turns: times of a batch over each other."""
    data = Data(**torch.load(file, mmap=True))
    own = NeighborLoader(data, FANOUTS, loader.input_data.node, batch_size=loader.batch_size, prefetch=2, seed=1,
                         device=graph.device)  # fmt: skip
    seconds = []
    for turn in range(8):
        begin = time.perf_counter()
        for _ in own if turn % 2 else loader:
            pass
        _synchronize(graph)
        seconds.append(time.perf_counter() - begin)
    return [seconds[turn] / seconds[turn + 1] for turn in range(2, 8, 2)]


def measure_ahead(rank: int, count: int, device: torch.device, folder: str, num_nodes: int) -> dict[str, float]:
    """Count row bytes a batch that are sent with foresight, and those of each batch's rows of other parts."""
    with DistGraph(folder, device=device, share_graph=False) as graph:
        loader = _make_loader(graph, num_nodes, 2, 0, _MORE_BATCHES["cpu"], ahead=_AHEAD)
        # Groups of batches have their size from the second epoch on.
        _run_epoch(graph, num_nodes, loader)
        before = loader._rows_ahead.num_read
        sent = _run_epoch(graph, num_nodes, loader)["row_bytes"]
        row_bytes = sum(own.shape[1:].numel() * own.dtype.itemsize for own in graph.rows.describe().values())
        read = (loader._rows_ahead.num_read - before) * row_bytes / len(loader)
        of_all = [graph.communicator.run(graph.communicator.agree, round(value)) for value in (sent, read)]
    return {name: sum(own) / count for name, own in zip(("planned_bytes", "read_bytes"), of_all, strict=True)}


def _count_in_group(loader: DistNeighborLoader) -> float:
    """Count the batches of a mean step: the first two steps of an epoch have one batch each."""
    count, size = len(loader), loader._group.choose(loader._group.num_bytes)
    return count / (min(count, 2) + -(-max(0, count - 2) // size))


def _make_loader(graph: DistGraph, num_nodes: int, prefetch: int, seed: int, batches: int = _BATCHES, ahead: int = 0
                 ) -> DistNeighborLoader:  # fmt: skip
    size = _SEEDS[graph.device.type]
    count = min(num_nodes, size * batches * graph.communicator.size)
    seeds = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))[:count]
    return DistNeighborLoader(graph, FANOUTS, seeds, batch_size=size, prefetch=prefetch, seed=1, ahead=ahead)


def _run_epoch(graph: DistGraph, num_nodes: int, epoch: int | DistNeighborLoader) -> dict[str, float]:
    """Measure rates over all processes, and bytes per batch that this one sent; of a loader, or of a new one per
    epoch.
    """
    loader = _make_loader(graph, num_nodes, 2, epoch) if isinstance(epoch, int) else epoch
    sent, remote = graph.communicator.sent.copy(), graph.rows.num_remote
    sizes, rows = [], 0
    _synchronize(graph)
    begin = time.perf_counter()
    for batch in loader:
        sizes.append(batch.edge_index.shape[1])
        rows += batch.n_id.numel()
    _synchronize(graph)
    seconds = time.perf_counter() - begin
    edges, batches = sum(sizes), len(sizes)
    spread = float(torch.tensor(sizes, dtype=torch.float64).std()) * batches / edges
    size, new = graph.communicator.size, graph.communicator.sent - sent
    row_bytes = sum(feature.shape[1:].numel() * feature.dtype.itemsize for feature in graph.rows.describe().values())
    return {"seconds": seconds / batches, "spread": spread,
            "edges": size * edges / seconds, "rows": size * rows / seconds,
            "row_bytes": new["rows"] / batches, "least_bytes": (graph.rows.num_remote - remote) * row_bytes / batches,
            "other_bytes": sum(n for what, n in new.items() if what != "rows") / batches}  # fmt: skip


def _synchronize(graph: DistGraph) -> None:
    graph.communicator.run(graph.communicator.agree, 0)


def _measure_hidden(graph: DistGraph, num_nodes: int) -> float:
    """Measure the share of loading time that steps of 1.3 times its length hide."""

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


class _Exchanges:
    """Exchanges of a captured plan, one after the other; as one graph on a GPU."""

    def __init__(self, segments: Transport, to_send: torch.Tensor, received: torch.Tensor) -> None:
        self._segments, self._words, self._device = segments, (to_send, received), to_send.device
        self._graph: CapturedGraph | None = None
        if self._device.type == "cuda":
            segments.hold(self)
            self._graph = CapturedGraph(self._enqueue, self._device.index)

    def _enqueue(self, stream: int) -> None:
        for _ in range(_EXCHANGES):
            self._segments.exchange(*self._words, stream)

    def run(self) -> float:
        """Run all of them, and return the seconds of one."""
        begin = time.perf_counter()
        if self._graph is None:
            self._enqueue(0)
        else:
            self._graph.replay()
            torch.cuda.synchronize(self._device)
        return (time.perf_counter() - begin) / _EXCHANGES

    def release(self) -> bool:
        """Release the graph, which a group cannot outlive."""
        self._graph = None
        return True


def measure_segments(communicator: Communicator) -> dict[str, list[float]]:
    """Measure exchanges of captured plans: seconds of the least and of a small one, bytes a second out of each GPU of a
    large one.
    """
    size, device = communicator.size, communicator.device

    def run(num_bytes: int) -> list[float]:
        segments = communicator.open_segments()
        assert segments is not None
        exchanges = _Exchanges(segments, *torch.zeros(2, size * num_bytes, dtype=torch.uint8, device=device).unbind())
        return [exchanges.run() for _ in range(1 + _RUNS)][1:]

    least, small, large = (communicator.run(run, num_bytes) for num_bytes in _SEGMENTS)
    moved = (size - 1) * (_SEGMENTS[2] - _SEGMENTS[1])
    return {"least_seconds": least, "segment_seconds": small,
            "segment_rate": [moved / max(1e-9, t - median(small)) for t in large]}  # fmt: skip

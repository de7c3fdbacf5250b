"""Rows that stand beside peers: samplers, loaders and tables on one graph, with equal seeds and fanouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain, islice, repeat
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from pyg_direct.bench.limits import (
    device_copy_rate,
    pinned_copy_rate,
    random_read_rate_of_cpu,
    time_on_clock,
    wait_for_gpu,
)
from pyg_direct.bench.peers import PEERS, Rows, Sampler, open_peers, whole_graph_tensor
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import FANOUTS
from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.features.feature import Feature
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import GpuPlan, open_plan

OURS = "pyg_direct"
WINDOWS = 5
_WINDOW_SECONDS = 0.1
# Draws differ between projects, and with them the nodes met after the first hop, and their edges.
_SAME_WORK = 0.03
_SCALES = {"G/s": 1e9, "M/s": 1e6}


@dataclass
class Contender:
    """Sampler that is measured.

    Attributes:
        name: As its row is named; ours begin with `pyg_direct`.
        run: Samples batches one after the other and returns the number of their edges.
        rates: Edges a second of each window.
        alone: Seconds of batches with nothing before or after them.
    """

    name: str
    run: Callable[[Sequence[Tensor]], int]
    note: str = ""
    rates: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    def measure(self, batches: Sequence[Tensor]) -> float:
        """Run a window, and return its seconds."""
        wait_for_gpu()
        begin = time.perf_counter()
        edges = self.run(batches)
        wait_for_gpu()
        seconds = time.perf_counter() - begin
        self.rates.append(edges / seconds)
        self.work.append(edges / len(batches))
        return seconds

    def measure_alone(self, batches: Sequence[Tensor]) -> None:
        """Run batches one by one."""
        for seeds in batches:
            self.alone += time_on_clock(partial(self.run, [seeds]), repeats=1, warm_up=0)


def hold_contest(contenders: Sequence[Contender], batches: Sequence[Tensor], *, alone: bool = True) -> None:
    """Measure all of them; slower ones get fewer batches a window.

    Args:
        batches: Seeds of each batch; a window takes as many as fit it, at least two.
        alone: Whether to time batches with nothing before or after them too.
    """
    counts = []
    for contender in contenders:
        contender.run(batches[:2])
        counts.append(max(2, min(len(batches), int(2 * _WINDOW_SECONDS / contender.measure(batches[:2])))))
        contender.rates.clear()
        contender.work.clear()
    for _ in range(WINDOWS):
        for contender, count in zip(contenders, counts, strict=True):
            contender.measure(batches[:count])
            if alone:
                contender.measure_alone(batches[: min(count, 4)])


def rows_of_contest(case: str, contenders: Sequence[Contender], unit: str, limit: float | None = None,
                    limit_name: str = "") -> Iterator[Row]:  # fmt: skip
    """Rates of all, times of batches alone, and ours over the best peer.

    Raises:
        RuntimeError: a contender samples another number of edges than the first.
    """
    work = {c.name: mean(c.work) for c in contenders}
    first = contenders[0].name
    for contender in contenders:
        edges = work[contender.name]
        if abs(edges / work[first] - 1) > _SAME_WORK:
            raise RuntimeError(f"{contender.name} samples {edges:.0f} edges a batch, {first} {work[first]:.0f}")
        note = ", ".join(filter(None, [f"{edges:.0f} edges a batch", contender.note]))
        rates = [rate / _SCALES[unit] for rate in contender.rates]
        yield Row.of(case, contender.name, unit, rates, limit, limit_name, note)
        if contender.alone:
            yield Row.of(case, f"{contender.name}, a batch alone", "ms", [1e3 * s for s in contender.alone], note=note)
    peers = [c for c in contenders if not c.name.startswith(OURS)]
    if peers:
        best = max(peers, key=lambda c: median(c.rates))
        for ours in contenders:
            if ours.name.startswith(OURS):
                ratios = [rate / median(best.rates) for rate in ours.rates]
                yield Row.of(case, f"{ours.name} over the best peer", "x", ratios, note=best.name)


# Ids, int64 `[B]` on the GPU, to their rows there.
Reader = Callable[[Tensor], Tensor]


def open_tables(table: Tensor, placement: str) -> Iterator[tuple[str, Reader]]:
    """Tables of torch and of the installed peers that hold `table`, float32 `[N, F]`, on the GPU or on the host."""
    name, reader = _open_torch(table, placement)
    yield name, reader
    for peer in PEERS:
        if peer.title in _OPENERS and peer.is_installed:
            yield peer.name, _OPENERS[peer.title](table, placement)


def _open_torch(table: Tensor, placement: str) -> tuple[str, Reader]:
    if placement == "cuda":
        on_gpu = table.cuda()
        return "torch.index_select", lambda ids: torch.index_select(on_gpu, 0, ids)
    return "torch.index_select on the CPU, then a copy", lambda ids: torch.index_select(table, 0, ids.cpu()).cuda()


def _open_glt(table: Tensor, placement: str) -> Reader:
    feature = import_module("graphlearn_torch").data.Feature(
        table.clone(), split_ratio=float(placement == "cuda"), device=0
    )
    return lambda ids: feature[ids]


def _open_quiver(table: Tensor, placement: str) -> Reader:
    cache = table.numel() * table.element_size() if placement == "cuda" else 0
    feature = import_module("quiver").Feature(0, [0], device_cache_size=cache)
    feature.from_cpu_tensor(table.clone())
    return lambda ids: feature[ids]


def _open_whole_graph(table: Tensor, placement: str) -> Reader:
    tensor = whole_graph_tensor(table, placement)
    return lambda ids: tensor.gather(ids)


_OPENERS: dict[str, Callable[[Tensor, str], Reader]] = {
    "GLT": _open_glt,
    "Quiver": _open_quiver,
    "WholeGraph": _open_whole_graph,
}


_BATCHES = 50
# The package that PyG's loader samples with; None if neither is installed.
SAMPLER = "pyg-lib" if WITH_PYG_LIB else "torch-sparse" if WITH_TORCH_SPARSE else None


def measure_samplers_on_gpu(topology: CSRTopo, name: str, sizes: Sequence[int] = (1024, 8192)) -> Iterator[Row]:
    """Edges a second of both frontiers, topology in GPU memory and on the host."""
    rows = rows_of(topology)
    for placement in ("cuda", "unified"):
        for expand_all, frontier in ((False, "new nodes"), (True, "all nodes")):
            peers = list(open_peers(rows, placement, FANOUTS, expand_all=expand_all))
            for size in sizes:
                contenders = [Contender(OURS, _run_ours(topology, placement, expand_all), "with e_id")]
                contenders += [Contender(peer.name, _run_each(sampler), peer.note) for peer, sampler in peers]
                hold_contest(contenders, _seeds(topology.node_count, size))
                yield from rows_of_contest(f"peers/{name}/{placement}/{size}/{frontier}", contenders, "G/s")


def measure_samplers_on_cpu(topology: CSRTopo, name: str, size: int = 1024) -> Iterator[Row]:
    """Edges a second of one thread of ours, of the one thread of each peer, and of two threads of ours."""
    rows = rows_of(topology)
    plan = open_plan(topology.place("cpu", "cpu"), Recipe(FANOUTS))
    before, torch_before = set_cpu_threads(1), torch.get_num_threads()
    torch.set_num_threads(1)

    def run_with(threads: int) -> Callable[[Sequence[Tensor]], int]:
        def run(batches: Sequence[Tensor]) -> int:
            set_cpu_threads(threads)
            return sum(plan.sample(seeds, number).edge_counts[-1] for number, seeds in enumerate(batches))

        return run

    def run_side_by_side(batches: Sequence[Tensor]) -> int:
        return sum(sample.edge_counts[-1] for sample in pool.map(plan.sample, batches, range(len(batches))))

    try:
        contenders = [Contender(f"{OURS}, 1 thread", run_with(1), "with e_id")]
        for peer, sampler in open_peers(rows, "cpu", FANOUTS, expand_all=False):
            contenders.append(Contender(f"{peer.name}, 1 thread", _run_each(sampler), peer.note))
        contenders.append(Contender(f"{OURS}, 2 threads on a batch", run_with(2), "with e_id"))
        pool = ThreadPoolExecutor(2, initializer=set_cpu_threads, initargs=(1,))
        contenders.append(Contender(f"{OURS}, 2 threads, a batch each", run_side_by_side, "with e_id"))
        hold_contest(contenders, _seeds(topology.node_count, size), alone=False)
        pool.shutdown()
        limit = random_read_rate_of_cpu(1) / 1e6
        yield from rows_of_contest(f"peers/{name}/cpu/{size}", contenders, "M/s", limit,
                                   "random 4-byte reads a second of one thread, one an edge")  # fmt: skip
    finally:
        set_cpu_threads(before)
        torch.set_num_threads(torch_before)


def measure_loaders(topology: CSRTopo, name: str, workers: Sequence[int], size: int = 1024,
                    batches: int = 16) -> Iterator[Row]:  # fmt: skip
    """Edges a second of `NeighborLoader` without features: ours, and PyG's with each number of workers."""
    rows = rows_of(topology)
    targets = torch.arange(topology.node_count).repeat_interleave(rows.indptr.diff())
    data = Data(edge_index=torch.stack([rows.indices, targets]), num_nodes=topology.node_count)
    del targets
    common: dict[str, Any] = {"num_neighbors": list(FANOUTS), "batch_size": size, "shuffle": True, "drop_last": True}
    contenders = [_measure_loader(OURS, NeighborLoader(data, seed=0, **common), 2, batches)]
    if SAMPLER is not None:
        for count in workers:
            # Of a small graph an epoch is shorter than a window: workers that start in it would be timed.
            loader = PygNeighborLoader(data, is_sorted=True, num_workers=count, persistent_workers=count > 0, **common)
            # Batches that workers prepare before they are asked do not count.
            title = f"PyG's loader, {SAMPLER}, {count} workers"
            contenders.append(_measure_loader(title, loader, 3 * count + 2, batches))
    yield from rows_of_contest(f"peers/{name}/loader/{size}", contenders, "M/s")


def measure_tables(num_bytes: int = 4 << 30, width: int = 128, num_ids: int = 1 << 20) -> Iterator[Row]:
    """Bytes a second of random float32 rows, all of them in GPU memory or all on the host."""
    table = torch.empty(num_bytes // (4 * width), width)
    table[:, 0], table[:, 1:] = torch.arange(len(table)), 1.0
    ids = torch.randint(len(table), (num_ids,), device="cuda")
    for placement, place, unit, scale in (("cuda", "hot", "TB/s", 1e12), ("unified", "cold", "GB/s", 1e9)):
        feature = Feature(device_cache_size="100%" if place == "hot" else 0).from_cpu_tensor(table.clone())
        readers = {OURS: feature.__getitem__, **dict(open_tables(table, placement))}
        seconds: dict[str, list[float]] = {reader: [] for reader in readers}
        for window in range(WINDOWS + 1):
            for reader, read in readers.items():
                seconds[reader].append(_time_reads(read, ids, 16 if place == "hot" else 2, check=window == 0))
        limit = device_copy_rate() / 2 if place == "hot" else pinned_copy_rate()
        limit_name = "half of a device copy" if place == "hot" else "page-locked copy"
        for reader, times in seconds.items():
            rates = [num_ids * width * 4 / s / scale for s in times[1:]]
            case = f"peers/gather/{4 * width} B/{num_bytes >> 30} GiB {place}"
            yield Row.of(case, reader, unit, rates, limit / scale, limit_name)


def rows_of(topology: CSRTopo) -> Rows:
    """Return a topology as peers take it."""
    eid = torch.arange(topology.edge_count) if topology.eid is None else topology.eid.cpu().long()
    return Rows(topology.indptr.cpu(), topology.indices.cpu().long(), eid)


def _seeds(num_nodes: int, size: int) -> list[Tensor]:
    # No seed twice in a batch: peers treat repeats in different ways.
    return [torch.randperm(num_nodes)[:size] for _ in range(10)] * (_BATCHES // 10)


def _run_each(sample: Sampler) -> Callable[[Sequence[Tensor]], int]:
    return lambda batches: sum(sample(seeds) for seeds in batches)


def _run_ours(topology: CSRTopo, placement: str, expand_all: bool) -> Callable[[Sequence[Tensor]], int]:
    if expand_all:
        sampler = GraphSageSampler(topology, FANOUTS, mode="GPU" if placement == "cuda" else "UVA")
        return _run_each(lambda seeds: sum(adj.edge_index.shape[1] for adj in sampler.sample(seeds)[2]))
    plan = open_plan(topology.place(placement, resolve_device("cuda")), Recipe(FANOUTS))
    assert isinstance(plan, GpuPlan)

    def run(batches: Sequence[Tensor]) -> int:
        # One batch ahead, as the loader does.
        pending = [plan.submit(batches[0], 0)]
        edges = 0
        for number, seeds in enumerate(batches[1:], 1):
            pending.append(plan.submit(seeds, number))
            edges += pending.pop(0).finish().edge_counts[-1]
        return edges + pending[0].finish().edge_counts[-1]

    return run


def _measure_loader(name: str, loader: Any, warm_up: int, batches: int) -> Contender:
    source = chain.from_iterable(repeat(loader))

    def run(asked: Sequence[Tensor]) -> int:
        return sum(int(batch.edge_index.shape[1]) for batch in islice(source, len(asked)))

    contender = Contender(name, run, "with e_id")
    run([torch.empty(0)] * warm_up)
    for _ in range(WINDOWS):
        contender.measure([torch.empty(0)] * batches)
    return contender


def _time_reads(read: Callable[[Tensor], Tensor], ids: Tensor, count: int, *, check: bool) -> float:
    if check and not torch.equal(read(ids)[:, 0].long(), ids):
        raise RuntimeError("a table returned other rows than it was asked for")
    wait_for_gpu()
    begin = time.perf_counter()
    for _ in range(count):
        read(ids)
    wait_for_gpu()
    return (time.perf_counter() - begin) / count

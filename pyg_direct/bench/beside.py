"""Rows that stand beside peers: samplers, loaders and tables on one graph, with equal seeds and fanouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from pyg_direct.bench.contest import OURS, WINDOWS, Contender, hold_contest, rows_of_contest
from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate, random_read_rate_of_cpu
from pyg_direct.bench.peer_tables import open_tables
from pyg_direct.bench.peers import Rows, Sampler, open_peers
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import FANOUTS
from pyg_direct.bench.timing import wait_for_gpu
from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.features.feature import Feature
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler
from pyg_direct.sampling.plan_factory import open_plan
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_gpu import GpuPlan

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

"""Sampling: edges a second with NeighborLoader's frontier and `e_id`, memory, and the time to the first batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from pyg_direct.bench.limits import (
    random_read_rate,
    random_read_rate_of_cpu,
    replay_seconds,
    time_on_clock,
    time_on_gpu,
    wait_for_gpu,
)
from pyg_direct.bench.result_row import Row
from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.graphsage_sampler import GraphSageSampler
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import GpuPlan, open_plan

FANOUTS = (15, 10, 5)
_BATCHES = 50


def measure_gpu_sampling(edge_index: torch.Tensor, num_nodes: int, name: str) -> Iterator[Row]:
    """Rows of a graph whose edges are on the GPU, with topology there and in unified host memory."""
    device = resolve_device("cuda")
    begin = time.perf_counter()
    wait_for_gpu()
    topology = CSRTopo(edge_index, num_nodes=num_nodes)
    for placement, cache in (("cuda", None), ("unified", None), ("unified", "20%")):
        placed = topology.place(placement, device, topology_cache=cache)
        for num_seeds in (1024, 8192):
            plan = open_plan(placed, Recipe(FANOUTS))
            assert isinstance(plan, GpuPlan)
            case = f"sampling/{name}/{placement}{'' if cache is None else f' + {cache} cached'}/{num_seeds}"
            batches = [torch.randint(num_nodes, (num_seeds,)) for _ in range(_BATCHES)]
            plan.sample(batches[0], 0)
            wait_for_gpu()
            if placement == "cuda" and num_seeds == 1024:
                yield Row.of(case, "COO to first batch", "s", [time.perf_counter() - begin],
                             note="compress on the GPU, place, capture, sample")  # fmt: skip
            yield from measure_plan(plan, batches, case)
            yield from measure_sampler(topology, placement, cache, batches, case)


def measure_sampler(topology: CSRTopo, placement: str, cache: str | None, batches: list[torch.Tensor], case: str
                    ) -> Iterator[Row]:  # fmt: skip
    """Edges a second of `GraphSageSampler`, whose layers expand all nodes so far, one call after the other."""
    mode = "GPU" if placement == "cuda" else "UVA"
    sampler = GraphSageSampler(topology, list(FANOUTS), mode=mode, seed=0, topology_cache=cache)
    sampler.sample(batches[0])
    rates = []
    for seeds in batches:
        wait_for_gpu()
        begin = time.perf_counter()
        adjs = sampler.sample(seeds)[-1]
        wait_for_gpu()
        rates.append(sum(adj.e_id.numel() for adj in adjs) / (time.perf_counter() - begin) / 1e9)
    yield Row.of(case, "edges, GraphSageSampler", "G/s", rates, note="layers expand all nodes so far")


def measure_plan(plan: GpuPlan, batches: list[torch.Tensor], case: str) -> Iterator[Row]:
    """Edges a second, one batch at a time and in a row, and the memory of a plan."""
    edges, seconds = [], []
    for number, seeds in enumerate(batches):
        wait_for_gpu()
        begin = time.perf_counter()
        sample = plan.sample(seeds, number)
        wait_for_gpu()
        seconds.append(time.perf_counter() - begin)
        edges.append(sample.edge_counts[-1])
    slot = plan._slots[0]
    assert slot.graph is not None
    floor = replay_seconds(slot.graph.num_nodes)
    empty = f"replay of {slot.graph.num_nodes} empty kernels"
    yield Row.of(
        case, "time", "ms", [1e3 * s for s in seconds], 1e3 * floor, empty, "alone, with the wait and the export"
    )
    limit = random_read_rate(plan.topology.placement) / 1e9, "random 8-byte reads a second, one an edge"
    yield Row.of(case, "edges", "G/s", [e / s / 1e9 for e, s in zip(edges, seconds, strict=True)], *limit)
    replays = time_on_gpu(slot.graph.replay, 30)
    times = [s / len(batches) for s in time_on_clock(partial(sample_ahead, plan, batches), repeats=5, warm_up=0)]
    rates = [sum(edges) / len(batches) / s / 1e9 for s in times]
    yield Row.of(case, "edges, sustained", "G/s", rates, *limit)
    yield Row.of(case, "time, sustained", "ms", [1e3 * t for t in times], 1e3 * floor, empty, "one batch ahead")
    yield Row.of(case, "graph replay", "ms", [1e3 * s for s in replays], 1e3 * floor, empty)
    yield Row.of(case, "GPU memory of the plan", "MB", [plan.num_bytes / 1e6], note="two batches on their way")
    yield Row.of(case, "GPU memory shared by plans", "MB", [plan.num_scratch_bytes / 1e6], note="table and bitmaps")


def sample_ahead(plan: GpuPlan, batches: list[torch.Tensor]) -> None:
    """Sample batches as a loader does: the next one is enqueued before the last one is finished."""
    before = None
    for number, seeds in enumerate(batches):
        pending = plan.submit(seeds, number)
        if before is not None:
            before.finish()
        before = pending
    if before is not None:
        before.finish()


def measure_cpu_sampling(edge_index: torch.Tensor, num_nodes: int, name: str, all_threads: Sequence[int] = (1, 2)
                         ) -> Iterator[Row]:  # fmt: skip
    """Edges a second of the CPU plan on each of these numbers of threads, which take turns batch by batch."""
    placed = CSRTopo(edge_index, num_nodes=num_nodes).place("cpu", "cpu")
    batches = [torch.randint(num_nodes, (1024,)) for _ in range(12)]
    before = set_cpu_threads(1)
    try:
        plans: dict[int, Any] = {}
        for threads in all_threads:
            set_cpu_threads(threads)
            plans[threads] = open_plan(placed, Recipe(FANOUTS))
            counts = [plans[threads].sample(seeds, number).edge_counts[-1] for number, seeds in enumerate(batches)]
        rates: dict[int, list[float]] = {threads: [] for threads in plans}
        for turn in range(36):
            number = turn % len(batches)
            for threads, plan in plans.items():
                set_cpu_threads(threads)
                (seconds,) = time_on_clock(partial(plan.sample, batches[number], number), 1, 0)
                rates[threads].append(counts[number] / seconds / 1e6)
        case = f"sampling/{name}/cpu/1024"
        for threads in plans:
            limit = random_read_rate_of_cpu(threads) / 1e6
            yield Row.of(f"{case}/{threads} threads", "edges", "M/s", rates[threads], limit,
                         "random 4-byte reads a second, one an edge")  # fmt: skip
        for threads in list(plans)[1:]:
            gains = [several / one for several, one in zip(rates[threads], rates[all_threads[0]], strict=True)]
            yield Row.of(f"{case}/{threads} threads", "of one batch, over 1 thread", "x", gains)
    finally:
        set_cpu_threads(before)

"""Sampling by a GPU and CPU cores together, beside each alone: the benefit of `MixedGraphSageSampler`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor

from pyg_direct.bench.result_row import Row
from pyg_direct.bench.timing import wait_for_gpu
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.sampling.mixed_cpu_gpu import MixedGraphSageSampler, SampleJob

_FANOUTS, _SEEDS, _EPOCHS = (15, 10, 5), 1024, 5
# Epochs that compile, and measure the time of a batch and the best number of cores; cores alone compile in one.
_FIRST = 15


class RandomSeeds(SampleJob):
    """Batches of seeds, equal in every epoch.

    Args:
        num_nodes: Nodes of the graph.
        count: Number of batches.
    """

    def __init__(self, num_nodes: int, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._seeds = [torch.randint(num_nodes, (_SEEDS,), generator=generator) for _ in range(count)]

    def __getitem__(self, index: int) -> Tensor:
        return self._seeds[index]

    def __len__(self) -> int:
        return len(self._seeds)


def measure_mixed(edge_index: Tensor, num_nodes: int, name: str, cores: Sequence[int] = (), batches: int = 24,
                  batches_on_gpu: int = 480) -> Iterator[Row]:  # fmt: skip
    """Measure edges a second of each mode, in alternating epochs.

    Args:
        edge_index, num_nodes: The graph.
        name: Name of the rows.
        cores: Numbers of cores that sample; by default one, and all except one for the caller.
        batches, batches_on_gpu: Batches per epoch, of the cores alone and with a GPU. The GPU makes many while a core
            makes one.
    """
    cores = cores or sorted({1, max(1, (os.cpu_count() or 1) - 1)})
    topology = CSRTopo(edge_index, num_nodes=num_nodes)
    jobs = {name: RandomSeeds(num_nodes, batches if name == "CPU_ONLY" else batches_on_gpu)
            for name in ("CPU_ONLY", "beside a GPU")}  # fmt: skip
    modes = [("CPU_ONLY", number) for number in cores]
    if torch.cuda.is_available():
        modes += [(f"{place}_ONLY", 0) for place in ("GPU", "UVA")]
        modes += [(f"{place}_CPU_MIXED", number) for place in ("GPU", "UVA") for number in cores]
    samplers = {mode: MixedGraphSageSampler(jobs.get(mode[0], jobs["beside a GPU"]), mode[1], topology, _FANOUTS,
                                            mode=mode[0], seed=1) for mode in modes}  # fmt: skip
    rates: dict[tuple[str, int], list[float]] = {mode: [] for mode in modes}
    shares: dict[tuple[str, int], float] = {}
    for turn in range(_FIRST + _EPOCHS):
        for mode, sampler in samplers.items():
            if mode[0] == "CPU_ONLY" and turn < _FIRST - 1:
                continue
            wait_for_gpu()
            begin, edges = time.perf_counter(), 0
            for _, _, adjs in sampler:
                edges += sum(adj.e_id.numel() for adj in adjs)
            wait_for_gpu()
            rates[mode].append(edges / (time.perf_counter() - begin) / 1e6)
            shares[mode] = sampler.num_on_cores / max(1, sampler.num_on_cores + sampler.num_on_gpu)
    rates = {mode: own[-_EPOCHS:] for mode, own in rates.items()}
    for (kind, number), own in rates.items():
        beside = rates.get((f"{kind[:3]}_ONLY", 0)) if kind.endswith("MIXED") else None
        limit, limit_name = (median(beside), "the GPU alone") if beside else (None, "")
        yield Row.of(f"mixed/{name}/{kind}/{number} cores", "edges", "M/s", own, limit, limit_name,
                     f"{_SEEDS} seeds, {list(_FANOUTS)}; cores sampled {shares[kind, number]:.0%} of the batches; "
                     "layers expand all nodes so far")  # fmt: skip

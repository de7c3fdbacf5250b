"""Loaders that stand beside each other on one graph, with equal seeds and fanouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from pyg_direct.bench.limits import time_on_clock, wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import FANOUTS
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader

OURS = "pyg_direct"
WINDOWS = 5
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


def rows_of_contest(case: str, contenders: Sequence[Contender], unit: str, limit: float | None = None,
                    limit_name: str = "") -> Iterator[Row]:  # fmt: skip
    """Rates of all, times of batches alone, and ours over the best peer."""
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


# The package that PyG's loader samples with; None if neither is installed.
SAMPLER = "pyg-lib" if WITH_PYG_LIB else "torch-sparse" if WITH_TORCH_SPARSE else None


def measure_loaders(topology: CSRTopo, name: str, workers: Sequence[int], size: int = 1024,
                    batches: int = 16) -> Iterator[Row]:  # fmt: skip
    """Edges a second of `NeighborLoader` without features: ours, and PyG's with each number of workers."""
    targets = torch.arange(topology.node_count).repeat_interleave(topology.indptr.cpu().diff())
    data = Data(edge_index=torch.stack([topology.indices.cpu().long(), targets]), num_nodes=topology.node_count)
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


def _measure_loader(name: str, loader: Any, warm_up: int, batches: int) -> Contender:
    source = chain.from_iterable(repeat(loader))

    def run(asked: Sequence[Tensor]) -> int:
        return sum(int(batch.edge_index.shape[1]) for batch in islice(source, len(asked)))

    contender = Contender(name, run, "with e_id")
    run([torch.empty(0)] * warm_up)
    for _ in range(WINDOWS):
        contender.measure([torch.empty(0)] * batches)
    return contender

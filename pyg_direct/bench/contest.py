"""Contenders measured in one process, window by window in turn, so that a drift of the machine meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

from torch import Tensor

from pyg_direct.bench.result_row import Row
from pyg_direct.bench.timing import time_on_clock, wait_for_gpu

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
        note: Remark for readers of its rows.
        rates: Edges a second of each window.
        alone: Seconds of batches with nothing before or after them.
        work: Edges a batch of each window.
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
        contenders: Those to measure.
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

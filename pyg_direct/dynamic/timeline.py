"""When an epoch did what: spans of its stages, told and drawn."""

from __future__ import annotations

import os
import time
from bisect import bisect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from pyg_direct.features.tier_report import open_pyplot

# From top to bottom: on a thread, on the copy stream, on the stream that computes.
LANES = {"slice": "#9aa5b1", "copy": "#ed8936", "wait": "#c53030", "aggregate": "#2b6cb0", "move": "#63b3ed",
         "passes": "#38a169", "step": "#805ad5"}  # fmt: skip


class Timeline:
    """Spans of stages: "slice" (edges sorted and matrices built, on a thread), "copy" (ahead of use), "wait"
    (for such copies, within the next ones), "aggregate" (first layers), "move" (a frame's snapshots to their places),
    "passes" (forward and backward) and "step".

    On a GPU they are those of the GPU, but for "slice".
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self._begin_event = self._record()
        self._begin = time.perf_counter()

    def _record(self) -> Any:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        # Of this GPU, which need not be the current one.
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def span(self, lane: str, on_host: bool = False) -> Iterator[None]:
        """Note when the block ran, on torch's current stream where there is a GPU."""
        timed = self._on_gpu and not on_host
        first = self._record() if timed else time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((lane, first, self._record() if timed else time.perf_counter()))

    @property
    def count(self) -> int:
        """Spans so far."""
        return len(self._spans)

    def spans(self) -> list[tuple[str, float, float]]:
        """(lane, first, last) of each, in seconds since the beginning; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [(lane, self._since(first), self._since(last)) for lane, first, last in list(self._spans)]

    def _since(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - self._begin
        return float(self._begin_event.elapsed_time(moment)) / 1e3

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage in all."""
        total = dict.fromkeys(LANES, 0.0)
        for lane, first, last in self.spans():
            total[lane] += last - first
        return total

    def hidden_share(self) -> float | None:
        """Share of the seconds of copies ahead of use for which the stream that computes did not wait; None where
        nothing was copied so.

        A stream waits while a copy is under way: the rest of a span "wait" is what the host takes to queue it.
        """
        spans = self.spans()
        copies = [(first, last) for lane, first, last in spans if lane == "copy"]
        waits = [(first, last) for lane, first, last in spans if lane == "wait"]
        copied = sum(last - first for first, last in copies)
        # The stream copies one after the other, and each waits once for the next: no moment counts twice.
        copies.sort()
        ends, waited = [last for _, last in copies], 0.0
        for begin, end in waits:
            for first, last in copies[bisect(ends, begin) :]:
                if first >= end:
                    break
                waited += min(end, last) - max(begin, first)
        return max(0.0, 1 - waited / copied) if copied else None

    def __str__(self) -> str:
        return "\n".join(f"{lane}: {1e3 * seconds:.3f} ms" for lane, seconds in self.seconds().items() if seconds)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw a bar for each span into a picture (needs the extra `bench`); returns its path."""
        plt = open_pyplot()

        figure, axes = plt.subplots(figsize=(9, 2.6), constrained_layout=True)
        spans = self.spans()
        for place, (name, color) in enumerate(LANES.items()):
            bars = [(1e3 * first, 1e3 * (last - first)) for lane, first, last in spans if lane == name]
            axes.broken_barh(bars, (-place - 0.4, 0.8), color=color)
        axes.set_yticks([-place for place in range(len(LANES))], list(LANES))
        axes.set_xlabel("ms")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return Path(path)


def trace(timeline: Timeline | None, lane: str, on_host: bool = False) -> AbstractContextManager[None]:
    """A span of a timeline, or nothing."""
    return nullcontext() if timeline is None else timeline.span(lane, on_host)

"""Times of repeats, with the device idle before and after."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Cycles of a GPU's clock, some 150 us, in which Python queues a few calls.
_HEAD_START = 300_000


def time_on_gpu(work: Callable[[], object], repeats: int = 20, warm_up: int = 3, queued: int = 8, *,
                is_ahead: bool = False) -> list[float]:  # fmt: skip
    """Seconds of each repeat between events on the current stream, the mean of `queued` calls in a row.

    Several calls are queued so that the GPU does not wait for Python between them; with `is_ahead` it does not wait for
    the first one either.
    """
    for _ in range(warm_up):
        work()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if is_ahead:
            torch.cuda._sleep(_HEAD_START)
        begin.record()
        for _ in range(queued):
            work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / queued)
    return seconds


def time_on_clock(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> list[float]:
    """Seconds of each repeat by the wall clock, work on the GPU included."""
    seconds = []
    for repeat in range(warm_up + repeats):
        wait_for_gpu()
        begin = time.perf_counter()
        work()
        wait_for_gpu()
        if repeat >= warm_up:
            seconds.append(time.perf_counter() - begin)
    return seconds


def wake_core(seconds: float = 0.5) -> None:
    """Keep this core at work for a while, as a training loop does: one that has slept runs slower at first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wait_for_gpu() -> None:
    """Wait until the GPU, if there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""Times of repeats, with the device idle before and after."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pyg_direct.profiling import time_call, time_on_stream
from pyg_direct.runtime.cuda.device import resolve_device

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
        if is_ahead:
            torch.cuda._sleep(_HEAD_START)
        seconds.append(time_on_stream(work, queued))
    return seconds


def time_on_clock(work: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> list[float]:
    """Seconds of each repeat by the wall clock, work on the GPU included."""
    device = resolve_device(None)
    return [time_call(work, device) for _ in range(warm_up + repeats)][warm_up:]


def wake_core(seconds: float = 0.5) -> None:
    """Keep this core at work for a while, as a training loop does: one that has slept runs slower at first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wait_for_gpu() -> None:
    """Wait until the GPU, if there is one, has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

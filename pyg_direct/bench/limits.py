"""Times of repeats, and highest rates of the machine, measured in the run that uses them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.ops.run_kernel import run_gpu
from pyg_direct.profiling import time_call, time_on_stream
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
from pyg_direct.runtime.cuda.memory import allocate

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


_BYTES = 2 << 30


@functools.cache
def device_copy_rate() -> float:
    """Bytes a second that a copy inside GPU memory reads plus writes."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _BYTES / median(time_on_gpu(lambda: target.copy_(source)))


@functools.cache
def pinned_copy_rate(num_bytes: int = _BYTES // 2, repeats: int = 20) -> float:
    """Bytes a second of a copy from page-locked host memory to the GPU."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return num_bytes / median(time_on_gpu(lambda: target.copy_(source, non_blocking=True), repeats))


@functools.cache
def random_read_rate(placement: str, table_bytes: int = 1 << 30) -> float:
    """Reads a second of 8 bytes at random places of a table in `cuda` or `unified` memory, by one kernel."""
    block = allocate(table_bytes, placement, "cuda")
    table = block.view_on_gpu(torch.int64, (table_bytes // 8,))
    if placement != "cuda":
        block.view_on_cpu(torch.int64, (table_bytes // 8,)).fill_(1)
    ids = torch.randint(table_bytes // 8, (1 << 22,), device="cuda")
    out = torch.empty_like(ids)
    return len(ids) / median(time_on_gpu(lambda: gather_rows(table, ids, out=out), 10))


def random_read_rate_of_cpu(threads: int, table_bytes: int = 1 << 29) -> float:
    """Reads a second of 4 bytes at random places of a table in ordinary memory, by `torch.index_select` in as many
    threads at once; one call for all would run on one.
    """
    table = torch.ones(table_bytes // 4, dtype=torch.int32)
    pieces = torch.randint(len(table), (1 << 22,)).chunk(threads)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            read = functools.partial(torch.index_select, table, 0)
            return (1 << 22) / median(time_on_clock(lambda: list(pool.map(read, pieces)), 10))
    finally:
        torch.set_num_threads(before)


@functools.cache
def replay_seconds(num_kernels: int) -> float:
    """Seconds to replay a captured graph of that many kernels that do next to nothing."""
    items = torch.zeros(1, dtype=torch.int64, device="cuda")
    run_gpu(draw_bits_gpu, 1, 0, items, 0, items)

    def record(stream: int) -> None:
        for _ in range(num_kernels):
            run_gpu(draw_bits_gpu, 1, 0, items, 0, items, stream=stream)

    graph = CapturedGraph(record, torch.cuda.current_device())
    return median(time_on_gpu(graph.replay, 50))

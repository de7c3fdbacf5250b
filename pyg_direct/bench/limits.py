"""Highest rates of the machine, measured in the run that uses them."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch

from pyg_direct.bench.timing import time_on_clock, time_on_gpu
from pyg_direct.kernels.sampling.random import draw_bits_gpu
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.ops.run_kernel import run_gpu
from pyg_direct.runtime.cuda.graph_capture import CapturedGraph
from pyg_direct.runtime.cuda.memory import allocate

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

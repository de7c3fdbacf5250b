"""Start of several processes over one table: from rows in memory to the first read of every process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import torch
from torch.multiprocessing.spawn import spawn

from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature

# Shape of ogbn-papers100M: 57 GB of float32.
PAPERS_NODES, PAPERS_WIDTH = 111_059_956, 128
_READS = 1 << 18


def measure_shared_start(scale: float, counts: tuple[int, ...]) -> Iterator[Row]:
    """Measure seconds until all processes over one copy of the rows have read some, and their total host memory.

    The rows lie in the memory of the process that starts the others, and are freed there after they are moved. The
    start of Python and CUDA is included.

    Args:
        scale: Factor on the rows of papers100M's shape.
        counts: Processes; on GPUs each has its own GPU.
    """
    num_rows, on_gpu = max(1, int(PAPERS_NODES * scale)), torch.cuda.is_available()
    num_bytes = num_rows * PAPERS_WIDTH * 4
    for count in counts:
        seconds, taken = _start(num_rows, count, on_gpu)
        case = f"multi_gpu/start/papers100M x {scale:g}/{count} {'GPUs' if on_gpu else 'processes'}"
        note = f"{num_bytes / 1e9:.1f} GB of rows in one copy that all processes read; each reads {_READS} of them"
        yield Row.of(case, "rows in memory to rows read by all", "s", [seconds], note=note)
        yield Row.of(case, "host memory", "GB", [taken / 1e9], num_bytes / 1e9, "one copy of the rows",
                     "with what the processes themselves need")  # fmt: skip


def _start(num_rows: int, count: int, on_gpu: bool) -> tuple[float, int]:
    before = _count_bytes([os.getpid()])
    x = torch.empty(num_rows, PAPERS_WIDTH)
    x.copy_(_row_values(torch.arange(num_rows))[:, None].expand_as(x))
    options: dict[str, Any] = {"device_list": list(range(count)), "cold_policy": "pinned"} if on_gpu else {}
    begin = time.monotonic()
    feature = Feature(device_cache_size=0, device=None if on_gpu else "cpu", **options).from_cpu_tensor(x)
    handle = feature.share_ipc()
    del x
    context = multiprocessing.get_context("spawn")
    answers, is_measured = context.SimpleQueue(), context.Event()
    started = spawn(_read, args=(handle, on_gpu, answers, is_measured), nprocs=count, join=False)
    ends: list[float] = []
    while len(ends) < count:
        # Raises an error of a process here.
        started.join(0.01)
        if not answers.empty():
            ends.append(answers.get())
    taken = _count_bytes([os.getpid(), *(process.pid for process in started.processes)]) - before
    is_measured.set()
    started.join()
    return max(ends) - begin, taken


def _count_bytes(processes: Sequence[int]) -> int:
    """Count the host memory of processes; memory shared by several of them counts once."""
    found = [psutil.Process(process).memory_full_info() for process in processes]
    # Only Linux reports a process's part of shared memory.
    return sum(getattr(one, "pss", one.uss) for one in found)


def _read(rank: int, handle: Any, on_gpu: bool, answers: Any, is_measured: Any) -> None:
    if on_gpu:
        torch.cuda.set_device(rank)
    feature = Feature.new_from_ipc_handle(rank, handle)
    ids = torch.randint(feature.shape[0], (_READS,), generator=torch.Generator().manual_seed(rank))
    rows = feature[ids.to(feature.device)].cpu()
    if not torch.equal(rows, _row_values(ids)[:, None].expand_as(rows)):
        raise AssertionError(f"process {rank} has read wrong rows")
    answers.put(time.monotonic())
    is_measured.wait()


def _row_values(ids: torch.Tensor) -> torch.Tensor:
    return (ids % 65_521).float()

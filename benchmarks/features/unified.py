"""Microbenchmarks of PyTorch-Direct (its figures 6 and 7): rows of a table in host memory read by the GPU."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyg_direct.bench.limits import time_on_clock, time_on_gpu, wait_for_gpu, wake_core
from pyg_direct.bench.result_row import Row
from pyg_direct.features.unified_tensor import to_unified
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.memory import allocate

_TABLE_BYTES = 1 << 30
_LINE = 128
_COUNTS = (8 << 10, 64 << 10, 256 << 10)
_ROW_BYTES = (256, 1 << 10, 4 << 10, 16 << 10)
_WIDTHS = (2048, 2052, 2056, 2060, 2064, 2068, 2072, 2076)
# Published figures, on the paper's GPUs and PCIe 3 and 4: time over a pinned copy's, and speed-up over the baseline.
_PAPER_IDEAL, _PAPER_ALIGNED = "the paper: 1.03 to 1.20", "the paper: 1.93 x over the baseline"


def _pinned_seconds(num_bytes: int) -> float:
    """Measure seconds of one page-locked copy of `num_bytes`, which the paper calls ideal."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return sorted(time_on_gpu(lambda: target.copy_(source, non_blocking=True), 9, 2, 2, is_ahead=True))[4]


def _make_table(row_bytes: int, num_bytes: int) -> Tensor:
    count = num_bytes // row_bytes
    return torch.arange(count, dtype=torch.float32)[:, None].expand(count, row_bytes // 4).contiguous()


def _ways(rows: Tensor, pinned_rows: Tensor, ids: Tensor) -> dict[str, tuple[Callable[[], Tensor], bool]]:
    """List the timed ways by name, and True if the CPU takes part. `rows` lie in unified memory."""
    table, host_ids = to_unified(rows), ids.cpu()
    on_gpu = table.on_gpu()
    return {"baseline: torch on the CPU, then a copy": (lambda: rows[host_ids].cuda(), True),
            "naive: torch reads page-locked rows": (lambda: torch.index_select(pinned_rows, 0, ids), False),
            "torch reads unified rows": (lambda: torch.index_select(on_gpu, 0, ids), False),
            "pyg_direct: unified[ids]": (lambda: table[ids], False)}  # fmt: skip


def _measure(row_bytes: int, counts: tuple[int, ...], table_bytes: int = _TABLE_BYTES
             ) -> Iterator[tuple[int, str, list[float]]]:  # fmt: skip
    """Measure (rows, way, seconds of each repeat)."""
    rows = _make_table(row_bytes, table_bytes)
    block = allocate(rows.numel() * 4, "pinned", "cuda")
    block.view_on_cpu(rows.dtype, rows.shape).copy_(rows)
    pinned = block.view_on_gpu(rows.dtype, rows.shape)
    to_unified(rows)
    for count in counts:
        ids = torch.randint(len(rows), (count,), device="cuda")
        for name, (read, on_cpu) in _ways(rows, pinned, ids).items():
            assert torch.equal(read()[:, -1].long(), ids), f"{name} gives wrong rows"
            seconds = time_on_clock(read, 1 if count * row_bytes > 1 << 30 else 3, 0) if on_cpu else (
                time_on_gpu(read, 5, 1, 2, is_ahead=True))  # fmt: skip
            yield count, name, seconds
        torch.cuda.empty_cache()
    del rows, pinned, block
    gc.collect()


def measure_figure_6() -> Iterator[Row]:
    """Measure 8 K to 256 K rows of 256 B to 16 KB; Python's time for a call is a separate row (`measure_indexing`)."""
    for row_bytes in _ROW_BYTES:
        for count, name, seconds in _measure(row_bytes, _COUNTS):
            num_bytes = count * row_bytes
            yield Row.of(f"fig6/{count >> 10} K rows of {row_bytes} B", name, "ms", [1e3 * s for s in seconds],
                         1e3 * _pinned_seconds(num_bytes), "a page-locked copy of these bytes",
                         f"{num_bytes / 2**20:g} MiB, without a call's Python; {_PAPER_IDEAL}")  # fmt: skip


def count_line_requests(row_bytes: int, access_bytes: int, *, is_shifted: bool) -> float:
    """Count the lines of 128 bytes that the accesses of a group of threads request per row.

    This is an average over consecutive rows that begin at a line, with each access counted separately. It is computed,
    and not confirmed by a profiler.

    Args:
        row_bytes: Bytes of a row.
        access_bytes: Bytes that the threads of a group read at once, such as 32 x 4 or 32 x 16.
        is_shifted: True if accesses begin with the line in which the row begins (section 4.5), not with the row.
    """
    requests, num_rows = 0, _LINE // math.gcd(row_bytes, _LINE)
    for begin in range(0, num_rows * row_bytes, row_bytes):
        first = begin - begin % _LINE if is_shifted else begin
        for at in range(first, begin + row_bytes, access_bytes):
            end = min(at + access_bytes, begin + row_bytes)
            requests += (end - 1) // _LINE - at // _LINE + 1
    return requests / num_rows


def _tell_requests(row_bytes: int) -> str:
    told = [f"accesses of {size} B ask for {count_line_requests(row_bytes, size, is_shifted=False):.4g} lines a row, "
            f"shifted {count_line_requests(row_bytes, size, is_shifted=True):.4g}" for size in (128, 512)]  # fmt: skip
    return f"{_PAPER_ALIGNED}; by arithmetic, not counted by a profiler, {'; '.join(told)}"


def measure_figure_7(count: int = 64 << 10) -> Iterator[Row]:
    """Measure rows of 2,048 to 2,076 bytes in steps of 4, by their alignment to lines of 128 bytes."""
    for row_bytes in _WIDTHS:
        for _, name, seconds in _measure(row_bytes, (count,), _TABLE_BYTES // 4):
            num_bytes = count * row_bytes
            yield Row.of(f"fig7/{row_bytes} B", f"rate of {name}", "GB/s", [num_bytes / s / 1e9 for s in seconds],
                         num_bytes / _pinned_seconds(num_bytes) / 1e9, "a page-locked copy of these bytes",
                         _tell_requests(row_bytes), "rows beside lines of 128 bytes", row_bytes,
                         "bytes of a row")  # fmt: skip


def measure_indexing(counts: tuple[int, ...] = (1, 1024), repeats: int = 200) -> Iterator[Row]:
    """Measure Python's time for `unified[ids]`, beside torch's indexing on the device of the ids."""
    device = resolve_device(None)
    rows = _make_table(512, 1 << 20)
    plain, table = rows.to(device), to_unified(rows.clone())
    for count in counts:
        ids = torch.randint(len(rows), (count,), device=device)
        taken: dict[str, list[float]] = {"torch": [], "ours": []}
        # In training a core does not sleep before an index.
        wake_core(0.05)
        for _ in range(repeats):
            for way, source in (("torch", plain), ("ours", table)):
                wait_for_gpu()
                begin = time.perf_counter()
                source[ids]
                taken[way].append(1e6 * (time.perf_counter() - begin))
        beside = sorted(taken["torch"])[repeats // 2]
        yield Row.of(f"unified/{count} rows of 512 B", "Python time of unified[ids]", "us", taken["ours"], beside,
                     "torch's index on the same device",
                     f"p20, p50, p80 of {repeats} single calls, each after a wait for the GPU, in turns with the "
                     "limit's, on a core that is awake")  # fmt: skip

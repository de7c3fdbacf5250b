"""Gather of rows: from GPU memory beside `torch.index_select`, from host memory beside a page-locked copy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate
from pyg_direct.bench.row import Row
from pyg_direct.bench.timing import time_on_gpu
from pyg_direct.features.feature import _LINK_BLOCKS
from pyg_direct.ops.gather import gather_rows
from pyg_direct.runtime.memory import allocate

_IDS = 1 << 20


def measure_hot_rows(widths: tuple[int, ...] = (32, 100, 128, 256, 1024), table_bytes: int = 8 << 30) -> Iterator[Row]:
    """Random fp32 rows of a table in GPU memory."""
    limit = device_copy_rate() / 2e12
    for width in widths:
        num_rows = table_bytes // (4 * width)
        table = torch.empty(num_rows, width, device="cuda").normal_()
        ids = torch.randint(num_rows, (_IDS,), device="cuda")
        out = torch.empty(_IDS, width, device="cuda")
        assert torch.equal(gather_rows(table, ids), table[ids])
        moved = _IDS * width * 4 / 1e12
        case = f"gather/hot/{4 * width} B"
        ours = time_on_gpu(partial(gather_rows, table, ids, out=out))
        torch_own = time_on_gpu(partial(torch.index_select, table, 0, ids, out=out))
        for metric, seconds in (("rows, one way", ours), ("torch.index_select", torch_own)):
            yield Row.of(case, metric, "TB/s", [moved / s for s in seconds], limit, "half of a device copy")


def measure_cold_rows(table_bytes: int = 8 << 30, width: int = 128) -> Iterator[Row]:
    """Random and ascending fp32 rows of a table in host memory."""
    limit = pinned_copy_rate() / 1e9
    num_rows = table_bytes // (4 * width)
    for placement in ("unified", "pinned"):
        block = allocate(table_bytes, placement, "cuda")
        on_cpu = block.view_on_cpu(torch.float32, (num_rows, width))
        on_cpu[:, 0] = torch.arange(num_rows, dtype=torch.float32)
        on_cpu[:, 1:] = 1.0
        table = block.view_on_gpu(torch.float32, (num_rows, width))
        out = torch.empty(_IDS, width, device="cuda")
        for order in ("random", "ascending"):
            ids = torch.randint(num_rows, (_IDS,), device="cuda")
            ids = ids.sort().values if order == "ascending" else ids
            seconds = time_on_gpu(partial(gather_rows, table, ids, out=out, max_blocks=_LINK_BLOCKS), 10, 2)
            assert torch.equal(out[:, 0].long(), ids)
            case = f"gather/cold/{4 * width} B/{table_bytes >> 30} GiB {placement}/{order}"
            rates = [_IDS * width * 4 / s / 1e9 for s in seconds]
            yield Row.of(case, "rows, one way", "GB/s", rates, limit, "page-locked copy")
        del block, on_cpu, table

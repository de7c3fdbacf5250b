"""Gather of rows stored in fewer bits, and of host tables of growing size."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from pyg_direct.bench.gather import fill_host_table, time_cold_rows
from pyg_direct.bench.limits import device_copy_rate, pinned_copy_rate, time_on_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.features.feature import Feature

_IDS = 1 << 20
_STORES = (None, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def measure_cold_growth(most_bytes: int = 64 << 30) -> Iterator[Row]:
    """Rows of unified tables of 0.5 GiB and more; takes `most_bytes` of host memory."""
    limit = pinned_copy_rate() / 1e9
    _, memory = fill_host_table(most_bytes, "unified")
    num_bytes = 1 << 29
    while num_bytes <= most_bytes:
        for width in (512, 400, 128):
            for order in ("random", "ascending"):
                rates = time_cold_rows(memory[: num_bytes // 4], width, ascending=order == "ascending")
                yield Row.of(f"gather/cold/{width} B/{num_bytes / 2**30:g} GiB", f"{width} B, {order}", "GB/s",
                             [r / 1e9 for r in rates], limit, "page-locked copy", curve="cold tables",
                             at=num_bytes / 2**30, at_name="GiB of the table")  # fmt: skip
        num_bytes *= 2


def measure_stored_rows(num_rows: int = 1 << 23, width: int = 128) -> Iterator[Row]:
    """Rows of float32 stored in fewer bits, from GPU memory and over the link."""
    for store_dtype in _STORES:
        name = "float32" if store_dtype is None else str(store_dtype).removeprefix("torch.")
        stored_bytes = width * (4 if store_dtype is None else store_dtype.itemsize)
        for cache, where in (("100%", "hot"), (0, "cold")):
            table = torch.arange(num_rows, dtype=torch.float32)[:, None].remainder(2048).repeat(1, width)
            feature = Feature(device_cache_size=cache, store_dtype=store_dtype).from_cpu_tensor(table)
            ids = torch.randint(num_rows, (_IDS,), device="cuda")
            seconds = time_on_gpu(lambda ids=ids, feature=feature: feature[ids], 10, 2, 2)  # type: ignore[misc]
            case, rates = f"gather/{where}/{width} numbers as {name}", [_IDS / s / 1e9 for s in seconds]
            if where == "hot":
                limit, limit_name = device_copy_rate() / (stored_bytes + 4 * width), "a device copy of these bytes"
            else:
                limit, limit_name = pinned_copy_rate() / stored_bytes, "a page-locked copy of these bytes"
            yield Row.of(case, "rows", "G/s", rates, limit / 1e9, limit_name)
            del feature, table
            gc.collect()

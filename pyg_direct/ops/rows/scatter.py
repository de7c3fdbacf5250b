"""Rows written into tables by id, on the device of the ids (see `kernels/rows/scatter.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.rows import scatter as kernels
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.rows.gather import rows_in_units, unread_errors, widest_unit
from pyg_direct.ops.run_kernel import full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.runtime.host.tensor_views import as_bytes

_UNITS = (torch.int64, torch.uint32, torch.int16, torch.uint8)


def scatter_rows(table: Tensor, ids: Tensor, rows: Tensor, *, errors: Tensor | None = None,
                 is_unique: bool = False) -> None:  # fmt: skip
    """Write `rows[i]` to row `ids[i]` of a table, bit for bit; of an id that comes several times, the last one.

    Args:
        table: `[N, ...]`, contiguous, readable and writable by the device of the ids.
        ids: int32 or int64 `[n]`, on the device that does the work.
        rows: `[n, ...]` of the table's dtype, on that device.
        errors: On a GPU: int64 `[1]` that gets the lowest position of an id out of range, which is not written.
            Ids on the CPU are checked before anything is written.
        is_unique: No id comes twice, which saves sorting them.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    ids = check_ids("ids", ids, table.shape[0])
    shape = (ids.numel(), *table.shape[1:])
    if rows.shape != shape or rows.dtype != table.dtype or rows.device != ids.device:
        raise ArgumentError(f"rows must be {shape} of {table.dtype} on {ids.device}, got {tuple(rows.shape)} of "
                            f"{rows.dtype} on {rows.device}")  # fmt: skip
    if not table.is_contiguous():
        raise ArgumentError("table must be contiguous, got a strided tensor")
    if rows.numel() == 0:
        return
    rows = rows.detach().resolve_conj().resolve_neg().contiguous()
    errors = unread_errors(ids.device) if errors is None else errors
    if not is_unique and ids.numel() > 1:
        ids, rows = keep_last(ids, rows)
    unit = widest_unit(rows, table, table, _UNITS)
    source, target = rows_in_units(rows, unit), rows_in_units(table, unit)
    if runs_on_gpu(ids):
        run_gpu(kernels.scatter_items_gpu, min(full_grid(ids), grid_for(source.numel(), ids)), source.view(-1), ids,
                table.shape[0], source.shape[1], target.view(-1), errors)  # fmt: skip
    else:
        run_cpu(kernels.scatter_rows_cpu, source, ids, target)


def keep_last(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return all ids and rows in order if no id comes twice, otherwise the last of each."""
    ordered, order = ids.sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_last[:-1])
    kept = order[is_last].sort().values
    if kept.numel() == ids.numel():
        return ids, rows
    if not rows.numel():
        return ids[kept], rows[: kept.numel()]
    flat = as_bytes(rows).view(len(rows), -1)
    return ids[kept], flat[kept].view(-1).view(rows.dtype).view(kept.numel(), *rows.shape[1:])

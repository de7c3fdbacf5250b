"""Rows of one table for batch after batch: what `gather_rows` works out anew at each call is worked out once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.ops.gather import FEW_BYTES, Directory, check_widening, choose_gather


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """Few rows `[n, ...]` of a contiguous table, both on the CPU, in one step of torch's.

    None where `gather_rows` must read them: they are many, an id names none, or torch does not know the dtype.
    """
    if ids.numel() * table.stride(0) * table.element_size() > FEW_BYTES:
        return None
    try:
        return table.index_select(0, ids)
    except (IndexError, RuntimeError):
        return None


class RowReader:
    """`gather_rows` on a GPU for ids that need no check but that of the kernel.

    Args:
        hot, cold, directory, dtype, exponents: As in `gather_rows`; the tables must stay where they are.
        errors: int64 `[1]` that gets the lowest position of an id out of range.
        max_blocks: Cap of the grid; None for none.
        strands: As in `choose_gather`.
    """

    def __init__(self, hot: Tensor, cold: Tensor | None, directory: Directory | None, errors: Tensor,
                 max_blocks: int | None, *, dtype: torch.dtype | None = None,
                 exponents: Tensor | None = None, strands: int = 1) -> None:  # fmt: skip
        dtype = hot.dtype if dtype is None else dtype
        # What torch makes like another tensor costs it half of what it makes of a dtype and a device.
        self._row, self._like = tuple(hot.shape[1:]), torch.empty(0, dtype=dtype, device=hot.device)
        num_rows = hot.shape[0] if cold is None else cold.shape[0]
        exponents = check_widening(hot.dtype, dtype, exponents, num_rows, hot.device)
        self._gather = choose_gather(hot, cold, directory, dtype, exponents, errors, max_blocks, strands=strands)

    def read(self, ids: Tensor) -> Tensor:
        """Rows `[n, ...]` of `ids`, int64 `[n]`, contiguous and on the GPU."""
        out = self._like.new_empty((ids.shape[0], *self._row))
        if out.numel() > 0:
            self._gather(ids, out)
        return out

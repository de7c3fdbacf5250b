"""Rows of one table for batch after batch: what `gather_rows` checks anew at each call is checked once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.ops.gather import Directory, _check_widening, _gather_on_gpu


class RowReader:
    """`gather_rows` on a GPU for ids that need no check but that of the kernel.

    Args:
        hot, cold, directory, dtype, exponents: As in `gather_rows`; the tables must stay where they are.
        errors: int64 `[1]` that gets the lowest position of an id out of range.
        max_blocks: Cap of the grid; None for none.
    """

    def __init__(self, hot: Tensor, cold: Tensor | None, directory: Directory | None, errors: Tensor,
                 max_blocks: int | None, *, dtype: torch.dtype | None = None,
                 exponents: Tensor | None = None) -> None:  # fmt: skip
        self._shape, self._device = hot.shape[1:], hot.device
        self._dtype = hot.dtype if dtype is None else dtype
        self._num_rows = hot.shape[0] if cold is None else cold.shape[0]
        self._exponents = _check_widening(hot, self._dtype, exponents, self._num_rows, hot.device)
        self._hot, self._cold = hot, hot[:0] if cold is None else cold
        self._directory = Directory.empty(hot.device) if directory is None else directory
        self._errors, self._max_blocks = errors, max_blocks

    def read(self, ids: Tensor) -> Tensor:
        """Rows `[n, ...]` of `ids`, int64 `[n]`, contiguous and on the GPU."""
        out = torch.empty((ids.shape[0], *self._shape), dtype=self._dtype, device=self._device)
        if out.numel() > 0:
            _gather_on_gpu(self._hot, self._cold, self._directory, ids, self._num_rows, self._exponents, out,
                           self._errors, self._max_blocks)  # fmt: skip
        return out

"""Rows of one table for batch after batch: what `gather_rows` works out anew at each call is worked out once."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels import gather as kernels
from pyg_direct.kernels.jit import THREADS
from pyg_direct.ops.gather import Directory, _flat, _lane_bits, _row_bytes, _widest_unit
from pyg_direct.ops.launch import run_gpu

_NO_CAP = 2**31 - 1


class RowReader:
    """`gather_rows` on a GPU for ids that need no check but that of the kernel.

    Args:
        hot, cold, directory: As in `gather_rows`; they must stay where they are.
        errors: int64 `[1]` that gets the lowest position of an id out of range.
        max_blocks: Cap of the grid; None for none.
    """

    def __init__(self, hot: Tensor, cold: Tensor | None, directory: Directory | None, errors: Tensor,
                 max_blocks: int | None) -> None:  # fmt: skip
        self._shape, self._dtype, self._device = hot.shape[1:], hot.dtype, hot.device
        self._num_rows = hot.shape[0] if cold is None else cold.shape[0]
        cold = hot[:0] if cold is None else cold
        self._directory = Directory.empty(hot.device) if directory is None else directory
        self._errors, self._cap = errors, _NO_CAP if max_blocks is None else max_blocks
        row_bytes, addresses = _row_bytes(hot), hot.data_ptr() | cold.data_ptr()
        # What torch allocates is aligned to more than 16 bytes.
        self._wide = row_bytes % 16 == 0 and addresses % 16 == 0
        unit = torch.int64 if self._wide else _widest_unit(hot, cold, cold, (torch.int64, torch.uint32, torch.uint8))
        self._unit = unit
        self._width = row_bytes // (16 if self._wide else unit.itemsize)
        self._lane_bits = _lane_bits(self._width)
        # Tables as the kernel takes them; the tensors themselves are kept alive by this object.
        self._keep = hot, cold
        self._tables = (hot.data_ptr(), cold.data_ptr()) if self._wide else (_flat(hot, unit), _flat(cold, unit))
        self._kernel = kernels.gather_wide_rows_gpu if self._wide else kernels.gather_rows_gpu

    def read(self, ids: Tensor) -> Tensor:
        """Rows `[n, ...]` of `ids`, int64 `[n]`, contiguous and on the GPU."""
        count = ids.shape[0]
        out = torch.empty((count, *self._shape), dtype=self._dtype, device=self._device)
        if out.numel() > 0:
            grid = min(-(-(count << self._lane_bits) // THREADS), self._cap)
            same_size = self._dtype.itemsize == self._unit.itemsize
            flat = out if self._wide else out.view(self._unit) if same_size else _flat(out, self._unit)
            run_gpu(self._kernel, grid, *self._tables, *self._directory, ids, self._num_rows, self._width,
                    self._lane_bits, flat, self._errors)  # fmt: skip
        return out

"""Rows of a table of each type by its own ids: one launch for all types (see `kernels/typed.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import typed as kernels
from pyg_direct.kernels.gather import PIECE
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.ops.gather import gather_rows
from pyg_direct.ops.launch import run_gpu
from pyg_direct.ops.narrow import is_narrow


def fits_typed(table: Tensor) -> bool:
    """Whether a table may be read with those of other types: contiguous, aligned rows of 1, 2, 4, 8 or n * 16 bytes."""
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    is_wide = 0 < row_bytes < 2**31 and row_bytes % PIECE == 0 and table.data_ptr() % PIECE == 0
    return is_narrow(table) or (is_wide and table.is_contiguous())


class TypedReader:
    """Reads rows of several tables, each by its own ids, as `gather_rows` reads those of each.

    Args:
        tables: Tables `[N_t, ...]` of one dtype and row on one device, for which `fits_typed` holds; they must stay
            where they are.
        errors: int64 `[1]` that gets the lowest place in the output whose id was out of range; its row is zeros.
    """

    def __init__(self, tables: Sequence[Tensor], errors: Tensor) -> None:
        first = tables[0]
        assert all(fits_typed(t) and (t.dtype, t.shape[1:]) == (first.dtype, first.shape[1:]) for t in tables)
        self._tables, self._errors = list(tables), errors
        self._shape, self._dtype, self._device = first.shape[1:], first.dtype, first.device
        self._row_bytes = math.prod(self._shape) * first.element_size()
        words = [table.data_ptr() for table in tables] + [len(table) for table in tables]
        self._where = torch.tensor(words, dtype=torch.int64, device="cpu").to(self._device)
        self.layout_words = 2 * len(tables) + 1

    def list_layout(self, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The words that `read` needs on the device, int64 `[2 * T + 1]`.

        Args:
            begins: Where the ids of each table begin in the list that `read` is given, int64 `[T]`.
            counts: Their number, int64 `[T]`.
        """
        layout, count = np.zeros(self.layout_words, np.int64), len(counts)
        np.cumsum(counts, out=layout[1 : count + 1])
        layout[count + 1 :] = begins - layout[:count]
        return layout

    def read(self, ids: Tensor, layout: Tensor, counts: list[int]) -> tuple[Tensor, Sequence[Tensor]]:
        """(all rows, those of each table): `[sum of counts, ...]`, and parts of it.

        Args:
            ids: int64, contiguous; ids of all types.
            layout: That of `list_layout`, on the device.
            counts: Rows of each table.
        """
        rows = torch.empty((sum(counts), *self._shape), dtype=self._dtype, device=self._device)
        if SIMULATED or not ids.is_cuda:
            words = layout.tolist()
            begins = [sum(pair) for pair in zip(words[: len(counts)], words[len(counts) + 1 :], strict=True)]
            parts = [gather_rows(table, ids[begin : begin + count], errors=self._errors)
                     for table, begin, count in zip(self._tables, begins, counts, strict=True)]  # fmt: skip
            torch.cat(parts, out=rows)
        elif rows.numel() > 0:
            address = rows.data_ptr()
            if self._row_bytes % PIECE == 0:
                grid = -(-rows.shape[0] * self._row_bytes // (2 * PIECE * THREADS))
                run_gpu(kernels.gather_typed_gpu, grid, layout, self._where, ids, self._row_bytes, address,
                        self._errors)  # fmt: skip
            else:
                run_gpu(kernels.gather_typed_narrow_gpu, -(-rows.shape[0] // THREADS), layout, self._where, ids,
                        self._row_bytes.bit_length() - 1, address, self._errors)  # fmt: skip
        return rows, torch.unsafe_split_with_sizes(rows, counts)

"""Rows of several tables of short rows by one list of ids: one launch for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.kernels import narrow as kernels
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.ops.gather import gather_rows
from pyg_direct.ops.launch import run_gpu

MOST_TABLES = kernels.MOST_TABLES
_ROW_BYTES = (1, 2, 4, 8, 16)


def is_narrow(table: Tensor) -> bool:
    """Whether a table may be read together with others: contiguous, with rows of 1, 2, 4, 8 or 16 bytes, aligned."""
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    return row_bytes in _ROW_BYTES and table.is_contiguous() and table.data_ptr() % row_bytes == 0


class NarrowReader:
    """Reads rows of tables together, as `gather_rows` reads those of each.

    Args:
        tables: Two to `MOST_TABLES` tables `[N, ...]` of one N and device, for which `is_narrow` holds. They must stay
            where they are.
        errors: int64 `[1]` that gets the lowest position of an id out of range, whose rows are zeros.
    """

    def __init__(self, tables: Sequence[Tensor], errors: Tensor) -> None:
        assert 2 <= len(tables) <= MOST_TABLES, f"{len(tables)} tables"
        assert all(is_narrow(table) and len(table) == len(tables[0]) for table in tables)
        self._tables, self._errors, self._num_rows = tables, errors, len(tables[0])
        self._bits = [_ROW_BYTES.index(math.prod(t.shape[1:]) * t.element_size()) for t in tables]
        rest = MOST_TABLES - len(tables)
        self._addresses = [table.data_ptr() for table in tables] + [0] * rest
        self._padded_bits = self._bits + [0] * rest
        self._missing = [0] * rest

    def read(self, ids: Tensor) -> list[Tensor]:
        """Rows of `ids`, int32 or int64 `[n]`, contiguous and where the tables are: `[n, ...]` of each table.

        On a GPU they share one piece of memory.
        """
        if SIMULATED or not ids.is_cuda:
            return [gather_rows(table, ids, errors=self._errors) for table in self._tables]
        count, device = ids.shape[0], ids.device
        # Each begins where 16 bytes may be stored at once.
        sizes = [count << bits for bits in self._bits]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // 16) * 16)
        memory = torch.empty(begins[-1], dtype=torch.uint8, device=device)
        address = memory.data_ptr()
        if count > 0:
            outputs = [address + begin for begin in begins[:-1]] + self._missing
            run_gpu(kernels.gather_narrow_gpu, -(-count // THREADS), ids, self._num_rows, *self._addresses, *outputs,
                    *self._padded_bits, self._errors)  # fmt: skip
        out = []
        for table, begin, size in zip(self._tables, begins, sizes, strict=False):
            rows = memory[begin : begin + size].view(table.dtype)
            out.append(rows.view(count, *table.shape[1:]) if table.dim() > 1 else rows)
        return out

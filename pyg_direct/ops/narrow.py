"""Rows of several tables of short rows by one list of ids: one launch for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
        rest = [0] * (MOST_TABLES - len(tables))
        row_bytes = [math.prod(table.shape[1:]) * table.element_size() for table in tables]
        self._addresses = [table.data_ptr() for table in tables] + rest
        self._bits = [_ROW_BYTES.index(size) for size in row_bytes] + rest
        # Tables of one dtype and row are read into one piece of memory, but for numbers that could take part in a
        # gradient: torch refuses some writes to what comes out of `unbind`.
        places: dict[Any, list[int]] = {}
        for place, table in enumerate(tables):
            is_whole = not (table.dtype.is_floating_point or table.dtype.is_complex)
            places.setdefault((table.dtype, table.shape[1:]) if is_whole else place, []).append(place)
        # (the first of them, its row, its bytes, their places)
        self._alike = [(tables[at[0]], tuple(tables[at[0]].shape[1:]), row_bytes[at[0]], at) for at in places.values()]

    def read(self, ids: Tensor) -> list[Tensor]:
        """Rows of `ids`, int32 or int64 `[n]`, contiguous and where the tables are: `[n, ...]` of each table.

        On a GPU those of integers or bools of one dtype and row share a piece of memory.
        """
        if SIMULATED or not ids.is_cuda:
            return [gather_rows(table, ids, errors=self._errors) for table in self._tables]
        count, out, outputs = ids.shape[0], list(self._tables), [0] * MOST_TABLES
        for table, row, row_bytes, places in self._alike:
            if len(places) == 1:
                memory = out[places[0]] = table.new_empty((count, *row))
            else:
                memory = table.new_empty((len(places), count, *row))
                for place, rows in zip(places, memory.unbind(0), strict=True):
                    out[place] = rows
            address = memory.data_ptr()
            for place in places:
                outputs[place] = address
                address += count * row_bytes
        if count > 0:
            run_gpu(kernels.gather_narrow_gpu, -(-count // THREADS), ids, self._num_rows, *self._addresses, *outputs,
                    *self._bits, self._errors)  # fmt: skip
        return out

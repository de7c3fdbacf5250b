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
        rest = [0] * (MOST_TABLES - len(tables))
        row_bytes = [math.prod(table.shape[1:]) * table.element_size() for table in tables]
        self._addresses = [table.data_ptr() for table in tables] + rest
        self._bits = [_ROW_BYTES.index(size) for size in row_bytes] + rest
        # Integers and bools come from one piece of memory, as each piece takes the host longer than a launch until it
        # is free again; the widest first, so that all are aligned. Numbers that could take part in a gradient have
        # their own, and rows of several items.
        order = sorted(range(len(tables)), key=lambda place: -row_bytes[place])
        whole = [p for p in order if tables[p].dim() == 1 and not (tables[p].is_floating_point() or
                                                                   tables[p].is_complex())]  # fmt: skip
        whole = [] if len(whole) == 1 else whole
        # (place, table, its row)
        self._alone = [(p, tables[p], tuple(tables[p].shape[1:])) for p in order if p not in whole]
        self._words = torch.empty(0, dtype=torch.int64, device=tables[0].device)
        self._whole_bytes = sum(row_bytes[p] for p in whole)
        # (dtype, its bytes, places of the tables), widest first
        self._whole = [(dtype, dtype.itemsize, [p for p in whole if tables[p].dtype == dtype])
                       for dtype in dict.fromkeys(tables[p].dtype for p in whole)]  # fmt: skip

    def read(self, ids: Tensor, memory: list[Tensor] | None = None) -> list[Tensor]:
        """Rows of `ids`, int32 or int64 `[n]`, contiguous and where the tables are: `[n, ...]` of each table.

        On a GPU those of integers and bools share a piece of memory.

        Args:
            ids: Which rows.
            memory: Gets the tensors that the memory of all rows belongs to.
        """
        own: list[Tensor] = [] if memory is None else memory
        if SIMULATED or not ids.is_cuda:
            rows = [gather_rows(table, ids, errors=self._errors) for table in self._tables]
            own += rows
            return rows
        count, out, outputs = ids.shape[0], list(self._tables), [0] * MOST_TABLES
        for place, table, row in self._alone:
            out[place] = table.new_empty((count, *row))
            outputs[place] = out[place].data_ptr()
            own.append(out[place])
        if self._whole:
            rest = self._words.new_empty((count * self._whole_bytes + 7) // 8)
            own.append(rest)
            address = rest.data_ptr()
            for dtype, item_bytes, places in self._whole:
                items = rest if dtype is torch.int64 else rest.view(dtype)
                sizes = [count] * len(places)
                *parts, rest = items.unsafe_split_with_sizes([*sizes, items.shape[0] - count * len(places)])
                for place, part in zip(places, parts, strict=True):
                    out[place], outputs[place] = part, address
                    address += count * item_bytes
        if count > 0:
            run_gpu(kernels.gather_narrow_gpu, -(-count // THREADS), ids, self._num_rows, *self._addresses, *outputs,
                    *self._bits, self._errors)  # fmt: skip
        return out

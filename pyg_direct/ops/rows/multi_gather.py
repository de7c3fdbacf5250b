"""Gather from several tables in one launch (see `kernels/rows/multi_gather.py`).

`NarrowReader` reads several tables of short rows by one list of ids. `TypedReader` reads a table of each type by its
own ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS
from pyg_direct.errors import IdError
from pyg_direct.kernels.batch_counters import NO_POSITION
from pyg_direct.kernels.rows import multi_gather as kernels
from pyg_direct.kernels.rows.gather import PIECE
from pyg_direct.ops.rows.gather import LIGHT, gather_rows
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu, run_gpu, threads_for
from pyg_direct.runtime.host.pages import use_large_pages

MOST_TABLES = kernels.MOST_TABLES
_ROW_BYTES = (1, 2, 4, 8, 16)


def is_narrow(table: Tensor) -> bool:
    """Report whether a table may be read together with others: contiguous, with rows of 1, 2, 4, 8 or 16 bytes,
    aligned.
    """
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    return row_bytes in _ROW_BYTES and table.is_contiguous() and table.data_ptr() % row_bytes == 0


class NarrowReader:
    """Reader of several tables at once, equal to `gather_rows` of each.

    Args:
        tables: Two to `MOST_TABLES` tables `[N, ...]` of one N and device, for which `is_narrow` holds. They must not
            move.
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
        # Integers and bools share one block of memory, because freeing each block takes the host longer than a launch.
        # The widest come first, so that all are aligned. Numbers that could take part in a gradient, and rows of
        # several items, have their own memory.
        order = sorted(range(len(tables)), key=lambda place: -row_bytes[place])
        whole = [p for p in order if tables[p].dim() == 1 and not (tables[p].is_floating_point() or
                                                                   tables[p].is_complex())]  # fmt: skip
        whole = [] if len(whole) == 1 else whole
        # (position, table, its row)
        self._alone = [(p, tables[p], tuple(tables[p].shape[1:])) for p in order if p not in whole]
        self._words = torch.empty(0, dtype=torch.int64, device=tables[0].device)
        self._whole_bytes = sum(row_bytes[p] for p in whole)
        # (dtype, its bytes, positions of the tables), widest first
        self._whole = [(dtype, dtype.itemsize, [p for p in whole if tables[p].dtype == dtype])
                       for dtype in dict.fromkeys(tables[p].dtype for p in whole)]  # fmt: skip

    def read(self, ids: Tensor, memory: list[Tensor] | None = None) -> list[Tensor]:
        """Read rows of `ids`, int32 or int64 `[n]`, contiguous and on the device of the tables: `[n, ...]` of each
        table.

        On a GPU the rows of integers and bools share a block of memory.

        Args:
            ids: Rows to read.
            memory: Receives the tensors that own the memory of all rows.
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


def fits_typed(table: Tensor) -> bool:
    """Report whether a table may be read with tables of other types: contiguous, aligned rows of 1, 2, 4, 8 or n * 16
    bytes.
    """
    row_bytes = math.prod(table.shape[1:]) * table.element_size()
    is_wide = 0 < row_bytes < 2**31 and row_bytes % PIECE == 0 and table.data_ptr() % PIECE == 0
    return is_narrow(table) or (is_wide and table.is_contiguous())


class TypedReader:
    """Reader of several tables, each by its own ids, equal to `gather_rows` of each.

    Args:
        tables: Tables `[N_t, ...]` of one dtype and row on one device, for which `fits_typed` holds; they must not
            move.
        errors: On a GPU: int64 `[1]` that gets the lowest position in the output whose id was out of range; its row is
            zeros. A CPU raises at once.
    """

    def __init__(self, tables: Sequence[Tensor], errors: Tensor | None) -> None:
        first = tables[0]
        assert all(fits_typed(t) and (t.dtype, t.shape[1:]) == (first.dtype, first.shape[1:]) for t in tables)
        self._tables, self._errors = list(tables), errors
        self._shape, self._dtype, self._device = first.shape[1:], first.dtype, first.device
        self._row_bytes = math.prod(self._shape) * first.element_size()
        self._num_rows = [len(table) for table in tables]
        self._where = torch.from_numpy(self._find_tables()).to(self._device)
        self.layout_words = 2 * len(tables) + 1

    def _find_tables(self) -> np.ndarray:
        """Return addresses of the tables, and then their rows, int64 `[2 * T]`."""
        return np.array([table.data_ptr() for table in self._tables] + self._num_rows, np.int64)

    def list_layout(self, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the words that `read` needs on the device, int64 `[2 * T + 1]`.

        Args:
            begins: First position of each table's ids in the list for `read`, int64 `[T]`.
            counts: Their number, int64 `[T]`.
        """
        layout, count = np.zeros(self.layout_words, np.int64), len(counts)
        np.cumsum(counts, out=layout[1 : count + 1])
        layout[count + 1 :] = begins - layout[:count]
        return layout

    def read(self, ids: Tensor, layout: Tensor, counts: list[int]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return (all rows, the rows of each table): `[sum of counts, ...]`, and parts of it.

        Args:
            ids: int64, contiguous; ids of all types.
            layout: The result of `list_layout`, on the device.
            counts: Rows of each table.

        Raises:
            IdError: an id on the CPU is out of range.
        """
        rows = torch.empty((sum(counts), *self._shape), dtype=self._dtype, device=self._device)
        if not ids.is_cuda:
            self._read_on_cpu(ids, layout, rows)
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

    def _read_on_cpu(self, ids: Tensor, layout: Tensor, rows: Tensor) -> None:
        # Other code may move a table that stays the same tensor, for example to shared memory.
        tables, num_bytes = self._find_tables(), rows.shape[0] * self._row_bytes
        with threads_for(num_bytes // LIGHT):
            errors = np.full(cpu_chunks(), NO_POSITION)
            run_cpu(kernels.gather_typed_cpu, layout, tables, ids, self._row_bytes, use_large_pages(rows).data_ptr(),
                    len(errors), errors)  # fmt: skip
        if (place := int(errors.min())) != NO_POSITION:
            starts, count = layout.numpy(), len(self._tables)
            number = int(np.searchsorted(starts[: count + 1], place, side="right")) - 1
            raise IdError(f"ids must lie in [0, {self._num_rows[number]}), got "
                          f"{int(ids[place + starts[count + 1 + number]])}")  # fmt: skip

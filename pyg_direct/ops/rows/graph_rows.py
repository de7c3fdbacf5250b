"""Rows of the graphs of a batch: they lie side by side in joined tables (see `kernels/rows/gather.py`).

`GraphRows` reads them by CPU loops, `GraphRowsOnGpu` by one launch.

`LoopChoice` lets torch join the batches of short programs, which need no compiler then.

Rows of several batches come to a GPU by one copy and one launch. Places, sizes and addresses of all batches are
computed together. What is left for each batch are a few calls of torch, for any number of graphs. Each batch has memory
of its own.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.rows import gather as kernels
from pyg_direct.ops.rows.gather_rows import LIGHT
from pyg_direct.ops.run_kernel import FEW_ITEMS, grid_for, run_gpu, threads_for

_FEW_BYTES, _WORD = 1 << 16, 8
# Seconds that torch joins batches in a process before the loops are compiled or read.
_TORCH_SECONDS = 0.1
# The same if Numba is not imported yet.
_LONE_SECONDS = 0.5


class LoopChoice:
    """Choice of the loops, after torch has joined batches for some time in this process.

    `with LoopChoice() as is_by_loops:` surrounds the joining of a batch.
    """

    __slots__ = ("_begin",)
    seconds = 0.0

    @staticmethod
    def is_made() -> bool:
        """Report whether batches are joined by the loops now."""
        return LoopChoice.seconds >= (_TORCH_SECONDS if "numba" in sys.modules else _LONE_SECONDS)

    def __enter__(self) -> bool:
        self._begin = None if LoopChoice.is_made() else time.perf_counter()
        return self._begin is None

    def __exit__(self, *error: object) -> None:
        if self._begin is not None:
            LoopChoice.seconds += time.perf_counter() - self._begin


class GraphRows:
    """Reader of the rows of the graphs of one batch.

    Attributes:
        ptr: First row of each graph in the batch, and the end, for each group of tables with equal slices, int64
            `[K, B + 1]`.
        totals: Rows of the batch in each group.

    Args:
        numbers: Numbers of the graphs, int64 `[B]` on the CPU, below G.
        spans: First row of each graph in each group, then its number of rows in each, int64 `[G, 2 * K]` on the CPU.
    """

    def __init__(self, numbers: Tensor, spans: Tensor) -> None:
        self._numbers, self._spans = numbers.numpy(), spans.numpy()
        self._ptr = np.empty((spans.shape[1] >> 1, len(self._numbers) + 1), np.int64)
        kernels.place_graphs_cpu(self._numbers, self._spans, self._ptr)
        self.ptr, self.totals = torch.from_numpy(self._ptr), self._ptr[:, -1].tolist()
        self._columns: list[tuple[int, ...]] = []
        # Kept until they are written, even if a batch drops them before.
        self._outputs: list[Tensor] = []

    def read(self, table: Tensor, dim: int, group: int | None, shift: int = -1) -> Tensor:
        """Return the rows of the graphs, which are written by `finish`.

        Args:
            table: Contiguous, on the CPU.
            dim: Dimension of the rows.
            group: Group of the table; None for one row per graph.
            shift: Group whose first row of each graph in the batch is added to its items, of an int64 table whose
                rows are its last dimension; -1 for none.
        """
        shape = list(table.shape)
        rows, shape[dim] = shape[dim], len(self._numbers) if group is None else self.totals[group]
        out = table.new_empty(shape)
        width = math.prod(shape[dim + 1 :]) * table.element_size()
        self._columns.append((out.data_ptr(), table.data_ptr(), -1 if group is None else group, width,
                              math.prod(shape[:dim]), rows, shift))  # fmt: skip
        self._outputs += out, table
        return out

    def read_shifted(self, table: Tensor, group: int, shifts: Tensor) -> Tensor:
        """Return the items of the graphs, with a number of each graph added.

        Args:
            table: Contiguous, int64 `[N]` or `[L, N]` on the CPU.
            group: Group of the table.
            shifts: Numbers to add, int64 `[B, 1]`, or `[B, L]` for each line.
        """
        out = table.new_empty(*table.shape[:-1], self.totals[group])
        lines = table.numpy(), out.numpy()
        if table.dim() == 1:
            lines = lines[0][None], lines[1][None]
        with _threads_for(out.nbytes):
            kernels.shift_graphs_cpu(self._numbers, self._spans, self._ptr, group, lines[0], shifts.numpy(), lines[1])
        return out

    def number_rows(self, group: int) -> Tensor:
        """Return the index of the graph of each row, int64 `[total]`, which `finish` writes."""
        out = torch.empty(self.totals[group], dtype=torch.int64, device="cpu")
        self._columns.append((out.data_ptr(), 0, group, _WORD, 1, 0, -1))
        self._outputs += out, out
        return out

    def list_ptr(self, group: int) -> Tensor:
        """Return a copy of a row of `ptr`."""
        return self.ptr[group].clone()

    def finish(self) -> None:
        """Write all rows that `read` returned."""
        if self._columns:
            columns = np.array(self._columns, np.int64)
            with _threads_for(sum(out.nbytes for out in self._outputs[::2])):
                kernels.copy_graphs_cpu(self._numbers, self._spans, self._ptr, columns)
            self._columns, self._outputs = [], []


class Column(NamedTuple):
    """Column of a batch, for `collate_graphs_gpu`. A list is given by its position behind all columns.

    Attributes:
        out, table: Addresses of the output and of the table, 0 without one.
        kind: `COPIED`; `SHIFTED`, for int64 with a number added; `NUMBERED`, the index of the graph; or `LISTED`.
        firsts: List of the first row of each graph, `[B]`; of a `LISTED` column the list to be written.
        ptr: List of the first row of each graph in the batch, and the end, `[B + 1]`; -1 for one row per graph.
        bits: An item takes 2**bits bytes.
        width: Items of a row.
        lines: The table is viewed as so many lines of rows; of a `LISTED` column, the numbers of the list.
        rows: Rows of a line of the table.
        graphs: Graphs of the batch, B.
        shifts: List of the numbers to add, `[B]` for each line.
        stride: Numbers from the list of a line to the next one.
    """

    out: int
    table: int
    kind: int
    firsts: int
    ptr: int
    bits: int
    width: int
    lines: int
    rows: int
    graphs: int
    shifts: int = 0
    stride: int = 0


class GraphRowsOnGpu:
    """Reader of the rows of the graphs of one batch on a GPU, by one copy to it and one launch.

    Attributes and methods are those of `GraphRows`; tables and results lie on the GPU.
    """

    def __init__(self, numbers: Tensor, spans: Tensor, device: torch.device) -> None:
        self._device, self._count = device, numbers.numel()
        own = spans.numpy()[numbers.numpy()].T
        groups = len(own) >> 1
        ptr = np.zeros((groups, self._count + 1), np.int64)
        np.cumsum(own[groups:], axis=1, out=ptr[:, 1:])
        self.ptr, self.totals = torch.from_numpy(ptr), ptr[:, -1].tolist()
        self._lists = [numbers.numpy(), own[:groups].reshape(-1), ptr.reshape(-1)]
        self._length = self._count + groups * (2 * self._count + 1)
        self._begin_of_ptr = self._count * (1 + groups)
        self._columns: list[Column] = []
        # Kept until they are written, even if a batch drops them before.
        self._outputs: list[Tensor] = []

    def _place(self, group: int | None) -> tuple[int, int]:
        """Return the lists of the first rows, in the table and in the batch."""
        if group is None:
            return 0, -1
        return self._count * (1 + group), self._begin_of_ptr + (self._count + 1) * group

    def _keep(self, column: Column, *tensors: Tensor) -> None:
        # An empty output has no memory.
        if tensors[0].numel() > 0:
            self._columns.append(column)
            self._outputs += tensors

    def read(self, table: Tensor, dim: int, group: int | None, shift: int = -1) -> Tensor:
        """Return the rows of the graphs, which are written by `finish`; see `GraphRows`."""
        shape = list(table.shape)
        rows, shape[dim] = shape[dim], self._count if group is None else self.totals[group]
        out = table.new_empty(shape)
        num_bytes, address = math.prod(shape[dim + 1 :]) * table.element_size(), table.data_ptr()
        # The largest items that lie at multiples of their size.
        common = (num_bytes | address | 16) & -(num_bytes | address | 16)
        bits = common.bit_length() - 1
        if shift >= 0:
            self._keep(Column(out.data_ptr(), address, kernels.SHIFTED, *self._place(group), 3, 1, table.numel() // rows
                              if rows else 0, rows, self._count, self._place(shift)[1]), out, table)  # fmt: skip
            return out
        self._keep(Column(out.data_ptr(), address, kernels.COPIED, *self._place(group), bits, num_bytes >> bits,
                          math.prod(shape[:dim]), rows, self._count), out, table)  # fmt: skip
        return out

    def read_shifted(self, table: Tensor, group: int, shifts: Tensor) -> Tensor:
        """Return the items of the graphs, with a number of each graph added, written by `finish`; see `GraphRows`."""
        out = table.new_empty(*table.shape[:-1], self.totals[group])
        lines = 1 if table.dim() == 1 else len(table)
        added = np.ascontiguousarray(shifts.expand(self._count, lines).numpy().T).reshape(-1)
        self._keep(Column(out.data_ptr(), table.data_ptr(), kernels.SHIFTED, *self._place(group), 3, 1, lines,
                          table.shape[-1], self._count, self._length, self._count), out, table)  # fmt: skip
        self._lists.append(added)
        self._length += len(added)
        return out

    def number_rows(self, group: int) -> Tensor:
        """Return the index of the graph of each row, int64 `[total]`, written by `finish`."""
        out = torch.empty(self.totals[group], dtype=torch.int64, device=self._device)
        self._keep(Column(out.data_ptr(), 0, kernels.NUMBERED, *self._place(group), 3, 1, 1, 0, self._count), out)
        return out

    def list_ptr(self, group: int) -> Tensor:
        """Return a row of `ptr` on the GPU, written by `finish`."""
        out = torch.empty(self._count + 1, dtype=torch.int64, device=self._device)
        self._keep(Column(out.data_ptr(), 0, kernels.LISTED, self._place(group)[1], -1, 3, 1, self._count + 1, 0,
                          self._count), out)  # fmt: skip
        return out

    def finish(self) -> None:
        """Write all rows that the other methods returned."""
        if self._columns:
            words = np.concatenate([np.array(self._columns, np.int64).reshape(-1), *self._lists])
            pairs = self._count * len(self._columns)
            run_gpu(kernels.collate_graphs_gpu, grid_for(pairs * kernels.LANES, self._outputs[0]),
                    to_device(torch.from_numpy(words), self._device), self._count, len(self._columns))  # fmt: skip
            self._columns, self._outputs = [], []


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the CPU to a device; the copy is complete before the next kernel."""
    if device.type == "cpu":
        return values
    # The driver copies so few bytes during the call.
    return (values if values.nbytes <= _FEW_BYTES else values.pin_memory()).to(device, non_blocking=True)


def _join_on(words: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Join arrays of int64 on a device; see `to_device`."""
    size = sum(map(len, words))
    is_locked = device.type == "cuda" and size * _WORD > _FEW_BYTES
    joined = torch.empty(size, dtype=torch.int64, pin_memory=is_locked, device="cpu")
    np.concatenate(words, out=joined.numpy())
    return joined.to(device, non_blocking=True)


def _threads_for(num_bytes: int) -> threads_for:
    """One thread for loops that write few bytes, and where torch has one thread."""
    return threads_for(FEW_ITEMS if torch.get_num_threads() == 1 else num_bytes // LIGHT)


# Columns begin at multiples of so many bytes, the largest item that kernels read.
_ALIGNED = 16
_NUMBER = np.dtype(np.int64)


class TableRows(NamedTuple):
    """Rows of a table.

    Attributes:
        table: Contiguous, on the GPU.
        dim: Dimension of the rows.
        group: Group of the table; None for one row per graph.
        added: Numbers to add to the items of each graph, for int64 tables whose rows are their last dimension. One
            group adds the first row of the graph in the batch. Two groups do so for each of two lines. Steps of all
            graphs, int64 `[G, 1]` or `[G, L]` for L lines, add the sum over the graphs before. None adds nothing.
    """

    table: Tensor
    dim: int
    group: int | None
    added: Sequence[int] | np.ndarray | None = None


class RowNumbers(NamedTuple):
    """Index of the graph of each row in a group of tables, int64 `[total]`."""

    group: int


class RowBegins(NamedTuple):
    """First row of each graph in a group of tables, and the end, int64 `[B + 1]`."""

    group: int


Layout = TableRows | RowNumbers | RowBegins


class MadeRows(NamedTuple):
    """Rows of n batches, of at most B graphs.

    Attributes:
        numbers: Numbers of the graphs of each batch, int64 `[n, B]`; behind a smaller batch follow others.
        counts: Graphs of each batch.
        ptr: First row of each graph in its batch, and the end, for each group, int64 `[K, n, B + 1]`.
        values: Columns of each batch.
        memory: Tensors that own the memory of each batch: of its rows of each dtype, and of what has one row per graph.
    """

    numbers: np.ndarray
    counts: list[int]
    ptr: np.ndarray
    values: list[list[Tensor]]
    memory: list[list[Tensor]]


class _Piece(NamedTuple):
    """Columns `[begin, end)` of one dtype, whose rows of a batch lie side by side in one tensor."""

    begin: int
    end: int
    dtype: torch.dtype


class BatchesOfGraphs:
    """Reader of the rows of the graphs of several batches.

    Args:
        spans: First row of each graph in each group, then its number of rows in each, int64 `[G, 2 * K]` on the CPU.
        layouts: The columns of a batch.
        device: The GPU of tables and batches.
    """

    def __init__(self, spans: Tensor, layouts: Sequence[Layout], device: torch.device) -> None:
        # Spans of each group lie together, as all batches read them.
        self._spans, self._num_groups, self._device = spans.numpy().T.copy(), spans.shape[1] >> 1, device
        # A program may keep labels of all batches: they do not keep the memory of the rows.
        kinds = [(own.group is None, own.table.dtype if isinstance(own, TableRows) else torch.int64)
                 for own in layouts]  # fmt: skip
        pieces = list(dict.fromkeys(kinds))
        order = sorted(range(len(layouts)), key=lambda place: pieces.index(kinds[place]))
        # From here on columns of a piece follow each other.
        self._layouts = [layouts[place] for place in order]
        self._places = [order.index(place) for place in range(len(order))]
        self._tables = [own for own in self._layouts if isinstance(own, TableRows)]
        self._shapes = [list(own.table.shape) if isinstance(own, TableRows) else [0] for own in self._layouts]
        self._dims = [own.dim if isinstance(own, TableRows) else 0 for own in self._layouts]
        piece_of = [pieces.index(kinds[place]) for place in order]
        begins = [piece_of.index(piece) for piece in piece_of]
        self._pieces = [_Piece(piece_of.index(piece), piece_of.index(piece) + piece_of.count(piece), dtype)
                        for piece, (_, dtype) in enumerate(pieces)]  # fmt: skip
        self._piece_of, self._first_of = np.array(piece_of, _NUMBER), np.array(begins, _NUMBER)
        self._item_bytes = np.array([pieces[piece][1].itemsize for piece in piece_of], _NUMBER)[:, None]
        # Items of a row, in all lines.
        self._widths = np.array([math.prod(shape[:dim] + shape[dim + 1 :])
                                 for shape, dim in zip(self._shapes, self._dims, strict=True)], _NUMBER
                                )[:, None]  # fmt: skip
        self._counted = np.array([self._find_counted(own) for own in self._layouts], _NUMBER)
        # Words of the columns without addresses of outputs, for batches of the numbers of graphs that came last.
        self._columns: tuple[tuple[int, ...], np.ndarray] = ((), np.zeros(0, _NUMBER))

    def _find_counted(self, layout: Layout) -> int:
        """Find the place of a column's number of rows: behind those of all groups are the number of graphs, and one
        more.
        """
        if layout.group is None:
            return self._num_groups
        return self._num_groups + 1 if isinstance(layout, RowBegins) else layout.group

    def is_current(self) -> bool:
        """Check that the tables have the shapes that they had, and need no gradient."""
        return all(not isinstance(own, TableRows) or (list(own.table.shape) == shape and own.table.is_contiguous()
                                                      and not own.table.requires_grad)
                   for own, shape in zip(self._layouts, self._shapes, strict=True))  # fmt: skip

    def read(self, batches: Sequence[Tensor], most_bytes: int) -> MadeRows:
        """Read the rows of the first batches, as many as take `most_bytes` on the GPU, and of at least one.

        Args:
            batches: Numbers of the graphs of each batch, int64 `[B]` on the CPU, below G; at least one batch and graph.
        """
        counts = list(map(Tensor.numel, batches))
        numbers = _join_numbers(batches, counts)
        firsts, ptr = self._place(numbers, counts)
        if not self._layouts:
            return MadeRows(numbers, counts, ptr, [[] for _ in counts], [[] for _ in counts])
        sizes = np.empty((self._num_groups + 2, len(counts)), _NUMBER)
        sizes[:-2], sizes[-2] = ptr[:, np.arange(len(counts)), counts], counts
        sizes[-1] = sizes[-2] + 1
        rows = sizes[self._counted]
        items = rows * self._widths
        # Up to the beginning of the next column.
        spaces = (items * self._item_bytes + (_ALIGNED - 1)) & -_ALIGNED
        if len(counts) > 1 and int(spaces.sum()) > most_bytes:
            fitting = max(1, int(np.searchsorted(spaces.sum(0).cumsum(), most_bytes, "right")))
            return self.read(batches[:fitting], most_bytes)
        columns, memory, addresses = self._allocate(items, spaces)
        for place, shape in enumerate(self._shapes):
            if len(shape) > 1:
                before, after = shape[: self._dims[place]], shape[self._dims[place] + 1 :]
                columns[place] = [own.view(*before, count, *after)
                                  for own, count in zip(columns[place], rows[place].tolist(), strict=True)]  # fmt: skip
        words = self._write_words(addresses, numbers, counts, firsts, ptr)
        grid = grid_for(addresses.size * numbers.shape[1] * kernels.LANES, memory[0][0])
        run_gpu(kernels.collate_graphs_gpu, grid, _join_on(words, self._device), numbers.shape[1], addresses.size)
        values = zip(*(columns[place] for place in self._places), strict=True)
        return MadeRows(numbers, counts, ptr, list(map(list, values)), list(map(list, zip(*memory, strict=True))))

    def _place(self, numbers: np.ndarray, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Compute the first row of each graph in the tables, int64 `[K, n, B]`, and `ptr` of `MadeRows`."""
        own = self._spans.take(numbers, axis=1)
        sizes = own[self._num_groups :]
        if min(counts) < numbers.shape[1]:
            sizes = sizes * (np.arange(numbers.shape[1]) < np.array(counts)[:, None])
        ptr = np.zeros((self._num_groups, len(counts), numbers.shape[1] + 1), _NUMBER)
        np.cumsum(sizes, axis=2, out=ptr[:, :, 1:])
        return own[: self._num_groups], ptr

    def _allocate(self, items: np.ndarray, spaces: np.ndarray
                  ) -> tuple[list[Sequence[Tensor]], list[list[Tensor]], np.ndarray]:  # fmt: skip
        """Allocate the columns of all batches, without their shapes: (columns, memory of each piece, addresses)."""
        # Each column, and the gap behind it.
        pairs = np.stack((items, spaces // self._item_bytes - items), 1)
        cuts = pairs.reshape(-1, items.shape[1]).T.tolist()
        columns: list[Sequence[Tensor]] = []
        memory = []
        for begin, end, dtype in self._pieces:
            own = [cut[2 * begin : 2 * end - 1] for cut in cuts]
            made = [torch.empty(sum(cut), dtype=dtype, device=self._device) for cut in own]
            # Not views: writes to one column do not count for another.
            parts = zip(*map(torch.unsafe_split_with_sizes, made, own), strict=True) if end - begin > 1 else [made]
            columns += list(parts)[::2]
            memory.append(made)
        begins = np.array([[one.data_ptr() for one in made] for made in memory], _NUMBER)
        offsets = spaces.cumsum(0) - spaces
        return columns, memory, begins[self._piece_of] + offsets - offsets[self._first_of]

    def _write_words(self, addresses: np.ndarray, numbers: np.ndarray, counts: Sequence[int], firsts: np.ndarray,
                     ptr: np.ndarray) -> list[np.ndarray]:  # fmt: skip
        """Write the words of the kernel: the numbers of a `Column` for each column and batch, then the lists."""
        steps = [sum_before(own.added[numbers]).transpose(0, 2, 1) for own in self._tables
                 if isinstance(own.added, np.ndarray)]  # fmt: skip
        tables = [own.table.data_ptr() for own in self._tables]
        # Most groups of an epoch have as many batches of as many graphs.
        known, laid = self._columns
        if known != (*counts, *tables):
            laid = self._lay_out(np.array(counts), numbers.shape[1])
            self._columns = (*counts, *tables), laid
        columns = laid.copy()
        columns[:, :, 0] = addresses
        return [own.reshape(-1) for own in (columns, numbers, firsts, ptr, *steps)]

    def _lay_out(self, counts: np.ndarray, most: int) -> np.ndarray:
        """Lay out the words of the columns of batches of so many graphs, `most` at most, int64 `[C, n, COLUMN]`."""
        count, groups = len(counts), self._num_groups
        batches = np.arange(count, dtype=_NUMBER)
        begin_of_ptr = (1 + groups) * count * most
        length = begin_of_ptr + groups * count * (most + 1)

        def find_ptr(group: int) -> np.ndarray:
            return begin_of_ptr + (group * count + batches) * (most + 1)

        columns = np.zeros((len(self._layouts), count, kernels.COLUMN), _NUMBER)
        for place, (layout, shape) in enumerate(zip(self._layouts, self._shapes, strict=True)):
            group = layout.group
            begins: Any = batches * most if group is None else ((1 + group) * count + batches) * most
            own: Any = -1 if group is None else find_ptr(group)
            if isinstance(layout, RowBegins):
                words: tuple[Any, ...] = (0, 0, kernels.LISTED, own, -1, 3, 1, counts + 1, 0, counts)
            elif isinstance(layout, RowNumbers):
                words = 0, 0, kernels.NUMBERED, begins, own, 3, 1, 1, 0, counts
            else:
                table, dim, added = layout.table, layout.dim, layout.added
                address, shifts, stride = table.data_ptr(), np.zeros(1, _NUMBER), 0
                if added is None:
                    row_bytes = math.prod(shape[dim + 1 :]) * table.element_size()
                    # The largest items that lie at multiples of their size.
                    bits = ((row_bytes | address | _ALIGNED) & -(row_bytes | address | _ALIGNED)).bit_length() - 1
                    kind, width = kernels.COPIED, row_bytes >> bits
                else:
                    kind, bits, width = kernels.SHIFTED, 3, 1
                    if isinstance(added, np.ndarray):
                        own_steps = most * added.shape[1]
                        shifts, stride = length + batches * own_steps, most if added.shape[1] > 1 else 0
                        length += count * own_steps
                    else:
                        # The other list may lie before the first one.
                        shifts, stride = find_ptr(added[0]), (added[-1] - added[0]) * count * (most + 1)
                words = (0, address, kind, begins, own, bits, width, math.prod(shape[:dim]), shape[dim], counts,
                         shifts, stride)  # fmt: skip
            for at, number in enumerate(words):
                columns[place, :, at] = number
        return columns


def _join_numbers(batches: Sequence[Tensor], counts: Sequence[int]) -> np.ndarray:
    """Join the numbers of batches, int64 `[n, B]`, with any number of a graph behind a smaller batch."""
    if min(counts) == max(counts):
        return torch.cat(list(batches)).numpy().reshape(len(counts), -1)
    numbers = np.full((len(counts), max(counts)), int(batches[0][0]), _NUMBER)
    for own, batch in zip(numbers, batches, strict=True):
        own[: len(batch)] = batch.numpy()
    return numbers


def sum_before(steps: np.ndarray) -> np.ndarray:
    """Sum the steps of the graphs before each one in its batch, int64 `[n, B, L]`."""
    sums = np.zeros_like(steps)
    np.cumsum(steps[:, :-1], axis=1, out=sums[:, 1:])
    return sums

"""Rows of the graphs of a batch: they lie side by side in joined tables (see `kernels/rows/gather.py`).

`GraphRows` reads them by CPU loops, `GraphRowsOnGpu` by one launch.

`LoopChoice` lets torch join the batches of short programs, which need no compiler then.
"""

from __future__ import annotations

import math
import sys
import time
from typing import NamedTuple

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


def _threads_for(num_bytes: int) -> threads_for:
    """One thread for loops that write few bytes, and where torch has one thread."""
    return threads_for(FEW_ITEMS if torch.get_num_threads() == 1 else num_bytes // LIGHT)

"""Rows of the graphs of a batch, by CPU loops: they lie side by side in joined tables (see `kernels/rows/gather.py`).

`LoopChoice` lets torch join the batches of short programs, which need no compiler then.
"""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.rows import gather as kernels
from pyg_direct.ops.rows.gather_rows import LIGHT
from pyg_direct.ops.run_kernel import FEW_ITEMS, threads_for

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

    def read(self, table: Tensor, dim: int, group: int | None) -> Tensor:
        """Return the rows of the graphs, which are written by `finish`.

        Args:
            table: Contiguous, on the CPU.
            dim: Dimension of the rows.
            group: Group of the table; None for one row per graph.
        """
        shape = list(table.shape)
        rows, shape[dim] = shape[dim], len(self._numbers) if group is None else self.totals[group]
        out = table.new_empty(shape)
        width = math.prod(shape[dim + 1 :]) * table.element_size()
        self._columns.append((out.data_ptr(), table.data_ptr(), -1 if group is None else group, width,
                              math.prod(shape[:dim]), rows))  # fmt: skip
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
        """Return the index of the graph of each row, int64 `[total]`."""
        ptr = self._ptr[group]
        return torch.from_numpy(np.arange(len(self._numbers)).repeat(ptr[1:] - ptr[:-1]))

    def finish(self) -> None:
        """Write all rows that `read` returned."""
        if self._columns:
            columns = np.array(self._columns, np.int64)
            with _threads_for(sum(out.nbytes for out in self._outputs[::2])):
                kernels.copy_graphs_cpu(self._numbers, self._spans, self._ptr, columns)
            self._columns, self._outputs = [], []


def _threads_for(num_bytes: int) -> threads_for:
    """One thread for loops that write few bytes, and where torch has one thread."""
    return threads_for(FEW_ITEMS if torch.get_num_threads() == 1 else num_bytes // LIGHT)

"""Sums over CSR of the rows of several snapshots, scaled before and after in one pass (see
`kernels/snapshots/scaled_csr.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import THREADS
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.kernels.snapshots import scaled_csr as kernels
from pyg_direct.ops.aggregate.operators import LongRows, length_of_run
from pyg_direct.ops.run_kernel import full_grid, run_gpu

# Numbers of a row that a thread reads at once.
_NUMBERS_AT_ONCE, _MOST = 4, 2**31 - 1
# Numbers of a row of a snapshot from which its factor is read for every edge. Narrower rows are scaled before. Four
# snapshots on an H200 take 1.06 ms instead of 1.19 with 16 numbers, and 4.31 instead of 4.02 with 64.
_SCALED_HERE = 64


class CSR(NamedTuple):
    """Edges by target.

    Attributes:
        indptr: Offsets, int32 `[T + 1]`.
        row: Source of each edge, int32 `[E]`.
        long_rows: Memory for the slices of long rows.
        shift: From this bit of `row` on, a bit for each snapshot that has an edge; 0 if all have all edges.
    """

    indptr: Tensor
    row: Tensor
    long_rows: LongRows
    shift: int = 0

    def list_arrays(self) -> tuple[Tensor, ...]:
        """Return all arrays."""
        return self.indptr, self.row, *self.long_rows

    @classmethod
    def of(cls, indptr: Tensor, row: Tensor, sizes: tuple[int, int] | None = None, shift: int = 0) -> CSR:
        """List the long rows on the device; `sizes` are the most long rows and slices."""
        return cls(indptr, row, LongRows.of(indptr, row.numel(), indptr.numel() - 1, -1, sizes), shift)


def scales_here(channels: int) -> bool:
    """Report whether `column` may be given, and is faster than multiplying it into rows of `channels` numbers
    before.
    """
    return channels >= _SCALED_HERE and channels % _NUMBERS_AT_ONCE == 0


def sum_scaled(x: Tensor, csr: CSR, weight: Tensor | None, low: int, column: Tensor | None, scale: Tensor | None,
               own: Tensor, diagonal: Tensor | None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Return `[T, S, F]` on a GPU: the sums, or `out` with them added.

    Args:
        x: fp32 `[T, S, F]`, contiguous and aligned to 16 bytes; S * F a multiple of 4.
        csr: Edges between the same rows; if it marks the snapshots that have them, `low` is the first of `x`.
        weight: fp32 `[E, 1]`, or `[E, S']` of a group whose snapshot `low` is the first of `x`, if F is a multiple of
            4; None for ones.
        low: First snapshot of `x` in the group.
        column: Factors of sources, fp32 `[T, S]`, if F is a multiple of 4; None for ones.
        scale: Factors of sums, fp32 `[T, S]`; None for ones.
        own: Rows as `x` (or `x`) that are multiplied by `diagonal` and added to each target.
        diagonal: fp32 `[T, S]`; None for zeros, and if there is an `out`.
        out: Tensor to add to, `[T, S, F]`.
    """
    num_targets, size, channels = x.shape
    assert out is None or diagonal is None, "the diagonal is part of what is there"
    adds = int(out is not None)
    out = torch.empty_like(x) if out is None else out
    num_edges, pieces = csr.row.numel(), size * channels // _NUMBERS_AT_ONCE
    long_rows = csr.long_rows
    partials = long_rows.make_partials(size * channels, torch.float32)
    run = length_of_run(num_targets * pieces, x)
    num_runs = -(-num_targets // run)
    num_weights = 0 if weight is None else weight.shape[1]
    first = low if num_weights > 1 else 0
    helpers = min(long_rows.capacity, -(-full_grid(x) * THREADS // pieces))
    blocks = -(-(num_runs + helpers) * pieces // THREADS)
    run_gpu(kernels.sum_scaled_rows_gpu, max(1, blocks), x.data_ptr(), csr.indptr, csr.indptr.data_ptr(),
            csr.row.data_ptr(), address_of(weight) + 4 * first, num_weights, address_of(column), address_of(scale),
            own.data_ptr(), address_of(diagonal), csr.shift, low, num_edges, num_targets, num_runs, run, size, channels,
            pieces, LONG_ROW if helpers else _MOST, adds, long_rows.slices, long_rows.counts, helpers,
            partials.data_ptr(), out.data_ptr())  # fmt: skip
    if helpers:
        none = x.new_empty(0)
        run_gpu(kernels.add_scaled_slices_gpu, long_rows.grid_of_hubs(), own.view(-1), csr.indptr,
                none if scale is None else scale.view(-1), none if diagonal is None else diagonal.view(-1),
                num_edges, size, channels, adds, long_rows.hubs, long_rows.counts, partials, out.view(-1))  # fmt: skip
    return out


def address_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first number; 0 for None."""
    return 0 if tensor is None or tensor.numel() == 0 else tensor.data_ptr()

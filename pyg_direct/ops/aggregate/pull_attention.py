"""Gradients of attention over many relations in one launch (see `kernels/aggregate/pull_attention.py`); on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.kernels.aggregate import pull_attention as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.aggregate.operators import PIECE, WIDE_KINDS, LongRows, is_wide, operators
from pyg_direct.ops.aggregate.sum import Transposed
from pyg_direct.ops.run_kernel import grid_of, run_gpu, runs_on_gpu


class BySource(NamedTuple):
    """Edges of all relations by source, and where each relation begins.

    Attributes:
        indptr, target, edge: Offsets of the sources `[U + 1]`, target and number of each edge `[E]`, int32.
        long: Slices of sources with many edges.
        sources, targets: First source and first target of each relation, then their number, int64 `[R + 1]`.
        shifts: Row of a target's gradient, minus the number of the target, int64 `[R]`.
    """

    indptr: Tensor
    target: Tensor
    edge: Tensor
    long: LongRows
    sources: Tensor
    targets: Tensor
    shifts: Tensor

    @classmethod
    def of(cls, row: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int], shifts: Sequence[int],
           is_captured: bool) -> BySource:  # fmt: skip
        """Sort edges by source.

        Args:
            row, target: Ends of each edge, `[E]`.
            sources, targets, shifts: See the attributes.
            is_captured: True in a captured graph, for which the host cannot wait.
        """
        indptr, goal, edge = Transposed.of(row.to(torch.int32), target.to(torch.int32), sources[-1])
        numbers, device = [*sources, *targets, *shifts], row.device
        if is_captured:
            # A copy from the host would be repeated from memory that is no longer there.
            placed = torch.empty(len(numbers), dtype=torch.int64, device=device)
            for at, number in zip(placed.unbind(), numbers, strict=True):
                at.fill_(number)
        else:
            placed = torch.tensor(numbers)
            placed = placed.pin_memory().to(device, non_blocking=True) if row.is_cuda else placed
        sizes = None if is_captured or len(row) <= LONG_ROW else LongRows.measure(indptr.diff().long())
        long = LongRows.of(indptr, len(row), sources[-1], -1, sizes)
        return cls(indptr, goal, edge.to(torch.int32), long, *placed.split([len(sources), len(targets), len(shifts)]))


def can_pull(x: Tensor, heads: int, most: int) -> bool:
    """Report whether `pull_attention` takes rows `[U, F]` of so many heads; `most` rows, targets or edges."""
    channels = x.shape[1] // max(heads, 1)
    lanes = channels * x.element_size() // PIECE
    return runs_on_gpu(x) and is_wide(x, channels, most * heads) and lanes in (1, 2, 4, 8, 16, 32)


def pull_attention(x: Tensor, grad: Tensor, out: Tensor, alpha: Tensor, by_source: Tensor, by_target: Tensor,
                   vectors: Tensor, edges: BySource, slope: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of rows `[U, F]` and of the scores of edges before `leaky` `[E, H]`.

    Args:
        x: Rows of the sources of all relations, `[U, F]`; see `can_pull`.
        grad: Gradients of the sums of each type, `[G, F]` of the dtype of `x`.
        out: Sums of all relations, fp32 `[T, F]`.
        alpha: Weights of edges, fp32 `[E, H]`.
        by_source, by_target: Scores of sources `[U, H]` and targets `[T, H]`, fp32.
        vectors: Vector of each relation that the scores of its sources are products with, fp32 `[R, F]`.
        edges: The edges.
        slope: Factor of negative scores.
    """
    (num_sources, width), (num_edges, heads), num_targets = x.shape, alpha.shape, len(out)
    to_x, to_edges, totals = torch.empty_like(x), torch.empty_like(alpha), torch.empty_like(by_target)
    if num_edges == 0:
        return to_x.zero_(), to_edges
    pieces, kind = width * x.element_size() // PIECE, WIDE_KINDS[x.dtype]
    lanes = pieces // heads
    run_gpu(kernels.total_gradients_gpu, grid_of(num_targets * pieces, 0), grad.data_ptr(), out.data_ptr(),
            edges.targets, edges.shifts, num_targets, heads, lanes, kind, totals.data_ptr())  # fmt: skip
    partials = edges.long.make_partials(width, torch.float32)
    run_gpu(kernels.pull_attention_gpu, grid_of((num_sources + edges.long.capacity) * pieces, 0), x.data_ptr(),
            grad.data_ptr(), edges.indptr, edges.target.data_ptr(), edges.edge.data_ptr(), alpha.data_ptr(),
            totals.data_ptr(), by_source.view(-1), by_target.data_ptr(), vectors.data_ptr(), edges.sources,
            edges.shifts, num_edges, num_sources, heads, lanes, slope, kind, edges.long.slices, edges.long.counts,
            partials.data_ptr(), to_edges.data_ptr(), to_x.data_ptr())  # fmt: skip
    edges.long.add_partials(edges.indptr, num_edges, width, partials, to_x)
    return to_x, to_edges


def sum_by_source(values: Tensor, edges: BySource, num_sources: int) -> Tensor:
    """Sum numbers of edges `[E, H]` by source, `[U, H]`."""
    made: Tensor = operators().sum_rows(values, edges.indptr, edges.edge, None, num_sources, False, -1)
    return made

"""Attention over many relations in one launch, and its gradients, on a GPU.

See `kernels/aggregate/typed_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.kernels.aggregate import typed_attention as kernels, typed_attention as pair_kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.aggregate.operators import PIECE, WIDE_KINDS, LongRows, is_wide, operators
from pyg_direct.ops.aggregate.sum_rows import Transposed
from pyg_direct.ops.run_kernel import grid_of, run_gpu, runs_on_gpu


class BySource(NamedTuple):
    """Edges of all relations by source, and where each relation begins.

    Attributes:
        indptr, target, edge: Offsets of the sources `[U + 1]`, target and number of each edge `[E]`, int32.
        row: Source of each edge in the order by target, int32 `[E]`.
        sources, targets: First source and first target of each relation, then their number, int64 `[R + 1]`.
        shifts: Row of a target's gradient, minus the number of the target, int64 `[R]`.
    """

    indptr: Tensor
    target: Tensor
    edge: Tensor
    row: Tensor
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
        row = row.to(torch.int32)
        indptr, goal, edge = Transposed.of(row, target.to(torch.int32), sources[-1])
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
        parts = placed.split([len(sources), len(targets), len(shifts)])
        return cls(indptr, goal, edge.to(torch.int32), row, long, *parts)


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
    """
    (num_sources, width), (num_edges, heads) = x.shape, alpha.shape
    to_x, to_edges, totals = torch.empty_like(x), torch.empty_like(alpha), torch.empty_like(by_target)
    if num_edges == 0:
        return to_x.zero_(), to_edges
    pieces, kind = width * x.element_size() // PIECE, WIDE_KINDS[x.dtype]
    lanes = pieces // heads
    _total_gradients(grad, out, edges, totals)
    partials = edges.long.make_partials(width, torch.float32)
    run_gpu(kernels.pull_attention_gpu, grid_of((num_sources + edges.long.capacity) * pieces, 0), x.data_ptr(),
            grad.data_ptr(), edges.indptr, edges.target.data_ptr(), edges.edge.data_ptr(), alpha.data_ptr(),
            totals.data_ptr(), by_source.view(-1), by_target.data_ptr(), vectors.data_ptr(), edges.sources,
            edges.shifts, num_edges, num_sources, heads, lanes, slope, kind, edges.long.slices, edges.long.counts,
            partials.data_ptr(), to_edges.data_ptr(), to_x.data_ptr())  # fmt: skip
    edges.long.add_partials(edges.indptr, num_edges, width, partials, to_x)
    return to_x, to_edges


def _total_gradients(grad: Tensor, out: Tensor, edges: BySource, totals: Tensor) -> None:
    """Write the products of sums and their gradients, `totals` `[T, H]`."""
    (num_targets, width), heads = out.shape, totals.shape[1]
    pieces = width * grad.element_size() // PIECE
    run_gpu(kernels.total_gradients_gpu, grid_of(num_targets * pieces, 0), grad.data_ptr(), out.data_ptr(),
            edges.targets, edges.shifts, num_targets, heads, pieces // heads, WIDE_KINDS[grad.dtype],
            totals.data_ptr())  # fmt: skip


def attend_pairs(keys: Tensor, queries: Tensor, vectors: Tensor | None, heads: int, indptr: Tensor, row: Tensor,
                 bounds: Tensor, slope: float, keeps_weights: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (sums fp32 `[T, F]`, weights of edges fp32 `[E, H]`, empty unless they are kept).

    Args:
        keys: Rows of the sources of all relations, `[U, F]`; or keys and values, `[U, 2 F]`, if `vectors` is None. See
            `can_pull`.
        queries: Rows of the targets of all relations, `[T, F]` of the same dtype.
        vectors: Vector of each relation, fp32 `[R, F]`; None for scores that are products.
        indptr: Offsets of the targets' edges, `[T + 1]`.
        row: Source of each edge, int32 `[E]`.
        bounds: First target of each relation, then T, int64 `[R + 1]`.
    """
    (num_targets, width), num_edges = queries.shape, len(row)
    alpha = torch.empty(num_edges if keeps_weights else 0, heads, dtype=torch.float32, device=keys.device)
    out = torch.empty(num_targets, width, dtype=torch.float32, device=keys.device)
    pieces = width * keys.element_size() // PIECE
    run_gpu(pair_kernels.attend_pairs_gpu, grid_of(num_targets * pieces, 0), keys.data_ptr(), queries.data_ptr(),
            0 if vectors is None else vectors.data_ptr(), indptr, row.data_ptr(), bounds, num_edges, num_targets, heads,
            pieces // heads, slope, WIDE_KINDS[keys.dtype], 0, alpha.data_ptr() if keeps_weights else 0,
            out.data_ptr())  # fmt: skip
    return out, alpha


def pull_pairs(keys: Tensor, queries: Tensor, vectors: Tensor | None, grad: Tensor, out: Tensor, alpha: Tensor,
               indptr: Tensor, row: Tensor, edges: BySource, slope: float
               ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of keys (and values), of queries, and each target's part in the gradient of its vector, fp32
    `[T, F]`; for the arguments of `attend_pairs` and `pull_attention`.
    """
    (num_targets, width), (num_edges, heads), num_sources = queries.shape, alpha.shape, len(keys)
    to_keys, to_queries, shares = torch.empty_like(keys), torch.empty_like(queries), torch.empty_like(alpha)
    to_vectors = None if vectors is None else torch.empty_like(out)
    if num_edges == 0:
        return to_keys.zero_(), to_queries.zero_(), None if to_vectors is None else to_vectors.zero_()
    totals = torch.empty(num_targets, heads, dtype=torch.float32, device=keys.device)
    _total_gradients(grad, out, edges, totals)
    pieces, kind = width * keys.element_size() // PIECE, WIDE_KINDS[keys.dtype]
    lanes, address = pieces // heads, 0 if vectors is None else vectors.data_ptr()
    partials = edges.long.make_partials(keys.shape[1], torch.float32)
    run_gpu(pair_kernels.pull_keys_gpu, grid_of((num_sources + edges.long.capacity) * pieces, 0), keys.data_ptr(),
            queries.data_ptr(), grad.data_ptr(), address, edges.indptr, edges.target.data_ptr(), edges.edge.data_ptr(),
            alpha.data_ptr(), totals.data_ptr(), edges.sources, edges.shifts, num_edges, num_sources, heads, lanes,
            slope, kind, edges.long.slices, edges.long.counts, partials.data_ptr(), shares.data_ptr(),
            to_keys.data_ptr())  # fmt: skip
    edges.long.add_partials(edges.indptr, num_edges, keys.shape[1], partials, to_keys)
    run_gpu(pair_kernels.pull_queries_gpu, grid_of(num_targets * pieces, 0), shares.data_ptr(), keys.data_ptr(),
            queries.data_ptr(), address, indptr, row.data_ptr(), edges.targets, num_edges, num_targets, heads, lanes,
            slope, kind, 0 if to_vectors is None else to_vectors.data_ptr(), to_queries.data_ptr())  # fmt: skip
    return to_keys, to_queries, to_vectors


def sum_by_source(values: Tensor, edges: BySource, num_sources: int) -> Tensor:
    """Sum numbers of edges `[E, H]` by source, `[U, H]`."""
    made: Tensor = operators().sum_rows(values, edges.indptr, edges.edge, None, num_sources, False, -1)
    return made

"""Attention over many relations in one launch, and its gradients, on a GPU.

See `kernels/aggregate/typed_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.kernels.aggregate import typed_attention as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.ops.aggregate.operators import PIECE, WIDE_KINDS, LongRows, is_wide, length_of_run, operators
from pyg_direct.ops.aggregate.sum_rows import Transposed
from pyg_direct.ops.run_kernel import grid_of, run_gpu, runs_on_gpu

# Rows and targets of a slice, of which sums of many are made, and most slices. Gradients of each type are summed by a
# launch, which takes as long as a slice.
_ROW_SLICE, _MOST_ROW_SLICES = 8, 8192
_TARGET_SLICE, _MOST_TARGET_SLICES = 2, 1 << 15


class Places(NamedTuple):
    """First rows of each relation of a layer and of each type, int64 on the device.

    Attributes:
        sources, targets: First source and first target of each relation, then their number, `[R + 1]`.
        shifts: Row of a target's gradient, minus the number of the target, `[R]`.
        firsts, members: First row of each type's sums and first of its relations in the order by type, then their
            number, `[G + 1]`.
        with_targets: Rows of each type's sums that edges lead to, the first of them, `[G]`.
        relations, starts, sizes: The relations in this order, their first targets and their numbers of targets, `[R]`.
        target_slices, row_slices: First slice of the targets of each relation `[R + 1]`, and of the rows of each
            type's sums `[G + 1]`.
        length: Targets of a slice.
        num_slices, rows_of, kept, num_row_slices: On the host, the number of slices of targets; the rows of each
            type's sums, and those with a gradient, the first of them; and the number of slices of rows of each type.
    """

    sources: Tensor
    targets: Tensor
    shifts: Tensor
    firsts: Tensor
    members: Tensor
    with_targets: Tensor
    relations: Tensor
    starts: Tensor
    sizes: Tensor
    target_slices: Tensor
    row_slices: Tensor
    length: int
    num_slices: int
    rows_of: tuple[int, ...]
    kept: tuple[int, ...]
    num_row_slices: tuple[int, ...]

    @classmethod
    def of(cls, num_sources: Sequence[int], sizes: Sequence[int], groups: Sequence[Sequence[int]],
           counts: Sequence[int], device: torch.device, is_captured: bool) -> Places:  # fmt: skip
        """Lay out relations.

        Args:
            num_sources, sizes: Sources and targets of each relation.
            groups: The relations into each type.
            counts: Rows of each type.
            is_captured: True in a captured graph, for which the host cannot wait.
        """
        begins, kept = _begin(sizes), tuple(max(sizes[i] for i in group) for group in groups)
        shifts = [0] * len(sizes)
        for group, first in zip(groups, _begin(kept), strict=False):
            for i in group:
                shifts[i] = first - begins[i]
        length = max(_TARGET_SLICE, -(-begins[-1] // _MOST_TARGET_SLICES))
        row_slices = [-(-count // _length_of_row_slice(count)) for count in counts]
        order = [i for group in groups for i in group]
        target_slices = _begin([-(-size // length) for size in sizes])
        parts = [_begin(num_sources), begins, shifts, _begin(counts), _begin([len(group) for group in groups]),
                 kept, order, [begins[i] for i in order], [sizes[i] for i in order], target_slices,
                 _begin(row_slices)]  # fmt: skip
        placed = _upload([number for part in parts for number in part], device, is_captured)
        return cls._make([*placed.split([len(part) for part in parts]), length, target_slices[-1], tuple(counts), kept,
                          tuple(row_slices)])  # fmt: skip


def _length_of_row_slice(num_rows: int) -> int:
    return max(_ROW_SLICE, -(-num_rows // _MOST_ROW_SLICES))


def _begin(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _upload(numbers: Sequence[int], device: torch.device, is_captured: bool) -> Tensor:
    """Return numbers on a device, int64."""
    if not is_captured:
        placed = torch.tensor(numbers)
        return placed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else placed.to(device)
    # A copy from the host would be repeated from memory that is no longer there. The arguments of launches stay.
    placed = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(list(placed.unbind()), list(numbers))
    return placed


class BySource(NamedTuple):
    """Edges of all relations by source.

    Attributes:
        indptr, target, edge: Offsets of the sources `[U + 1]`, target and number of each edge `[E]`, int32.
        row: Source of each edge in the order by target, int32 `[E]`.
    """

    indptr: Tensor
    target: Tensor
    edge: Tensor
    row: Tensor
    long: LongRows

    @classmethod
    def of(cls, row: Tensor, target: Tensor, num_sources: int, is_captured: bool) -> BySource:
        """Sort edges by source.

        Args:
            row, target: Ends of each edge, `[E]`.
            is_captured: True in a captured graph, for which the host cannot wait.
        """
        row = row.to(torch.int32)
        indptr, goal, edge = Transposed.of(row, target.to(torch.int32), num_sources)
        sizes = None if is_captured or len(row) <= LONG_ROW else LongRows.measure(indptr.diff().long())
        long = LongRows.of(indptr, len(row), num_sources, -1, sizes)
        return cls(indptr, goal, edge.to(torch.int32), row, long)


def can_pull(x: Tensor, heads: int, most: int) -> bool:
    """Report whether `pull_attention` takes rows `[U, F]` of so many heads; `most` rows, targets or edges."""
    channels = x.shape[1] // max(heads, 1)
    lanes = channels * x.element_size() // PIECE
    return runs_on_gpu(x) and is_wide(x, channels, most * heads) and lanes in (1, 2, 4, 8, 16, 32)


def attend_groups(x: Tensor, by_target: Tensor, vectors: Tensor, biases: Sequence[Tensor | None], indptr: Tensor,
                  row: Tensor, places: Places, slope: float, keeps_weights: bool, has_relu: bool
                  ) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Return (sums of each type, fp32 `[rows, F]`; weights of edges, fp32 `[E, H]`, empty unless they are kept).

    With `has_relu` sums have passed a ReLU, and have the dtype of `x`.

    A weight has its sign bit set if its score is not above zero.

    Args:
        x: Rows of the sources of all relations, `[U, F]`; see `can_pull`.
        by_target: Scores of the targets of all relations, fp32 `[T, H]`.
        vectors: Vector of each relation that the scores of its sources are products with, fp32 `[R, F]`.
        biases: `[F]` for each type that has one.
        indptr: Offsets of the targets' edges, `[T + 1]`.
        row: Source of each edge, `[E]`, fewer than 2^31.
    """
    (width, heads), (num_edges, num_rows) = (x.shape[1], by_target.shape[1]), (len(row), sum(places.rows_of))
    alpha = torch.empty(num_edges if keeps_weights else 0, heads, dtype=torch.float32, device=x.device)
    totals = torch.empty(num_rows, width, dtype=x.dtype if has_relu else torch.float32, device=x.device)
    pieces, bias = width * x.element_size() // PIECE, _stack_biases(biases, by_target.new_empty(0, width))
    ends, row = indptr.to(torch.int32), row.to(torch.int32)
    if num_rows:
        threads = 32 * kernels.warps_of_row(heads, pieces // heads)
        run = length_of_run(sum(places.kept) * threads, x)
        run_gpu(kernels.attend_groups_gpu, grid_of(-(-num_rows // run) * threads, 0), x.data_ptr(), ends.data_ptr(),
                row.data_ptr(), by_target.data_ptr(), vectors.data_ptr(), 0 if bias is None else bias.data_ptr(),
                places.firsts, places.members, places.with_targets, places.relations.data_ptr(), num_rows, num_edges,
                run, heads, pieces // heads, slope, int(has_relu), WIDE_KINDS[x.dtype],
                alpha.data_ptr() if keeps_weights else 0, totals.data_ptr())  # fmt: skip
    return torch.unsafe_split_with_sizes(totals, list(places.rows_of)), alpha


def pull_attention(x: Tensor, grad: Tensor, alpha: Tensor, vectors: Tensor, indptr: Tensor, edges: BySource,
                   places: Places, slope: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of rows `[U, F]`, of vectors fp32 `[R, F]`, and of targets `[T, H]`.

    Args:
        grad: Gradients of the sums of each type, `[G, F]` of the dtype of `x`.
        alpha: Weights of edges of `attend_groups`, which has the other arguments.
    """
    (num_sources, width), (num_edges, heads), num_targets = x.shape, alpha.shape, len(indptr) - 1
    to_x, to_edges, to_targets = torch.empty_like(x), torch.empty_like(alpha), alpha.new_empty(num_targets, heads)
    if num_edges == 0:
        return to_x.zero_(), torch.zeros_like(vectors), to_targets.zero_()
    pieces, kind = width * x.element_size() // PIECE, WIDE_KINDS[x.dtype]
    lanes, ends = pieces // heads, indptr.to(torch.int32)
    threads = 32 * kernels.warps_of_row(heads, lanes)
    sums = alpha.new_empty(places.num_slices, width)
    run_gpu(kernels.pull_scores_gpu, grid_of(places.num_slices * threads, 0), x.data_ptr(), grad.data_ptr(),
            ends.data_ptr(), edges.row.data_ptr(), alpha.data_ptr(), vectors.data_ptr(), edges.indptr.data_ptr(),
            places.targets, places.target_slices, places.shifts, places.length, places.num_slices, num_edges, heads,
            lanes, slope, kind, to_edges.data_ptr(), to_targets.data_ptr(), to_x.data_ptr(),
            sums.data_ptr())  # fmt: skip
    to_vectors: Tensor = operators().sum_rows(sums, places.target_slices, None, None, len(vectors), False, -1)
    partials, num_items = edges.long.make_partials(width, torch.float32), num_sources + edges.long.capacity
    run = length_of_run(num_items * threads, x)
    run_gpu(kernels.pull_attention_gpu, grid_of(-(-num_items // run) * threads, 0), grad.data_ptr(), edges.indptr,
            edges.indptr.data_ptr(), edges.target.data_ptr(), edges.edge.data_ptr(), alpha.data_ptr(),
            to_edges.data_ptr(), vectors.data_ptr(), places.sources, places.shifts, num_edges, num_sources, run, heads,
            lanes, kind, edges.long.slices, edges.long.counts, partials.data_ptr(), to_x.data_ptr())  # fmt: skip
    edges.long.add_partials(edges.indptr, num_edges, width, partials, to_x)
    return to_x, to_vectors, to_targets


def _total_gradients(grad: Tensor, out: Tensor, places: Places, totals: Tensor) -> None:
    """Write the products of sums and their gradients, `totals` `[T, H]`."""
    (num_targets, width), heads = out.shape, totals.shape[1]
    pieces = width * grad.element_size() // PIECE
    run_gpu(kernels.total_gradients_gpu, grid_of(num_targets * pieces, 0), grad.data_ptr(), out.data_ptr(),
            places.targets, places.shifts, num_targets, heads, pieces // heads, WIDE_KINDS[grad.dtype],
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
    run_gpu(kernels.attend_pairs_gpu, grid_of(num_targets * pieces, 0), keys.data_ptr(), queries.data_ptr(),
            0 if vectors is None else vectors.data_ptr(), indptr, row.data_ptr(), bounds, num_edges, num_targets, heads,
            pieces // heads, slope, WIDE_KINDS[keys.dtype], alpha.data_ptr() if keeps_weights else 0,
            out.data_ptr())  # fmt: skip
    return out, alpha


def pull_pairs(keys: Tensor, queries: Tensor, vectors: Tensor | None, grad: Tensor, out: Tensor, alpha: Tensor,
               indptr: Tensor, row: Tensor, edges: BySource, places: Places, slope: float
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
    _total_gradients(grad, out, places, totals)
    pieces, kind = width * keys.element_size() // PIECE, WIDE_KINDS[keys.dtype]
    lanes, address = pieces // heads, 0 if vectors is None else vectors.data_ptr()
    partials = edges.long.make_partials(keys.shape[1], torch.float32)
    run_gpu(kernels.pull_keys_gpu, grid_of((num_sources + edges.long.capacity) * pieces, 0), keys.data_ptr(),
            queries.data_ptr(), grad.data_ptr(), address, edges.indptr, edges.target.data_ptr(), edges.edge.data_ptr(),
            alpha.data_ptr(), totals.data_ptr(), places.sources, places.shifts, num_edges, num_sources, heads, lanes,
            slope, kind, edges.long.slices, edges.long.counts, partials.data_ptr(), shares.data_ptr(),
            to_keys.data_ptr())  # fmt: skip
    edges.long.add_partials(edges.indptr, num_edges, keys.shape[1], partials, to_keys)
    run_gpu(kernels.pull_queries_gpu, grid_of(num_targets * pieces, 0), shares.data_ptr(), keys.data_ptr(),
            queries.data_ptr(), address, indptr, row.data_ptr(), places.targets, num_edges, num_targets, heads, lanes,
            slope, kind, 0 if to_vectors is None else to_vectors.data_ptr(), to_queries.data_ptr())  # fmt: skip
    return to_keys, to_queries, to_vectors


def add_groups(out: Tensor, biases: Sequence[Tensor | None], places: Places) -> tuple[Tensor, ...]:
    """Return the sums of the results of the relations into each type, fp32 `[rows, F]`, and biases `[F]`.

    Args:
        out: Results of all relations, fp32 `[T, F]`.
    """
    width, num_rows = out.shape[1], sum(places.rows_of)
    totals = torch.empty(num_rows, width, dtype=torch.float32, device=out.device)
    bias = _stack_biases(biases, totals)
    pieces = width * 4 // PIECE
    if num_rows:
        run_gpu(kernels.add_groups_gpu, grid_of(num_rows * pieces, 0), out.data_ptr(),
                0 if bias is None else bias.data_ptr(), places.firsts, places.members, places.starts.data_ptr(),
                places.sizes.data_ptr(), num_rows, pieces, totals.data_ptr())  # fmt: skip
    return torch.unsafe_split_with_sizes(totals, list(places.rows_of))


def _stack_biases(biases: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """Return biases in the dtype and width of sums, zero for types without one; None if no type has one."""
    if all(part is None for part in biases):
        return None
    return torch.stack([like.new_zeros(like.shape[1]) if part is None else part.to(like.dtype) for part in biases])


def join_gradients(grads: Sequence[Tensor | None], outs: Sequence[Tensor], dtype: torch.dtype, width: int,
                   places: Places) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (gradients of the rows of each type that edges lead to, one type after the other, in the dtype of rows;
    sums of all rows of each gradient, fp32 `[G, F]`).

    Args:
        grads: Gradients of the sums of each type, fp32 `[rows, F]`; None for zeros.
        outs: The sums themselves, if they have passed a ReLU; they and their gradients have the dtype `dtype`.
    """
    device, itemsize = places.sources.device, dtype.itemsize
    joined = torch.empty(sum(places.kept), width, dtype=dtype, device=device)
    partials = torch.empty(sum(places.num_row_slices), width, dtype=torch.float32, device=device)
    pieces, first, begin = width * itemsize // PIECE, 0, 0
    sizes = zip(places.rows_of, places.kept, places.num_row_slices, strict=True)
    for number, (grad, (count, kept, num_slices)) in enumerate(zip(grads, sizes, strict=True)):
        if grad is None:
            joined[first : first + kept].zero_()
            partials[begin : begin + num_slices].zero_()
        elif count:
            grad = align(grad)
            run_gpu(kernels.join_rows_gpu, grid_of(num_slices * pieces, 0), grad.data_ptr(),
                    outs[number].data_ptr() if outs else 0, count, kept, _length_of_row_slice(count), num_slices,
                    pieces, WIDE_KINDS[dtype], joined[first:].data_ptr(), partials[begin:].data_ptr())  # fmt: skip
        first, begin = first + kept, begin + num_slices
    sums: Tensor = operators().sum_rows(partials, places.row_slices, None, None, len(grads), False, -1)
    return joined, sums


def align(grad: Tensor) -> Tensor:
    """Return numbers one after the other, which kernels read in pieces of 16 bytes."""
    grad = grad.contiguous()
    return grad.clone() if grad.data_ptr() % PIECE else grad

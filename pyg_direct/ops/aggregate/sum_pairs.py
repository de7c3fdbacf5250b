"""Sums of messages that are functions of both ends' rows, item by item, differentiable (see `kernels/aggregate/pairs`).

No message is kept: the backward pass reads the rows of both ends again, by target or by source. Sums have one order, so
that equal calls give equal bits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pyg_direct.kernels.aggregate import pairs as kernels
from pyg_direct.kernels.aggregate.softmax import TINY
from pyg_direct.ops.aggregate import operators
from pyg_direct.ops.aggregate.operators import PIECE, LongRows, is_wide
from pyg_direct.ops.run_kernel import (
    choose_lane_bits,
    grid_of,
    is_asked_again,
    pull_by_torch,
    run_cpu,
    run_gpu,
    runs_on_gpu,
    threads_for,
)

# Items that a CPU computes in the time of one item of `threads_for`.
_LIGHT = 4


class Pairs(NamedTuple):
    """Edges that are known to fit, by target and by source.

    Attributes:
        indptr: Offsets of the targets, `[T + 1]` or longer; those above E count as E.
        row, target: Row of sources and target of each edge, sorted by target, `[E]`.
        num_targets: T.
        max_degree: Upper bound of the edges of a target, -1 if it is not known.
        starts: Offsets of the sources, `[N + 1]`.
        targets: Target of each edge, sorted by source, `[E]`.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    num_targets: int
    max_degree: int
    starts: Tensor
    targets: Tensor

    def by_target(self, function: int, own: tuple[Tensor, ...], others: tuple[Tensor, ...], slope: float = 0.0
                  ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return both sums of each target, `[T, F]`, in fp32 or wider.

        Args:
            function: See `kernels/aggregate/pairs.py`.
            own, others: Parts of targets `[T, F]`, and of sources `[N, F]`.
        """
        return _sum_pairs(function, own, others, self.indptr, self.row, self.num_targets, self.max_degree, slope)

    def by_source(self, function: int, own: tuple[Tensor, ...], others: tuple[Tensor, ...], slope: float = 0.0
                  ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `by_target`, with the roles of sources and targets exchanged."""
        return _sum_pairs(function, own, others, self.starts, self.targets, len(own[0]), -1, slope)

    def add_up(self, messages: Tensor) -> Tensor:
        """Add up messages `[E, F]` by torch's functions, `[T, F]`."""
        return messages.new_zeros(self.num_targets, messages.shape[1]).index_add(0, self.target, messages)


def _sum_pairs(function: int, own: tuple[Tensor, ...], others: tuple[Tensor, ...], indptr: Tensor, row: Tensor,
               num_targets: int, max_degree: int, slope: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_edges, width = row.numel(), own[0].shape[1]
    work = torch.promote_types(own[0].dtype, torch.float32)
    if num_targets == 0 or width == 0 or num_edges == 0:
        none = own[0].new_zeros(num_targets, width, dtype=work)
        return none, none
    parts, more = ([part.detach().to(work).contiguous() for part in given] for given in (own, others))
    indptr, row = indptr.contiguous(), row.to(indptr.dtype).contiguous()
    out = torch.empty(num_targets, 2, width, dtype=work, device=own[0].device)
    if not runs_on_gpu(out):
        parts, more = [*parts, *parts[:1]][:2], [*more, *2 * more[:1]][:3]
        with threads_for(num_edges * width // _LIGHT):
            run_cpu(kernels.sum_pairs_cpu, function, *parts, *more, indptr, row, num_edges,
                    out.new_tensor(slope).numpy()[()], out)  # fmt: skip
        return out[:, 0], out[:, 1]
    slices = LongRows.of(indptr, num_edges, num_targets, max_degree)
    partials, num_items = slices.make_partials(2 * width, work), num_targets + slices.capacity
    most = max(num_edges, num_items, len(more[0]))
    if work == torch.float32 and all(is_wide(part, width, most) for part in (*parts, *more, out)):
        pieces = width * out.element_size() // PIECE
        ends = [*[part.data_ptr() for part in parts], 0][:2], [*[part.data_ptr() for part in more], 0, 0][:3]
        run_gpu(kernels.sum_wide_pairs_gpu, grid_of(num_items * pieces, 0), function, *ends[0], *ends[1], indptr,
                row.data_ptr(), row.element_size(), num_edges, num_targets, pieces, slope, slices.slices, slices.counts,
                partials.data_ptr(), out.data_ptr())  # fmt: skip
    else:
        none, lane_bits = out.new_empty(0), choose_lane_bits(width)
        run_gpu(kernels.sum_pairs_gpu, grid_of(num_items, lane_bits), function, *[*parts, none][:2],
                *[*more, none, none][:3], indptr, row, num_edges, num_targets, width, lane_bits, slope, slices.slices,
                slices.counts, partials, out)  # fmt: skip
    slices.add_partials(indptr, num_edges, 2 * width, partials, out)
    return out[:, 0], out[:, 1]


def sum_gated(target_rows: Tensor, source_rows: Tensor, values: Tensor, pairs: Pairs) -> Tensor:
    """Compute the sum of sigmoid(target_rows[t] + source_rows[s]) * values[s] over the edges (s, t), `[T, F]`.

    Args:
        target_rows: `[T, F]`.
        source_rows, values: `[N, F]` of the same dtype.
    """
    made: Tensor = _Gate.apply(target_rows, source_rows, values, pairs)
    return made


class _Gate(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor, values: Tensor, pairs: Pairs) -> Tensor:
        out, slope = pairs.by_target(kernels.GATE, (own,), (rows, values))
        ctx.save_for_backward(own, rows, values, slope)
        ctx.pairs = pairs
        # In memory of its own: programs may write to it.
        return out.to(own.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, slope = ctx.saved_tensors
        pairs, needed = ctx.pairs, ctx.needs_input_grad
        if is_asked_again([grad]):
            return *pull_by_torch(partial(_gate_by_torch, pairs), given, needed[:3], [grad]), None
        own, rows, values = given
        to_rows = to_values = None
        if needed[1] or needed[2]:
            to_values, total = pairs.by_source(kernels.GATE, (rows,), (own, grad))
            to_rows, to_values = (total * values).to(rows.dtype), to_values.to(values.dtype)
        return (grad * slope).to(own.dtype), to_rows, to_values, None


def _gate_by_torch(pairs: Pairs, own: Tensor, rows: Tensor, values: Tensor) -> list[Tensor]:
    gates = (own.index_select(0, pairs.target) + rows.index_select(0, pairs.row)).sigmoid()
    return [pairs.add_up(gates * values.index_select(0, pairs.row))]


def sum_affine(factor: Tensor | None, shift: Tensor, rows: Tensor, pairs: Pairs, slope: float) -> Tensor:
    """Compute the sum of leaky(factor[t] * rows[s] + shift[t]) over the edges (s, t), `[T, F]`.

    Args:
        factor: `[T, F]`; None for ones.
        shift: `[T, F]` of the same dtype.
        rows: `[N, F]` of the same dtype.
        slope: Factor of numbers below zero: 0 for ReLU, 1 for no activation.
    """
    made: Tensor = _Affine.apply(torch.ones_like(shift) if factor is None else factor, shift, rows, pairs, slope)
    return made


class _Affine(Function):
    @staticmethod
    def forward(ctx: Any, factor: Tensor, shift: Tensor, rows: Tensor, pairs: Pairs, slope: float) -> Tensor:
        # leaky(f x + s) is w (f x + s), with one weight w for each edge.
        weights, weighted = pairs.by_target(kernels.AFFINE, (factor, shift), (rows,), slope)
        ctx.save_for_backward(factor, shift, rows, weights, weighted)
        ctx.pairs, ctx.slope = pairs, slope
        return (factor * weighted + shift * weights).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, weights, weighted = ctx.saved_tensors
        pairs, slope, needed = ctx.pairs, ctx.slope, ctx.needs_input_grad
        if is_asked_again([grad]):
            return *pull_by_torch(partial(_affine_by_torch, pairs, slope), given, needed[:3], [grad]), None, None
        factor, shift, rows = given
        to_rows = None
        if needed[2]:
            work = weights.dtype
            to_rows, _ = pairs.by_source(kernels.PULL_AFFINE, (rows,), (factor, shift, factor.to(work) * grad), slope)
            to_rows = to_rows.to(rows.dtype)
        to_factor = (grad * weighted).to(factor.dtype) if needed[0] else None
        return to_factor, (grad * weights).to(shift.dtype), to_rows, None, None


def _affine_by_torch(pairs: Pairs, slope: float, factor: Tensor, shift: Tensor, rows: Tensor) -> list[Tensor]:
    products = factor.index_select(0, pairs.target) * rows.index_select(0, pairs.row)
    return [pairs.add_up(F.leaky_relu(products + shift.index_select(0, pairs.target), slope))]


def sum_softmax(scores: Tensor, rows: Tensor, pairs: Pairs) -> Tensor:
    """Compute the sum of softmax(scores)[s] * rows[s] over the edges (s, t), with a softmax for each target and item.

    Args:
        scores: `[N, F]`; may be `rows`.
        rows: `[N, F]` of the same dtype.
    """
    made: Tensor = _Softmax.apply(scores, rows, pairs)
    return made


class _Softmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, rows: Tensor, pairs: Pairs) -> Tensor:
        best = operators.extreme_rows(scores, pairs.indptr, pairs.row, pairs.num_targets, True, pairs.max_degree)
        total, weighted = pairs.by_target(kernels.SOFTMAX, (best,), (scores, rows))
        total = total + TINY
        out = weighted / total
        ctx.save_for_backward(scores, rows, total.log_().add_(best), out)
        ctx.pairs = pairs
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, rows, shift, out = ctx.saved_tensors
        pairs, needed = ctx.pairs, ctx.needs_input_grad
        if is_asked_again([grad]):
            return *pull_by_torch(partial(_softmax_by_torch, pairs), [scores, rows], needed[:2], [grad]), None
        to_rows, to_scores = pairs.by_source(kernels.PULL_SOFTMAX, (scores.to(shift.dtype), rows), (shift, grad, out))
        return to_scores.to(scores.dtype), to_rows.to(rows.dtype), None


def _softmax_by_torch(pairs: Pairs, scores: Tensor, rows: Tensor) -> list[Tensor]:
    picked, index = scores.index_select(0, pairs.row), pairs.target.long().unsqueeze(1)
    lowest = picked.new_full((pairs.num_targets, picked.shape[1]), -math.inf)
    best = lowest.scatter_reduce(0, index.expand_as(picked), picked.detach(), "amax")
    weights = (picked - best.index_select(0, pairs.target)).exp()
    return [pairs.add_up(weights * rows.index_select(0, pairs.row)) / (pairs.add_up(weights) + TINY)]

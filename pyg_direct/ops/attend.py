"""Sums of rows over edges sorted by target, weighted by a softmax over the edges of each target; differentiable.

As `ops/aggregate.py`: a `torch.library` operator, nothing that waits for the GPU. Where weights and sums take one
launch (see `is_fused`), that is `kernels/attend.py`; else it is `softmax` and then `aggregate`, which also make the
gradients of gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels import attend as kernels
from pyg_direct.kernels.span import LONG_ROW
from pyg_direct.ops.aggregate import Transposed, aggregate, check_rows
from pyg_direct.ops.aggregate_kernels import (
    WIDE_KINDS,
    is_wide,
    length_of_run,
    operators,
    sum_rows,
)
from pyg_direct.ops.launch import grid_of, run_gpu, runs_on_gpu
from pyg_direct.ops.offsets import expand
from pyg_direct.ops.softmax import check_scores, pick_scores, softmax, softmax_edges

_SCHEMA = (
    "attend_rows(Tensor x, Tensor? source, Tensor? target, Tensor? edge, Tensor indptr, Tensor row, SymInt num_targets,"
    " bool loops, float slope, int max_degree, bool keeps_weights) -> (Tensor, Tensor)"
)
_library = torch.library.Library("pyg_direct", "FRAGMENT")
_kernels = operators()


def attend(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor, *,
           target_of: Tensor | None = None, num_targets: int | None = None, negative_slope: float = 1.0,
           loops: bool = False, max_degree: int | None = None, transposed: Transposed | None = None,
           deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Sum of the rows `row[e]` of `x` over the edges e of each target, times their weights, which `softmax` makes of
    scores; 0 for a target without edges.

    Args:
        x: Rows `[N, ...]` of fp32, fp16, bfloat16 (added up in fp32) or float64, the columns of H heads one after the
            other.
        source, target, edge: Scores of sources `[N, H]`, targets `[T, H]` and edges `[E, H]`; see `softmax`.
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer; those above E count as E.
        row: Source of each edge, `[E]`.
        target_of: Target of each edge, `[E]`, if it is there already; only gradients need it.
        num_targets: T, where `indptr` is longer.
        negative_slope, loops: See `softmax`.
        max_degree: Upper bound of the edges of a target, if known; without it many edges take two launches.
        transposed: See `aggregate`; for what takes two launches.
        deterministic: See `aggregate`.

    Returns:
        `[T, ...]` of the dtype of `x`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    num_targets = indptr.numel() - 1 if num_targets is None else num_targets
    row = check_scores(source, target, edge, indptr, row, num_targets)
    check_rows(x, indptr, row, "sum", None, num_targets, row.numel())
    heads, width = pick_scores(source, target, edge).shape[1], math.prod(x.shape[1:])
    if heads == 0 or width % heads != 0:
        raise ArgumentError(f"scores must have a divisor of {width} columns, got {heads}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    degree = -1 if max_degree is None else max_degree
    flat = x.reshape(x.shape[0], width)
    if deterministic or not is_fused(flat, source, target, edge, row.numel(), num_targets, degree):
        alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=negative_slope,
                        loops=loops, max_degree=max_degree, deterministic=deterministic)  # fmt: skip
        return aggregate(x, indptr, row, weight=alpha.to(x.dtype), target=target_of, num_targets=num_targets,
                         max_degree=max_degree, transposed=transposed, deterministic=deterministic)  # fmt: skip
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (x, source, target, edge)):
        out = _Attend.apply(flat, source, target, edge, indptr, row, target_of, num_targets, loops, negative_slope,
                            degree)  # fmt: skip
    else:
        out, _ = torch.ops.pyg_direct.attend_rows.default(flat, source, target, edge, indptr, row, num_targets, loops,
                                                          negative_slope, degree, False)  # fmt: skip
    made: Tensor = out.reshape(num_targets, *x.shape[1:])
    return made


def is_fused(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, num_edges: int,
             num_targets: int, max_degree: int) -> bool:  # fmt: skip
    """Whether weights and sums of rows `[N, F]` take one launch: on a GPU, in fp32, of heads that are read in pieces of
    16 bytes, without long rows of edges, which are cut into slices, and of scores of both ends or of edges.

    A thread finds the weights of its edges anew. Of pieces of 16 bytes that costs less than the launch and the weights
    that are saved, at any width that was measured; item by item it costs up to twice as much.
    """
    scores = pick_scores(source, target, edge)
    heads = scores.shape[1]
    return (
        runs_on_gpu(x)
        and scores.dtype == torch.float32
        and ((source is None) == (target is None) != (edge is None))
        and (num_edges <= LONG_ROW or 0 <= max_degree <= LONG_ROW)
        and min(num_edges, num_targets, x.shape[1]) > 0
        and is_wide(x, x.shape[1] // heads, max(x.shape[0], num_edges, num_targets) * heads)
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                row: Tensor, target_of: Tensor | None, num_targets: int, loops: bool, slope: float, max_degree: int
                ) -> Tensor:  # fmt: skip
        out: Tensor
        out, alpha = torch.ops.pyg_direct.attend_rows.default(x, source, target, edge, indptr, row, num_targets, loops,
                                                              slope, max_degree, True)  # fmt: skip
        ctx.save_for_backward(x, source, target, edge, indptr, row, target_of, alpha)
        ctx.options = num_targets, loops, slope, max_degree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, target, edge, indptr, row, target_of, alpha = ctx.saved_tensors
        num_targets, _, slope, max_degree = ctx.options
        if torch.is_grad_enabled():
            return *_differentiate(grad, x, source, target, edge, indptr, row, ctx), *(None,) * 7
        grad = grad.contiguous()
        if target_of is None:
            target_of = expand(indptr[: num_targets + 1], row.numel())
        to_x = to_source = to_target = to_edge = None
        if ctx.needs_input_grad[0]:
            to_x = _kernels.spread_rows(grad, indptr, row, target_of, alpha, x.shape[0], False, max_degree)
        if any(ctx.needs_input_grad[1:4]):
            to_alpha = _kernels.dot_rows(grad, x, indptr, row, target_of, alpha.shape[1], False)
            to_edge, to_target, to_source = torch.ops.pyg_direct.pull_softmax.default(
                to_alpha, alpha, source, target, edge, indptr, row, num_targets, slope, max_degree,
                ctx.needs_input_grad[1])  # fmt: skip
        made = to_x, to_source, to_target, to_edge
        wanted = [value if needs else None for value, needs in zip(made, ctx.needs_input_grad[:4], strict=True)]
        return *wanted, *(None,) * 7


def _differentiate(grad: Tensor, x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None,
                   indptr: Tensor, row: Tensor, ctx: Any) -> list[Tensor | None]:  # fmt: skip
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them: by way of the two
    operators.
    """
    num_targets, loops, slope, max_degree = ctx.options
    # Aliases: scores come of the rows in most layers, and no path may lead from one to the other.
    x = x.view_as(x)
    source, target, edge = (None if part is None else part.view_as(part) for part in (source, target, edge))
    bound = None if max_degree < 0 else max_degree
    alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=slope, loops=loops,
                    max_degree=bound)  # fmt: skip
    out = aggregate(x, indptr, row, weight=alpha, num_targets=num_targets, max_degree=bound)
    needs = ctx.needs_input_grad[:4]
    wanted = [part for part, is_wanted in zip((x, source, target, edge), needs, strict=True) if is_wanted]
    made = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))  # type: ignore[arg-type]
    return [next(made) if is_wanted else None for is_wanted in needs]


def attend_rows(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor,
                row: Tensor, num_targets: int, loops: bool, slope: float, max_degree: int, keeps_weights: bool
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sums `[T, F]` of rows `[N, F]`, weights of edges `[E, H]`, of none without `keeps_weights`)."""
    like, num_edges, width = pick_scores(source, target, edge), row.numel(), x.shape[1]
    heads = like.shape[1]
    if not is_fused(x, source, target, edge, num_edges, num_targets, max_degree):
        alpha = softmax_edges(source, target, edge, indptr, row, num_targets, loops, slope, max_degree)
        out = sum_rows(x, indptr, row, alpha, num_targets, False, max_degree)
        return out, alpha if keeps_weights else alpha.new_empty(0, heads)
    alpha = like.new_empty(num_edges if keeps_weights else 0, heads)
    indptr, x, row = indptr.contiguous(), x.detach().contiguous(), row.to(indptr.dtype).contiguous()
    # Of sources, or of edges.
    scores, own = like.detach().contiguous(), None if target is None else target.detach().contiguous()
    out = torch.empty(num_targets, width, dtype=x.dtype, device=x.device)
    lanes = width // heads * x.element_size() // 16
    pieces = lanes * heads
    run = length_of_run(num_targets * pieces, x)
    num_runs = -(-num_targets // run)
    run_gpu(kernels.attend_rows_gpu, grid_of(num_runs * pieces, 0), x.data_ptr(), indptr, indptr.data_ptr(),
            row.data_ptr(), row.element_size(), scores.data_ptr(), 0 if own is None else own.data_ptr(), num_edges,
            num_targets, num_runs, run, lanes, heads, int(loops), slope, WIDE_KINDS[x.dtype],
            alpha.data_ptr() if keeps_weights else 0, out.data_ptr())  # fmt: skip
    return out, alpha


def _shape(x: Tensor, source: Tensor | None, target: Tensor | None, edge: Tensor | None, indptr: Tensor, row: Tensor,
           num_targets: int, loops: bool, slope: float, max_degree: int, keeps_weights: bool
           ) -> tuple[Tensor, Tensor]:  # fmt: skip
    like = pick_scores(source, target, edge)
    return x.new_empty(num_targets, x.shape[1]), like.new_empty(row.numel() if keeps_weights else 0, like.shape[1])


_library.define(_SCHEMA)
for _key in ("CPU", "CUDA"):
    _library.impl("attend_rows", attend_rows, _key)
_library.impl("attend_rows", _shape, "Meta")

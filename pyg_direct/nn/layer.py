"""A layer of SAGEConv or GraphConv as one step of autograd: rows of sources summed, times a matrix, and a target's own
row times another.

In small batches most of the time is autograd's and Python's, for each step anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.product import add_up, multiply_plainly
from pyg_direct.nn.sorted import SortedEdges
from pyg_direct.ops.aggregate import Transposed, aggregate, spread_known, sum_known


def convolve(x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor, edges: SortedEdges, *,
             reduce: str, transposed: Transposed | None = None) -> Tensor:  # fmt: skip
    """aggregate(x) @ weight.T + bias + own @ own_weight.T, `[T, O]`.

    Args:
        x: Rows of the sources, float32 or float64 `[N, C]`.
        own: Rows of the targets, `[T, D]`.
        weight, bias, own_weight: `[O, C]`, `[O]`, `[O, D]` of the dtype of the rows.
        edges: Checked: their ends lie below N and T.
        reduce: `sum` or `mean`.
        transposed: The edges by source, where `x` gets a gradient; on a GPU None for gradients in any order, which
            need no sort.
    """
    if torch.is_grad_enabled() and (x.requires_grad or own.requires_grad or weight.requires_grad
                                    or own_weight.requires_grad or (bias is not None and bias.requires_grad)
                                    ):  # fmt: skip
        # Without what `Function.apply` does for `torch.func`, whose transforms do not come here.
        made: Tensor = super(Function, _Layer).apply(x, own, weight, bias, own_weight, edges, reduce == "mean",
                                                     transposed)  # type: ignore[misc]  # fmt: skip
        return made
    summed = sum_known(x, edges.indptr, edges.row, own.shape[0], reduce == "mean", edges.max_degree)
    return multiply_plainly(summed, weight, bias, own, own_weight)


class _Layer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor,
                edges: SortedEdges, mean: bool, transposed: Transposed | None) -> Tensor:  # fmt: skip
        indptr, row = edges.indptr, edges.row
        summed = sum_known(x, indptr, row, own.shape[0], mean, edges.max_degree)
        # The rows themselves are read only where gradients are differentiated again.
        given = x if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(given, own, weight, bias, own_weight, summed, indptr, row, edges.target)
        ctx.is_same, ctx.num_rows, ctx.mean = own is x, x.shape[0], mean
        ctx.max_degree, ctx.transposed = edges.max_degree, transposed
        return multiply_plainly(summed, weight, bias, own, own_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, own, weight, _, own_weight, summed, indptr, row, target = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiate(ctx, grad), None, None, None
        turned, to_x = grad.t(), None
        if wants[0]:
            to_x = spread_known(grad @ weight, indptr, row, target, ctx.num_rows, ctx.mean, ctx.max_degree,
                                ctx.transposed)  # fmt: skip
        if wants[0] and ctx.is_same:
            # Where the targets are all rows, both gradients meet in one memory.
            assert to_x is not None
            to_x, to_own = to_x.addmm_(grad, own_weight), None
        else:
            to_own = grad @ own_weight if wants[1] else None
        return (to_x, to_own, turned @ summed if wants[2] else None, add_up(grad) if wants[3] else None,
                turned @ own if wants[4] else None, None, None, None)  # fmt: skip


def _differentiate(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    x, own, weight, bias, own_weight, summed, indptr, row, target = ctx.saved_tensors
    if x is not None:
        summed = aggregate(x, indptr, row, reduce="mean" if ctx.mean else "sum", target=target,
                           num_targets=own.shape[0], max_degree=ctx.max_degree)  # fmt: skip
    out = summed @ weight.t() + own @ own_weight.t()
    out = out if bias is None else out + bias
    given = (x, own, weight, bias, own_weight)
    wanted = [part for part, wants in zip(given, ctx.needs_input_grad, strict=False) if wants]
    if ctx.is_same and ctx.needs_input_grad[0]:
        # One tensor stands for both.
        wanted.remove(next(part for part in wanted if part is own))
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [None if not wants or (i == 1 and ctx.is_same and ctx.needs_input_grad[0]) else next(found)
            for i, wants in enumerate(ctx.needs_input_grad[:5])]  # fmt: skip

"""GINConv over sorted edges: rows of sources summed, and a target's own row added where the sum lies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.conv.sage import Fitting, fit_edges
from pyg_direct.nn.dispatch import find_reduce, is_plain
from pyg_direct.nn.sorted_edges import find_batch, find_whole, may_find
from pyg_direct.nn.trimming import Kept
from pyg_direct.ops.aggregate.sum import aggregate, spread_known, sum_known
from pyg_direct.ops.run_kernel import is_recorded


def forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """What replaces `forward` of an accelerated GINConv."""
    out = None
    if not is_recorded() and not self._unknown.are(edge_index):
        if not may_find(edge_index, x):
            self._unknown.note(edge_index)
        elif is_plain(self, edge_index):
            out = _sum(self, x, edge_index, size)
    return type(self).forward(self, x, edge_index, size) if out is None else self.nn(out)


def _sum(self: Any, x: Any, edge_index: Tensor, size: Any) -> Tensor | None:
    """What the convolution gives its network; None where PyG's own code must find it, or must refuse."""
    rows, own = x if isinstance(x, (tuple, list)) else (x, x)
    if not all(isinstance(part, Tensor) and part.dim() == 2 for part in (rows, own)):
        return None
    # Items of other dtypes, or of other widths, meet by torch's rules.
    if not rows.dtype == own.dtype == self.eps.dtype or rows.shape[1] != own.shape[1]:
        return None
    batch = find_batch(edge_index)
    if batch is None:
        batch = find_whole(edge_index, own.shape[0], rows.shape[1])
    fitting = None if batch is None else fit_edges(self, batch, rows, own, edge_index, size)
    if fitting is None:
        return None
    self._paths.note()
    return add_own(rows, own, self.eps, fitting, reduce=find_reduce(self), is_first=isinstance(x, Kept))


def add_own(x: Tensor, own: Tensor, eps: Tensor, fitting: Fitting, *, reduce: str, is_first: bool = False) -> Tensor:
    """aggregate(x) + (1 + eps) * own, `[T, C]`.

    Args:
        x: Rows of the sources, float32 or float64 `[N, C]`.
        own: Rows of the targets, `[T, C]`.
        eps: One number, `[1]`, of the dtype of the rows.
        fitting: What leads where.
        reduce: `sum` or `mean`.
        is_first: Whether `own` are the first rows of `x`, cut off by what adds both gradients: one has that of both.
    """
    mean = reduce == "mean"
    if not (torch.is_grad_enabled() and (x.requires_grad or own.requires_grad or eps.requires_grad)):
        return _add_own(x, own, 1 + eps, fitting, mean)
    # Without what `Function.apply` does for `torch.func`, whose transforms do not come here.
    made: Tensor = super(Function, _Sum).apply(x, own, eps, fitting, mean, is_first or own is x)  # type: ignore[misc]
    return made


def _add_own(x: Tensor, own: Tensor, scale: Tensor, fitting: Fitting, mean: bool) -> Tensor:
    edges = fitting.edges
    return sum_known(x, edges.indptr, edges.row, own.shape[0], mean, edges.max_degree).addcmul_(own, scale)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, eps: Tensor, fitting: Fitting, mean: bool, is_first: bool
                ) -> Tensor:  # fmt: skip
        scale = 1 + eps
        # Rows are kept for the gradient of `eps` alone: a program may write to others meanwhile, as over PyG's code.
        ctx.save_for_backward(own if ctx.needs_input_grad[2] else None, scale)
        ctx.eps = eps
        ctx.fitting, ctx.mean, ctx.is_first, ctx.is_same = fitting, mean, is_first, own is x
        ctx.num_rows = x.shape[0]
        return _add_own(x, own, scale, fitting, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, scale = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiate(ctx, own, ctx.eps, grad), None, None, None
        edges, transposed = ctx.fitting
        to_x = to_own = None
        if wants[0]:
            # A mean by source overwrites what it is given, which is others' too.
            given = grad.clone() if ctx.mean and transposed is not None else grad.contiguous()
            to_x = spread_known(given, edges.indptr, edges.row, edges.target, ctx.num_rows, ctx.mean, edges.max_degree,
                                transposed)  # fmt: skip
        if to_x is not None and ctx.is_first:
            # Both gradients meet in one memory.
            to_x.narrow(0, 0, grad.shape[0]).addcmul_(grad, scale)
        elif wants[1]:
            to_own = grad * scale
        return to_x, to_own, (grad * own).sum().view(1) if wants[2] else None, None, None, None


def _differentiate(ctx: Any, own: Tensor | None, eps: Tensor, grad: Tensor) -> list[Tensor | None]:
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    edges = ctx.fitting.edges
    # Sums are linear in their rows, which others may stand for. Of views: what a tensor came from is not asked for.
    own, eps = torch.zeros_like(grad).requires_grad_() if own is None else own.view_as(own), eps.view_as(eps)
    x = own if ctx.is_same else grad.new_zeros(ctx.num_rows, grad.shape[1]).requires_grad_()
    summed = aggregate(x, edges.indptr, edges.row, reduce="mean" if ctx.mean else "sum", target=edges.target,
                       num_targets=own.shape[0], max_degree=edges.max_degree)  # fmt: skip
    # One tensor may stand for both.
    out = summed + (1 + eps) * (x if ctx.is_same else own)
    wants = [ctx.needs_input_grad[0], ctx.needs_input_grad[1] and not ctx.is_same, ctx.needs_input_grad[2]]
    wanted = [part for part, wanted in zip((x, own, eps), wants, strict=True) if wanted]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if wanted else None for wanted in wants]

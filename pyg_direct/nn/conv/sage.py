"""SAGEConv and GraphConv over sorted edges, as one step of autograd.

Rows of sources are summed and multiplied with a matrix; a target's own row is multiplied with another. The product
of the own row is added where the sum lies. In small batches autograd and Python take most of the time, once for
each step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import conv

from pyg_direct.nn.dispatch import find_reduce, is_plain, wins_on_cpu
from pyg_direct.nn.linear import add_up, multiply, multiply_plainly
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, WholeGraph, find_batch, find_whole, may_find
from pyg_direct.nn.trimming import Kept, is_accelerated, is_linear
from pyg_direct.ops.aggregate.sum import Transposed, aggregate, spread_known, sum_known
from pyg_direct.ops.run_kernel import is_recorded, runs_on_gpu

_DTYPES = (torch.float32, torch.float64)


class Fitting(NamedTuple):
    """The edges of a layer, known to fit its rows.

    Attributes:
        edges: Their ends lie below the rows.
        transposed: The same by source, where the rows get a gradient; on a GPU None for gradients in any order, which
            need no sort.
    """

    edges: SortedEdges
    transposed: Transposed | None


def fit_edges(self: Any, batch: SortedBatch, rows: Tensor, own: Tensor, edge_index: Tensor, size: Any
              ) -> Fitting | None:  # fmt: skip
    """The edges of a convolution that sums rows `[N, C]` for targets with rows `[T, D]` in one step of autograd.

    Returns:
        None where it takes several steps, or where PyG is to refuse.
    """
    reduce, (num_sources, num_targets) = find_reduce(self), (rows.shape[0], own.shape[0])
    tracked, on_gpu = torch.is_grad_enabled() and rows.requires_grad, runs_on_gpu(rows)
    if (
        reduce not in ("sum", "mean")
        or rows.dtype not in _DTYPES
        or not is_accelerated(self)
        or not rows.device == own.device == edge_index.device
        or (size is not None and tuple(size) != (num_sources, num_targets))
        or not batch.fits(edge_index, num_sources, num_targets)
        or not (on_gpu or wins_on_cpu(rows))
    ):
        return None
    edges = batch.view(edge_index)
    # What is sorted by source serves a batch once, and a whole graph in each step.
    sorts = not on_gpu or isinstance(batch, WholeGraph) or torch.are_deterministic_algorithms_enabled()
    return Fitting(edges, batch.transpose(edges, num_sources) if sorts and tracked else None)


def convolve(x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor, edges: SortedEdges, *,
             reduce: str, transposed: Transposed | None = None, is_first: bool = False) -> Tensor:  # fmt: skip
    """aggregate(x) @ weight.T + bias + own @ own_weight.T, `[T, O]`.

    Args:
        x: Rows of the sources, float32 or float64 `[N, C]`.
        own: Rows of the targets, `[T, D]`.
        weight, bias, own_weight: `[O, C]`, `[O]`, `[O, D]` of the dtype of the rows.
        edges: Their ends lie below N and T.
        reduce: `sum` or `mean`.
        transposed: The edges by source, where `x` gets a gradient; on a GPU None for gradients in any order, which
            need no sort.
        is_first: Whether `own` are the first rows of `x`, cut off by what adds both gradients: one has that of both.
    """
    if torch.is_grad_enabled() and (x.requires_grad or own.requires_grad or weight.requires_grad
                                    or own_weight.requires_grad or (bias is not None and bias.requires_grad)
                                    ):  # fmt: skip
        # Without what `Function.apply` does for `torch.func`, whose transforms do not come here.
        made: Tensor = super(Function, _Layer).apply(x, own, weight, bias, own_weight, edges, reduce == "mean",
                                                     transposed, is_first or own is x)  # type: ignore[misc]  # fmt: skip
        return made
    summed = sum_known(x, edges.indptr, edges.row, own.shape[0], reduce == "mean", edges.max_degree)
    return multiply_plainly(summed, weight, bias, own, own_weight)


class _Layer(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor,
                edges: SortedEdges, mean: bool, transposed: Transposed | None, is_first: bool) -> Tensor:  # fmt: skip
        indptr, row = edges.indptr, edges.row
        summed = sum_known(x, indptr, row, own.shape[0], mean, edges.max_degree)
        # The rows themselves are read only where gradients are differentiated again.
        given = x if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(given, own, weight, bias, own_weight, summed, indptr, row, edges.target)
        ctx.is_first, ctx.num_rows, ctx.mean = is_first, x.shape[0], mean
        ctx.max_degree, ctx.transposed = edges.max_degree, transposed
        return multiply_plainly(summed, weight, bias, own, own_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, own, weight, _, own_weight, summed, indptr, row, target = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiate(ctx, grad), None, None, None, None
        turned, to_x = grad.t(), None
        if wants[0]:
            to_x = spread_known(grad @ weight, indptr, row, target, ctx.num_rows, ctx.mean, ctx.max_degree,
                                ctx.transposed)  # fmt: skip
        if to_x is not None and ctx.is_first:
            # Both gradients meet in one memory.
            to_x.narrow(0, 0, grad.shape[0]).addmm_(grad, own_weight)
            to_own = None
        else:
            to_own = grad @ own_weight if wants[1] else None
        return (to_x, to_own, turned @ summed if wants[2] else None, add_up(grad) if wants[3] else None,
                turned @ own if wants[4] else None, None, None, None, None)  # fmt: skip


def _differentiate(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    *saved, summed, indptr, row, target = ctx.saved_tensors
    # Where one tensor stands for several, each has a gradient of its own.
    given: Any = [None if part is None else part.view_as(part) for part in saved]
    x, own, weight, bias, own_weight = given
    if x is not None:
        summed = aggregate(x, indptr, row, reduce="mean" if ctx.mean else "sum", target=target,
                           num_targets=own.shape[0], max_degree=ctx.max_degree)  # fmt: skip
    out = summed @ weight.t() + own @ own_weight.t()
    out = out if bias is None else out + bias
    wanted = [part for part, wants in zip(given, ctx.needs_input_grad, strict=False) if wants]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if wants else None for wants in ctx.needs_input_grad[:5]]


def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What replaces `forward` of an accelerated SAGEConv or GraphConv."""
    out = None
    if not is_recorded() and not self._unknown.are(edge_index):
        if may_find(edge_index, x):
            out = _find(self, x, edge_index, *args, **kwargs)
        else:
            self._unknown.note(edge_index)
    return type(self).forward(self, x, edge_index, *args, **kwargs) if out is None else out


def _find(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """What the layer returns; None where PyG's own code must find it, or must refuse."""
    out = None
    if is_plain(self, edge_index):
        pair = x if isinstance(x, (tuple, list)) else (x, x)
        is_sage = isinstance(self, conv.SAGEConv)
        combine, names = (_combine_sage, ("size",)) if is_sage else (_combine_graph, ("edge_weight", "size"))
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            return None
        if all(isinstance(part, Tensor) and part.dim() == 2 for part in pair):
            batch = find_batch(edge_index)
            if batch is None and not (args or kwargs):
                batch = find_whole(edge_index, pair[1].shape[0], pair[0].shape[1])
            if batch is not None:
                out = combine(self, batch, pair, edge_index, *args, **kwargs)
    return out


def _combine_sage(self: Any, batch: SortedBatch, x: Any, edge_index: Tensor, size: Any = None) -> Tensor | None:
    if not self.root_weight:
        return None
    first, second = self.lin_l, self.lin_r
    if not _are_matrices(first, second, x):
        return None
    rows = self.lin(x[0]).relu() if self.project and hasattr(self, "lin") else x[0]
    out = _convolve_at_once(self, batch, rows, x, edge_index, first, second, size)
    if out is None:
        out = _add_product(self.propagate(edge_index, x=(rows, x[1]), size=size), first, x[1], second)
    return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


def _combine_graph(self: Any, batch: SortedBatch, x: Any, edge_index: Tensor, edge_weight: Any = None,
                   size: Any = None) -> Tensor | None:  # fmt: skip
    first, second = self.lin_rel, self.lin_root
    if not _are_matrices(first, second, x):
        return None
    out = None
    if edge_weight is None:
        out = _convolve_at_once(self, batch, x[0], x, edge_index, first, second, size)
    if out is None:
        out = self.propagate(edge_index, x=(x[0], x[1]), edge_weight=edge_weight, size=size)
        out = _add_product(out, first, x[1], second)
    return out


def _convolve_at_once(self: Any, batch: SortedBatch, rows: Tensor, x: Any, edge_index: Tensor, first: Any, second: Any,
                      size: Any) -> Tensor | None:  # fmt: skip
    """Sum and products in one step of autograd; None where they take several."""
    own = x[1]
    # What does not fit is refused in torch's words.
    if rows.shape[1] != first.weight.shape[1] or own.shape[1] != second.weight.shape[1]:
        return None
    fitting = fit_edges(self, batch, rows, own, edge_index, size)
    if fitting is None:
        return None
    self._paths.note()
    return convolve(rows, own, first.weight, first.bias, second.weight, fitting.edges, reduce=find_reduce(self),
                    transposed=fitting.transposed, is_first=isinstance(x, Kept) and rows is x.rows)  # fmt: skip


def _are_matrices(first: Any, second: Any, x: Any) -> bool:
    """Whether both are matrices of the dtype of the rows, the second without a bias."""
    return (
        is_linear(first)
        and is_linear(second)
        and second.bias is None
        and x[1].dtype == x[0].dtype == first.weight.dtype == second.weight.dtype
        and not torch.is_autocast_enabled(x[0].device.type)
    )


def _add_product(summed: Tensor, first: Any, own: Tensor, second: Any) -> Tensor:
    """first(summed) + second(own), without a pass over memory for the plus."""
    if summed.dtype != own.dtype:
        return first(summed) + second(own)  # type: ignore[no-any-return]
    return multiply(summed, first.weight, first.bias, own, second.weight)

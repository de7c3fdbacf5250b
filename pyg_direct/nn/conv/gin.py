"""GINConv over sorted edges: rows of sources are summed, and a target's own row is added in the same memory.

Several relations take one sum together, and then each its network.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import conv

from pyg_direct.nn.conv.sage import Fitting, fit_edges
from pyg_direct.nn.conv.spec import ConvSpec, Joined
from pyg_direct.nn.dispatch import copy_rows, find_narrow_first, find_reduce, is_plain, propagate
from pyg_direct.nn.hetero.joined_edges import JoinedEdges, Relation, Tables, Used, join_edges, split_apart
from pyg_direct.nn.sorted_edges import find_batch
from pyg_direct.nn.static_batch import open_signals, works_by_row
from pyg_direct.nn.trimming import Kept, is_accelerated
from pyg_direct.nn.whole_graphs import find_whole, may_find, wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate, spread_known, sum_known
from pyg_direct.ops.run_kernel import is_recorded, pull_by_torch, runs_on_gpu


def forward(self: Any, x: Any, edge_index: Any, size: Any = None) -> Tensor:
    """Override `forward` of an accelerated GINConv."""
    out = None
    if not is_recorded() and type(x) is Tensor and x.dim() == 3:
        out = _convolve_signals(self, x, edge_index, size)
        return type(self).forward(self, x, edge_index, size) if out is None else out
    if not is_recorded() and not self._unknown.are(edge_index):
        if not may_find(edge_index, x):
            self._unknown.note(edge_index)
        elif is_plain(self, edge_index):
            out = _sum(self, x, edge_index, size)
    return type(self).forward(self, x, edge_index, size) if out is None else self.nn(out)


def _convolve_signals(self: Any, x: Tensor, edge_index: Any, size: Any) -> Tensor | None:
    """Return the results for signals `[B, N, F]` over one structure; None if PyG's own code must compute them."""
    signals = None if size is not None else open_signals(self, x, edge_index)
    if signals is None:
        return None
    self._paths.note()
    out = signals.sum(self, signals.rows) + (1 + self.eps) * signals.rows
    if works_by_row(self.nn):
        made: Tensor = self.nn(out).transpose(0, 1)
        return made
    return self.nn(out.transpose(0, 1))  # type: ignore[no-any-return]


def _sum(self: Any, x: Any, edge_index: Tensor, size: Any) -> Tensor | None:
    """Return the input of the convolution's network; None if PyG's own code must compute or refuse it."""
    rows, own = x if isinstance(x, (tuple, list)) else (x, x)
    if not all(isinstance(part, Tensor) and part.dim() == 2 for part in (rows, own)):
        return None
    # Items of other dtypes, or of other widths, are combined by torch's rules.
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
    """Compute aggregate(x) + (1 + eps) * own, `[T, C]`.

    Args:
        x: Rows of the sources, float32 or float64 `[N, C]`.
        own: Rows of the targets, `[T, C]`.
        eps: One number, `[1]`, of the dtype of the rows.
        reduce: `sum` or `mean`.
        is_first: True if `own` are the first rows of `x`, narrowed by a step that adds both gradients: one gradient
            then covers both.
    """
    mean = reduce == "mean"
    if not (torch.is_grad_enabled() and (x.requires_grad or own.requires_grad or eps.requires_grad)):
        return _add_own(x, own, 1 + eps, fitting, mean)
    # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
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
        # Rows are kept only for the gradient of `eps`: a program may write to other rows meanwhile, as with PyG's code.
        ctx.save_for_backward(own if ctx.needs_input_grad[2] else None, scale)
        ctx.eps = eps
        ctx.fitting, ctx.mean, ctx.is_first = fitting, mean, is_first
        ctx.num_rows = x.shape[0]
        return _add_own(x, own, scale, fitting, mean)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, scale = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # Sums are linear in their rows, so other tensors may stand for them.
            x = grad.new_zeros(ctx.num_rows, grad.shape[1]).requires_grad_()
            own = torch.zeros_like(grad).requires_grad_() if own is None else own
            run = partial(_add_own_by_torch, ctx.fitting, ctx.mean)
            return *pull_by_torch(run, (x, own, ctx.eps), wants[:3], [grad]), None, None, None
        edges, transposed = ctx.fitting
        to_x = to_own = None
        if wants[0]:
            # A mean by source overwrites its input, which other steps use too.
            given = grad.clone() if ctx.mean and transposed is not None else grad.contiguous()
            to_x = spread_known(given, edges.indptr, edges.row, edges.target, ctx.num_rows, ctx.mean, edges.max_degree,
                                transposed)  # fmt: skip
        if to_x is not None and ctx.is_first:
            # Both gradients are added in one memory.
            to_x.narrow(0, 0, grad.shape[0]).addcmul_(grad, scale)
        elif wants[1]:
            to_own = grad * scale
        return to_x, to_own, (grad * own).sum().view(1) if wants[2] else None, None, None, None


def _add_own_by_torch(fitting: Fitting, mean: bool, x: Tensor, own: Tensor, eps: Tensor) -> list[Tensor]:
    """Compute `add_own` by functions that torch can differentiate again."""
    edges = fitting.edges
    summed = aggregate(x, edges.indptr, edges.row, reduce="mean" if mean else "sum", target=edges.target,
                       num_targets=own.shape[0], max_degree=edges.max_degree)  # fmt: skip
    return [summed + (1 + eps) * own]


# Bytes of the sums of all relations, above which a CPU sums each separately. From there on glibc gets new memory of the
# system for each step, which costs the gain of the joined sum. It is 0.82 to 1.05 times as fast, below 1.03 to 1.48,
# and 1.85 with such memory kept.
MOST_BYTES = 32 << 20


def read_joined(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """Return the key that relations must share to be summed together; None if the relation is summed separately."""
    reduce = find_reduce(module)
    if (
        not is_accelerated(module)
        or reduce not in ("sum", "mean")
        or x.dtype not in DTYPES
        # Items of other dtypes, or of other widths, are combined by torch's rules.
        or not x.dtype == own.dtype == module.eps.dtype
        or x.shape[1] != own.shape[1]
        or module.eps.device != x.device
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return reduce, x.shape[1], x.dtype


def convolve_joined(relations: Sequence[Relation]) -> list[Tensor] | None:
    """Return the input of each convolution's network: aggregate(sources) + (1 + eps) * own, `[T, C]`; None if each is
    faster separately.
    """
    tables, first = Tables.of(relations), relations[0].sources
    most = sum(relation.own.numel() for relation in relations) * first.element_size()
    if not runs_on_gpu(first) and most > MOST_BYTES:
        return None
    tracked = torch.is_grad_enabled() and any(table.requires_grad for table in tables.tables)
    num_tables = len(tables.tables)
    edges = join_edges(relations, tables.starts, tables.num_rows)
    ends = tables.places, tables.add_own(relations)
    used = [True] * len(relations)
    is_mean = find_reduce(relations[0].conv) == "mean"
    # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
    out: Tensor = super(Function, _JoinedSums).apply(edges, ends, used, num_tables, is_mean, edges.transpose(tracked),
                                               *tables.tables, *(relation.conv.eps for relation in relations))  # type: ignore[misc]  # fmt: skip
    return split_apart(out, edges.sizes, used)


def finish_joined(module: Any, out: Tensor) -> Tensor:
    """Return the result of the convolution."""
    made: Tensor = module.nn(out)
    return made


class _JoinedSums(Function):
    """Sums of all relations, `[T, C]`; the inputs are tables of rows, the first ones of sources, and a factor of
    each.
    """

    @staticmethod
    def forward(ctx: Any, edges: JoinedEdges, ends: tuple[list[int], list[int]], used: Used, num_sources: int,
                mean: bool, transposed: Transposed | None, *given: Tensor) -> Tensor:  # fmt: skip
        own = ends[1]
        num_tables = len(given) - len(own)
        tables, scales = given[:num_tables], (torch.cat(given[num_tables:]) + 1).split(1)
        rows = torch.cat(tables[:num_sources]) if num_sources > 1 else tables[0]
        out = sum_known(rows, edges.indptr, edges.row, sum(edges.sizes), mean, edges.max_degree)
        for piece, place, scale in zip(out.split(edges.sizes), own, scales, strict=True):
            piece.addcmul_(tables[place], scale)
        ctx.save_for_backward(*given, *scales)
        ctx.edges, ctx.ends, ctx.used, ctx.num_sources = edges, ends, used, num_sources
        ctx.mean, ctx.transposed = mean, transposed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        edges, (sources, own), wants = ctx.edges, ctx.ends, ctx.needs_input_grad[6:]
        given, scales = ctx.saved_tensors[: -len(own)], ctx.saved_tensors[-len(own) :]
        if torch.is_grad_enabled():
            return *(None,) * 6, *pull_by_torch(partial(_sum_by_torch, ctx), given, wants, [grad])
        num_tables = len(given) - len(own)
        found: list[Tensor | None] = [None] * len(given)
        if any(wants[: ctx.num_sources]):
            # A mean by source overwrites its input, which other steps use too.
            back = grad.clone() if ctx.mean and ctx.transposed is not None else grad.contiguous()
            sizes = [len(table) for table in given[: ctx.num_sources]]
            spread = spread_known(back, edges.indptr, edges.row, edges.target, sum(sizes), ctx.mean, edges.max_degree,
                                  ctx.transposed)  # fmt: skip
            reached = _reach(sources, ctx.used)
            for place, part in enumerate(spread.split(sizes)):
                found[place] = part if wants[place] and place in reached else None
        for number, (piece, place) in enumerate(zip(grad.split(edges.sizes), own, strict=True)):
            if not ctx.used[number]:
                continue
            if wants[place]:
                part = found[place]
                # If targets are sources too, or of several relations, gradients are added in one memory.
                found[place] = piece * scales[number] if part is None else part.addcmul_(piece, scales[number])
            if wants[num_tables + number]:
                found[num_tables + number] = (piece * given[place]).sum().view(1)
        return *(None,) * 6, *found


def _reach(sources: Sequence[int], used: Used) -> set[int]:
    """Return the tables of sources of the results that received a gradient."""
    return {place for place, is_used in zip(sources, used, strict=True) if is_used}


def _sum_by_torch(ctx: Any, *given: Tensor) -> list[Tensor]:
    """Compute the sums by functions that torch can differentiate again."""
    edges, (sources, own) = ctx.edges, ctx.ends
    reached = _reach(sources, ctx.used)
    rows = [table if place in reached else table.detach() for place, table in enumerate(given[: ctx.num_sources])]
    summed = aggregate(torch.cat(rows), edges.indptr, edges.row, reduce="mean" if ctx.mean else "sum",
                       target=edges.target, num_targets=sum(edges.sizes), max_degree=edges.max_degree)  # fmt: skip
    scaled = [(1 + eps) * given[place] for eps, place in zip(given[len(given) - len(own) :], own, strict=True)]
    return [summed + torch.cat([part if is_used else part.detach()
                                for part, is_used in zip(scaled, ctx.used, strict=True)])]  # fmt: skip


GIN = ConvSpec(conv.GINConv, forward, propagate, message=copy_rows, find_left=find_narrow_first,
               sees_neighbors_only=True, joined=Joined(read_joined, convolve_joined, finish_joined))  # fmt: skip

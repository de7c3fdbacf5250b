"""Messages of GINEConv over sorted edges, made and summed in one step of autograd. Rows of sources and of edges are
added, followed by ReLU. Several relations make and sum their messages at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import conv

from pyg_direct.nn.conv.gin import MOST_BYTES, finish_joined
from pyg_direct.nn.conv.spec import ConvSpec, Joined
from pyg_direct.nn.dispatch import find_narrow_first, find_reduce, promote, propagate
from pyg_direct.nn.hetero.joined_edges import Relation, Tables, join_apart, join_edges, split_apart
from pyg_direct.nn.sorted_edges import SortedEdges
from pyg_direct.nn.trimming import is_linear
from pyg_direct.nn.whole_graphs import wins_on_cpu
from pyg_direct.ops.aggregate.operators import GATHERED_BYTES
from pyg_direct.ops.aggregate.sum_rows import (
    DTYPES,
    aggregate,
    is_fused,
    pull_fused,
    spread_known,
    sum_fused,
    sum_known,
    unpack_kept,
)
from pyg_direct.ops.run_kernel import is_heard, runs_on_gpu


def sum_messages(x: Tensor, edge_rows: Tensor, indptr: Tensor, row: Tensor, target: Tensor, num_targets: int, *,
                 reduce: str, max_degree: int | None) -> Tensor:  # fmt: skip
    """Compute relu(x[row] + edge_rows) reduced over the edges of each target, `[T, C]`.

    Args:
        x: Rows of sources, floating `[N, C]`.
        edge_rows: Rows of edges, `[E, C]` of the same dtype.
        indptr, row, target: Edges that are known to fit, sorted by target; `indptr` may be longer.
        num_targets: T.
        reduce: See `ops.aggregate.sum_rows`.
        max_degree: Upper bound of the edges of a target, None if it is not known.
    """
    if reduce not in ("sum", "mean"):
        messages = (x.index_select(0, row) + edge_rows).relu()
        return aggregate(messages, indptr, reduce=reduce, target=target, num_targets=num_targets, max_degree=max_degree)
    # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
    made: Tensor = super(Function, _Sum).apply(x, edge_rows, indptr, row, target, num_targets, reduce == "mean",
                                               max_degree)  # type: ignore[misc]  # fmt: skip
    return made


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, edge_rows: Tensor, indptr: Tensor, row: Tensor, target: Tensor, num_targets: int,
                mean: bool, max_degree: int | None) -> Tensor:  # fmt: skip
        ctx.num_rows, ctx.mean, ctx.num_targets = len(x), mean, num_targets
        if is_fused(x, edge_rows, num_targets, max_degree):
            out, kept = sum_fused(x, edge_rows, indptr, row, num_targets, mean=mean, keeps=any(ctx.needs_input_grad))
            ctx.save_for_backward(kept, None, indptr, row, target)
            return out
        messages = x.index_select(0, row).add_(edge_rows).relu_()
        ctx.save_for_backward(None, messages, indptr, row, target)
        return sum_known(messages, indptr, None, num_targets, mean, max_degree)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, messages, indptr, row, target = ctx.saved_tensors
        wants_x, wants_edges = ctx.needs_input_grad[:2]
        if ctx.mean:
            degree = indptr[: ctx.num_targets + 1].clamp(max=row.numel()).diff().clamp_(min=1)
            grad = grad / degree.unsqueeze(1).to(grad.dtype)
        to_x = None
        if messages is not None:
            to_edges = torch.ops.aten.threshold_backward(grad.index_select(0, target), messages, 0)
        elif torch.is_grad_enabled() or is_heard(grad):
            # By functions that torch can differentiate again, or batch over many gradients.
            to_edges = grad.index_select(0, target).masked_fill(~unpack_kept(kept, grad.shape[1]), 0)
        else:
            # Atomics suit gradients without memory yet, or small ones.
            spreads = wants_x and not torch.are_deterministic_algorithms_enabled() and (
                not wants_edges or 4 * row.numel() * grad.shape[1] < GATHERED_BYTES)  # fmt: skip
            to_edges, to_x = pull_fused(grad, kept, row, target, ctx.num_rows, to_edges=wants_edges or not spreads,
                                        to_x=spreads)  # fmt: skip
        if wants_x and to_x is None:
            to_x = _add_to_sources(to_edges, row, ctx.num_rows)
        return to_x, to_edges if wants_edges else None, *(None,) * 6


def _add_to_sources(rows: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Add up rows of edges for the source of each, `[N, C]`."""
    is_plain = torch.is_grad_enabled() or torch.are_deterministic_algorithms_enabled() or is_heard(rows)
    if is_plain or not runs_on_gpu(rows):
        return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, row, rows)
    # Each edge is a target of its own: torch adds items one by one, and 16-bit items in 16 bits.
    each = torch.arange(row.numel() + 1, dtype=row.dtype, device=row.device)
    return spread_known(rows, each, row, each[:-1], num_rows, False, 1, None)


def convolve(self: Any, x: Tensor, edges: SortedEdges, num_targets: int, kwargs: dict[str, Any]) -> Tensor | None:
    """Compute the result of a GINEConv from rows of sources and of edges."""
    num_edges, matrix, attribute = edges.row.numel(), self.lin, kwargs.get("edge_attr")
    if (
        x.dim() != 2
        or not isinstance(attribute, Tensor)
        or attribute.dim() != 2
        or attribute.shape[0] != num_edges
        or attribute.device != x.device
        or (matrix is None and attribute.shape[1] != x.shape[1])
    ):
        return None
    edge_rows = attribute if matrix is None else matrix(attribute)
    x, edge_rows = promote(x, edge_rows)
    return sum_messages(x, edge_rows, edges.indptr, edges.row, edges.target, num_targets, reduce=find_reduce(self),
                        max_degree=edges.max_degree)  # fmt: skip


def read_joined(module: Any, x: Tensor, own: Tensor, edge_rows: Tensor) -> Hashable:
    """Return the key that relations must share to be summed together; None if the relation is summed separately.

    Args:
        module: A GINEConv.
        x, own: Rows of its sources and of its targets, `[N, C]` and `[T, C]`.
        edge_rows: Rows of its edges, `[E, D]`.
    """
    if (
        x.dtype not in DTYPES
        # Items of other dtypes, or of other widths, are combined by torch's rules.
        or not x.dtype == own.dtype == edge_rows.dtype == module.eps.dtype
        or not x.device == edge_rows.device == module.eps.device
        or x.shape[1] != own.shape[1]
        or edge_rows.dim() != 2
        or not _fits(module.lin, x, edge_rows)
        or torch.is_autocast_enabled(x.device.type)
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return find_reduce(module), x.shape[1], x.dtype


def _fits(matrix: Any, x: Tensor, edge_rows: Tensor) -> bool:
    """Report whether a matrix, or none, makes rows of edges as wide as the rows of their sources."""
    if matrix is None:
        return edge_rows.shape[1] == x.shape[1]
    return (
        is_linear(matrix)
        and tuple(matrix.weight.shape) == (x.shape[1], edge_rows.shape[1])
        and matrix.weight.dtype == x.dtype
    )


def convolve_joined(relations: Sequence[Relation]) -> list[Tensor] | None:
    """Return the input of each convolution's network: aggregate(relu(sources + edges)) + (1 + eps) * own, `[T, C]`;
    None if each is faster separately.
    """
    first = relations[0].sources
    num_edges = sum(relation.edge_index.shape[1] for relation in relations)
    if not runs_on_gpu(first) and num_edges * first.shape[1] * first.element_size() > MOST_BYTES:
        return None
    tables, used = Tables.of(relations), [True] * len(relations)
    edges = join_edges(relations, tables.starts, tables.num_rows)
    rows = join_apart(tables.tables, tables.serve(), used)
    along = join_apart([relation.edge_rows if relation.conv.lin is None else relation.conv.lin(relation.edge_rows)
                        for relation in relations], [[i] for i in range(len(relations))], used)  # fmt: skip
    out = sum_messages(rows, along, edges.indptr, edges.row, edges.target, sum(edges.sizes),
                       reduce=find_reduce(relations[0].conv), max_degree=edges.max_degree)  # fmt: skip
    pieces = split_apart(out, edges.sizes, used)
    return [piece + (1 + relation.conv.eps) * relation.own for piece, relation in zip(pieces, relations, strict=True)]


GINE = ConvSpec(conv.GINEConv, propagate=propagate, sum=convolve, find_left=find_narrow_first, sees_neighbors_only=True,
                joined=Joined(read_joined, convolve_joined, finish_joined, takes_attributes=True))  # fmt: skip

"""GINConv and GINEConv over several relations: one sum or one message step for all, then each one's network.

GINConv computes one sum for all relations, as one step of autograd. GINEConv makes and sums the messages of all
relations at once. The network of each relation follows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.conv.gine import sum_messages
from pyg_direct.nn.dispatch import find_reduce, wins_on_cpu
from pyg_direct.nn.hetero.joined_edges import JoinedEdges, Relation, Tables, Used, join_apart, join_edges, split_apart
from pyg_direct.nn.trimming import is_accelerated, is_linear
from pyg_direct.ops.aggregate.sum import DTYPES, Transposed, aggregate, spread_known, sum_known
from pyg_direct.ops.run_kernel import runs_on_gpu

# Bytes of the sums of all relations, above which a CPU sums each by itself: from there on glibc gets new memory of the
# system for each step, which took what the joined sum saves (0.82 to 1.05 times as fast, else 1.03 to 1.48, and 1.85
# with such memory kept).
_MOST_BYTES = 32 << 20


def read(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """What relations must have in common to be summed with this one; None where it is summed by itself."""
    reduce = find_reduce(module)
    if (
        not is_accelerated(module)
        or reduce not in ("sum", "mean")
        or x.dtype not in DTYPES
        # Items of other dtypes, or of other widths, meet by torch's rules.
        or not x.dtype == own.dtype == module.eps.dtype
        or x.shape[1] != own.shape[1]
        or module.eps.device != x.device
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return reduce, x.shape[1], x.dtype


def convolve(relations: Sequence[Relation]) -> list[Tensor] | None:
    """What each convolution gives its network: aggregate(sources) + (1 + eps) * own, `[T, C]`; None where each is
    faster by itself.
    """
    tables, first = Tables.of(relations), relations[0].sources
    most = sum(relation.own.numel() for relation in relations) * first.element_size()
    if not runs_on_gpu(first) and most > _MOST_BYTES:
        return None
    tracked = torch.is_grad_enabled() and any(table.requires_grad for table in tables.tables)
    num_tables = len(tables.tables)
    edges = join_edges(relations, tables.starts, tables.num_rows)
    ends = tables.places, tables.add_own(relations)
    used = [True] * len(relations)
    is_mean = find_reduce(relations[0].conv) == "mean"
    # Without what `Function.apply` does for `torch.func`, whose transforms do not come here.
    out: Tensor = super(Function, _Sums).apply(edges, ends, used, num_tables, is_mean, edges.transpose(tracked),
                                               *tables.tables, *(relation.conv.eps for relation in relations))  # type: ignore[misc]  # fmt: skip
    return split_apart(out, edges.sizes, used)


def finish(module: Any, out: Tensor) -> Tensor:
    """What the convolution returns."""
    made: Tensor = module.nn(out)
    return made


class _Sums(Function):
    """Sums of all relations, `[T, C]`; given tables of rows, the first ones of sources, and a factor of each."""

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
            return *(None,) * 6, *_differentiate(ctx, given, wants, grad)
        num_tables = len(given) - len(own)
        found: list[Tensor | None] = [None] * len(given)
        if any(wants[: ctx.num_sources]):
            # A mean by source overwrites what it is given, which is others' too.
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
                # Where targets are sources too, or of several relations, gradients meet in one memory.
                found[place] = piece * scales[number] if part is None else part.addcmul_(piece, scales[number])
            if wants[num_tables + number]:
                found[num_tables + number] = (piece * given[place]).sum().view(1)
        return *(None,) * 6, *found


def _reach(sources: Sequence[int], used: Used) -> set[int]:
    """Tables of sources of the results that a gradient came back to."""
    return {place for place, is_used in zip(sources, used, strict=True) if is_used}


def _differentiate(ctx: Any, given: Sequence[Tensor], wants: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    edges, (sources, own) = ctx.edges, ctx.ends
    num_tables, reached = len(given) - len(own), _reach(sources, ctx.used)
    # Relations that share a convolution are given one factor, of which each has a gradient of its own.
    given = [part.view_as(part) for part in given]
    rows = [table if place in reached else table.detach() for place, table in enumerate(given[: ctx.num_sources])]
    summed = aggregate(torch.cat(rows), edges.indptr, edges.row, reduce="mean" if ctx.mean else "sum",
                       target=edges.target, num_targets=sum(edges.sizes), max_degree=edges.max_degree)  # fmt: skip
    scaled = [(1 + eps) * given[place] for eps, place in zip(given[num_tables:], own, strict=True)]
    out = summed + torch.cat([part if is_used else part.detach()
                              for part, is_used in zip(scaled, ctx.used, strict=True)])  # fmt: skip
    if not out.requires_grad:
        # All that is asked for leads to results that nobody used.
        return [None] * len(wants)
    wanted = [part for part, want in zip(given, wants, strict=True) if want]
    made = iter(torch.autograd.grad(out, wanted, grad, create_graph=True, allow_unused=True))
    return [next(made) if want else None for want in wants]


def read_with_edges(module: Any, x: Tensor, own: Tensor, edge_rows: Tensor) -> Hashable:
    """What relations must have in common to be summed with this one; None where it is summed by itself.

    Args:
        module: A GINEConv.
        x, own: Rows of its sources and of its targets, `[N, C]` and `[T, C]`.
        edge_rows: What belongs to its edges, `[E, D]`.
    """
    if (
        x.dtype not in DTYPES
        # Items of other dtypes, or of other widths, meet by torch's rules.
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
    """Whether a matrix, or none, gives edges rows as wide as those of their sources."""
    if matrix is None:
        return edge_rows.shape[1] == x.shape[1]
    return (
        is_linear(matrix)
        and tuple(matrix.weight.shape) == (x.shape[1], edge_rows.shape[1])
        and matrix.weight.dtype == x.dtype
    )


def convolve_with_edges(relations: Sequence[Relation]) -> list[Tensor] | None:
    """What each convolution gives its network: aggregate(relu(sources + edges)) + (1 + eps) * own, `[T, C]`; None where
    each is faster by itself.
    """
    first = relations[0].sources
    num_edges = sum(relation.edge_index.shape[1] for relation in relations)
    if not runs_on_gpu(first) and num_edges * first.shape[1] * first.element_size() > _MOST_BYTES:
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

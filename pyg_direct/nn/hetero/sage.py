"""A layer of SAGEConv or GraphConv over several relations as one step of autograd: one sum for all of them, and the
products of relations into one type added where they lie.

A target's own row takes one product for all relations that lead to its type, with the sum of their matrices, forward
and backward; and nothing is computed for results that no gradient comes back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.linear import add_up
from pyg_direct.ops.aggregate.sum import Transposed, aggregate, spread_known, sum_known


class Matrices(NamedTuple):
    """What a relation's convolution multiplies with.

    Attributes:
        weight, bias: Of the sum of its sources, `[O, C]` and `[O]` or None.
        own_weight: Of a target's own row, `[O, D]`.
    """

    weight: Tensor
    bias: Tensor | None
    own_weight: Tensor


class TypedEdges(NamedTuple):
    """Edges of all relations of a layer, sorted by relation, then target, and known to fit.

    Attributes:
        indptr, row, target: In the words of `ops.aggregate.sum`; sources of all types stand one behind the other, and
            so do the targets of all relations.
        sizes: Targets of each relation.
        sources: Which of the tables has the rows of each relation's sources.
        own: Which of the tables has the own rows of each relation's targets.
        num_sources: So many tables, the first ones, hold rows of sources.
        groups: Relations whose results are added up; those of one group share their targets' own rows.
        max_degree: Upper bound of the edges of a target, None where it is not known.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    sizes: list[int]
    sources: list[int]
    own: list[int]
    num_sources: int
    groups: list[list[int]]
    max_degree: int | None


def convolve_relations(tables: Sequence[Tensor], matrices: Sequence[Matrices], edges: TypedEdges, *, reduce: str,
                       transposed: Transposed | None = None) -> list[Tensor]:  # fmt: skip
    """aggregate(sources) @ weight.T + bias + own @ own_weight.T of each relation, added up by group.

    Args:
        tables: Rows by type, `[N, C]` of one dtype; those of sources are of one width.
        matrices: Of each relation, of the dtype of the rows.
        edges: What leads where.
        reduce: `sum` or `mean`.
        transposed: The edges by source, where a table of sources gets a gradient; on a GPU None for gradients in any
            order, which need no sort.

    Returns:
        `[T, O]` of each group.
    """
    # Without what `Function.apply` does for `torch.func`, whose transforms do not come here.
    given = [part for group in matrices for part in group]
    out: tuple[Tensor, ...] = super(Function, _TypedLayer).apply(edges, reduce == "mean", transposed, *tables, *given)  # type: ignore[misc]
    return list(out)


def _compute(edges: TypedEdges, sums: Sequence[Tensor], tables: Sequence[Tensor], matrices: Sequence[Matrices]
             ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Results of the groups, and the matrices of their targets' own rows."""
    outs, totals = [], []
    for group in edges.groups:
        first, *others = group
        biases = [bias for bias in (matrices[i].bias for i in group) if bias is not None]
        out = F.linear(sums[first], matrices[first].weight, _add(biases) if biases else None)
        for i in others:
            out.addmm_(sums[i], matrices[i].weight.t())
        totals.append(_add([matrices[i].own_weight for i in group]))
        outs.append(out.addmm_(tables[edges.own[first]], totals[-1].t()))
    return outs, totals


def _add(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        total = total.add_(part) if number else total + part
    return total


def _reach(edges: TypedEdges, grads: Sequence[Tensor | None]) -> set[int]:
    """Tables of sources of the results that a gradient comes back to; others get none, which optimizers tell from
    zeros.
    """
    return {edges.sources[i] for group, grad in zip(edges.groups, grads, strict=True) if grad is not None
            for i in group}  # fmt: skip


def _group(given: Sequence[Any]) -> list[Matrices]:
    return [Matrices(*given[i : i + 3]) for i in range(0, len(given), 3)]


class _TypedLayer(Function):
    @staticmethod
    def forward(ctx: Any, edges: TypedEdges, mean: bool, transposed: Transposed | None, *given: Tensor | None
                ) -> tuple[Tensor, ...]:  # fmt: skip
        num_tables = len(given) - 3 * len(edges.sizes)
        tables: Any = given[:num_tables]
        num_targets = sum(edges.sizes)
        sources = tables[: edges.num_sources]
        rows = torch.cat(sources) if len(sources) > 1 else sources[0]
        summed = sum_known(rows, edges.indptr, edges.row, num_targets, mean, edges.max_degree)
        outs, totals = _compute(edges, summed.split(edges.sizes), tables, _group(given[num_tables:]))
        ctx.save_for_backward(summed, *totals, *given)
        ctx.edges, ctx.mean, ctx.transposed = edges, mean, transposed
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        edges: TypedEdges = ctx.edges
        summed, *saved = ctx.saved_tensors
        totals, given = saved[: len(edges.groups)], saved[len(edges.groups) :]
        num_tables = len(given) - 3 * len(edges.sizes)
        wants = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            return None, None, None, *_differentiate(edges, ctx.mean, given, wants, grads)
        found: list[Tensor | None] = [None] * len(given)
        matrices, parts = _group(given[num_tables:]), summed.split(edges.sizes)
        if any(wants[: edges.num_sources]):
            back = summed.new_empty(summed.shape)
            pieces = back.split(edges.sizes)
            for group, grad in zip(edges.groups, grads, strict=True):
                for i in group:
                    pieces[i].zero_() if grad is None else torch.mm(grad, matrices[i].weight, out=pieces[i])
            sizes = [len(table) for table in given[: edges.num_sources]]
            spread = spread_known(back, edges.indptr, edges.row, edges.target, sum(sizes), ctx.mean, edges.max_degree,
                                  ctx.transposed)  # fmt: skip
            reached = _reach(edges, grads)
            for place, part in enumerate(spread.split(sizes)):
                found[place] = part if wants[place] and place in reached else None
        for group, total, grad in zip(edges.groups, totals, grads, strict=True):
            if grad is None:
                continue
            own, turned = edges.own[group[0]], grad.t()
            if wants[own]:
                to_own = found[own]
                # Where targets are sources too both gradients meet in one memory.
                found[own] = grad @ total if to_own is None else to_own.addmm_(grad, total)
            to_bias = to_matrix = None
            for i in group:
                first = num_tables + 3 * i
                if wants[first]:
                    found[first] = turned @ parts[i]
                if wants[first + 1]:
                    to_bias = found[first + 1] = add_up(grad) if to_bias is None else to_bias
                if wants[first + 2]:
                    to_matrix = found[first + 2] = turned @ given[own] if to_matrix is None else to_matrix
        return None, None, None, *found


def _differentiate(edges: TypedEdges, mean: bool, given: Sequence[Any], wants: Sequence[bool],
                   grads: Sequence[Tensor | None]) -> list[Tensor | None]:  # fmt: skip
    """The gradients in what torch can differentiate once more, for those who ask for a graph of them."""
    num_tables = len(given) - 3 * len(edges.sizes)
    # Relations that share a convolution are given one tensor, of which each has a gradient of its own.
    given = [None if part is None else part.view_as(part) for part in given]
    tables, reached = given[:num_tables], _reach(edges, grads)
    rows = torch.cat([table if place in reached else table.detach()
                      for place, table in enumerate(tables[: edges.num_sources])])  # fmt: skip
    summed = aggregate(rows, edges.indptr, edges.row, reduce="mean" if mean else "sum", target=edges.target,
                       num_targets=sum(edges.sizes), max_degree=edges.max_degree)  # fmt: skip
    outs, _ = _compute(edges, summed.split(edges.sizes), tables, _group(given[num_tables:]))
    wanted = [part for part, want in zip(given, wants, strict=True) if want]
    asked = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
    if not asked:
        # All that is asked for leads to results that nobody used.
        return [None] * len(wants)
    made = iter(torch.autograd.grad([out for out, _ in asked], wanted, [grad for _, grad in asked], create_graph=True,
                                    allow_unused=True))  # fmt: skip
    return [next(made) if want else None for want in wants]

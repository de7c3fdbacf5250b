"""SAGEConv and GraphConv over sorted edges, as one step of autograd.

Rows of sources are summed and multiplied by a matrix; a target's own row is multiplied by another. The product of the
own row is added in the same memory. In small batches autograd and Python take most of the time, once for each step.

A layer over several relations is one step, too. It has one sum for all of them, and the products of relations into one
type are added in place. A target's own row takes one product for all relations that lead to its type, with the sum of
their matrices. If no gradient comes back to a result, nothing is computed for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import conv

from pyg_direct.nn.conv.spec import ConvSpec, Joined, NumRead
from pyg_direct.nn.dispatch import copy_rows, find_narrow_first, find_reduce, is_plain, propagate, weigh_rows
from pyg_direct.nn.hetero.joined_edges import Relation, Tables, join_edges
from pyg_direct.nn.linear import add_up, multiply, multiply_plainly
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, find_batch
from pyg_direct.nn.static_batch import open_signals
from pyg_direct.nn.trimming import Kept, is_accelerated, is_linear
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, may_find, wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate, spread_known, sum_known
from pyg_direct.ops.run_kernel import is_recorded, pull_by_torch, runs_on_gpu

_DTYPES = (torch.float32, torch.float64)
# Products of a number in the time in which a number of an edge is read, in a step and an evaluation. On an H200, sums
# of 85,810 rows of 4,231 numbers take 818 us; products of 14,328 such rows with 64 columns take 193, and 290 backward.
_PRODUCTS = 27


class Fitting(NamedTuple):
    """The edges of a layer, known to fit its rows.

    Attributes:
        transposed: The same edges by source, if the rows get a gradient; on a GPU None for gradients in any order,
            which need no sort.
    """

    edges: SortedEdges
    transposed: Transposed | None


def fit_edges(self: Any, batch: SortedBatch, rows: Tensor, own: Tensor, edge_index: Tensor, size: Any
              ) -> Fitting | None:  # fmt: skip
    """Return the edges of a convolution that sums rows `[N, C]` for targets with rows `[T, D]` in one step of autograd.

    Returns:
        None if it takes several steps, or if PyG must refuse.
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
    # Edges sorted by source serve a batch once, and a whole graph in each step.
    sorts = not on_gpu or isinstance(batch, WholeGraph) or torch.are_deterministic_algorithms_enabled()
    return Fitting(edges, batch.transpose(edges, num_sources) if sorts and tracked else None)


def convolve(x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, own_weight: Tensor, edges: SortedEdges, *,
             reduce: str, transposed: Transposed | None = None, is_first: bool = False) -> Tensor:  # fmt: skip
    """Compute aggregate(x) @ weight.T + bias + own @ own_weight.T, `[T, O]`.

    Args:
        x: Rows of the sources, float32 or float64 `[N, C]`.
        own: Rows of the targets, `[T, D]`.
        weight, bias, own_weight: `[O, C]`, `[O]`, `[O, D]` of the dtype of the rows.
        edges: Their ends lie below N and T.
        reduce: `sum` or `mean`.
        transposed: The edges by source, if `x` gets a gradient; on a GPU None for gradients in any order, which need no
            sort.
        is_first: True if `own` are the first rows of `x`, narrowed by a step that adds both gradients: one gradient
            then covers both.
    """
    if torch.is_grad_enabled() and (x.requires_grad or own.requires_grad or weight.requires_grad
                                    or own_weight.requires_grad or (bias is not None and bias.requires_grad)
                                    ):  # fmt: skip
        # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
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
        # The rows themselves are read only if gradients are differentiated again.
        given = x if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(given, own, weight, bias, own_weight, summed, indptr, row, edges.target)
        ctx.is_first, ctx.num_rows, ctx.mean = is_first, x.shape[0], mean
        ctx.max_degree, ctx.transposed = edges.max_degree, transposed
        return multiply_plainly(summed, weight, bias, own, own_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight, bias, own_weight, summed, indptr, row, target = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            given = x, own, weight, bias, own_weight
            return *pull_by_torch(partial(_convolve_by_torch, ctx), given, wants[:5], [grad]), *(None,) * 4
        turned, to_x = grad.t(), None
        if wants[0]:
            to_x = spread_known(grad @ weight, indptr, row, target, ctx.num_rows, ctx.mean, ctx.max_degree,
                                ctx.transposed)  # fmt: skip
        if to_x is not None and ctx.is_first:
            # Both gradients are added in one memory.
            to_x.narrow(0, 0, grad.shape[0]).addmm_(grad, own_weight)
            to_own = None
        else:
            to_own = grad @ own_weight if wants[1] else None
        return (to_x, to_own, turned @ summed if wants[2] else None, add_up(grad) if wants[3] else None,
                turned @ own if wants[4] else None, None, None, None, None)  # fmt: skip


def _convolve_by_torch(ctx: Any, x: Tensor | None, own: Tensor, weight: Tensor, bias: Tensor | None,
                       own_weight: Tensor) -> list[Tensor]:  # fmt: skip
    """Compute `convolve` by functions that torch can differentiate again."""
    *_, summed, indptr, row, target = ctx.saved_tensors
    if x is not None:
        summed = aggregate(x, indptr, row, reduce="mean" if ctx.mean else "sum", target=target,
                           num_targets=own.shape[0], max_degree=ctx.max_degree)  # fmt: skip
    out = summed @ weight.t() + own @ own_weight.t()
    return [out if bias is None else out + bias]


def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Override `forward` of an accelerated SAGEConv or GraphConv."""
    out = None
    if not is_recorded() and type(x) is Tensor and x.dim() == 3:
        out = _convolve_signals(self, x, edge_index, *args, **kwargs)
    elif not is_recorded() and not self._unknown.are(edge_index):
        if may_find(edge_index, x):
            out = _find(self, x, edge_index, *args, **kwargs)
        else:
            self._unknown.note(edge_index)
    return type(self).forward(self, x, edge_index, *args, **kwargs) if out is None else out


def _convolve_signals(
    self: Any, x: Tensor, edge_index: Any, edge_weight: Any = None, size: Any = None
) -> Tensor | None:
    """Return the results for signals `[B, N, F]` over one structure; None if PyG's own code must compute them."""
    is_sage = isinstance(self, conv.SAGEConv)
    if size is not None or (is_sage and edge_weight is not None):
        return None
    signals = open_signals(self, x, edge_index, edge_weight)
    if signals is None:
        return None
    self._paths.note()
    rows = signals.rows
    if not is_sage:
        out = self.lin_rel(signals.sum(self, rows, weight=signals.weight)) + self.lin_root(rows)
        return out.transpose(0, 1)
    given = self.lin(rows).relu() if self.project and hasattr(self, "lin") else rows
    out = self.lin_l(signals.sum(self, given))
    out = out + self.lin_r(rows) if self.root_weight else out
    return (F.normalize(out, p=2.0, dim=-1) if self.normalize else out).transpose(0, 1)


def _find(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the result of the layer; None if PyG's own code must compute or refuse it."""
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
    """Compute sum and products in one step of autograd; None if they take several."""
    own = x[1]
    # torch itself refuses shapes that do not fit.
    if rows.shape[1] != first.weight.shape[1] or own.shape[1] != second.weight.shape[1]:
        return None
    fitting = fit_edges(self, batch, rows, own, edge_index, size)
    if fitting is None:
        return None
    self._paths.note()
    return convolve(rows, own, first.weight, first.bias, second.weight, fitting.edges, reduce=find_reduce(self),
                    transposed=fitting.transposed, is_first=isinstance(x, Kept) and rows is x.rows)  # fmt: skip


def _are_matrices(first: Any, second: Any, x: Any) -> bool:
    """Report whether both are matrices of the dtype of the rows, the second without a bias."""
    return (
        is_linear(first)
        and is_linear(second)
        and second.bias is None
        and x[1].dtype == x[0].dtype == first.weight.dtype == second.weight.dtype
        and not torch.is_autocast_enabled(x[0].device.type)
    )


def _add_product(summed: Tensor, first: Any, own: Tensor, second: Any) -> Tensor:
    """Compute first(summed) + second(own), without a pass over memory for the sum."""
    if summed.dtype != own.dtype:
        return first(summed) + second(own)  # type: ignore[no-any-return]
    return multiply(summed, first.weight, first.bias, own, second.weight)


class Matrices(NamedTuple):
    """Matrices of a relation's convolution.

    Attributes:
        weight, bias: For the sum of its sources, `[O, C]` and `[O]` or None.
        own_weight: For a target's own row, `[O, D]`.
    """

    weight: Tensor
    bias: Tensor | None
    own_weight: Tensor


class TypedEdges(NamedTuple):
    """Edges of all relations of a layer, sorted by relation, then target, and known to fit.

    Attributes:
        indptr, row, target: In the words of `ops.aggregate.sum_rows`; sources of all types are concatenated, and so
            are the targets of all relations.
        sources: Table with the rows of each relation's sources.
        own: Table with the own rows of each relation's targets.
        num_sources: So many tables, the first ones, hold rows of sources.
        groups: Relations whose results are added up; relations of one group share their targets' own rows.
        max_degree: Upper bound of the edges of a target, None if it is not known.
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
    """Compute aggregate(sources) @ weight.T + bias + own @ own_weight.T of each relation, added up by group.

    Args:
        tables: Rows by type, `[N, C]` of one dtype; rows of sources have one width.
        matrices: Matrices of each relation, of the dtype of the rows.
        reduce: `sum` or `mean`.
        transposed: The edges by source, if a table of sources gets a gradient; on a GPU None for gradients in any
            order, which need no sort.

    Returns:
        `[T, O]` of each group.
    """
    # Bypass the `torch.func` support of `Function.apply`; its transforms do not come here.
    given = [part for group in matrices for part in group]
    out: tuple[Tensor, ...] = super(Function, _TypedLayer).apply(edges, reduce == "mean", transposed, *tables, *given)  # type: ignore[misc]
    return list(out)


def _compute_groups(edges: TypedEdges, sums: Sequence[Tensor], tables: Sequence[Tensor], matrices: Sequence[Matrices]
             ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return results of the groups, and the matrices of their targets' own rows."""
    outs, totals = [], []
    for group in edges.groups:
        first, *others = group
        biases = [bias for bias in (matrices[i].bias for i in group) if bias is not None]
        out = F.linear(sums[first], matrices[first].weight, _add_up_parts(biases) if biases else None)
        for i in others:
            out.addmm_(sums[i], matrices[i].weight.t())
        totals.append(_add_up_parts([matrices[i].own_weight for i in group]))
        outs.append(out.addmm_(tables[edges.own[first]][: edges.sizes[first]], totals[-1].t()))
    return outs, totals


def _add_up_parts(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        total = total.add_(part) if number else total + part
    return total


def _reach(edges: TypedEdges, grads: Sequence[Tensor | None]) -> set[int]:
    """Return the tables of sources of the results that receive a gradient; others get None, which optimizers treat
    differently from zeros.
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
        outs, totals = _compute_groups(edges, summed.split(edges.sizes), tables, _group(given[num_tables:]))
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
            run = partial(_convolve_relations_by_torch, edges, ctx.mean, _reach(edges, grads))
            return None, None, None, *pull_by_torch(run, given, wants, grads)
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
            own, size, turned = edges.own[group[0]], edges.sizes[group[0]], grad.t()
            if wants[own]:
                found[own] = _add_to_first(found[own], grad, total, given[own])
            to_bias = to_matrix = None
            for i in group:
                first = num_tables + 3 * i
                if wants[first]:
                    found[first] = turned @ parts[i]
                if wants[first + 1]:
                    to_bias = found[first + 1] = add_up(grad) if to_bias is None else to_bias
                if wants[first + 2]:
                    to_matrix = found[first + 2] = turned @ given[own][:size] if to_matrix is None else to_matrix
        return None, None, None, *found


def _add_to_first(to_own: Tensor | None, grad: Tensor, matrix: Tensor, table: Any) -> Tensor:
    """Add a product to the gradient of the first rows of a table."""
    if to_own is None:
        if len(grad) == len(table):
            return grad @ matrix
        to_own = table.new_zeros(table.shape)
    # If targets are sources too, both gradients are added in one memory.
    to_own.narrow(0, 0, len(grad)).addmm_(grad, matrix)
    return to_own


def _convolve_relations_by_torch(edges: TypedEdges, mean: bool, reached: set[int], *given: Any) -> list[Tensor]:
    """Compute `convolve_relations` by functions that torch can differentiate again.

    Args:
        reached: Result of `_reach`.
    """
    tables, matrices = given[: -3 * len(edges.sizes)], _group(given[-3 * len(edges.sizes) :])
    rows = torch.cat([table if place in reached else table.detach()
                      for place, table in enumerate(tables[: edges.num_sources])])  # fmt: skip
    summed = aggregate(rows, edges.indptr, edges.row, reduce="mean" if mean else "sum", target=edges.target,
                       num_targets=sum(edges.sizes), max_degree=edges.max_degree)  # fmt: skip
    return _compute_groups(edges, summed.split(edges.sizes), tables, matrices)[0]


# Matrices of a class, for the sums and for a target's own row.
_MATRICES: dict[type, tuple[str, str]] = {conv.SAGEConv: ("lin_l", "lin_r"), conv.GraphConv: ("lin_rel", "lin_root")}


def read_joined(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """Return the key that SAGEConv and GraphConv must share to be summed together; None for separate sums."""
    reduce = find_reduce(module)
    if (
        reduce not in ("sum", "mean")
        or x.dtype not in DTYPES
        or not _are_matrices(*_matrices(module), (x, own))
        or not (runs_on_gpu(x) or wins_on_cpu(x))
    ):
        return None
    return reduce, x.shape[1], x.dtype


def _matrices(module: Any) -> tuple[Any, Any]:
    """Return the matrix for the sums and the matrix for a target's own row."""
    first, second = _MATRICES[type(module)]
    return getattr(module, first), getattr(module, second)


def convolve_joined(relations: Sequence[Relation]) -> list[Tensor]:
    """Return the results of each SAGEConv or GraphConv."""
    groups = [[number] for number in range(len(relations))]
    outs = add_up_joined(relations, groups, [None] * len(groups))
    return [F.normalize(out, p=2.0, dim=-1) if getattr(relation.conv, "normalize", False) else out
            for out, relation in zip(outs, relations, strict=True)]  # fmt: skip


def add_up_joined(relations: Sequence[Relation], groups: list[list[int]], num_read: NumRead) -> list[Tensor]:
    """Add up results of SAGEConv and GraphConv by group."""
    tables = Tables.of(relations)
    num_sources = len(tables.tables)
    tracked = torch.is_grad_enabled() and any(table.requires_grad for table in tables.tables)
    sizes = [len(relation.own) for relation in relations]
    for group, read in zip(groups, num_read, strict=True):
        if read is not None:
            # All targets that edges lead to are computed.
            most = max(read, *(relations[i].batch.count_targets(relations[i].edge_index) for i in group))
            for i in group:
                sizes[i] = min(sizes[i], most)
    joined = join_edges(relations, tables.starts, tables.num_rows, sizes=sizes)
    edges = TypedEdges(joined.indptr, joined.row, joined.target, joined.sizes, tables.places, tables.add_own(relations),
                       num_sources, groups, joined.max_degree)  # fmt: skip
    pairs = [_matrices(relation.conv) for relation in relations]
    matrices = [Matrices(first.weight, first.bias, second.weight) for first, second in pairs]
    return convolve_relations(tables.tables, matrices, edges, reduce=find_reduce(relations[0].conv),
                              transposed=joined.transpose(tracked))  # fmt: skip


def _multiplies_first(x: Tensor, weight: Tensor, num_edges: int, num_targets: int) -> bool:
    """Report whether rows of all sources are multiplied in less time than wide rows of all edges are read."""
    return x.shape[1] > len(weight) and num_edges * _PRODUCTS > (len(x) - num_targets) * len(weight)


def add_up_whole(relations: Sequence[Relation], groups: list[list[int]]) -> list[Tensor] | None:
    """Add up results of SAGEConv and GraphConv over whole graphs by group, from rows of any width.

    A target's own row takes one product for all relations of its group.
    """
    if any(relation.sources.dtype not in _DTYPES for relation in relations):
        return None
    outs = []
    for group in groups:
        pairs = [(relations[i], *_matrices(relations[i].conv)) for i in group]
        biases = [first.bias for _, first, _ in pairs if first.bias is not None]
        own = pairs[0][0].own
        out = multiply(own, _add_up_parts([second.weight for *_, second in pairs]),
                       _add_up_parts(biases) if biases else None)  # fmt: skip
        for relation, first, _ in pairs:
            x, batch = relation.sources, relation.batch
            edges = batch.view(relation.edge_index)
            multiplies = _multiplies_first(x, first.weight, edges.row.numel(), len(own))
            rows = F.linear(x, first.weight) if multiplies else x
            tracked = torch.is_grad_enabled() and rows.requires_grad
            summed = aggregate(rows, edges.indptr, edges.row, reduce=find_reduce(relation.conv), target=edges.target,
                               num_targets=len(own), max_degree=edges.max_degree,
                               transposed=batch.transpose(edges, len(x)) if tracked else None)  # fmt: skip
            out = out + summed if multiplies else torch.addmm(out, summed, first.weight.t())
        outs.append(out)
    return outs


_SHARED: dict[str, Any] = {
    "forward": forward,
    "propagate": propagate,
    "find_left": find_narrow_first,
    "sees_neighbors_only": True,
    "joined": Joined(read_joined, convolve_joined, add_up=add_up_joined, add_up_whole=add_up_whole),
}
SAGE = ConvSpec(conv.SAGEConv, message=copy_rows, **_SHARED)
GRAPH = ConvSpec(conv.GraphConv, message=weigh_rows, **_SHARED)

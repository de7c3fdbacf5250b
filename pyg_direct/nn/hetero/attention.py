"""Attention over the relations of a layer in one launch a stage, forward and backward, added up by type.

A score is leaky(x[source] . vector + score of the target), as in GATConv. For the way back no row of an edge is kept:
only the products and the weights of edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.nn.hetero.joined_edges import Groups, ReadSources, Used, multiply_apart, sum_apart
from pyg_direct.nn.sorted_edges import SortedBatch, may_wait
from pyg_direct.ops.aggregate.compute_softmax import attend, softmax
from pyg_direct.ops.aggregate.compute_typed_attention import (
    BySource,
    Places,
    add_groups,
    align,
    attend_groups,
    attend_pairs as attend_pairs_of,
    can_pull,
    join_gradients,
    pull_attention,
    pull_pairs,
)
from pyg_direct.ops.aggregate.products import dot
from pyg_direct.ops.aggregate.sum_rows import aggregate
from pyg_direct.ops.run_kernel import is_asked_again, is_heard, pull_by_torch


def score_sources(made: Tensor, vectors: Sequence[Tensor], read: ReadSources, used: Used) -> Tensor:
    """Return the products of rows with the vectors of their relations, `[U, H]` in the dtype of the vectors.

    Args:
        made: Rows of the sources of all relations, `[U, H * C]`.
        vectors: `[1, H, C]` of each.
        read: The number of sources of each, and their edges.
    """
    ends = accumulate(read.sizes, initial=0)
    return multiply_apart([made] * len(vectors), [_spread(vector) for vector in vectors], used,
                          rows=[slice(*pair) for pair in pairwise(ends)], dtype=made.dtype,
                          out_dtype=vectors[0].dtype)  # fmt: skip


def _spread(vector: Tensor) -> Tensor:
    """Return a matrix `[H, H * C]` that multiplies each head by its part of a vector `[1, H, C]`."""
    heads = torch.eye(vector.shape[1], dtype=vector.dtype, device=vector.device).unsqueeze(-1)
    return (heads * vector).flatten(1)


def score_pairs(made: Tensor, others: Tensor, vectors: Sequence[Tensor], read: ReadSources, used: Used, slope: float
                ) -> Tensor:  # fmt: skip
    """Return the products of vectors with leaky(row of the source + row of the target), `[E, H]`, as of GATv2Conv.

    Args:
        made, others: Rows of the sources and targets of all relations, `[U, H * C]` and `[T, H * C]`.
        vectors: `[1, H, C]` of each.
    """
    edges = read.edges
    both = made.index_select(0, edges.row) + others.index_select(0, edges.target)
    scores: Tensor = _PairScores.apply(both.view(-1, *vectors[0].shape[1:]), used, edges.counts, slope, *vectors)
    return scores


def can_attend(made: Tensor, heads: int, read: ReadSources) -> bool:
    """Report whether `attend_relations` and `attend_pairs` take rows `[U, H * C]` of sources."""
    edges, num_edges, num_targets = read.edges, len(read.edges.row), sum(read.edges.sizes)
    return (
        can_pull(made, heads, max(len(made), num_edges, num_targets))
        and min(num_edges, num_targets) > 0
        # Targets with many edges would keep others waiting.
        and (num_edges <= LONG_ROW or (0 <= (edges.max_degree or 0) <= LONG_ROW and edges.max_degree is not None))
    )


class ProductEdges(NamedTuple):
    """Edges of `attend_products`, sorted by target.

    Attributes:
        indptr, row, target: Offsets of the targets' edges, `[T + 1]`, and both ends of each, `[E]`.
        num_sources, num_targets: Rows of keys and of queries.
        max_degree: Upper bound of the edges of a target, None if it is not known.
        batch, key: Batch that remembers results for them, and the key of these.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    num_sources: int
    num_targets: int
    max_degree: int | None
    batch: SortedBatch
    key: tuple[Any, ...]

    def sort(self) -> BySource:
        """Return the edges by source, sorted once for the layers that share them."""
        made: BySource = self.batch.remember(
            ("by source", *self.key),
            lambda: BySource.of(self.row, self.target, self.num_sources, not may_wait(self.row)),
        )
        return made

    def lay_out(self) -> Places:
        """Return where their sources and targets begin and end."""
        made: Places = self.batch.remember(
            ("places", *self.key),
            lambda: Places.of([self.num_sources], [self.num_targets], [[0]], [self.num_targets], self.row.device,
                              not may_wait(self.row)))  # fmt: skip
        return made


def can_attend_products(both: Tensor, heads: int, edges: ProductEdges) -> bool:
    """Report whether `attend_products` takes keys and values `[U, 2 * H * C]`."""
    num_edges, most = len(edges.row), edges.max_degree
    return (
        # Modes see only torch's operators.
        not is_heard(both)
        and can_pull(both[:, : both.shape[1] // 2], heads, max(edges.num_sources, edges.num_targets, num_edges))
        and min(num_edges, edges.num_targets) > 0
        and (num_edges <= LONG_ROW or (most is not None and 0 <= most <= LONG_ROW))
    )


def attend_products(both: Tensor, queries: Tensor, heads: int, edges: ProductEdges) -> Tensor:
    """Return the sums of values `[T, H * C]`, weighted by a softmax over the products of keys and queries.

    Args:
        both: Keys and values of the sources, `[U, 2 * H * C]`; see `can_attend_products`.
        queries: Rows of the targets, `[T, H * C]` of the same dtype.
    """
    made: Tensor = _AttendProducts.apply(edges, heads, both, queries)
    return made


class _Layer(NamedTuple):
    """Attention of a layer, without its tensors that get gradients.

    Attributes:
        has_relu: True if sums pass a ReLU, and then have the dtype of rows.
    """

    read: ReadSources
    groups: Groups
    used: Used
    slope: float
    has_relu: bool = False


def attend_relations(made: Tensor, by_target: Tensor, vectors: Sequence[Tensor], biases: Sequence[Tensor | None],
                     read: ReadSources, groups: Groups, used: Used, slope: float, *, has_relu: bool = False
                     ) -> list[Tensor]:  # fmt: skip
    """Return the sums of each group, `[count, H * C]`: attention of each relation, added up, and biases.

    Args:
        made: Rows of the sources of all relations, `[U, H * C]`; see `can_attend`.
        by_target: Scores of the targets of all relations, fp32 `[sum of sizes, H]`.
        vectors: Vector of each relation for scores of sources, fp32 `[1, H, C]`.
        biases: `[H * C]` for each group that has one.
        used: Is set and read in a backward pass.
        has_relu: See `_Layer`.
    """
    layer = _Layer(read, groups, used, slope, has_relu)
    return list(_Attend.apply(layer, made, by_target, *vectors, *biases))


def _compose(layer: _Layer, made: Tensor, by_target: Tensor, *given: Any) -> list[Tensor]:
    """Compute the same by functions that torch can differentiate again."""
    read, groups, used, slope, has_relu = layer
    edges, vectors = read.edges, given[: len(read.sizes)]
    by_source = score_sources(made, vectors, read, used)
    rows = made.view(len(made), *vectors[0].shape[1:])
    out = attend(rows, by_source, by_target, None, edges.indptr, edges.row, target_of=edges.target,
                 num_targets=sum(edges.sizes), negative_slope=slope, max_degree=edges.max_degree,
                 widens=True)  # fmt: skip
    outs = sum_apart(out.flatten(1), groups, used, given[len(read.sizes) :])
    return [out.relu().to(made.dtype) for out in outs] if has_relu else outs


def attend_pairs(made: Tensor, others: Tensor, vectors: Sequence[Tensor], biases: Sequence[Tensor | None],
                 read: ReadSources, groups: Groups, used: Used, slope: float) -> list[Tensor]:  # fmt: skip
    """Compute `attend_relations` for scores of `score_pairs`.

    Args:
        others: Rows of the targets of all relations, `[sum of sizes, H * C]` of the dtype of `made`.
    """
    return list(_AttendPairs.apply(_Layer(read, groups, used, slope), made, others, *vectors, *biases))


def _compose_pairs(layer: _Layer, made: Tensor, others: Tensor, *given: Any) -> list[Tensor]:
    """Compute the same by functions that torch can differentiate again."""
    read, groups, used, slope, _ = layer
    edges, vectors = read.edges, given[: len(read.sizes)]
    scores = score_pairs(made, others, vectors, read, used, slope)
    rows = made.view(len(made), *vectors[0].shape[1:])
    out = attend(rows, None, None, scores.to(torch.float32), edges.indptr, edges.row, target_of=edges.target,
                 num_targets=sum(edges.sizes), max_degree=edges.max_degree, widens=True)  # fmt: skip
    return sum_apart(out.flatten(1), groups, used, given[len(read.sizes) :])


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, made: Tensor, by_target: Tensor, *given: Any) -> tuple[Tensor, ...]:
        edges, count = layer.read.edges, len(layer.read.sizes)
        sums, alpha = attend_groups(made, by_target.contiguous(), _stack(given[:count]), given[count:], edges.indptr,
                                    edges.row, _lay_out(layer), layer.slope, any(ctx.needs_input_grad),
                                    layer.has_relu)  # fmt: skip
        _keep(ctx, layer, made, by_target, *given, alpha, *(sums if layer.has_relu else ()))
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, (made, by_target, *given) = ctx.layer, ctx.saved_tensors
        edges, count, wants = layer.read.edges, len(layer.read.sizes), ctx.needs_input_grad[1:]
        alpha, *outs = given[len(wants) - 2 :]
        given = given[: len(wants) - 2]
        layer.groups.note(grads, layer.used)
        if is_asked_again(grads):
            return None, *pull_by_torch(partial(_compose, layer), [made, by_target, *given], wants, grads)
        places = _lay_out(layer)
        joined, biases = _join_grads(grads, outs, made, places, wants[2 + count :])
        if not (any(wants[: 2 + count]) and any(layer.used)):
            return None, None, None, *(None,) * count, *biases
        order, vectors = _order(layer), given[:count]
        to_made, pulled, to_target = pull_attention(made, joined, alpha, _stack(vectors), edges.indptr, order, places,
                                                    layer.slope)  # fmt: skip
        parts = zip(pulled.unbind(), vectors, layer.used, wants[2:], strict=False)
        to_vectors = [row.view(vector.shape) if used and wanted else None for row, vector, used, wanted in parts]
        return None, to_made, to_target, *to_vectors, *biases


class _AttendPairs(Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, made: Tensor, others: Tensor, *given: Any) -> tuple[Tensor, ...]:
        edges, order, vectors = layer.read.edges, _order(layer), given[: len(layer.read.sizes)]
        out, alpha = attend_pairs_of(made, others, _stack(vectors), vectors[0].shape[1], edges.indptr, order.row,
                                     _lay_out(layer).targets, layer.slope, any(ctx.needs_input_grad))  # fmt: skip
        _keep(ctx, layer, made, others, *given, alpha, out)
        return add_groups(out, given[len(layer.read.sizes) :], _lay_out(layer))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, (made, others, *given, alpha, out) = ctx.layer, ctx.saved_tensors
        edges, count, wants = layer.read.edges, len(layer.read.sizes), ctx.needs_input_grad[1:]
        layer.groups.note(grads, layer.used)
        if is_asked_again(grads):
            return None, *pull_by_torch(partial(_compose_pairs, layer), [made, others, *given], wants, grads)
        places = _lay_out(layer)
        joined, biases = _join_grads(grads, (), made, places, wants[2 + count :])
        if not (any(wants[: 2 + count]) and any(layer.used)):
            return None, None, None, *(None,) * count, *biases
        order, vectors = _order(layer), given[:count]
        to_made, to_others, along = pull_pairs(made, others, _stack(vectors), joined, out, alpha, edges.indptr,
                                               order.row, order, places, layer.slope)  # fmt: skip
        assert along is not None
        parts = zip(along.split_with_sizes(edges.sizes), vectors, layer.used, wants[2:], strict=False)
        to_vectors = [rows.sum(0).view(vector.shape) if used and wanted else None
                      for rows, vector, used, wanted in parts]  # fmt: skip
        return None, to_made, to_others, *to_vectors, *biases


class _AttendProducts(Function):
    @staticmethod
    def forward(ctx: Any, edges: ProductEdges, heads: int, both: Tensor, queries: Tensor) -> Tensor:
        both, queries = both.contiguous(), queries.contiguous()
        out, alpha = attend_pairs_of(both, queries, None, heads, edges.indptr, edges.sort().row,
                                     edges.lay_out().targets, 1.0, any(ctx.needs_input_grad))  # fmt: skip
        ctx.edges, ctx.heads = edges, heads
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(both, queries, alpha, out)
        return out.to(both.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (both, queries, alpha, out), edges = ctx.saved_tensors, ctx.edges
        if is_asked_again([grad]):
            return None, None, *pull_by_torch(partial(_compose_products, edges, ctx.heads), [both, queries],
                                              ctx.needs_input_grad[2:], [grad])  # fmt: skip
        to_both, to_queries, _ = pull_pairs(both, queries, None, align(grad), out, alpha, edges.indptr,
                                            edges.sort().row, edges.sort(), edges.lay_out(), 1.0)  # fmt: skip
        return None, None, to_both, to_queries


def _compose_products(edges: ProductEdges, heads: int, both: Tensor, queries: Tensor) -> list[Tensor]:
    """Compute the same by functions that torch can differentiate again."""
    keys, values = (part.reshape(len(both), heads, -1) for part in both.chunk(2, dim=1))
    scores = dot(keys, queries.view(edges.num_targets, heads, -1), edges.indptr, edges.row, edges.target,
                 max_degree=edges.max_degree)  # fmt: skip
    return [weigh_values(scores, values, edges).flatten(1)]


def weigh_values(scores: Tensor, values: Tensor, edges: ProductEdges) -> Tensor:
    """Return the sums of values `[U, H, C]` of sources, weighted by a softmax over scores `[E, H]`: `[T, H, C]`."""
    work, sizes = torch.promote_types(scores.dtype, torch.float32), (edges.num_targets, edges.max_degree)
    alpha = softmax(None, None, scores.to(work), edges.indptr, edges.row, num_targets=sizes[0], max_degree=sizes[1])
    dtype = torch.promote_types(values.dtype, scores.dtype)
    made: Tensor = aggregate(values.to(dtype), edges.indptr, edges.row, weight=alpha.to(dtype), target=edges.target,
                             num_targets=sizes[0], max_degree=sizes[1])  # fmt: skip
    return made


def _keep(ctx: Any, layer: _Layer, *tensors: Any) -> None:
    """Keep what the way back needs."""
    ctx.set_materialize_grads(False)
    ctx.layer = layer
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(*tensors)


def _stack(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat([vector.flatten(1) for vector in vectors])


def _join_grads(grads: Sequence[Tensor | None], outs: Sequence[Tensor], like: Tensor, places: Places,
                wants: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the gradients of the sums of each type that edges lead to, one after the other, in the dtype of rows; and
    the gradients of biases. `outs` are the sums, if they have passed a ReLU.
    """
    joined, sums = join_gradients(grads, outs, like.dtype, like.shape[1], places)
    parts = zip(sums.unbind(), grads, wants, strict=True)
    return joined, [row if grad is not None and wanted else None for row, grad, wanted in parts]


def _lay_out(layer: _Layer) -> Places:
    """Return where relations and types begin, once for the layers that share them."""
    edges, groups, sources = layer.read.edges, layer.groups, layer.read.sizes
    given = tuple(map(tuple, groups.relations)), tuple(groups.counts), tuple(groups.sizes)
    made: Places = edges.batch.remember(
        ("places", *edges.key, *given),
        lambda: Places.of(sources, groups.sizes, groups.relations, groups.counts, edges.row.device,
                          not may_wait(edges.row)))  # fmt: skip
    return made


def _order(layer: _Layer) -> BySource:
    """Return the edges by source, sorted once for the layers that share them."""
    edges, num_sources = layer.read.edges, sum(layer.read.sizes)
    made: BySource = edges.batch.remember(
        ("order", *edges.key), lambda: BySource.of(edges.row, edges.target, num_sources, not may_wait(edges.row))
    )
    return made


class _PairScores(Function):
    """Scores of edges `[E, H]`: leaky ReLU of the sum of source and target `[E, H, C]`, times the vector of the
    relation `[1, H, C]`.
    """

    @staticmethod
    def forward(ctx: Any, both: Tensor, used: Used, counts: Sequence[int], slope: float, *vectors: Tensor) -> Tensor:
        ctx.save_for_backward(both, *vectors)
        ctx.used, ctx.counts, ctx.slope = used, counts, slope
        bent = F.leaky_relu(both, slope).split(list(counts))
        return torch.cat([(part * vector).sum(-1) for part, vector in zip(bent, vectors, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, *vectors = ctx.saved_tensors
        counts, wants, grad = list(ctx.counts), ctx.needs_input_grad[4:], grad.unsqueeze(-1)
        to_both = None
        if ctx.needs_input_grad[0] and torch.is_grad_enabled():
            # By functions that torch can differentiate again; inputs that belong to no used result have no part in
            # this.
            live = [vector if used else vector.detach() for vector, used in zip(vectors, ctx.used, strict=True)]
            spread = torch.cat([part * vector for part, vector in zip(grad.split(counts), live, strict=True)])
            to_both = torch.where(both > 0, spread, spread * ctx.slope)
        elif ctx.needs_input_grad[0]:
            spread = torch.empty_like(both)
            for part, vector, rows in zip(grad.split(counts), vectors, spread.split(counts), strict=True):
                torch.mul(part, vector, out=rows)
            to_both = torch.ops.aten.leaky_relu_backward(spread, both, ctx.slope, False)
        found: list[Tensor | None] = [None] * len(vectors)
        bent = F.leaky_relu(both, ctx.slope).split(counts)
        for i, (part, rows) in enumerate(zip(grad.split(counts), bent, strict=True)):
            if ctx.used[i] and wants[i]:
                found[i] = (part * rows).sum(0, keepdim=True)
        return to_both, None, None, None, *found

"""Attention over the relations of a layer in one launch a stage, forward and backward, added up by type.

A score is leaky(x[source] . vector + score of the target), as in GATConv. For the way back no row of an edge is kept:
only the products, the weights of edges, and the sums of each relation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_direct.nn.hetero.joined_edges import Groups, ReadSources, Used, multiply_apart, sum_apart
from pyg_direct.nn.linear import add_up, multiply_exactly
from pyg_direct.nn.sorted_edges import is_capturing
from pyg_direct.ops.aggregate.operators import operators
from pyg_direct.ops.aggregate.pull_attention import BySource, can_pull, pull_attention, sum_by_source
from pyg_direct.ops.aggregate.softmax import attend, attend_rows, is_fused


def score_sources(made: Tensor, vectors: Sequence[Tensor], read: ReadSources, used: Used) -> Tensor:
    """Return the products of rows with the vectors of their relations, `[U, H]` in the dtype of the vectors.

    Args:
        made: Rows of the sources of all relations, `[U, H * C]`.
        vectors: `[1, H, C]` of each.
        read: The number of sources of each, and their edges.
        used: Is read in a backward pass.
    """
    ends = accumulate(read.sizes, initial=0)
    return multiply_apart([made] * len(vectors), [_spread(vector) for vector in vectors], used,
                          rows=[slice(*pair) for pair in pairwise(ends)], dtype=made.dtype,
                          out_dtype=vectors[0].dtype)  # fmt: skip


def _spread(vector: Tensor) -> Tensor:
    """Return a matrix `[H, H * C]` that multiplies each head by its part of a vector `[1, H, C]`."""
    heads = torch.eye(vector.shape[1], dtype=vector.dtype, device=vector.device).unsqueeze(-1)
    return (heads * vector).flatten(1)


def can_attend(made: Tensor, vector: Tensor, read: ReadSources) -> bool:
    """Report whether `attend_relations` takes these rows; see `score_sources`."""
    edges, heads, num_edges = read.edges, vector.shape[1], len(read.edges.row)
    num_targets, degree = sum(edges.sizes), -1 if edges.max_degree is None else edges.max_degree
    scores = vector.new_empty(0, heads)
    return can_pull(made, heads, max(len(made), num_edges, num_targets)) and is_fused(
        made, scores, scores, None, num_edges, num_targets, degree
    )


class _Layer(NamedTuple):
    """Attention of a layer, without its tensors that get gradients."""

    read: ReadSources
    groups: Groups
    used: Used
    slope: float


def attend_relations(made: Tensor, by_target: Tensor, vectors: Sequence[Tensor], biases: Sequence[Tensor | None],
                     read: ReadSources, groups: Groups, used: Used, slope: float) -> list[Tensor]:  # fmt: skip
    """Return the sums of each group, `[count, H * C]`: attention of each relation, added up, and biases.

    Args:
        made: Rows of the sources of all relations, `[U, H * C]`; see `can_attend`.
        by_target: Scores of the targets of all relations, fp32 `[sum of sizes, H]`.
        vectors: Vector of each relation for scores of sources, fp32 `[1, H, C]`.
        biases: `[H * C]` for each group that has one.
        read: Edges of the sources.
        groups: Relations that are added up.
        used: Is set and read in a backward pass.
        slope: Factor of negative scores.
    """
    layer = _Layer(read, groups, used, slope)
    return list(_Attend.apply(layer, made, by_target, *vectors, *biases))


def _compose(layer: _Layer, made: Tensor, by_target: Tensor, *given: Any) -> list[Tensor]:
    """Compute the same by functions that torch can differentiate again."""
    read, groups, used, slope = layer
    edges, vectors = read.edges, given[: len(read.sizes)]
    by_source = score_sources(made, vectors, read, used)
    rows = made.view(len(made), *vectors[0].shape[1:])
    out = attend(rows, by_source, by_target, None, edges.indptr, edges.row, target_of=edges.target,
                 num_targets=sum(edges.sizes), negative_slope=slope, max_degree=edges.max_degree, widens=True)  # fmt: skip
    return sum_apart(out.flatten(1), groups, used, given[len(read.sizes) :])


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, made: Tensor, by_target: Tensor, *given: Any) -> tuple[Tensor, ...]:
        read, groups, _, slope = layer
        edges, count = read.edges, len(read.sizes)
        vectors, biases = given[:count], given[count:]
        by_source = torch.cat([multiply_exactly(part, _spread(vector).t())
                               for part, vector in zip(made.split(read.sizes), vectors, strict=True)])  # fmt: skip
        degree, tracked = -1 if edges.max_degree is None else edges.max_degree, any(ctx.needs_input_grad)
        out, alpha = attend_rows(made, by_source, by_target, None, edges.indptr, edges.row, sum(edges.sizes), False,
                                 slope, degree, tracked, True)  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.layer = layer
        if tracked:
            ctx.save_for_backward(made, by_target, *given, by_source, alpha, out)
        return groups.add_up(out, biases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, (made, by_target, *given, by_source, alpha, out) = ctx.layer, ctx.saved_tensors
        read, groups, used, slope = layer
        groups.note(grads, used)
        if torch.is_grad_enabled():
            return None, *_differentiate(layer, [made, by_target, *given], grads, ctx.needs_input_grad[1:])
        edges, count, wants = read.edges, len(read.sizes), ctx.needs_input_grad[1:]
        biases = [add_up(grad) if grad is not None and wanted else None
                  for grad, wanted in zip(grads, wants[2 + count :], strict=True)]  # fmt: skip
        if not (any(wants[: 2 + count]) and any(used)):
            return None, None, None, *(None,) * count, *biases
        found, parts = _order(layer), []
        for group, grad in zip(groups.relations, grads, strict=True):
            size = max(groups.sizes[i] for i in group)
            parts.append(made.new_zeros(size, made.shape[1]) if grad is None else grad[:size].to(made.dtype))
        vectors = given[:count]
        to_made, to_edges = pull_attention(made, torch.cat(parts), out, alpha, by_source, by_target,
                                           torch.cat([vector.flatten(1) for vector in vectors]), found,
                                           slope)  # fmt: skip
        kernels, degree = operators(), -1 if edges.max_degree is None else edges.max_degree
        to_target = kernels.sum_rows(to_edges, edges.indptr, None, None, len(out), False, degree)
        to_vectors: list[Tensor | None] = [None] * count
        if any(wants[2 : 2 + count]):
            to_source = sum_by_source(to_edges, found, len(made))
            for i, (rows, scores) in enumerate(zip(made.split(read.sizes), to_source.split(read.sizes), strict=True)):
                if used[i] and wants[2 + i]:
                    heads = multiply_exactly(rows.t(), scores).view(*vectors[i].shape[1:], -1)
                    to_vectors[i] = heads.diagonal(dim1=0, dim2=2).t().unsqueeze(0)
        return None, to_made, to_target, *to_vectors, *biases


def _order(layer: _Layer) -> BySource:
    """Return the edges by source, sorted once for the layers that share them."""
    read, groups = layer.read, layer.groups
    edges = read.edges
    begins = list(accumulate(edges.sizes, initial=0))
    shifts, first = [0] * len(edges.sizes), 0
    for group in groups.relations:
        for i in group:
            shifts[i] = first - begins[i]
        first += max(groups.sizes[i] for i in group)

    def make() -> BySource:
        sources = list(accumulate(read.sizes, initial=0))
        return BySource.of(edges.row, edges.target, sources, begins, shifts, is_capturing(edges.row))

    made: BySource = edges.batch.remember(("order", *edges.key, *shifts), make)
    return made


def _differentiate(layer: _Layer, given: Sequence[Any], grads: Sequence[Tensor | None], wants: Sequence[bool]
                   ) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients by functions that torch can differentiate again, for callers that ask for their graph."""
    # Aliases, because no path may lead from one to another.
    aliases = [None if part is None else part.view_as(part) for part in given]
    outs = _compose(layer, *aliases)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    wanted = [part for part, wants_it in zip(aliases, wants, strict=True) if wants_it]
    if not pairs:
        return [None] * len(given)
    found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs],
                                     create_graph=True, allow_unused=True))  # fmt: skip
    return [next(found) if wants_it else None for wants_it in wants]

"""GATConv, and GATv2Conv, over several relations: their softmax and their weighted sum at once.

Each relation multiplies rows with a matrix of its own, so that these products, written where the others end, take the
place of rows by type.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import aggr, conv

from pyg_direct.nn.conv import gat
from pyg_direct.nn.hetero.joined_edges import (
    JoinedEdges,
    Relation,
    Used,
    begin_apart,
    join_edges,
    multiply_apart,
    split_apart,
)
from pyg_direct.nn.sorted_edges import SortedEdges
from pyg_direct.nn.trimming import is_linear
from pyg_direct.ops.aggregate.sum import DTYPES
from pyg_direct.ops.run_kernel import runs_on_gpu

# Bytes of what the edges of all relations of GATv2Conv are scored by, above which a CPU takes each by itself: these
# stay in its caches.
_MOST_BYTES = 1 << 20


def read(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """What relations must have in common to be weighed with this one; None where it is weighed by itself.

    Loops are known by a source that is its target, which joined numbers do not tell.
    """
    matrices, vectors = _matrices(module), _vectors(module)
    if (
        module.add_self_loops
        or type(module.aggr_module) is not aggr.SumAggregation
        or any(getattr(module, name) for name in gat._HOOKS)
        or not all(is_linear(matrix) for matrix in matrices)
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype not in DTYPES
        or not all(part.dtype == x.dtype and part.device == x.device
                   for part in (own, *vectors, *(part for matrix in matrices for part in matrix.parameters())))
        # What does not fit is refused in torch's words.
        or (x.shape[1], own.shape[1]) != tuple(matrix.weight.shape[1] for matrix in matrices)
        or (isinstance(module, conv.GATConv) and (any(matrix.bias is not None for matrix in matrices)
                                                  or gat._sums_first(module, x, own.shape[0])))
    ):  # fmt: skip
        return None
    dropout = module.dropout if module.training else 0.0
    return module.heads, module.out_channels, x.dtype, module.negative_slope, dropout


def _matrices(module: Any) -> tuple[Any, Any]:
    """Those of sources and of targets."""
    if isinstance(module, conv.GATv2Conv):
        return module.lin_l, module.lin_r
    return (module.lin_src, module.lin_dst) if module.lin is None else (module.lin, module.lin)


def _vectors(module: Any) -> tuple[Tensor, ...]:
    """Those that scores are products with."""
    return (module.att,) if isinstance(module, conv.GATv2Conv) else (module.att_src, module.att_dst)


def convolve(relations: Sequence[Relation]) -> list[Tensor]:
    """What each GATConv returns."""
    sources, matrices = [relation.sources for relation in relations], [_matrices(r.conv) for r in relations]
    used = [True] * len(relations)
    made = multiply_apart(sources, [matrix.weight for matrix, _ in matrices], used)
    # (x W) a = x (W a)
    to_source, to_target = zip(*((_fold(source.weight, relation.conv.att_src), _fold(own.weight, relation.conv.att_dst))
                                 for (source, own), relation in zip(matrices, relations, strict=True)),
                               strict=True)  # fmt: skip
    by_source = multiply_apart(sources, to_source, used)
    by_target = multiply_apart([relation.own for relation in relations], to_target, used)
    edges = join_edges(relations, *begin_apart(relations))
    return _sum(relations, made, (by_source, by_target, None), edges, relations[0].conv.negative_slope, used)


def convolve_v2(relations: Sequence[Relation]) -> list[Tensor] | None:
    """What each GATv2Conv returns; None where each is faster by itself."""
    first, used = relations[0].conv, [True] * len(relations)
    counts = [relation.edge_index.shape[1] for relation in relations]
    rows = relations[0].sources
    if not runs_on_gpu(rows) and sum(counts) * first.heads * first.out_channels * rows.element_size() > _MOST_BYTES:
        return None
    matrices = [_matrices(relation.conv) for relation in relations]
    made, others = (
        multiply_apart(rows, [matrix.weight for matrix in side], used, [matrix.bias for matrix in side])
        for rows, side in zip(zip(*((r.sources, r.own) for r in relations), strict=True),
                              zip(*matrices, strict=True), strict=True)
    )  # fmt: skip
    edges = join_edges(relations, *begin_apart(relations))
    both = made.index_select(0, edges.row) + others.index_select(0, edges.target)
    scores = _Scores.apply(both.view(-1, first.heads, first.out_channels), used, counts, first.negative_slope,
                           *(relation.conv.att for relation in relations))  # fmt: skip
    # What scores are sums of is bent already.
    return _sum(relations, made, (None, None, scores), edges, 1.0, used)


def _sum(relations: Sequence[Relation], made: Tensor, scores: gat._Given, edges: JoinedEdges, slope: float,
         used: Used) -> list[Tensor]:  # fmt: skip
    """The softmax and the sum of all relations, and what each makes of its part."""
    first, num_targets = relations[0].conv, sum(edges.sizes)
    known = SortedEdges(edges.indptr, edges.row, edges.target, edges.num_sources, num_targets, edges.max_degree)
    out = gat.sum_weighted(
        made.view(-1, first.heads, first.out_channels), scores, known, num_targets=num_targets, negative_slope=slope,
        dropout=first.dropout if first.training else 0.0,
        transposed=edges.transpose(torch.is_grad_enabled() and made.requires_grad))  # fmt: skip
    pieces = split_apart(out, edges.sizes, used)
    return [_finish(relation, piece) for relation, piece in zip(relations, pieces, strict=True)]


def _fold(weight: Tensor, vector: Tensor) -> Tensor:
    """A matrix `[H * C, D]` times a vector of each head `[1, H, C]`: `[H, D]`."""
    _, heads, channels = vector.shape
    return torch.bmm(vector.view(heads, 1, channels), weight.view(heads, channels, -1)).squeeze(1)


def _finish(relation: Relation, out: Tensor) -> Tensor:
    module = relation.conv
    out = out.flatten(1) if module.concat else out.mean(dim=1)
    out = out if module.res is None else out + module.res(relation.own)
    return out if module.bias is None else out + module.bias


class _Scores(Function):
    """Scores of edges `[E, H]`: what source and target make together `[E, H, C]`, bent, times the vector of the
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
            # In what torch can differentiate once more; what belongs to no result used has no part in that.
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

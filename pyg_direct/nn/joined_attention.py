"""GATConv over several relations: their softmax and their weighted sum at once.

Each relation multiplies rows with a matrix of its own, so that these products, written where the others end, take the
place of rows by type.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_direct.nn import attention
from pyg_direct.nn.apart import multiply_apart, split_apart
from pyg_direct.nn.joined_edges import Relation, begin_apart, join_edges
from pyg_direct.nn.sorted import SortedEdges
from pyg_direct.nn.trimmed import is_linear
from pyg_direct.ops.aggregate import DTYPES


def read(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """What relations must have in common to be weighed with this one; None where it is weighed by itself.

    Loops are known by a source that is its target, which joined numbers do not tell.
    """
    matrices = _matrices(module)
    if (
        module.add_self_loops
        or type(module.aggr_module) is not aggr.SumAggregation
        or any(getattr(module, name) for name in attention._HOOKS)
        or not all(is_linear(matrix) and matrix.bias is None for matrix in matrices)
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype not in DTYPES
        or not all(part.dtype == x.dtype and part.device == x.device
                   for part in (own, *(matrix.weight for matrix in matrices), module.att_src, module.att_dst))
        # What does not fit is refused in torch's words.
        or (x.shape[1], own.shape[1]) != tuple(matrix.weight.shape[1] for matrix in matrices)
        or attention._sums_first(module, x, own.shape[0])
    ):  # fmt: skip
        return None
    dropout = module.dropout if module.training else 0.0
    return module.heads, module.out_channels, x.dtype, module.negative_slope, dropout


def _matrices(module: Any) -> tuple[Any, Any]:
    """Those of sources and of targets."""
    return (module.lin_src, module.lin_dst) if module.lin is None else (module.lin, module.lin)


def convolve(relations: Sequence[Relation]) -> list[Tensor]:
    """What each convolution returns."""
    first, sources = relations[0].conv, [relation.sources for relation in relations]
    heads, channels = first.heads, first.out_channels
    matrices = [_matrices(relation.conv) for relation in relations]
    used = [True] * len(relations)
    made = multiply_apart(sources, [matrix.weight for matrix, _ in matrices], used)
    edges = join_edges(relations, *begin_apart(relations))
    # (x W) a = x (W a)
    to_source, to_target = zip(*((_fold(source.weight, relation.conv.att_src), _fold(own.weight, relation.conv.att_dst))
                                 for (source, own), relation in zip(matrices, relations, strict=True)),
                               strict=True)  # fmt: skip
    by_source = multiply_apart(sources, to_source, used)
    by_target = multiply_apart([relation.own for relation in relations], to_target, used)
    num_targets = sum(edges.sizes)
    known = SortedEdges(edges.indptr, edges.row, edges.target, edges.num_sources, num_targets, edges.max_degree)
    out = attention.sum_weighted(
        made.view(-1, heads, channels), (by_source, by_target, None), known, num_targets=num_targets,
        negative_slope=first.negative_slope, dropout=first.dropout if first.training else 0.0,
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

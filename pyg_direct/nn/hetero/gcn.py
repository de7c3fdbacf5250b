"""GCNConv over several relations, each from a type to itself: one weighted sum for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_direct.nn.conv import gcn
from pyg_direct.nn.dispatch import wins_on_cpu
from pyg_direct.nn.hetero.joined_edges import (
    Relation,
    Tables,
    begin_apart,
    join_apart,
    join_edges,
    multiply_apart,
    split_apart,
)
from pyg_direct.nn.linear import multiply
from pyg_direct.nn.trimming import is_linear
from pyg_direct.ops.aggregate.sum import DTYPES, aggregate
from pyg_direct.ops.run_kernel import runs_on_gpu


def read(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """What relations must have in common to be summed with this one; None where it is summed by itself."""
    if (
        own is not x
        or not module.normalize
        or module.cached
        or type(module.aggr_module) is not aggr.SumAggregation
        or not is_linear(module.lin)
        or module.lin.bias is not None
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype not in DTYPES
        or x.dtype != module.lin.weight.dtype
        or module.lin.weight.device != x.device
        or x.shape[1] != module.lin.weight.shape[1]
        or not (runs_on_gpu(x) or wins_on_cpu(x.new_empty(0, module.out_channels)))
    ):
        return None
    is_late = x.shape[1] <= module.out_channels
    return is_late, x.shape[1] if is_late else module.out_channels, x.dtype, module.add_self_loops


def convolve(relations: Sequence[Relation]) -> list[Tensor]:
    """What each convolution returns; the matrix comes before the sum or after it, where rows are narrower."""
    tables, first, used = Tables.of(relations), relations[0], [True] * len(relations)
    is_late, dtype = first.sources.shape[1] <= first.conv.out_channels, first.sources.dtype
    found = [gcn._normalise(relation.batch, relation.edge_index, len(relation.own), len(relation.own), None,
                            relation.conv, dtype) for relation in relations]  # fmt: skip
    if is_late:
        starts, num_sources = tables.starts, tables.num_rows
        rows = join_apart(tables.tables, tables.serve(), used)
    else:
        starts, num_sources = begin_apart(relations)
        rows = multiply_apart([r.sources for r in relations], [r.conv.lin.weight for r in relations], used)
    has_loops = first.conv.add_self_loops
    edges = join_edges(relations, starts, num_sources, name="looped together" if has_loops else "joined",
                       pairs=[(part.row, part.target) for part, _ in found], more=int(has_loops))  # fmt: skip
    # Those of relations are remembered too, as what they are is.
    weight = edges.batch.remember(("weighed", dtype, *edges.key), lambda: torch.cat([part for _, part in found]))
    out = aggregate(rows, edges.indptr, edges.row, weight=weight, target=edges.target, num_targets=sum(edges.sizes),
                    max_degree=edges.max_degree,
                    transposed=edges.transpose(torch.is_grad_enabled() and rows.requires_grad))  # fmt: skip
    pieces = split_apart(out, edges.sizes, used)
    if is_late:
        return [multiply(piece, relation.conv.lin.weight, relation.conv.bias)
                for piece, relation in zip(pieces, relations, strict=True)]  # fmt: skip
    return [piece if relation.conv.bias is None else piece + relation.conv.bias
            for piece, relation in zip(pieces, relations, strict=True)]  # fmt: skip

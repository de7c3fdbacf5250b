"""GCNConv over sorted edges: normalised in their order, and aggregated on the narrower side of its matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_direct.nn.propagate import DTYPES, is_plain, wins_on_cpu
from pyg_direct.nn.sorted import add_loops, find_batch, loop_places
from pyg_direct.nn.trimmed import Kept, is_linear
from pyg_direct.ops.aggregate import aggregate
from pyg_direct.ops.launch import runs_on_gpu


def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
    """What replaces `forward` of an accelerated GCNConv."""
    if torch.compiler.is_compiling():
        return type(self).forward(self, x, edge_index, edge_weight)
    rows, num_targets = (x.rows, x.kept.shape[0]) if isinstance(x, Kept) else (x, None)
    out = None
    if (self.normalize and not self.cached and isinstance(rows, Tensor) and rows.dim() == 2
            and type(self.aggr_module) is aggr.SumAggregation and is_plain(self, edge_index)
            and (edge_weight is None or edge_weight.shape == edge_index.shape[1:])):  # fmt: skip
        out = _convolve(self, rows, edge_index, edge_weight, num_targets)
    if out is None:
        out = type(self).forward(self, rows, edge_index, edge_weight)
        out = out if num_targets is None else out[:num_targets]
    return out


def _convolve(self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None,
              num_targets: int | None) -> Tensor | None:  # fmt: skip
    batch, num_sources = find_batch(edge_index), x.shape[0]
    num_targets = num_sources if num_targets is None else num_targets
    if batch is None or x.dtype not in DTYPES or not batch.fits(edge_index, num_sources, num_targets):
        return None
    if not runs_on_gpu(x) and not wins_on_cpu(x.new_empty(0, self.out_channels), "sum", True):
        return None

    def normalise() -> tuple[Tensor, Tensor]:
        return _normalise(edge_index, num_sources, num_targets, edge_weight, self, x.dtype)

    if edge_weight is None:
        key = "gcn", edge_index.shape[1], num_sources, num_targets, self.add_self_loops, x.dtype
        edges, weight = batch.remember(key, normalise)
    else:
        edges, weight = normalise()
    # The matrix may come before the sum or after it: where rows are narrower, or fewer.
    late = is_linear(self.lin) and (x.shape[1] <= self.out_channels or 2 * num_targets <= num_sources)
    rows = x if late else self.lin(x)
    # Under autocast the matrix returns another dtype.
    dtype = torch.promote_types(rows.dtype, weight.dtype)
    known = find_batch(edges)
    assert known is not None, "edges are not known to be sorted"
    order = known.view(edges)
    transposed = None
    if rows.requires_grad and (torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows)):
        transposed = known.transpose(order, num_sources)
    out = aggregate(rows.to(dtype), order.indptr, order.row, weight=weight.to(dtype), target=order.target,
                    num_targets=num_targets, max_degree=order.max_degree, transposed=transposed)  # fmt: skip
    if late:
        return F.linear(out, self.lin.weight, self.bias)
    return out if self.bias is None else out + self.bias


def _normalise(edge_index: Tensor, num_sources: int, num_targets: int, given: Tensor | None, self: Any,
               dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Edges, with one loop a target if asked for, and their symmetric weights; other loops then weigh nothing.

    Nodes from `num_targets` on have no edges of their own.
    """
    batch = find_batch(edge_index)
    assert batch is not None, "edges are not known to be sorted"
    work = torch.promote_types(dtype, torch.float32)
    indptr, row, target, *_ = batch.view(edge_index)
    weight = torch.ones(row.numel(), dtype=work, device=row.device) if given is None else given.to(work)
    edges, alone = edge_index, 0.0
    if self.add_self_loops:
        edges = add_loops(edge_index, num_targets, num_sources)
        places, loops = loop_places(indptr, target, num_targets)
        is_loop = row == target
        # A loop that is there already gives its weight to the one that stays; PyG fills others in where there are
        # weights at all.
        alone = 2.0 if self.improved and given is not None else 1.0
        own = weight.new_full((num_targets + 1,), alone)
        if given is not None:
            own = own.scatter(0, torch.where(is_loop, target, num_targets).long(), weight)
        weight = weight.new_zeros(edges.shape[1]).index_copy(0, places, weight.masked_fill(is_loop, 0))
        weight = weight.index_copy(0, loops, own[:num_targets])
    known = find_batch(edges)
    assert known is not None, "edges are not known to be sorted"
    indptr, row, target, _, _, max_degree = known.view(edges)
    degree = aggregate(weight.view(-1, 1), indptr, target=target, num_targets=num_targets, max_degree=max_degree)
    degree = F.pad(degree.view(-1), (0, num_sources - num_targets), value=alone)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0)
    return edges, (scale[row] * weight * scale[target]).to(dtype)

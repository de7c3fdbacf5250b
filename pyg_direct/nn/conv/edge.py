"""EdgeConv over sorted edges: the first matrix of its network is multiplied by rows of nodes, not of edges.

W1 x_i + W2 (x_j - x_i) is (W1 - W2) x_i + W2 x_j. A network may be this matrix, an activation and at most one more
matrix. Then a sum of its results is the last matrix times the sum of activations, without a row for each edge. The rest
of any other network runs over rows of edges.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import (
    REDUCES,
    SUMS,
    find_changed,
    find_slope,
    is_given,
    is_matrix,
    list_parts,
    pair_nodes,
)
from pyg_direct.ops.aggregate.sum_pairs import sum_affine


def find_left(module: Any) -> str | None:
    """Return why options of an EdgeConv leave it to the operators of any layer."""
    if not is_matrix(list_parts(module.nn)[0]):
        return "its network does not begin with a matrix"
    return find_changed(module, tuple(REDUCES))


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the aggregation of the network's results, `[T, F]`."""
    parts, (rows, targets) = list_parts(self.nn), kwargs["x"]
    first, rest = parts[0], parts[1:]
    if not is_given(known, rows, targets) or 2 * rows.shape[1] != first.weight.shape[1]:
        return None
    if rows.shape[1] != targets.shape[1] or not known.fits(len(rows), len(targets)):
        return None
    own, other = first.weight.chunk(2, dim=1)
    shift, rows = F.linear(targets, own - other, first.bias), F.linear(rows, other)
    slope, ends = find_slope(None), rest
    if rest and not is_matrix(rest[0]):
        slope, ends = find_slope(rest[0]), rest[1:]
    if type(self.aggr_module) in SUMS and slope is not None and len(ends) <= 1 and all(map(is_matrix, ends)):
        out = sum_affine(None, shift, rows, pair_nodes(known, len(rows), len(shift)), slope)
        return _finish(self, known, out, ends)
    with any_convolution.know(known):
        made = any_convolution.gather(shift, known.index)
        made = shift.index_select(0, known.index) if made is None else made
        for part in (known.gather_sources(rows), *rest):
            made = made + part if isinstance(part, Tensor) else part(made)
        out = self.aggr_module(made, known.index, dim_size=len(targets), dim=self.node_dim)
    return out


def _finish(self: Any, known: KnownTargets, out: Tensor, ends: list[Any]) -> Tensor:
    """Multiply sums of rows of edges by the last matrix, if there is one, or their means."""
    is_mean = type(self.aggr_module) is aggr.MeanAggregation
    if is_mean:
        out = (out * known.scale(len(out), out)).to(out.dtype)
    if not ends:
        return out
    out = F.linear(out, ends[0].weight)
    if ends[0].bias is None:
        return out
    degree = known.offsets(len(out)).diff().unsqueeze(1)
    return out + ends[0].bias * (degree.clamp(max=1) if is_mean else degree).to(out.dtype)


EDGE = ConvSpec(conv.EdgeConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
                sees_neighbors_only=True)  # fmt: skip

"""EdgeConv over sorted edges, if it sums: the first matrix of its network is multiplied by rows of nodes, not of edges.

W1 x_i + W2 (x_j - x_i) is (W1 - W2) x_i + W2 x_j. The network may be this matrix, an activation and at most one more
matrix. Then a sum of its results is the last matrix times the sum of activations, without a row for each edge. Numbers
of the first rows are subtracted from all, so that a common offset, as of coordinates on a map, costs no digits.
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
    SUMS,
    find_changed,
    find_slope,
    finish_sum,
    is_given,
    is_matrix,
    list_parts,
    pair_nodes,
    read_ends,
)
from pyg_direct.nn.linear import Product, multiply_ends
from pyg_direct.ops.aggregate.sum_pairs import sum_affine


def find_left(module: Any) -> str | None:
    """Return why options of an EdgeConv leave it to the operators of any layer."""
    first, slope, last = _read_network(module)
    if not is_matrix(first) or slope is None or len(last) > 1 or not all(map(is_matrix, last)):
        return "its network is not a matrix, an activation and a matrix"
    return find_changed(module, SUMS)


def _read_network(module: Any) -> tuple[Any, float | None, list[Any]]:
    """Return the first part of the network, the slope of its activation, and the other parts; see `find_slope`."""
    first, *rest = list_parts(module.nn)
    if not rest or is_matrix(rest[0]):
        return first, find_slope(None), rest
    return first, find_slope(rest[0]), rest[1:]


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the sum or mean of the network's results, `[T, F]`."""
    rows, targets = read_ends(kwargs.get("x"))
    first, slope, last = _read_network(self)
    if slope is None or not is_given(known, rows, targets) or 2 * rows.shape[1] != first.weight.shape[1]:
        return None
    if rows.shape[1] != targets.shape[1] or not known.fits(len(rows), len(targets)) or len(targets) == 0:
        return None
    own, other = first.weight.chunk(2, dim=1)
    # Of three, so that one unlike all others is not taken; the first, because padding may follow.
    few = targets.detach()[:3].sort(dim=0).values
    # Numbers that are not finite stay in their own results.
    middle = few[len(few) // 2].nan_to_num(0.0, 0.0, 0.0)
    bias = F.linear(middle.to(own.dtype), own, first.bias)
    # Edges of a batch lead to its first nodes only.
    count, near = min(known.edges.least_targets, len(targets)), rows - middle
    rows, shift = multiply_ends(near, near if rows is targets else targets - middle, [Product(other)],
                                [Product(own - other, bias, count)])  # fmt: skip
    out = sum_affine(None, shift, rows, pair_nodes(known, len(rows), count), slope)
    out = finish_sum(self, known, out)
    if last:
        out = F.linear(out, last[0].weight)
    if last and last[0].bias is not None:
        degree = known.offsets(count).diff().unsqueeze(1)
        is_mean = type(self.aggr_module) is aggr.MeanAggregation
        out = (out + last[0].bias * (degree.clamp(max=1) if is_mean else degree)).to(out.dtype)
    return F.pad(out, (0, 0, 0, len(targets) - count))


EDGE = ConvSpec(conv.EdgeConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
                sees_neighbors_only=True)  # fmt: skip

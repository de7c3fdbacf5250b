"""NNConv over sorted edges, whose network ends with a matrix: no matrix of an edge is made.

With h(e), the numbers before the last matrix, a message is the product of this matrix and the outer product of h(e) and
the source's row. So outer products are summed over the edges of each target, and multiplied by the matrix once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import SUMS, find_changed, is_given, is_matrix, list_parts, read_ends
from pyg_direct.nn.weighted_rows import REDUCES
from pyg_direct.ops.aggregate.sum_rows import aggregate

# Numbers of h(e) for each number of the result, up to which the sum of outer products is faster.
_MOST = 4


def find_left(module: Any) -> str | None:
    """Return why options of an NNConv leave it to the operators of any layer."""
    last = list_parts(module.nn)[-1]
    if not is_matrix(last):
        return "its network does not end with a matrix"
    if last.weight.shape[1] >= _MOST * module.out_channels:
        return "the matrix of an edge is small"
    return find_changed(module, SUMS)


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the sum or mean of messages, `[T, F]`."""
    (rows, targets), along = read_ends(kwargs.get("x")), kwargs.get("edge_attr")
    *first, last = list_parts(self.nn)
    if not is_given(known, rows) or not isinstance(along, Tensor):
        return None
    count = len(rows) if targets is None else len(targets)
    if not known.fits(len(rows), count):
        return None
    if along.dim() != 2 or len(along) != known.index.numel() or rows.shape[1] != self.in_channels_l:
        return None
    if torch.is_autocast_enabled(rows.device.type):
        return None
    # Edges of a batch lead to its first nodes only, and sums are wide.
    edges, used = known.edges, min(known.edges.least_targets, count)
    # Outer products of few edges of many nodes would take more memory than a matrix for each edge.
    if (len(rows) + used) * (last.weight.shape[1] + 1) > len(along) * self.out_channels:
        return None
    for part in first:
        along = part(along)
    if last.bias is not None:
        along = F.pad(along, (0, 1), value=1.0)
    if not is_given(known, along, rows, last.weight):
        return None
    width, channels = along.shape[1], rows.shape[1]
    along = along if known.order is None else along.index_select(0, known.order)
    spread = rows.unsqueeze(1).expand(len(rows), width, channels).reshape(len(rows), width * channels)
    sums = aggregate(spread, edges.indptr, edges.row, reduce=REDUCES[type(self.aggr_module)], weight=along,
                     target=edges.target, num_targets=used, max_degree=edges.max_degree,
                     transposed=known.batch.transpose(edges, len(rows)))  # fmt: skip
    # [in, out, h] to [out, h, in]
    weight = last.weight if last.bias is None else torch.cat([last.weight, last.bias.unsqueeze(1)], dim=1)
    weight = weight.view(channels, self.out_channels, width).permute(1, 2, 0).reshape(self.out_channels, -1)
    return F.pad(F.linear(sums, weight), (0, 0, 0, count - used))


NN = ConvSpec(conv.NNConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
              sees_neighbors_only=True)  # fmt: skip

"""SuperGATConv over sorted edges: scores are products of rows of nodes, then softmax and weighted sums at once.

PyG's own `forward` runs, and its loss of attention stays as it is. Its `propagate` alone is replaced: it is given edges
with loops, in an order that is not known, and uses the layer's edges.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.conv.gat import sum_weighted
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import find_replaced
from pyg_direct.nn.fused_messages import find_changed, find_slow
from pyg_direct.nn.sorted_edges import SortedBatch, find_batch
from pyg_direct.nn.whole_graphs import find_whole, may_find
from pyg_direct.ops.aggregate.products import dot
from pyg_direct.ops.aggregate.sum_rows import DTYPES
from pyg_direct.ops.run_kernel import is_ordinary, is_recorded


class _Thread(threading.local):
    # Edges of the layer whose `forward` runs, as they are known and as they were given.
    edges: tuple[SortedBatch, Tensor] | None = None


_THREAD = _Thread()


def find_left(module: Any) -> str | None:
    """Return why options of a SuperGATConv leave it to the operators of any layer."""
    return find_changed(module, (aggr.SumAggregation,)) or find_replaced(module) or find_slow(module)


def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    """Override `forward` of an accelerated SuperGATConv."""
    known, width = None, self.heads * self.out_channels
    if not is_recorded() and is_ordinary() and isinstance(x, Tensor) and may_find(
        edge_index, x, 3 * width, saves_launches=True
    ) and find_left(self) is None:  # fmt: skip
        batch = find_batch(edge_index)
        batch = find_whole(edge_index, len(x), 3 * width, saves_launches=True) if batch is None else batch
        if batch is not None and batch.fits(edge_index, len(x), len(x)):
            known = batch, edge_index
    before, _THREAD.edges = _THREAD.edges, known
    try:
        return type(self).forward(self, x, edge_index, *args, **kwargs)
    finally:
        _THREAD.edges = before


def propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
    """Override `propagate` of an accelerated SuperGATConv."""
    known, rows = _THREAD.edges, kwargs.get("x")
    if known is None or rows is None or size is not None or not _takes(self, rows):
        return any_convolution.propagate(self, edge_index, size, **kwargs)
    _THREAD.edges = None
    self._paths.note()
    return _attend(self, rows, *known)


def _takes(self: Any, rows: Any) -> bool:
    return (
        isinstance(rows, Tensor)
        and rows.dim() == 3
        and rows.dtype in DTYPES
        and (self.att_l is None or self.att_l.dtype == rows.dtype)
        and not torch.is_autocast_enabled(rows.device.type)
    )


def _attend(self: Any, rows: Tensor, batch: SortedBatch, edge_index: Tensor) -> Tensor:
    """Return the weighted sums of rows `[N, H, C]`."""
    num_nodes, edges = len(rows), batch.view(edge_index)
    count = min(edges.least_targets, num_nodes)
    if self.add_self_loops:
        (edges, _), count = batch.add_loops(edge_index, num_nodes), num_nodes
    by_source, targets = batch.transpose(edges, num_nodes), rows[:count]

    def multiply(sources: Tensor, queries: Tensor) -> Tensor:
        made: Tensor = dot(sources, queries, edges.indptr, edges.row, edges.target, max_degree=edges.max_degree,
                           transposed=by_source)  # fmt: skip
        return made

    scores = multiply(rows, targets)
    if self.attention_type == "MX":
        # The sum of a score of each end is a product of pairs with ones.
        ones = rows.new_ones(num_nodes, self.heads)
        sources = torch.stack([(rows * self.att_l).sum(-1), ones], dim=-1)
        queries = torch.stack([ones[:count], (targets * self.att_r).sum(-1)], dim=-1)
        scores = multiply(sources, queries) * scores.sigmoid()
    else:
        scores = scores / math.sqrt(self.out_channels)
    out = sum_weighted(rows, (None, None, scores), edges, num_targets=count, negative_slope=self.negative_slope,
                       dropout=self.dropout if self.training else 0.0, loops=self.add_self_loops,
                       transposed=by_source)  # fmt: skip
    return F.pad(out, (0, 0, 0, 0, 0, num_nodes - count)) if count < num_nodes else out


SUPER_GAT = ConvSpec(conv.SuperGATConv, forward, propagate, find_left=find_left, leaves_to_any=True)

"""SAGEConv and GraphConv over sorted edges: the product of a node's own row is added where that of the sum lies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv

from pyg_direct.nn.layer import convolve, fit_edges
from pyg_direct.nn.product import multiply
from pyg_direct.nn.propagate import find_reduce, is_plain
from pyg_direct.nn.sorted import SortedBatch, find_batch
from pyg_direct.nn.trimmed import Kept, is_linear
from pyg_direct.nn.whole import find_whole, may_find
from pyg_direct.ops.launch import is_recorded


def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What replaces `forward` of an accelerated SAGEConv or GraphConv."""
    out = None
    if not is_recorded() and not self._unknown.are(edge_index):
        if may_find(edge_index, x):
            out = _find(self, x, edge_index, *args, **kwargs)
        else:
            self._unknown.note(edge_index)
    return type(self).forward(self, x, edge_index, *args, **kwargs) if out is None else out


def _find(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """What the layer returns; None where PyG's own code must find it, or must refuse."""
    out = None
    if is_plain(self, edge_index):
        pair = x if isinstance(x, (tuple, list)) else (x, x)
        is_sage = isinstance(self, conv.SAGEConv)
        combine, names = (_combine_sage, ("size",)) if is_sage else (_combine_graph, ("edge_weight", "size"))
        if len(args) > len(names) or not kwargs.keys() <= set(names[len(args) :]):
            return None
        if all(isinstance(part, Tensor) and part.dim() == 2 for part in pair):
            batch = find_batch(edge_index)
            if batch is None and not (args or kwargs):
                batch = find_whole(edge_index, pair[1].shape[0], pair[0].shape[1])
            if batch is not None:
                out = combine(self, batch, pair, edge_index, *args, **kwargs)
    return out


def _combine_sage(self: Any, batch: SortedBatch, x: Any, edge_index: Tensor, size: Any = None) -> Tensor | None:
    if not self.root_weight:
        return None
    first, second = self.lin_l, self.lin_r
    if not _are_matrices(first, second, x):
        return None
    rows = self.lin(x[0]).relu() if self.project and hasattr(self, "lin") else x[0]
    out = _convolve_at_once(self, batch, rows, x, edge_index, first, second, size)
    if out is None:
        out = _add_product(self.propagate(edge_index, x=(rows, x[1]), size=size), first, x[1], second)
    return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


def _combine_graph(self: Any, batch: SortedBatch, x: Any, edge_index: Tensor, edge_weight: Any = None,
                   size: Any = None) -> Tensor | None:  # fmt: skip
    first, second = self.lin_rel, self.lin_root
    if not _are_matrices(first, second, x):
        return None
    out = None
    if edge_weight is None:
        out = _convolve_at_once(self, batch, x[0], x, edge_index, first, second, size)
    if out is None:
        out = self.propagate(edge_index, x=(x[0], x[1]), edge_weight=edge_weight, size=size)
        out = _add_product(out, first, x[1], second)
    return out


def _convolve_at_once(self: Any, batch: SortedBatch, rows: Tensor, x: Any, edge_index: Tensor, first: Any, second: Any,
                      size: Any) -> Tensor | None:  # fmt: skip
    """Sum and products in one step of autograd; None where they take several."""
    own = x[1]
    # What does not fit is refused in torch's words.
    if rows.shape[1] != first.weight.shape[1] or own.shape[1] != second.weight.shape[1]:
        return None
    fitting = fit_edges(self, batch, rows, own, edge_index, size)
    if fitting is None:
        return None
    return convolve(rows, own, first.weight, first.bias, second.weight, fitting.edges, reduce=find_reduce(self),
                    transposed=fitting.transposed, is_first=isinstance(x, Kept) and rows is x.rows)  # fmt: skip


def _are_matrices(first: Any, second: Any, x: Any) -> bool:
    """Whether both are matrices of the dtype of the rows, the second without a bias."""
    return (
        is_linear(first)
        and is_linear(second)
        and second.bias is None
        and x[1].dtype == x[0].dtype == first.weight.dtype == second.weight.dtype
        and not torch.is_autocast_enabled(x[0].device.type)
    )


def _add_product(summed: Tensor, first: Any, own: Tensor, second: Any) -> Tensor:
    """first(summed) + second(own), without a pass over memory for the plus."""
    if summed.dtype != own.dtype:
        return first(summed) + second(own)  # type: ignore[no-any-return]
    return multiply(summed, first.weight, first.bias, own, second.weight)

"""SAGEConv and GraphConv over sorted edges: the product of a node's own row is added where that of the sum lies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import conv

from pyg_direct.nn.product import multiply
from pyg_direct.nn.propagate import is_plain
from pyg_direct.nn.sorted import find_batch
from pyg_direct.nn.trimmed import is_linear


def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What replaces `forward` of an accelerated SAGEConv or GraphConv."""
    out = None
    if not torch.compiler.is_compiling() and is_plain(self, edge_index) and find_batch(edge_index) is not None:
        pair = x if isinstance(x, (tuple, list)) else (x, x)
        combine = _combine_sage if isinstance(self, conv.SAGEConv) else _combine_graph
        if all(isinstance(part, Tensor) and part.dim() == 2 for part in pair):
            out = combine(self, pair, edge_index, *args, **kwargs)
    return type(self).forward(self, x, edge_index, *args, **kwargs) if out is None else out


def _combine_sage(self: Any, x: Any, edge_index: Tensor, size: Any = None) -> Tensor | None:
    if not self.root_weight or not _are_matrices(self.lin_l, self.lin_r, x):
        return None
    rows = self.lin(x[0]).relu() if self.project and hasattr(self, "lin") else x[0]
    out = _add_product(self.propagate(edge_index, x=(rows, x[1]), size=size), self.lin_l, x[1], self.lin_r)
    return F.normalize(out, p=2.0, dim=-1) if self.normalize else out


def _combine_graph(self: Any, x: Any, edge_index: Tensor, edge_weight: Any = None, size: Any = None) -> Tensor | None:
    if not _are_matrices(self.lin_rel, self.lin_root, x):
        return None
    out = self.propagate(edge_index, x=(x[0], x[1]), edge_weight=edge_weight, size=size)
    return _add_product(out, self.lin_rel, x[1], self.lin_root)


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

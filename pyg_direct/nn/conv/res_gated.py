"""ResGatedGraphConv over sorted edges: gates and gated rows of sources are summed at once.

A gate is the sigmoid of a sum, so rows of edges of their own are multiplied apart from rows of nodes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import (
    count_first,
    find_changed,
    find_slow,
    is_given,
    is_matrix,
    pair_edges,
    pair_nodes,
    read_ends,
)
from pyg_direct.nn.linear import Product, add_to_first, multiply_ends
from pyg_direct.nn.trimming import has_hooks
from pyg_direct.ops.aggregate.sum_pairs import sum_gated


def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None) -> Any:
    """Override `forward` of an accelerated ResGatedGraphConv."""
    (rows, targets), matrices = read_ends(x), [self.lin_query, self.lin_value, self.lin_key]
    matrices += [self.lin_skip] if self.root_weight else []
    count = count_first(self, edge_index, rows, targets) if all(map(is_matrix, matrices)) else None
    if count is None or self.edge_dim is not None or (self.root_weight and self.lin_skip.bias is not None):
        return type(self).forward(self, x, edge_index, edge_attr)
    query, value, key, *skip = (Product(part.weight, part.bias) for part in matrices)
    skip = [part._replace(bias=self.bias) for part in skip]
    queries, values, keys, *own = multiply_ends(rows, targets, [query, value], [key._replace(num_rows=count), *skip])
    out = self.propagate(edge_index, k=keys, q=queries, v=values, edge_attr=None)
    if own:
        return add_to_first(own[0], out)
    out = F.pad(out, (0, 0, 0, len(targets) - count))
    return out if self.bias is None else out + self.bias


def find_left(module: Any) -> str | None:
    """Return why options of a ResGatedGraphConv leave it to the operators of any layer."""
    act = module.act
    if type(act) is not torch.nn.Sigmoid or "forward" in act.__dict__ or has_hooks(act):
        return "its gate is no sigmoid"
    if module.edge_dim is not None and not all(map(is_matrix, (module.lin_key, module.lin_query, module.lin_value))):
        return "a program changed its matrices"
    # Products of rows of edges with three matrices gain on a CPU, too.
    slow = find_slow(module) if module.edge_dim is None else None
    return find_changed(module, (aggr.SumAggregation,)) or slow


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the sum of messages, `[T, F]`."""
    given: Any = (kwargs.get(name) for name in ("k", "q", "v", "edge_attr"))
    own, rows, values, attribute = given
    if (attribute is None) != (self.edge_dim is None) or not is_given(known, own, rows, values):
        return None
    if not known.fits(len(rows), len(own)):
        return None
    if attribute is None:
        return sum_gated(own, rows, values, pair_nodes(known, len(rows), len(own)))
    if not is_given(known, attribute, rows) or len(attribute) != known.index.numel():
        return None
    key, query, value = ((part.weight.tensor_split([part.weight.shape[1] - attribute.shape[1]], dim=1), part.bias)
                         for part in (self.lin_key, self.lin_query, self.lin_value))  # fmt: skip
    own = F.linear(own, key[0][0], key[1])
    # The part of both ends' gates that belongs to the edge.
    along = F.linear(attribute, key[0][1] + query[0][1]) + known.gather_sources(F.linear(rows, query[0][0], query[1]))
    gated = F.linear(attribute, value[0][1]) + known.gather_sources(F.linear(values, value[0][0], value[1]))
    return sum_gated(own, along, gated, pair_edges(known, len(own)))


RES_GATED = ConvSpec(conv.ResGatedGraphConv, forward, any_convolution.propagate, find_left=find_left, fuse=fuse,
                     leaves_to_any=True, sees_neighbors_only=True)  # fmt: skip

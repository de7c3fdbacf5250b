"""GENConv over sorted edges: messages depend on the source alone, so that rows of nodes are aggregated.

Softmax takes its weights and its sum at once, for each number of a row. If edges have rows of their own, their messages
are made once, and aggregated as rows of nodes are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.fused_messages import find_changed, find_slow, is_given, pair_edges, pair_nodes, read_ends
from pyg_direct.nn.weighted_rows import REDUCES
from pyg_direct.ops.aggregate.sum_pairs import sum_softmax
from pyg_direct.ops.aggregate.sum_rows import aggregate

_KINDS = (*REDUCES, aggr.SoftmaxAggregation, aggr.PowerMeanAggregation)


def find_left(module: Any) -> str | None:
    """Return why options of a GENConv leave it to the operators of any layer."""
    # A maximum of zero has one more equal in PyG.
    if module.eps == 0 and type(module.aggr_module) in (aggr.MaxAggregation, aggr.MinAggregation):
        return "its messages may be zero"
    is_softmax = type(module.aggr_module) is aggr.SoftmaxAggregation
    return find_changed(module, _KINDS) or (find_slow(module) if is_softmax else None)


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the aggregation of messages, `[T, F]`."""
    (rows, targets), attribute, part = read_ends(kwargs.get("x")), kwargs.get("edge_attr"), self.aggr_module
    if not is_given(known, rows):
        return None
    count = len(rows) if targets is None else len(targets)
    if not known.fits(len(rows), count) or torch.is_autocast_enabled(rows.device.type):
        return None
    if attribute is not None:
        attribute = self.lin_edge(attribute) if hasattr(self, "lin_edge") else attribute
        if not is_given(known, attribute, rows) or attribute.shape != (known.index.numel(), rows.shape[1]):
            return None
        rows = known.gather_sources(rows) + attribute
    rows = rows.relu() + self.eps
    pairs = pair_nodes(known, len(rows), count) if attribute is None else pair_edges(known, count)
    if type(part) is aggr.SoftmaxAggregation:
        scores = rows if isinstance(part.t, (int, float)) and part.t == 1 else (rows * part.t).to(rows.dtype)
        return sum_softmax(scores.detach() if part.semi_grad else scores, rows, pairs)
    is_power = type(part) is aggr.PowerMeanAggregation and not (isinstance(part.p, (int, float)) and part.p == 1)
    if is_power:
        rows = rows.clamp(min=part.min_value, max=part.max_value).pow(part.p)
    name, edges = REDUCES.get(type(part), "mean"), known.edges
    # Each row of an edge has one target, so that the order of its additions is irrelevant.
    is_summed = attribute is None and name in ("sum", "mean")
    by_source = known.batch.transpose(edges, len(rows)) if is_summed else None
    out = aggregate(rows, edges.indptr, pairs.row, reduce=name, target=edges.target, num_targets=count,
                    max_degree=edges.max_degree, transposed=by_source)  # fmt: skip
    return out.clamp(min=part.min_value, max=part.max_value).pow(1.0 / part.p) if is_power else out


GEN = ConvSpec(conv.GENConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
               sees_neighbors_only=True)  # fmt: skip

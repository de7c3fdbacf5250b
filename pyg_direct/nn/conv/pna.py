"""PNAConv over sorted edges: rows of sources are multiplied before they are aggregated, and no message is made.

The network of a message is one matrix, over the target's row, the source's row and the row of the edge. So a message is
a + b + c, where a belongs to the target. Means, extremes and deviations of b + c are those of messages, up to a.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.any_convolution import KnownTargets
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import has_plain_messages
from pyg_direct.nn.fused_messages import is_own
from pyg_direct.nn.linear import multiply
from pyg_direct.nn.sorted_edges import SortedEdges
from pyg_direct.nn.trimming import has_hooks, is_linear
from pyg_direct.nn.whole_graphs import wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate
from pyg_direct.ops.run_kernel import runs_on_gpu

_KINDS = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MinAggregation: "min",
    aggr.MaxAggregation: "max",
    aggr.VarAggregation: "var",
    aggr.StdAggregation: "std",
}
_SCALERS = frozenset(("identity", "amplification", "attenuation", "linear", "inverse_linear"))
# PyG's least variance, whose root and all below count as zero.
_LEAST_VARIANCE = 1e-5


def find_left(module: Any) -> str | None:
    """Return why options of a PNAConv leave it to the operators of any layer; None if they do not."""
    if not has_plain_messages(module):
        return "hooks or a program's own steps look at its messages"
    if not all(map(_is_matrix, module.pre_nns)) or len({network[0].bias is None for network in module.pre_nns}) > 1:
        return "its messages take more than one matrix"
    if _list_kinds(module.aggr_module) is None:
        return "one of its aggregations has no operator"
    width = module.pre_nns[0][0].weight
    return None if runs_on_gpu(width) or wins_on_cpu(width) else "its rows are narrow"


def _is_matrix(network: Any) -> bool:
    """Report whether a network before the messages is one matrix."""
    return (
        type(network) is torch.nn.Sequential
        and "forward" not in network.__dict__
        and len(network) == 1
        and is_linear(network[0])
        and not has_hooks(network)
    )


def _list_kinds(module: Any) -> list[Any] | None:
    """Return the aggregations of a layer, in order; None if one is unknown or was changed."""
    if type(module) is not aggr.DegreeScalerAggregation or not _SCALERS.issuperset(module.scaler):
        return None
    parts = [module.aggr]
    if type(module.aggr) is aggr.MultiAggregation:
        if module.aggr.mode != "cat":
            return None
        parts = list(module.aggr.aggrs)
    inner = [part.var_aggr for part in parts if type(part) is aggr.StdAggregation]
    if any(type(part) not in _KINDS for part in parts) or not all(map(is_own, (module, module.aggr, *parts, *inner))):
        return None
    # Gradients of a part of a variance depend on the target's row.
    return None if any(getattr(part, "semi_grad", False) for part in (*parts, *inner)) else parts


class _Messages(NamedTuple):
    """Messages of the edges of a layer, without the part of the target.

    Attributes:
        rows: `[N, F]` by source, or `[E, F]` by edge.
        row: Row of each edge in the order of targets, `[E]`.
        edges: The edges.
        transposed: The same by row, None if it is not needed.
    """

    rows: Tensor
    row: Tensor
    edges: SortedEdges
    transposed: Transposed | None

    def reduce(self, rows: Tensor, name: str, num_targets: int) -> Tensor:
        """Reduce rows over the edges of each target."""
        edges = self.edges
        made: Tensor = aggregate(rows, edges.indptr, self.row, reduce=name, target=edges.target,
                                 num_targets=num_targets, max_degree=edges.max_degree,
                                 transposed=self.transposed if name in ("sum", "mean") else None)  # fmt: skip
        return made


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the scaled aggregations of messages, `[N, towers, ...]`; None if others must make them."""
    weight, x, edge_attr = self.pre_nns[0][0].weight, kwargs.get("x"), kwargs.get("edge_attr")
    if (
        not isinstance(x, Tensor)
        or x.dim() != 3
        or x.dtype != weight.dtype
        or x.dtype not in DTYPES
        or x.device != known.index.device
        or torch.is_autocast_enabled(x.device.type)
        or (edge_attr is None) != (self.edge_dim is None)
        or not known.fits(len(x), len(x))
    ):
        return None
    count, towers, inner = x.shape
    parts = [network[0].weight.split(inner, dim=1) for network in self.pre_nns]
    own = _multiply(self, x, [part[0] for part in parts], [network[0].bias for network in self.pre_nns])
    rows = _multiply(self, x, [part[1] for part in parts], None)
    if edge_attr is None:
        messages = _Messages(rows, known.edges.row, known.edges, known.batch.transpose(known.edges, count))
    else:
        along = self.edge_encoder(edge_attr)
        if along.shape != (known.index.numel(), inner) or along.dtype != x.dtype:
            return None
        made = multiply(along, torch.cat([part[2] for part in parts]), None) + known.gather_sources(rows)
        place = known.order if known.order is not None else known.count_edges()
        messages = _Messages(made, place, known.edges, None)
    degree = known.offsets(count).diff().to(x.dtype).unsqueeze(1)
    out = _reduce_all(_list_kinds(self.aggr_module) or [], messages, own, degree, count)
    joined = torch.stack(out, dim=1).view(count, len(out), towers, inner).transpose(1, 2).reshape(count, towers, -1)
    return _scale(self.aggr_module, joined, degree.unsqueeze(2))


def _multiply(self: Any, x: Tensor, weights: list[Tensor], biases: list[Tensor | None] | None) -> Tensor:
    """Return the rows of all towers `[N, T, F]` times the matrix of each, `[N, T * F]`."""
    bias = None if biases is None or biases[0] is None else torch.cat([part for part in biases if part is not None])
    if self.towers == 1 or (not self.divide_input and type(self).forward is conv.PNAConv.forward):
        # PyG repeats the rows for each tower.
        return multiply(x[:, 0], torch.cat(weights), bias)
    made = torch.cat([F.linear(x[:, tower], weight) for tower, weight in enumerate(weights)], dim=1)
    return made if bias is None else made + bias


def _reduce_all(kinds: list[Any], messages: _Messages, own: Tensor, degree: Tensor, count: int) -> list[Tensor]:
    """Return each aggregation of own + messages, `[N, T * F]`; zeros for targets without edges."""
    names = [_KINDS[type(part)] for part in kinds]
    has_edges = degree > 0
    own = torch.where(has_edges, own, 0)
    mean = square = None
    if "var" in names or "std" in names:
        both = torch.cat([messages.rows, messages.rows.square()], dim=1)
        mean, square = messages.reduce(both, "mean", count).chunk(2, dim=1)
    elif "mean" in names or "sum" in names:
        mean = messages.reduce(messages.rows, "mean", count)
    found: dict[str, Tensor] = {}
    for name in names:
        if name in found:
            continue
        if name in ("min", "max"):
            found[name] = messages.reduce(_part_from_zero(messages.rows), name, count) + own
            continue
        assert mean is not None, "found above"
        if name in ("mean", "sum"):
            found[name] = mean + own if name == "mean" else (mean + own) * degree
            continue
        assert square is not None, "found above"
        variance = square - mean * mean
        if name == "std":
            root = variance.clamp(min=_LEAST_VARIANCE).sqrt()
            variance = root.masked_fill(root <= math.sqrt(_LEAST_VARIANCE), 0.0)
        found[name] = variance
    if found.keys() <= {"var", "std"}:
        # A deviation does not depend on them, and parameters that have a gradient in PyG need one.
        found = {name: part + 0 * own for name, part in found.items()}
    return [found[name] for name in names]


def _part_from_zero(rows: Tensor) -> Tensor:
    """Return rows with the smallest numbers instead of zeros.

    Torch shares the gradient of an extreme of zero with the zeros that its result begins with. PyG's messages have the
    row of the target too, so that they are not zero there.
    """
    least = 2.0**-24 if rows.dtype == torch.float16 else torch.finfo(rows.dtype).tiny
    return rows + (rows == 0).to(rows.dtype) * least


def _scale(module: Any, out: Tensor, degree: Tensor) -> Tensor:
    """Return aggregations times each scale of degrees, one after the other, as PyG does."""
    least = degree.clamp(min=1)
    scales = {
        "amplification": lambda: torch.log(degree + 1) / module.avg_deg_log,
        "attenuation": lambda: module.avg_deg_log / torch.log(least + 1),
        "linear": lambda: degree / module.avg_deg_lin,
        "inverse_linear": lambda: module.avg_deg_lin / least,
    }
    outs = [out if name == "identity" else out * scales[name]() for name in module.scaler]
    return torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]


PNA = ConvSpec(conv.PNAConv, propagate=any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
               sees_neighbors_only=True)  # fmt: skip

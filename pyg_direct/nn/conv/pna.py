"""PNAConv over sorted edges: rows of sources are multiplied before they are aggregated, and no message is made.

The network of a message is one matrix, over the target's row, the source's row and the row of the edge. So a message is
a + b + c, where a belongs to the target. Means, extremes and deviations of b + c are those of messages, up to a.

Edges of a batch lead to its first nodes. Others have no aggregations, which are zeros in a sum with a matrix of their
own. A scale of degrees multiplies products of aggregations with its matrix, which are narrower than these.
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
from pyg_direct.nn.fused_messages import is_matrix, is_own, list_parts
from pyg_direct.nn.linear import Product, add_to_first, multiply, multiply_each, multiply_heads
from pyg_direct.nn.sorted_edges import SortedEdges
from pyg_direct.nn.trimming import has_hooks, is_linear
from pyg_direct.nn.whole_graphs import wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate
from pyg_direct.ops.run_kernel import is_ordinary, runs_on_gpu

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


def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None) -> Any:
    """Override `forward` of an accelerated PNAConv."""
    out = None
    if is_ordinary() and not any_convolution.is_short(edge_index) and isinstance(x, Tensor) and x.dim() == 2:
        networks = [list_parts(network) for network in self.post_nns]
        out = _convolve(self, x, edge_index, edge_attr, networks) if _splits(self, networks) else None
    return type(self).forward(self, x, edge_index, edge_attr) if out is None else out


def _splits(self: Any, networks: list[list[Any]]) -> bool:
    """Report whether the networks after the aggregations begin with matrices of one form."""
    firsts = [network[0] for network in networks]
    if find_left(self) is not None or not all(map(is_matrix, firsts)):
        return False
    num_parts = 1 + len(self.aggr_module.scaler) * len(_list_kinds(self.aggr_module) or [])
    shapes = {(first.weight.shape, first.bias is None) for first in firsts}
    return len(shapes) == 1 and firsts[0].weight.shape[1] == num_parts * self.F_in


def _convolve(self: Any, x: Tensor, edge_index: Tensor, edge_attr: Any, networks: list[list[Any]]) -> Tensor | None:
    """Return the result of the layer; None if others must make it."""
    parted = x.view(len(x), self.towers, -1) if self.divide_input else x.unsqueeze(1).expand(-1, self.towers, -1)
    known = any_convolution.find_known(self, edge_index, None, {"x": parted})
    if isinstance(known, str):
        return None
    firsts, inner = [network[0] for network in networks], self.F_in
    own = [Product(first.weight[:, :inner], first.bias) for first in firsts]
    made = _aggregate(self, list(parted.unbind(1)) if self.divide_input else [x], known, edge_attr, [own])
    if made is None:
        return None
    self._paths.note()
    joined, degree, (out,) = made
    scales = _list_scales(self.aggr_module, degree)
    # Of each tower, [O, S * K] to [K, S * O].
    weight = torch.stack([first.weight[:, inner:] for first in firsts]).unflatten(2, (len(scales), -1))
    products = multiply_heads(joined, weight.permute(0, 3, 2, 1).flatten(2)).chunk(len(scales), dim=2)
    total = products[0] if scales[0] is None else products[0] * scales[0]
    for scale, part in zip(scales[1:], products[1:], strict=True):
        total = total + part if scale is None else torch.addcmul(total, part, scale)
    out = add_to_first(out, total.transpose(0, 1).flatten(1))
    if any(len(network) > 1 for network in networks):
        outs = list(out.chunk(self.towers, dim=1))
        for tower, network in enumerate(networks):
            for part in network[1:]:
                outs[tower] = part(outs[tower])
        out = torch.cat(outs, dim=1)
    result: Tensor = self.lin(out)
    return result


def fuse(self: Any, known: KnownTargets, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the scaled aggregations of messages, `[N, towers, ...]`; None if others must make them."""
    x = kwargs.get("x")
    if not isinstance(x, Tensor) or x.dim() != 3:
        return None
    # PyG repeats the rows for each tower.
    is_one = self.towers == 1 or (not self.divide_input and type(self).forward is conv.PNAConv.forward)
    made = _aggregate(self, [x[:, 0]] if is_one else list(x.unbind(1)), known, kwargs.get("edge_attr"), [])
    if made is None:
        return None
    joined, degree, _ = made
    outs = [
        joined if scale is None else joined * scale.unsqueeze(2) for scale in _list_scales(self.aggr_module, degree)
    ]
    return F.pad(torch.cat(outs, dim=-1), (0, 0, 0, 0, 0, len(x) - len(joined)))


def _aggregate(self: Any, rows: list[Tensor], known: KnownTargets, edge_attr: Any, products: list[list[Product]]
               ) -> tuple[Tensor, Tensor, list[Tensor]] | None:  # fmt: skip
    """Return the aggregations of messages of the first nodes, `[T, towers, K]`, their degrees `[T, 1]`, and more
    products of the rows; None if others must make them.

    Args:
        rows: Rows of each tower, `[N, F]`, or those of all.
        products: Products of each tower with matrices.
    """
    weight, x = self.pre_nns[0][0].weight, rows[0]
    if (
        x.dtype != weight.dtype
        or x.dtype not in DTYPES
        or x.device != known.index.device
        or torch.is_autocast_enabled(x.device.type)
        or (edge_attr is None) != (self.edge_dim is None)
        or not known.fits(len(x), len(x))
    ):
        return None
    inner, count, edges = x.shape[1], min(known.edges.least_targets, len(x)), known.edges
    along = None if edge_attr is None else self.edge_encoder(edge_attr)
    if along is not None and (along.shape != (known.index.numel(), inner) or along.dtype != x.dtype):
        return None
    firsts = [network[0] for network in self.pre_nns]
    parts = [first.weight.split(inner, dim=1) for first in firsts]
    own = [Product(part[0], first.bias, count) for part, first in zip(parts, firsts, strict=True)]
    of_target, of_source, *more = _multiply(rows, [own, [Product(part[1]) for part in parts], *products])
    if along is None:
        messages = _Messages(of_source, edges.row, edges, known.batch.transpose(edges, len(x)))
    else:
        made = multiply(along, torch.cat([part[2] for part in parts]), None) + known.gather_sources(of_source)
        messages = _Messages(made, known.count_edges() if known.order is None else known.order, edges, None)
    degree = known.offsets(count).diff().to(x.dtype).unsqueeze(1)
    out = _reduce_all(_list_kinds(self.aggr_module) or [], messages, of_target, degree, count)
    joined = torch.stack(out, dim=1).view(count, len(out), len(firsts), inner).transpose(1, 2)
    return joined.reshape(count, len(firsts), len(out) * inner), degree, more


def _multiply(rows: list[Tensor], products: list[list[Product]]) -> list[Tensor]:
    """Return the products of all towers beside each other, `[N, towers * M]`."""
    if len(rows) == 1:
        joined = [
            part[0] if len(part) == 1 else Product(
                torch.cat([one.weight for one in part]),
                None if part[0].bias is None else torch.cat([one.bias for one in part if one.bias is not None]),
                part[0].num_rows,
            )
            for part in products
        ]  # fmt: skip
        return multiply_each(rows[0], joined)
    made = [multiply_each(own, [part[tower] for part in products]) for tower, own in enumerate(rows)]
    return [torch.cat(parts, dim=1) for parts in zip(*made, strict=True)]


def _reduce_all(kinds: list[Any], messages: _Messages, own: Tensor, degree: Tensor, count: int) -> list[Tensor]:
    """Return each aggregation of own + messages, `[N, T * F]`; zeros for targets without edges."""
    names = [_KINDS[type(part)] for part in kinds]
    has_edges = degree > 0
    own = torch.where(has_edges, own, 0)
    mean = square = None
    if "min" in names or "max" in names:
        _part_from_zero(messages.rows)
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
            found[name] = messages.reduce(messages.rows, name, count) + own
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


def _part_from_zero(rows: Tensor) -> None:
    """Write the smallest numbers instead of zeros.

    Torch shares the gradient of an extreme of zero with the zeros that its result begins with. PyG's messages have the
    row of the target too, so that they are not zero there.
    """
    with torch.no_grad():
        rows.masked_fill_(rows == 0, 2.0**-24 if rows.dtype == torch.float16 else torch.finfo(rows.dtype).tiny)


def _list_scales(module: Any, degree: Tensor) -> list[Tensor | None]:
    """Return the scales of degrees `[T, 1]`, as PyG makes them; None for ones."""
    least = degree.clamp(min=1)
    scales = {
        "amplification": lambda: torch.log(degree + 1) / module.avg_deg_log,
        "attenuation": lambda: module.avg_deg_log / torch.log(least + 1),
        "linear": lambda: degree / module.avg_deg_lin,
        "inverse_linear": lambda: module.avg_deg_lin / least,
    }
    return [None if name == "identity" else scales[name]() for name in module.scaler]


PNA = ConvSpec(conv.PNAConv, forward, any_convolution.propagate, find_left=find_left, fuse=fuse, leaves_to_any=True,
               sees_neighbors_only=True)  # fmt: skip

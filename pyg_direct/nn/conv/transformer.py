"""TransformerConv over sorted edges: keys and values by one product, then scores, softmax and weighted sums at once.

No row of an edge is made. If edges have rows of their own, the kernels for rows of nodes read these too: q (k + e) is
q k + q e. The sum of a (v + e) is the sum of a v plus the sum of a e.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import any_convolution
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import find_obstacle, find_replaced, is_plain
from pyg_direct.nn.hetero.attention import ProductEdges, attend_products, can_attend_products
from pyg_direct.nn.linear import Product, add_to_first, multiply_ends
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, find_batch
from pyg_direct.nn.trimming import is_linear
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, may_find
from pyg_direct.ops.aggregate.compute_softmax import softmax
from pyg_direct.ops.aggregate.products import dot
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate
from pyg_direct.ops.run_kernel import is_recorded, runs_on_gpu


def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Override `forward` of an accelerated TransformerConv."""
    plain, out = type(self).forward, None
    if (
        not is_recorded()
        and not any(value is not None for value in (*args, *kwargs.values()))
        and type(self.aggr_module) is aggr.SumAggregation
        and may_find(edge_index, x, _width_of(self), saves_launches=True)
        and is_plain(self, edge_index)
        and _gains(edge_index)
        and not self._edge_update_forward_pre_hooks
        and not self._edge_update_forward_hooks
    ):
        rows, targets = x if isinstance(x, (tuple, list)) else (x, x)
        out = _attend(self, rows, targets, edge_index, edge_attr)
    return plain(self, x, edge_index, edge_attr, *args, **kwargs) if out is None else out


def _gains(tensor: Tensor) -> bool:
    """Report whether a layer is faster so. On a core, PyG's code takes 0.5 to 1.5 times as long."""
    return runs_on_gpu(tensor)


def _width_of(self: Any) -> int:
    """Return the numbers of a row of PyG's code, which makes three rows for each edge."""
    return 3 * int(self.heads * self.out_channels)


def _attend(self: Any, rows: Any, targets: Any, edge_index: Tensor, edge_attr: Any) -> Tensor | None:
    """Return the result of the layer; None if PyG's code must make it."""
    if not (_takes(self, rows, edge_index) and _takes(self, targets, edge_index)):
        return None
    if (self.lin_edge is None) != (edge_attr is None):
        return None
    if edge_attr is not None and not (_takes(self, edge_attr, edge_index) and len(edge_attr) == edge_index.shape[1]):
        return None
    batch = find_batch(edge_index)
    if batch is None:
        batch = find_whole(edge_index, targets.shape[0], _width_of(self), saves_launches=True)
    if batch is None or not batch.fits(edge_index, rows.shape[0], targets.shape[0]):
        return None
    self._paths.note()
    edges = batch.view(edge_index)
    # Edges of a batch lead to the first nodes only; others have no weighted sum.
    count = min(edges.least_targets, targets.shape[0])
    both, queries, own = _project(self, rows, targets, count)
    scale = 1 / math.sqrt(self.out_channels)
    along = None if edge_attr is None else _Along.of(self.lin_edge(edge_attr), batch, edges)
    dropout = self.dropout if self.training else 0.0
    out = _sum(both, queries.view(count, self.heads, self.out_channels), scale, batch, edges, along, dropout)
    if rows.is_cuda and torch.is_autocast_enabled("cuda"):
        # PyG's softmax and sums are fp32 there.
        out = out.to(torch.promote_types(out.dtype, torch.float32))
    if not self.concat:
        out = out.view(count, self.heads, self.out_channels).mean(dim=1)
    if own is not None and self.lin_beta is None:
        return add_to_first(own, out)
    out = F.pad(out, (0, 0, 0, targets.shape[0] - count))
    if own is None:
        return out
    beta = self.lin_beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
    made: Tensor = beta * own + (1 - beta) * out
    return made


def _takes(self: Any, rows: Any, edge_index: Tensor) -> bool:
    """Report whether rows are those of nodes or edges, of the dtype and the device of the layer."""
    return (
        isinstance(rows, Tensor)
        and rows.dim() == 2
        and rows.dtype in DTYPES
        and (rows.dtype == self.lin_key.weight.dtype or torch.is_autocast_enabled(rows.device.type))
        and rows.device == edge_index.device
    )


def _project(self: Any, rows: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the scaled keys and the values of rows, `[N, 2 * H * C]`; the queries of the first targets, `[T, H * C]`;
    and the own rows of all targets, if the layer has them.
    """
    key, value, query, scale = self.lin_key, self.lin_value, self.lin_query, 1 / math.sqrt(self.out_channels)
    matrices = [key, value, query, *([self.lin_skip] if self.root_weight else [])]
    if not all(map(is_linear, matrices)):
        both = torch.cat([key(rows) * scale, value(rows)], dim=1)
        return both, query(targets)[:count], self.lin_skip(targets) if self.root_weight else None
    # Matrices are smaller than their products.
    bias = None if key.bias is None else torch.cat([key.bias * scale, value.bias])
    products = [Product(query.weight, query.bias, count), *(Product(one.weight, one.bias) for one in matrices[3:])]
    both, queries, *own = multiply_ends(
        rows, targets, [Product(torch.cat([key.weight * scale, value.weight]), bias)], products
    )
    return both, queries, own[0] if own else None


class _Along(NamedTuple):
    """Rows of edges.

    Attributes:
        rows: `[E, H * C]`, in the order in which they were given.
        place: Row of each edge in the order of targets, `[E]`.
    """

    rows: Tensor
    place: Tensor

    @classmethod
    def of(cls, rows: Tensor, batch: SortedBatch, edges: SortedEdges) -> _Along:
        if isinstance(batch, WholeGraph):
            return cls(rows, batch.order)
        number = edges.row.numel()
        place: Tensor = batch.remember(
            ("numbers", number), lambda: torch.arange(number, dtype=edges.row.dtype, device=rows.device)
        )
        return cls(rows, place)


def _sum(both: Tensor, queries: Tensor, scale: float, batch: SortedBatch, edges: SortedEdges, along: _Along | None,
         dropout: float) -> Tensor:  # fmt: skip
    """Return the weighted sums of values, and of rows of edges, `[T, H * C]`.

    Args:
        both: Scaled keys and values of sources, `[N, 2 * H * C]`.
        queries: `[T, H, C]` of the same dtype.
    """
    (count, heads, channels), degree = queries.shape, edges.max_degree
    if along is None and not dropout:
        key = ("products", edges.row.data_ptr(), edges.row.numel(), len(both), count)
        known = ProductEdges(edges.indptr, edges.row, edges.target, len(both), count, degree, batch, key)
        if queries.dtype == both.dtype and can_attend_products(both, heads, known):
            return attend_products(both, queries.flatten(1), heads, known)
    keys, values = (part.reshape(len(both), heads, channels) for part in both.chunk(2, dim=1))
    scores = dot(keys, queries, edges.indptr, edges.row, edges.target, max_degree=degree)
    if along is not None:
        own = along.rows.view(-1, heads, channels)
        scores = scores + dot(own, queries * scale, edges.indptr, along.place, edges.target, max_degree=degree)
    work = torch.promote_types(scores.dtype, torch.float32)
    alpha = softmax(None, None, scores.to(work), edges.indptr, edges.row, num_targets=count, max_degree=degree)
    alpha = F.dropout(alpha, dropout, True).to(values.dtype) if dropout else alpha.to(values.dtype)
    out = _add_up(values, edges.row, alpha, edges, count, batch.transpose(edges, len(both)))
    if along is not None:
        out = out + _add_up(own, along.place, alpha, edges, count, None)
    return out.flatten(1)


def _add_up(rows: Tensor, row: Tensor, alpha: Tensor, edges: SortedEdges, count: int, transposed: Transposed | None
            ) -> Tensor:  # fmt: skip
    made: Tensor = aggregate(rows, edges.indptr, row, weight=alpha, target=edges.target, num_targets=count,
                             max_degree=edges.max_degree, transposed=transposed)  # fmt: skip
    return made


def find_left(module: Any) -> str | None:
    """Return why options of a TransformerConv leave it to the operators of any layer."""
    if type(module.aggr_module) is not aggr.SumAggregation:
        return "messages are not summed"
    return find_obstacle(module) or find_replaced(module) or (
        None if _gains(module.lin_key.weight) else "a CPU gains nothing")  # fmt: skip


TRANSFORMER = ConvSpec(conv.TransformerConv, forward, any_convolution.propagate, find_left=find_left,
                       leaves_to_any=True, sees_neighbors_only=True)  # fmt: skip

"""GATConv and GATv2Conv over sorted edges: scores, then their softmax over targets and the weighted sum at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn.dispatch import is_plain
from pyg_direct.nn.linear import multiply
from pyg_direct.nn.sorted_edges import SortedEdges, find_batch, find_whole, may_find
from pyg_direct.nn.trimming import Kept, is_linear
from pyg_direct.ops.aggregate.softmax import attend, pick_scores, softmax
from pyg_direct.ops.aggregate.sum import DTYPES, Transposed, aggregate
from pyg_direct.ops.run_kernel import is_recorded

_HOOKS = ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")


def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What replaces `forward` of an accelerated GATConv or GATv2Conv."""
    width = self.heads * self.out_channels // 4
    if is_recorded() or not may_find(edge_index, x, width, saves_launches=True):
        return type(self).forward(self, x, edge_index, edge_attr, *args, **kwargs)
    out = None
    if (edge_attr is None and not any(value is not None for value in (*args, *kwargs.values()))
            and type(self.aggr_module) is aggr.SumAggregation and is_plain(self, edge_index)
            and not is_watched(self)):  # fmt: skip
        out = _attend(self, x, edge_index)
    return type(self).forward(self, x, edge_index, edge_attr, *args, **kwargs) if out is None else out


def is_watched(self: Any) -> bool:
    """Whether hooks look at the scores of edges."""
    return any(getattr(self, name) for name in _HOOKS)


def _attend(self: Any, x: Any, edge_index: Tensor) -> Tensor | None:
    rows, targets = x if isinstance(x, (tuple, list)) else (x, x)
    if not all(isinstance(part, Tensor) and part.dim() == 2 and part.dtype in DTYPES for part in (rows, targets)):
        return None
    batch = find_batch(edge_index)
    if batch is None:
        # Scores and their gradients take the larger part of the time, with both ways.
        batch = find_whole(edge_index, targets.shape[0], self.heads * self.out_channels // 4, saves_launches=True)
    if (
        batch is None
        or not batch.fits(edge_index, rows.shape[0], targets.shape[0])
        # PyG gives loops to the nodes that are sources and targets, which must then be all targets.
        or (self.add_self_loops and targets.shape[0] > rows.shape[0])
    ):
        return None
    self._paths.note()
    edges = batch.view(edge_index)
    if self.add_self_loops:
        edges, _ = batch.add_loops(edge_index, targets.shape[0])
    # Targets are the first of the rows.
    is_part = targets is rows or isinstance(x, Kept)
    weigh = _weigh_v2 if isinstance(self, conv.GATv2Conv) else _weigh
    heads, channels, num_targets = self.heads, self.out_channels, targets.shape[0]
    late = weigh is _weigh and _sums_first(self, rows, num_targets)
    made, scores = weigh(self, rows, targets, edges, is_part, late)
    # GATv2Conv bends what its scores are sums of.
    slope = self.negative_slope if weigh is _weigh else 1.0
    out = sum_weighted(made, scores, edges, num_targets=num_targets, negative_slope=slope,
                       dropout=self.dropout if self.training else 0.0, loops=self.add_self_loops)  # fmt: skip
    if late:
        bias = self.bias if self.res is None else None
        out = multiply(out, self.lin.weight, bias)
        return out if self.res is None else _add(out + self.res(targets), self.bias)
    out = out.view(num_targets, heads, channels)
    out = out.view(num_targets, heads * channels) if self.concat else out.mean(dim=1)
    if self.res is not None:
        out = out + self.res(targets)
    return _add(out, self.bias)


def _add(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _sums_first(self: Any, rows: Tensor, num_targets: int) -> bool:
    """Whether rows are narrower, or fewer, before their matrix; with one head the sum may come first."""
    return (
        self.heads == 1
        and is_linear(self.lin)
        and (rows.shape[1] <= self.out_channels or 2 * num_targets <= rows.shape[0])
        and not torch.is_autocast_enabled(rows.device.type)
    )


class _Scores(torch.autograd.Function):
    """Scores of sources `[N, 1]` and of the first of them as targets `[T, 1]`, of rows before their matrix: (x W) a is
    x (W a), and rows are read once for both.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, to_source: Tensor, to_target: Tensor, num_targets: int
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(rows, weight, to_source, to_target)
        scores = _join(to_source, to_target) @ weight @ rows.t()
        return scores[0].unsqueeze(1), scores[1, :num_targets].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, source: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
        # In what torch can differentiate once more.
        rows, weight, to_source, to_target = ctx.saved_tensors
        both = _join(to_source, to_target)
        grad = torch.stack([source.squeeze(1), F.pad(target.squeeze(1), (0, rows.shape[0] - target.shape[0]))])
        to_rows = grad.t() @ (both @ weight) if ctx.needs_input_grad[0] else None
        turned = grad @ rows
        own, other = (turned @ weight.t()).unbind()
        return to_rows, both.t() @ turned, own.view_as(to_source), other.view_as(to_target), None


def _join(to_source: Tensor, to_target: Tensor) -> Tensor:
    """The vectors of both scores, `[2, C]`."""
    return torch.cat([to_source.view(1, -1), to_target.view(1, -1)])


# Scores of sources, targets and edges.
_Given = tuple[Tensor | None, Tensor | None, Tensor | None]


def _weigh(self: Any, rows: Tensor, targets: Tensor, edges: SortedEdges, is_part: bool, late: bool
           ) -> tuple[Tensor, _Given]:  # fmt: skip
    """(rows to add up, scores that weigh them) of GATConv; with `late` the rows come before their matrix."""
    heads, channels = self.heads, self.out_channels
    if late and is_part:
        scores = _Scores.apply(rows, self.lin.weight, self.att_src, self.att_dst, targets.shape[0])
        return rows, (*scores, None)
    if late:
        # (x W) a = x (W a)
        to_source = self.lin.weight.t() @ self.att_src.view(channels, 1)
        to_target = self.lin.weight.t() @ self.att_dst.view(channels, 1)
        return rows, (rows @ to_source, targets @ to_target, None)
    made = self.lin(rows) if self.lin is not None else self.lin_src(rows)
    if self.lin is not None and is_part:
        others = made[: targets.shape[0]]
    else:
        others = self.lin(targets) if self.lin is not None else self.lin_dst(targets)
    source = (made.view(-1, heads, channels) * self.att_src).sum(dim=-1)
    target = (others.view(-1, heads, channels) * self.att_dst).sum(dim=-1)
    return made.view(-1, heads, channels), (source, target, None)


def _weigh_v2(self: Any, rows: Tensor, targets: Tensor, edges: SortedEdges, is_part: bool, late: bool
              ) -> tuple[Tensor, _Given]:  # fmt: skip
    """(rows to add up, scores that weigh them) of GATv2Conv."""
    heads, channels = self.heads, self.out_channels
    made = self.lin_l(rows).view(-1, heads, channels)
    if self.share_weights and is_part:
        others = made[: targets.shape[0]]
    else:
        others = self.lin_r(targets).view(-1, heads, channels)
    both = made.index_select(0, edges.row) + others.index_select(0, edges.target)
    scores = (F.leaky_relu(both, self.negative_slope) * self.att).sum(dim=-1)
    return made, (None, None, scores)


def sum_weighted(made: Tensor, scores: _Given, edges: SortedEdges, *, num_targets: int, negative_slope: float,
                 dropout: float, loops: bool = False, transposed: Transposed | None = None) -> Tensor:  # fmt: skip
    """Sums of rows `[N, H, C]` over the edges of each target, times the softmax of scores, of which `dropout` fall out.

    The dtype of both is that of the scores, but they are summed up in fp32 at least.
    """
    given = pick_scores(*scores)
    work = torch.promote_types(given.dtype, torch.float32)
    source, target, edge = (None if part is None else part.to(work) for part in scores)
    indptr, row, degree = edges.indptr, edges.row, edges.max_degree
    if not dropout and made.dtype == given.dtype and not torch.is_autocast_enabled(made.device.type):
        return attend(made, source, target, edge, indptr, row, target_of=edges.target, num_targets=num_targets,
                      negative_slope=negative_slope, loops=loops, max_degree=degree,
                      transposed=transposed)  # fmt: skip
    alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=negative_slope,
                    loops=loops, max_degree=degree).to(given.dtype)  # fmt: skip
    alpha = F.dropout(alpha, dropout, True)
    dtype = torch.promote_types(made.dtype, alpha.dtype)
    return aggregate(made.to(dtype), indptr, row, weight=alpha.to(dtype), target=edges.target,
                     num_targets=num_targets, max_degree=degree, transposed=transposed)  # fmt: skip

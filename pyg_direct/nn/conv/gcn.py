"""GCNConv over sorted edges: normalized in their order, and aggregated on the narrower side of its matrix.

Relations of a type with itself take one weighted sum together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import aggr, conv

from pyg_direct.nn.conv.spec import ConvSpec, Joined
from pyg_direct.nn.dispatch import find_narrow, find_reduce, is_plain, propagate, weigh_rows
from pyg_direct.nn.hetero.joined_edges import (
    Relation,
    Tables,
    begin_apart,
    join_apart,
    join_edges,
    multiply_apart,
    split_apart,
)
from pyg_direct.nn.linear import multiply
from pyg_direct.nn.module_state import is_attached
from pyg_direct.nn.paths import NO_WEIGHTS, OWN_LOOPS
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, find_batch
from pyg_direct.nn.static_batch import open_signals
from pyg_direct.nn.trimming import Kept, is_linear
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, may_find, wins_on_cpu
from pyg_direct.ops.aggregate.sum_rows import DTYPES, aggregate
from pyg_direct.ops.run_kernel import is_recorded, runs_on_gpu


def forward(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Tensor:
    """Override `forward` of an accelerated GCNConv."""
    if not is_recorded() and type(x) is Tensor and x.dim() == 3:
        found = _convolve_signals(self, x, edge_index, edge_weight)
        return type(self).forward(self, x, edge_index, edge_weight) if found is None else found
    if is_recorded() or not (isinstance(x, Kept) or may_find(edge_index, x, saves_launches=True)):
        return type(self).forward(self, x, edge_index, edge_weight)
    rows, num_targets = (x.rows, x.kept.shape[0]) if isinstance(x, Kept) else (x, None)
    out = None
    if (self.normalize and not self.cached and isinstance(rows, Tensor) and rows.dim() == 2
            and type(self.aggr_module) is aggr.SumAggregation and is_plain(self, edge_index)
            and (edge_weight is None
                 or (edge_weight.shape == edge_index.shape[1:] and edge_weight.is_floating_point()))):  # fmt: skip
        out = _convolve(self, rows, edge_index, edge_weight, num_targets)
    if out is None:
        out = type(self).forward(self, rows, edge_index, edge_weight)
        out = out if num_targets is None else out[:num_targets]
    return out


def _convolve_signals(self: Any, x: Tensor, edge_index: Any, edge_weight: Any) -> Tensor | None:
    """Return the results for signals `[B, N, F]` over one structure; None if PyG's own code must compute them."""
    if not self.normalize or self.cached or type(self.aggr_module) is not aggr.SumAggregation:
        return None
    signals = open_signals(self, x, edge_index, edge_weight)
    if signals is None:
        return None
    self._paths.note()
    given, num_nodes = x.dtype if edge_weight is None else edge_weight.dtype, x.shape[1]
    edges, weight = _normalise(signals.batch, edge_index, num_nodes, num_nodes, signals.weight, self, given)
    # The matrix comes after the sum if rows are narrower before it.
    if x.shape[2] <= self.out_channels:
        out = self.lin(signals.sum(self, signals.rows, edges, weight))
    else:
        out = signals.sum(self, self.lin(signals.rows), edges, weight)
    out = out if self.bias is None else out + self.bias
    return out.transpose(0, 1)


def _convolve(self: Any, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None,
              num_targets: int | None) -> Tensor | None:  # fmt: skip
    batch, num_sources = find_batch(edge_index), x.shape[0]
    num_targets = num_sources if num_targets is None else num_targets
    if batch is None and edge_weight is None:
        batch = find_whole(edge_index, num_targets, min(x.shape[1], self.out_channels), saves_launches=True)
    if batch is None or x.dtype not in DTYPES or not batch.fits(edge_index, num_sources, num_targets):
        return None
    if not runs_on_gpu(x) and not wins_on_cpu(x.new_empty(0, self.out_channels)):
        return None
    given = x.dtype if edge_weight is None else edge_weight.dtype
    self._paths.note()
    edges, weight = _normalise(batch, edge_index, num_sources, num_targets, edge_weight, self, given)
    # The matrix may come before the sum or after it: after it if rows are narrower, or fewer, and keep the dtype of the
    # matrix.
    late = (is_linear(self.lin) and (x.shape[1] <= self.out_channels or 2 * num_targets <= num_sources)
            and torch.promote_types(x.dtype, given) == x.dtype)  # fmt: skip
    rows = x if late else self.lin(x)
    # Under autocast the matrix returns another dtype.
    dtype = torch.promote_types(rows.dtype, weight.dtype)
    transposed = None
    sorts = torch.are_deterministic_algorithms_enabled() or not runs_on_gpu(rows) or isinstance(batch, WholeGraph)
    if rows.requires_grad and sorts:
        transposed = batch.transpose(edges, num_sources)
    out = aggregate(rows.to(dtype), edges.indptr, edges.row, weight=weight.to(dtype), target=edges.target,
                    num_targets=num_targets, max_degree=edges.max_degree, transposed=transposed)  # fmt: skip
    if late and not torch.is_autocast_enabled(x.device.type):
        return multiply(out, self.lin.weight, self.bias)
    if late:
        # PyG adds up its result there in the dtype of the weights, with a separate bias.
        out = multiply(out, self.lin.weight, None)
        out = out.to(torch.promote_types(out.dtype, given))
    return out if self.bias is None else out + self.bias


def _normalise(batch: SortedBatch, edge_index: Tensor, num_sources: int, num_targets: int, given: Tensor | None,
               self: Any, dtype: torch.dtype) -> tuple[SortedEdges, Tensor]:  # fmt: skip
    """Return edges, with one loop a target if requested, and their symmetric weights; other loops then have weight 0.

    Nodes from `num_targets` on have no edges as targets.
    """
    work = torch.promote_types(dtype, torch.float32)
    if given is None and self.add_self_loops:
        edges, weight = batch.add_loops(edge_index, num_targets, work)
        assert weight is not None, "edges are not weighed"
        return edges, weight.to(dtype)
    edges = batch.view(edge_index)
    if given is None:

        def weigh() -> Tensor:
            ones = torch.ones(edges.row.numel(), dtype=work, device=edges.row.device)
            return _weigh(edges, ones, num_sources, num_targets, 0.0).to(dtype)

        return edges, batch.remember(("weighed", edges.row.numel(), num_sources, num_targets, dtype), weigh)
    if not self.add_self_loops:
        return edges, _weigh(edges, given.to(work), num_sources, num_targets, 0.0).to(dtype)
    # PyG fills in missing loops.
    alone = 2.0 if self.improved else 1.0
    looped, _ = batch.add_loops(edge_index, num_targets)
    weight = _give_to_loops(edges, given.to(work), num_targets, alone)
    return looped, _weigh(looped, weight, num_sources, num_targets, alone).to(dtype)


def _weigh(edges: SortedEdges, weight: Tensor, num_sources: int, num_targets: int, alone: float) -> Tensor:
    """Return the symmetric weights of edges with weights; `alone` is the degree of a node that has no edges."""
    degree = aggregate(weight.view(-1, 1), edges.indptr, target=edges.target, num_targets=num_targets,
                       max_degree=edges.max_degree)  # fmt: skip
    degree = F.pad(degree.view(-1), (0, num_sources - num_targets), value=alone)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0)
    return scale[edges.row] * weight * scale[edges.target]


def _give_to_loops(edges: SortedEdges, weight: Tensor, num_targets: int, alone: float) -> Tensor:
    """Return weights of edges and of the loops after them; an existing loop passes its weight to the one that stays."""
    indptr, row, target, *_ = edges
    num_edges = row.numel()
    is_loop = row == target
    own = _LastLoop.apply(weight, torch.where(is_loop, target, num_targets).long(), num_targets, alone)
    nodes = torch.arange(num_targets, device=row.device)
    # Each target before an edge's own has one more loop.
    places = torch.arange(num_edges, device=row.device) + target
    loops = indptr[1 : num_targets + 1].clamp(max=num_edges) + nodes
    out = weight.new_zeros(num_edges + num_targets).index_copy(0, places, weight.masked_fill(is_loop, 0))
    return out.index_copy(0, loops, own)


class _LastLoop(Function):
    """Weight of each node's last loop, which PyG's code takes on a CPU; on a GPU it takes any of them.

    Each loop of a node gets the gradient of the one that stays, as in PyG.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, node: Tensor, num_nodes: int, alone: float) -> Tensor:
        ctx.save_for_backward(node)
        number = torch.arange(node.numel(), device=node.device)
        last = number.new_full((num_nodes + 1,), -1).scatter_reduce_(0, node, number, "amax")[:num_nodes]
        # Without edges there are no weights to read.
        taken = weight.new_full((num_nodes,), alone) if not node.numel() else weight.take(last.clamp(min=0))
        return taken.masked_fill_(last < 0, alone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (node,) = ctx.saved_tensors
        return F.pad(grad, (0, 1)).index_select(0, node), None, None, None


def read_joined(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """Return the key that relations must share to be summed together; None if the relation is summed separately."""
    if (
        own is not x
        or not module.normalize
        or module.cached
        or type(module.aggr_module) is not aggr.SumAggregation
        or not is_linear(module.lin)
        or module.lin.bias is not None
        or torch.is_autocast_enabled(x.device.type)
        or x.dtype not in DTYPES
        or x.dtype != module.lin.weight.dtype
        or module.lin.weight.device != x.device
        or x.shape[1] != module.lin.weight.shape[1]
        or not (runs_on_gpu(x) or wins_on_cpu(x.new_empty(0, module.out_channels)))
    ):
        return None
    is_late = x.shape[1] <= module.out_channels
    return is_late, x.shape[1] if is_late else module.out_channels, x.dtype, module.add_self_loops


def convolve_joined(relations: Sequence[Relation]) -> list[Tensor]:
    """Return the results of each convolution; the matrix comes after the sum if rows are narrower before it."""
    tables, first, used = Tables.of(relations), relations[0], [True] * len(relations)
    is_late, dtype = first.sources.shape[1] <= first.conv.out_channels, first.sources.dtype
    found = [_normalise(relation.batch, relation.edge_index, len(relation.own), len(relation.own), None,
                            relation.conv, dtype) for relation in relations]  # fmt: skip
    if is_late:
        starts, num_sources = tables.starts, tables.num_rows
        rows = join_apart(tables.tables, tables.serve(), used)
    else:
        starts, num_sources = begin_apart(relations)
        rows = multiply_apart([r.sources for r in relations], [r.conv.lin.weight for r in relations], used)
    has_loops = first.conv.add_self_loops
    edges = join_edges(relations, starts, num_sources, name="looped together" if has_loops else "joined",
                       pairs=[(part.row, part.target) for part, _ in found], more=int(has_loops))  # fmt: skip
    # Weights of relations are remembered too, because their edges are.
    weight = edges.batch.remember(("weighed", dtype, *edges.key), lambda: torch.cat([part for _, part in found]))
    out = aggregate(rows, edges.indptr, edges.row, weight=weight, target=edges.target, num_targets=sum(edges.sizes),
                    max_degree=edges.max_degree,
                    transposed=edges.transpose(torch.is_grad_enabled() and rows.requires_grad))  # fmt: skip
    pieces = split_apart(out, edges.sizes, used)
    if is_late:
        return [multiply(piece, relation.conv.lin.weight, relation.conv.bias)
                for piece, relation in zip(pieces, relations, strict=True)]  # fmt: skip
    return [piece if relation.conv.bias is None else piece + relation.conv.bias
            for piece, relation in zip(pieces, relations, strict=True)]  # fmt: skip


def find_left(module: Any) -> str | None:
    """Return why options of a GCNConv leave it to PyG."""
    reduce = find_reduce(module)
    if module.normalize and not (is_attached(module, "forward", forward) and not module.cached and reduce == "sum"):
        # If PyG adds loops it makes new edges, and if it normalizes it weighs them.
        if module.add_self_loops:
            return OWN_LOOPS
        if reduce not in ("sum", "mean"):
            return NO_WEIGHTS.format(reduce)
    return find_narrow(module, int(module.out_channels))


GCN = ConvSpec(conv.GCNConv, forward, propagate, message=weigh_rows, find_left=find_left,
               joined=Joined(read_joined, convolve_joined))  # fmt: skip

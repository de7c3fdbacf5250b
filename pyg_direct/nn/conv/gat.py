"""GATConv and GATv2Conv over sorted edges: scores, then their softmax over targets and the weighted sum at once.

Over several relations each multiplies rows by its own matrix. These products, written one after the other, take the
place of rows by type.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import aggr, conv

from pyg_direct.nn.conv.spec import ConvSpec, Joined, Message, NumRead
from pyg_direct.nn.dispatch import find_narrow, find_reduce, is_plain, promote, propagate
from pyg_direct.nn.hetero.attention import attend_pairs, attend_relations, can_attend, score_pairs, score_sources
from pyg_direct.nn.hetero.joined_edges import (
    Groups,
    JoinedEdges,
    ReadSources,
    Relation,
    Used,
    multiply_apart,
    read_sources,
    split_apart,
    sum_apart,
)
from pyg_direct.nn.hetero.projection import project
from pyg_direct.nn.hetero.unread_rows import find_rows_of_pass
from pyg_direct.nn.linear import multiply
from pyg_direct.nn.module_state import is_attached
from pyg_direct.nn.paths import NO_WEIGHTS, OWN_LOOPS
from pyg_direct.nn.sorted_edges import SortedEdges, find_batch
from pyg_direct.nn.trimming import Kept, is_linear
from pyg_direct.nn.whole_graphs import find_whole, may_find
from pyg_direct.ops.aggregate.compute_softmax import attend, pick_scores, softmax
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate
from pyg_direct.ops.run_kernel import is_heard, is_recorded, runs_on_gpu

# Stored rows of these dtypes are widened by autocast where a matrix first reads them.
_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
_HOOKS = ("_edge_update_forward_pre_hooks", "_edge_update_forward_hooks")


def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Override `forward` of an accelerated GATConv or GATv2Conv."""
    width = self.heads * self.out_channels // 4
    if is_recorded() or not may_find(edge_index, x, width, saves_launches=True):
        return type(self).forward(self, x, edge_index, edge_attr, *args, **kwargs)
    out = None
    if (edge_attr is None and not any(value is not None for value in (*args, *kwargs.values()))
            and type(self.aggr_module) is aggr.SumAggregation and is_plain(self, edge_index)
            and not is_watched(self)):  # fmt: skip
        out = _attend_one(self, x, edge_index)
    return type(self).forward(self, x, edge_index, edge_attr, *args, **kwargs) if out is None else out


def is_watched(self: Any) -> bool:
    """Report whether hooks read the scores of edges."""
    return any(getattr(self, name) for name in _HOOKS)


def _attend_one(self: Any, x: Any, edge_index: Tensor) -> Tensor | None:
    rows, targets = x if isinstance(x, (tuple, list)) else (x, x)
    if not all(isinstance(part, Tensor) and part.dim() == 2 and _takes_rows(part) for part in (rows, targets)):
        return None
    batch = find_batch(edge_index)
    if batch is None:
        # Scores and their gradients take the larger part of the time, in both orders.
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
    # GATv2Conv applies leaky ReLU to the addends of its scores.
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


def _takes_rows(rows: Tensor) -> bool:
    return rows.dtype in DTYPES or (rows.dtype in _STORED and torch.is_autocast_enabled(rows.device.type))


def _add(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _sums_first(self: Any, rows: Tensor, num_targets: int) -> bool:
    """Report whether rows are narrower, or fewer, before their matrix; with one head the sum may come first."""
    return (
        self.heads == 1
        and is_linear(self.lin)
        and (rows.shape[1] <= self.out_channels or 2 * num_targets <= rows.shape[0])
        and not torch.is_autocast_enabled(rows.device.type)
    )


class _Scores(torch.autograd.Function):
    """Scores of sources `[N, 1]`, and of the first of them as targets `[T, 1]`, from rows before their matrix. (x W) a
    is x (W a), and rows are read once for both.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, to_source: Tensor, to_target: Tensor, num_targets: int
                ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(rows, weight, to_source, to_target)
        scores = _join(to_source, to_target) @ weight @ rows.t()
        return scores[0].unsqueeze(1), scores[1, :num_targets].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, source: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
        # By functions that torch can differentiate again.
        rows, weight, to_source, to_target = ctx.saved_tensors
        both = _join(to_source, to_target)
        grad = torch.stack([source.squeeze(1), F.pad(target.squeeze(1), (0, rows.shape[0] - target.shape[0]))])
        to_rows = grad.t() @ (both @ weight) if ctx.needs_input_grad[0] else None
        turned = grad @ rows
        own, other = (turned @ weight.t()).unbind()
        return to_rows, both.t() @ turned, own.view_as(to_source), other.view_as(to_target), None


def _join(to_source: Tensor, to_target: Tensor) -> Tensor:
    """Return the vectors of both scores, `[2, C]`."""
    return torch.cat([to_source.view(1, -1), to_target.view(1, -1)])


# Scores of sources, targets and edges.
_Given = tuple[Tensor | None, Tensor | None, Tensor | None]


def _weigh(self: Any, rows: Tensor, targets: Tensor, edges: SortedEdges, is_part: bool, late: bool
           ) -> tuple[Tensor, _Given]:  # fmt: skip
    """Return (rows to add up, scores that weigh them) of GATConv; with `late` the rows come before their matrix."""
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
    """Return (rows to add up, scores that weigh them) of GATv2Conv."""
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
                 dropout: float, loops: bool = False, transposed: Transposed | None = None,
                 widens: bool = False) -> Tensor:  # fmt: skip
    """Sum rows `[N, H, C]` over the edges of each target, times the softmax of scores, of which the share `dropout` is
    dropped.

    The dtype of both is the dtype of the scores, but they are accumulated in fp32 or wider.
    """
    given = pick_scores(*scores)
    work = torch.promote_types(given.dtype, torch.float32)
    source, target, edge = (None if part is None else part.to(work) for part in scores)
    indptr, row, degree = edges.indptr, edges.row, edges.max_degree
    if not dropout and (widens or (made.dtype == given.dtype and not torch.is_autocast_enabled(made.device.type))):
        return attend(made, source, target, edge, indptr, row, target_of=edges.target, num_targets=num_targets,
                      negative_slope=negative_slope, loops=loops, max_degree=degree,
                      transposed=transposed, widens=widens)  # fmt: skip
    alpha = softmax(source, target, edge, indptr, row, num_targets=num_targets, negative_slope=negative_slope,
                    loops=loops, max_degree=degree).to(given.dtype)  # fmt: skip
    alpha = F.dropout(alpha, dropout, True)
    dtype = torch.promote_types(made.dtype, alpha.dtype)
    return aggregate(made.to(dtype), indptr, row, weight=alpha.to(dtype), target=edges.target,
                     num_targets=num_targets, max_degree=degree, transposed=transposed)  # fmt: skip


# Bytes of the addends of scores, for the edges of all relations of GATv2Conv. Above this a CPU computes each relation
# separately, because its addends stay in the caches.
_MOST_BYTES = 1 << 20


def read_joined(module: Any, x: Tensor, own: Tensor) -> Hashable:
    """Return the key that relations must share to be weighed together; None if the relation is weighed separately.

    Loops are found by a source that is its target, which joined numbers do not show.
    """
    matrices, vectors = _matrices(module), _vectors(module)
    parameters = [*vectors]
    for matrix in matrices:
        if is_linear(matrix):
            parameters += (matrix.weight,) if matrix.bias is None else (matrix.weight, matrix.bias)
    given = [*(part for part in (x, own) if part.dtype not in _STORED), *parameters]
    dtype, casts = _find_dtype(module, x), torch.is_autocast_enabled(x.device.type)
    if (
        module.add_self_loops
        or type(module.aggr_module) is not aggr.SumAggregation
        or any(getattr(module, name) for name in _HOOKS)
        or not all(is_linear(matrix) for matrix in matrices)
        or not (_takes_rows(x) and _takes_rows(own))
        or not all(part.dtype in DTYPES and part.device == x.device for part in given)
        or len({part.dtype for part in parameters}) > 1
        # Autocast leaves float64 alone.
        or any(part.dtype == torch.float64 if casts else part.dtype != dtype for part in given)
        # torch itself refuses shapes that do not fit.
        or (x.shape[1], own.shape[1]) != tuple(matrix.weight.shape[1] for matrix in matrices)
        or (isinstance(module, conv.GATConv) and (any(matrix.bias is not None for matrix in matrices)
                                                  or _sums_first(module, x, own.shape[0])))
    ):  # fmt: skip
        return None
    dropout = module.dropout if module.training else 0.0
    return module.heads, module.out_channels, module.concat, dtype, vectors[0].dtype, module.negative_slope, dropout


def _find_dtype(module: Any, x: Tensor) -> torch.dtype:
    """Return the dtype of products with matrices."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def _matrices(module: Any) -> tuple[Any, Any]:
    """Return the matrices of sources and of targets."""
    if isinstance(module, conv.GATv2Conv):
        return module.lin_l, module.lin_r
    return (module.lin_src, module.lin_dst) if module.lin is None else (module.lin, module.lin)


def _vectors(module: Any) -> tuple[Tensor, ...]:
    """Return the vectors that scores are products with."""
    return (module.att,) if isinstance(module, conv.GATv2Conv) else (module.att_src, module.att_dst)


def convolve_joined(relations: Sequence[Relation]) -> list[Tensor] | None:
    """Return the results of each GATConv or GATv2Conv; None if each is faster separately."""
    if _is_slow(relations):
        return None
    used, sizes = [True] * len(relations), [len(relation.own) for relation in relations]
    pieces = split_apart(_attend(relations, *_project(relations, sizes, used), used), sizes, used)
    return [_finish_joined(relation, piece) for relation, piece in zip(relations, pieces, strict=True)]


def add_up_joined(relations: Sequence[Relation], groups: list[list[int]], num_read: NumRead) -> list[Tensor] | None:
    """Return the results of all GATConvs or GATv2Convs into each type, added up; None if each is made separately."""
    if _is_slow(relations):
        return None
    used, first = [True] * len(relations), relations[0].conv
    plan, biases = _plan(relations, groups, num_read)
    made, of_targets, read = _project(relations, plan.sizes, used)
    vectors = [_vectors(relation.conv)[0] for relation in relations]
    if _is_fused(first, made, of_targets, read, vectors[0]):
        if _adds_rows(first):
            outs = attend_pairs(made, of_targets, vectors, biases, read, plan, used, first.negative_slope)
        else:
            outs = attend_relations(made, of_targets, vectors, biases, read, plan, used, first.negative_slope,
                                    has_relu=_has_relu(relations, made))  # fmt: skip
        return _add_residuals(relations, groups, outs)
    return _add_up(relations, plan, _attend(relations, made, of_targets, read, used), used, biases)


def _adds_rows(module: Any) -> bool:
    """Report whether scores add rows of both ends of an edge, as those of GATv2Conv, instead of two numbers."""
    return isinstance(module, conv.GATv2Conv)


def _is_slow(relations: Sequence[Relation]) -> bool:
    """Report whether each relation is faster separately."""
    first, rows = relations[0].conv, relations[0].sources
    num_edges = sum(relation.edge_index.shape[1] for relation in relations)
    num_bytes = num_edges * first.heads * first.out_channels * rows.element_size()
    return _adds_rows(first) and not runs_on_gpu(rows) and num_bytes > _MOST_BYTES


def _plan(relations: Sequence[Relation], groups: list[list[int]], num_read: NumRead
          ) -> tuple[Groups, list[Tensor | None]]:  # fmt: skip
    """Return the results to add up, for the targets that edges lead to, and the bias of each type, which others get."""
    sizes = [relation.batch.count_targets(relation.edge_index) for relation in relations]
    stacked = [[relations[i].conv.bias for i in group if relations[i].conv.bias is not None] for group in groups]
    dtype, counts = _vectors(relations[0].conv)[0].dtype, [len(relations[group[0]].own) for group in groups]
    counts = [count if read is None else min(count, max(read, *(sizes[i] for i in group)))
              for group, count, read in zip(groups, counts, num_read, strict=True)]  # fmt: skip
    return (Groups(groups, counts, sizes, dtype),
            [reduce(torch.add, parts) if parts else None for parts in stacked])  # fmt: skip


def _is_fused(module: Any, made: Tensor, of_targets: Tensor, read: ReadSources, vector: Tensor) -> bool:
    is_plain_sum = module.concat and not (module.training and module.dropout)
    fits = of_targets.dtype == (made.dtype if _adds_rows(module) else vector.dtype) and vector.dtype == torch.float32
    # Modes see only torch's operators.
    return is_plain_sum and fits and not is_heard(made) and can_attend(made, module.heads, read)


def _has_relu(relations: Sequence[Relation], made: Tensor) -> bool:
    """Report whether the results of a layer pass the ReLU that follows, in a recorded pass."""
    rows = find_rows_of_pass()
    is_rounded = made.dtype != torch.float32 and torch.is_autocast_enabled(made.device.type)
    return rows is not None and is_rounded and rows.note_products(
        may_relu=all(relation.conv.res is None for relation in relations))  # fmt: skip


def _add_up(relations: Sequence[Relation], plan: Groups, out: Tensor, used: Used, biases: list[Tensor | None]
            ) -> list[Tensor]:  # fmt: skip
    flat = out.flatten(1) if relations[0].conv.concat else out.mean(dim=1)
    return _add_residuals(relations, plan.relations, sum_apart(flat, plan, used, biases))


def _add_residuals(relations: Sequence[Relation], groups: Sequence[Sequence[int]], outs: list[Tensor]) -> list[Tensor]:
    for number, group in enumerate(groups):
        for relation in (relations[i] for i in group):
            if relation.conv.res is not None:
                count = len(outs[number])
                own = relation.own if count == len(relation.own) else relation.own.narrow(0, 0, count)
                outs[number] = outs[number] + relation.conv.res(own)
    return outs


def _project(relations: Sequence[Relation], sizes: Sequence[int], used: Used) -> tuple[Tensor, Tensor, ReadSources]:
    """Return the products of the sources that relations read `[U, H * C]`, the first targets of each, and the edges in
    between. Targets are scores `[sum of sizes, H]`, or with `_adds_rows` products too, `[sum of sizes, H * C]`.
    """
    first, read = relations[0].conv, read_sources(relations, sizes)
    left, right = zip(*(_matrices(relation.conv) for relation in relations), strict=True)
    dtype = _find_dtype(first, relations[0].sources)
    weights, biases = [matrix.weight for matrix in right], [matrix.bias for matrix in right]
    if not _adds_rows(first):
        made, of_targets = project(relations, [matrix.weight for matrix in left], weights,
                                   [relation.conv.att_dst for relation in relations], read.split(), sizes, used,
                                   dtype)  # fmt: skip
        return made, of_targets, read
    made = multiply_apart([relation.sources for relation in relations], [matrix.weight for matrix in left], used,
                          [matrix.bias for matrix in left], rows=read.split(), dtype=dtype)  # fmt: skip
    of_targets = multiply_apart([relation.own for relation in relations], weights, used, biases,
                                rows=[slice(size) for size in sizes], dtype=dtype)  # fmt: skip
    return made, of_targets, read


def _attend(relations: Sequence[Relation], made: Tensor, of_targets: Tensor, read: ReadSources, used: Used
            ) -> Tensor:  # fmt: skip
    """Return the weighted sums of all relations, `[sum of T, H, C]`; see `_project`."""
    first, vectors = relations[0].conv, [_vectors(relation.conv)[0] for relation in relations]
    if not _adds_rows(first):
        by_source = score_sources(made, vectors, read, used)
        return _sum_joined(made, (by_source, of_targets, None), read.edges, first, first.negative_slope)
    scores = score_pairs(made, of_targets, vectors, read, used, first.negative_slope)
    # The addends of scores have passed leaky ReLU already.
    return _sum_joined(made, (None, None, scores), read.edges, first, 1.0)


def _sum_joined(made: Tensor, scores: _Given, edges: JoinedEdges, module: Any, slope: float) -> Tensor:
    """Compute the softmax and the sum of all relations, `[sum of T, H, C]`."""
    num_targets = sum(edges.sizes)
    known = SortedEdges(edges.indptr, edges.row, edges.target, edges.num_sources, num_targets, edges.max_degree)
    return sum_weighted(
        made.view(-1, module.heads, module.out_channels), scores, known, num_targets=num_targets, negative_slope=slope,
        dropout=module.dropout if module.training else 0.0,
        transposed=edges.transpose(torch.is_grad_enabled() and made.requires_grad),
        widens=made.dtype != pick_scores(*scores).dtype)  # fmt: skip


def _finish_joined(relation: Relation, out: Tensor) -> Tensor:
    module = relation.conv
    out = out.flatten(1) if module.concat else out.mean(dim=1)
    out = out if module.res is None else out + module.res(relation.own)
    return out if module.bias is None else out + module.bias


def weigh_heads(self: Any, x: Tensor, edges: SortedEdges, kwargs: dict[str, Any]) -> Message:
    """Return rows of sources and the weights of edges that PyG's code has computed."""
    alpha = kwargs["alpha"]
    if x.dim() != 3 or tuple(alpha.shape) != (edges.row.numel(), x.shape[1]):
        return None
    return promote(x, alpha)


def find_left(module: Any) -> str | None:
    """Return why options of a GATConv or GATv2Conv leave it to PyG."""
    reduce, narrow = find_reduce(module), find_narrow(module, module.heads * module.out_channels)
    if (
        module.edge_dim is None
        and reduce == "sum"
        and not is_watched(module)
        and is_attached(module, "forward", forward)
    ):
        return None
    if module.add_self_loops:
        return OWN_LOOPS
    return narrow if reduce in ("sum", "mean") else NO_WEIGHTS.format(reduce)


_JOINED = Joined(read_joined, convolve_joined, add_up=add_up_joined)
_SHARED: dict[str, Any] = {"forward": forward, "propagate": propagate, "message": weigh_heads, "find_left": find_left,
                           "sees_neighbors_only": True, "joined": _JOINED}  # fmt: skip
GAT = ConvSpec(conv.GATConv, **_SHARED)
GATV2 = ConvSpec(conv.GATv2Conv, **_SHARED)

"""RGCNConv and FastRGCNConv over sorted edges: all relations in one sum, in one matrix if most targets have edges of
each.

If most pairs of a relation and a target have no edges, the pairs with edges are processed relation after relation
(`convolve_segments`). A matrix is multiplied by the sums of its relation's pairs, and the products are added up for the
targets. No row is multiplied, or stored, for a pair without edges. A row is multiplied once for all edges of a pair.

Nodes without rows have one for each relation, in the layer's weight. One weighted sum reads those rows that edges use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch_geometric
from torch import Tensor
from torch.autograd import Function
from torch_geometric.nn import aggr, conv

from pyg_direct.nn import paths
from pyg_direct.nn.conv.spec import ConvSpec
from pyg_direct.nn.dispatch import find_reduce, find_replaced, find_why_not_plain, is_plain
from pyg_direct.nn.linear import multiply_heads, multiply_tall
from pyg_direct.nn.sorted_edges import SortedBatch, SortedEdges, find_batch
from pyg_direct.nn.whole_graphs import WholeGraph, find_whole, keeps_graphs, may_find, may_remember
from pyg_direct.ops.aggregate.sum_rows import DTYPES, Transposed, aggregate
from pyg_direct.ops.local_ids.build_csr import compress_ids
from pyg_direct.ops.run_kernel import is_asked_again, is_recorded, pull_by_torch

# Edges a pair of a relation and a target, below which many pairs have none.
_MOST_EDGES = {"cuda": 0.5, "cpu": 0.75}
# Numbers of rows without edges that justify the split, and one more product a relation, both ways; they are compared
# after multiplication by the width of their matrix plus a constant. For an H200, whose host limits smaller sizes, and
# for two cores.
_PARTING = {"cuda": 1 << 33, "cpu": 1 << 25}
_A_RELATION = {"cuda": 1 << 30, "cpu": 1 << 21}
_WITHOUT_WIDTH = 96


class Segments(NamedTuple):
    """Edges by relation, then target, and their pairs P.

    Attributes:
        indptr: Offsets of the pairs' edges, `[P + 1]`.
        row: Source of each edge, `[E]`.
        pair: Pair of each edge, `[E]`.
        offsets: Offsets of the targets' pairs, `[T + 1]`.
        order: Pairs by target, `[P]`.
        target: Their targets, `[P]`.
        most: Edges of the relation that has most.
    """

    indptr: Tensor
    row: Tensor
    pair: Tensor
    sizes: list[int]
    offsets: Tensor
    order: Tensor
    target: Tensor
    back: Transposed
    most: int


def are_few(edges: Tensor, num_targets: int, relations: int, width: int) -> bool:
    """Report whether so many edges leave many pairs of a relation and a target without one, and enough of them to
    matter.
    """
    num_edges, pairs, where = edges.numel(), num_targets * relations, "cuda" if edges.is_cuda else "cpu"
    if not 0 < num_edges < _MOST_EDGES[where] * pairs:
        return False
    return (pairs - num_edges) * width * (_WITHOUT_WIDTH + width) > _PARTING[where] + relations * _A_RELATION[where]


def part_by_relation(edges: SortedEdges, edge_type: Tensor, num_targets: int, relations: int) -> Segments | None:
    """Return the pairs of these edges; None if a relation is out of range. Waits for the device once."""
    # Narrow keys take fewer passes; edges come sorted by target, and stay so in a relation.
    inside = edge_type.clamp(0, relations - 1)
    kinds, order = torch.sort(inside.to(torch.int16 if relations <= 1 << 15 else torch.int64), stable=True)
    target = edges.target.index_select(0, order)
    begins = torch.ones_like(target, dtype=torch.bool)
    begins[1:] = (target[1:] != target[:-1]) | (kinds[1:] != kinds[:-1])
    ends = torch.cumsum(begins, 0)
    # First edge of each relation, and its pairs.
    offsets = compress_ids(kinds.long(), relations)
    counts = torch.stack([torch.cat([ends.new_zeros(1), ends]).index_select(0, offsets), offsets]).diff()
    strays = (edge_type != inside).sum().expand(2, 1)
    (strays, *sizes), (_, *most) = torch.cat([strays, counts], dim=1).tolist()
    if strays:
        return None
    num_pairs, pair = sum(sizes), ends - 1
    # Their number is known, so that there is no wait; edges that begin no pair write after the last one.
    places = torch.arange(pair.numel(), device=pair.device)
    starts = pair.new_empty(num_pairs + 1).scatter_(0, torch.where(begins, pair, num_pairs), places)
    starts[num_pairs] = pair.numel()
    pair_target = target.index_select(0, starts[:num_pairs])
    by_target, pairs = torch.sort(pair_target, stable=True)
    each = torch.arange(num_pairs + 1, device=pairs.device)
    back = Transposed(each, pair_target, torch.empty_like(pairs).scatter_(0, pairs, each[:-1]))
    return Segments(starts, edges.row.index_select(0, order), pair, sizes, compress_ids(by_target, num_targets), pairs,
                    by_target, back, max(most))  # fmt: skip


def convolve_segments(x: Tensor, weight: Tensor, segments: Segments, num_targets: int, *, reduce: str,
                      num_blocks: int | None, max_degree: int | None) -> Tensor:  # fmt: skip
    """Sum over relations the reduced rows times the matrix of each, `[T, out]`.

    Args:
        x: Rows of the sources, `[N, in]`.
        weight: `[R, in, out]`, or `[R, num_blocks, in / num_blocks, out / num_blocks]`.
    """
    reduced = aggregate(x, segments.indptr, segments.row, reduce=reduce, target=segments.pair, max_degree=max_degree)
    made = _multiply_segments(reduced, segments.sizes, weight, num_blocks)
    return aggregate(made, segments.offsets, segments.order, target=segments.target, num_targets=num_targets,
                     max_degree=len(segments.sizes), transposed=segments.back)  # fmt: skip


def _multiply_segments(rows: Tensor, sizes: list[int], weight: Tensor, num_blocks: int | None) -> Tensor:
    """Return the rows of each relation times its matrix, `[P, out]`."""
    if num_blocks is None and rows.dtype == weight.dtype and not torch.is_autocast_enabled(rows.device.type):
        made: Tensor = _Segments.apply(sizes, rows, weight)
        return made
    parts = zip(rows.split(sizes), weight.unbind(), strict=True)
    return torch.cat([_multiply(part, matrix, num_blocks) for part, matrix in parts if part.shape[0]])


def _multiply(rows: Tensor, matrix: Tensor, num_blocks: int | None) -> Tensor:
    if num_blocks is None:
        return rows @ matrix
    made = multiply_heads(rows.view(rows.shape[0], num_blocks, -1), matrix)
    return made.transpose(0, 1).reshape(rows.shape[0], -1)


class _Segments(Function):
    """Products of segments of rows with a matrix each, written where the next step reads them."""

    @staticmethod
    def forward(ctx: Any, sizes: list[int], rows: Tensor, weight: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(rows, weight)
        made = rows.new_empty(len(rows), weight.shape[2])
        for part, matrix, out in zip(rows.split(sizes), weight.unbind(), made.split(sizes), strict=True):
            torch.mm(part, matrix, out=out)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), sizes, wants = ctx.saved_tensors, ctx.sizes, ctx.needs_input_grad[1:]
        if is_asked_again([grad]):
            return None, *pull_by_torch(partial(_compose, sizes), [rows, weight], wants, [grad])
        parts = grad.split(sizes)
        to_rows = rows.new_empty(rows.shape) if wants[0] else None
        if to_rows is not None:
            for part, matrix, out in zip(parts, weight.unbind(), to_rows.split(sizes), strict=True):
                torch.mm(part, matrix.t(), out=out)
        # Sums over many rows, of few numbers each.
        to_weight = torch.stack([multiply_tall(own, part).to(weight.dtype) for own, part in
                                 zip(rows.split(sizes), parts, strict=True)]) if wants[1] else None  # fmt: skip
        return None, to_rows, to_weight


def _compose(sizes: list[int], rows: Tensor, weight: Tensor) -> list[Tensor]:
    """Compute the same by functions that torch can differentiate again."""
    return [torch.cat([part @ matrix for part, matrix in zip(rows.split(sizes), weight.unbind(), strict=True)])]


# Items of the sums of all relations, above which they are left to PyG, relation after relation.
_MOST_ITEMS = 1 << 30


class _Parted(NamedTuple):
    """Edges sorted by target, then relation: offsets of (target, relation), and their ends.

    Attributes:
        most: Edges of the largest relation, if PyG checks that; otherwise 0.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    most: int


class _Stray(NamedTuple):
    """Given relations of edges with one out of range."""

    given: Tensor


class _Embedded(NamedTuple):
    """Edges of nodes without rows.

    Attributes:
        pair: Rows of the weight `[R * N, out]` that edges read, each once, `[P]`.
        row: Position among these of the row of each edge, `[E]`.
        weight: One over the edges of the same relation and target, `[E, 1]`; None for sums.
        by_row: The edges by row.
    """

    pair: Tensor
    row: Tensor
    weight: Tensor | None
    by_row: Transposed


def forward(self: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Tensor:
    """Override `forward` of an accelerated RGCNConv."""
    if is_recorded():
        return type(self).forward(self, x, edge_index, edge_type)  # type: ignore[no-any-return]
    out: Tensor | str = paths.ARGUMENTS
    pair = x if isinstance(x, tuple) else (x, x)
    if not is_plain(self, edge_index):
        out = find_why_not_plain(self)
    elif isinstance(edge_type, Tensor) and all(
        isinstance(part, Tensor) and part.dim() == 2 and part.dtype in DTYPES for part in pair
    ):
        out = _convolve(self, pair[0], pair[1], edge_index, edge_type)
    elif isinstance(edge_type, Tensor) and (x is None or (isinstance(x, Tensor) and _are_ids(x))):
        out = _embed(self, x, edge_index, edge_type)
    if isinstance(out, str):
        self._paths.note_left(out)
        return type(self).forward(self, x, edge_index, edge_type)  # type: ignore[no-any-return]
    self._paths.note()
    return out


def _are_ids(x: Tensor) -> bool:
    return x.dim() == 1 and x.dtype == torch.int64 and not x.is_inference()


def _find_edges(edge_index: Tensor, edge_type: Tensor, num_sources: int, num_targets: int, width: int
                ) -> SortedBatch | str:  # fmt: skip
    """Return the known edges of a batch or of a whole graph, or why they are not known."""
    batch = find_batch(edge_index)
    if batch is None:
        # PyG takes several launches for each relation.
        if not may_find(edge_index, None, width, saves_launches=True):
            return paths.UNKNOWN
        batch = find_whole(edge_index, num_targets, width, saves_launches=True)
    if batch is None:
        return paths.NOT_YET
    if (
        edge_type.shape != edge_index.shape[1:]
        or edge_type.dtype not in (torch.int32, torch.int64)
        or not batch.fits(edge_index, num_sources, num_targets)
    ):
        return paths.ARGUMENTS
    return batch


def _sort_types(batch: SortedBatch, edge_type: Tensor) -> Tensor:
    """Return the relations of edges in the order of their targets."""
    return edge_type.index_select(0, batch.order) if isinstance(batch, WholeGraph) else edge_type


def _remember(batch: SortedBatch, given: tuple[Tensor, ...], key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return the result of `make` for tensors that do not change, computed once for all layers that share them."""
    # Writes to the first ones leave no trace; a recording copies others over those.
    if any(part.is_inference() or not may_remember(part) for part in given):
        return make()
    return batch.remember_for(given, key, make, keeps_all=keeps_graphs())


def _convolve(self: Any, x: Tensor, own: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor | str:
    """Return the layer's result, or the reason why PyG's own code must compute or refuse it."""
    relations, num_targets = self.num_relations, own.shape[0]
    batch = _find_edges(edge_index, edge_type, x.shape[0], num_targets, x.shape[1])
    if isinstance(batch, str):
        return batch
    if x.dtype != self.weight.dtype:
        return paths.ARGUMENTS
    edges = batch.view(edge_index)
    few = are_few(edges.row, num_targets, relations, x.shape[1])
    if not few and num_targets * relations * x.shape[1] > _MOST_ITEMS:
        return "sums of all relations take too much memory"

    def part() -> _Parted | Segments | _Stray:
        kinds = _sort_types(batch, edge_type)
        made = (part_by_relation if few else _part)(edges, kinds, num_targets, relations)
        return _Stray(edge_type) if made is None else made

    key = "relations", edges.row.numel(), num_targets, relations, few
    parted = _remember(batch, (edge_type,), key, part)
    if isinstance(parted, _Stray):
        return "an edge is of no relation"
    if (type(self.aggr_module) is not aggr.SumAggregation and not isinstance(self, conv.FastRGCNConv)
            and _takes_segments(self, parted)):  # fmt: skip
        return "pyg-lib reduces over all relations together"
    weight, reduce = _read_weight(self), find_reduce(self)
    if isinstance(parted, Segments):
        out = convolve_segments(x, weight, parted, num_targets, reduce=reduce, num_blocks=self.num_blocks,
                                max_degree=edges.max_degree)  # fmt: skip
    else:
        sums = aggregate(x, parted.indptr, parted.row, reduce=reduce, target=parted.target,
                         max_degree=edges.max_degree)  # fmt: skip
        if self.num_blocks is not None:
            parts = sums.view(num_targets, relations, self.num_blocks, sums.shape[1] // self.num_blocks)
            out = torch.einsum("trbi,rbio->tbo", parts, weight).reshape(num_targets, self.out_channels)
        else:
            out = sums.view(num_targets, relations * sums.shape[1]) @ weight.reshape(-1, self.out_channels)
    out = _widen(self, out)
    if self.root is not None:
        at_once = out.dtype == own.dtype and not torch.is_autocast_enabled(own.device.type)
        out = torch.addmm(out, own, self.root) if at_once else out + own @ self.root
    return out if self.bias is None else out + self.bias


def _read_weight(self: Any) -> Tensor:
    """Return the matrix of each relation, `[R, in, out]` or by blocks."""
    weight: Tensor = self.weight
    if self.num_bases is None:
        return weight
    made: Tensor = self.comp @ weight.view(self.num_bases, -1)
    return made.view(self.num_relations, self.in_channels_l, self.out_channels)


def _widen(self: Any, out: Tensor) -> Tensor:
    """Return sums in PyG's dtype."""
    if isinstance(self, conv.FastRGCNConv):
        return out
    # PyG adds up relations from zeros of torch's default dtype, which is wider than bfloat16.
    return out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))


def _embed(self: Any, ids: Tensor | None, edge_index: Tensor, edge_type: Tensor) -> Tensor | str:
    """Return the layer's result for nodes without rows, or the reason why PyG's own code must compute or refuse it.

    Args:
        ids: Id of each node, `[N]`; None for all, in order.
    """
    relations, reduce, count = self.num_relations, find_reduce(self), self.in_channels_l
    num_nodes = count if ids is None else ids.shape[0]
    if self.num_blocks is not None or reduce not in ("sum", "mean") or self.weight.dtype not in DTYPES:
        return paths.ARGUMENTS
    batch = _find_edges(edge_index, edge_type, num_nodes, num_nodes, self.out_channels)
    if isinstance(batch, str):
        return batch
    edges = batch.view(edge_index)

    def part() -> _Embedded | _Stray:
        kinds = _sort_types(batch, edge_type).to(torch.int64)
        source = edges.row.to(torch.int64)
        if ids is not None and not isinstance(self, conv.FastRGCNConv):
            source = ids.index_select(0, source)
        places, pairs = kinds * count + source, edges.target * relations + kinds
        if kinds.numel() and bool(((kinds < 0) | (kinds >= relations) | (source < 0) | (source >= count)).any()):
            return _Stray(edge_type)
        pair, row = torch.unique(places, return_inverse=True)
        weight = None
        if reduce == "mean":
            _, same, number = torch.unique(pairs, return_inverse=True, return_counts=True)
            weight = number.index_select(0, same).to(torch.promote_types(self.weight.dtype, torch.float32)).reciprocal()
        by_row = Transposed.of(row, edges.target, pair.numel())
        return _Embedded(pair, row, weight, by_row)

    given = (edge_type,) if ids is None else (edge_type, ids)
    known = _remember(batch, given, ("embedded", edges.row.numel(), num_nodes, count, relations, reduce), part)
    if isinstance(known, _Stray):
        return "an edge is of no relation, or from no node"
    rows = _read_weight(self).reshape(-1, self.out_channels).index_select(0, known.pair)
    weight = None if known.weight is None else known.weight.to(rows.dtype)
    out = aggregate(rows, edges.indptr, known.row, weight=weight, target=edges.target, num_targets=num_nodes,
                    max_degree=edges.max_degree, transposed=known.by_row)  # fmt: skip
    out = _widen(self, out)
    if self.root is not None:
        out = out + (self.root[:count] if ids is None else self.root.index_select(0, ids))
    return out if self.bias is None else out + self.bias


def _takes_segments(self: Any, parted: _Parted | Segments) -> bool:
    """Report whether PyG multiplies segments by pyg-lib, and so takes means and maxima over all relations together."""
    if not torch_geometric.typing.WITH_SEGMM or self.num_bases is not None or self.num_blocks is not None:
        return False
    asked: bool | None = torch_geometric.backend.use_segment_matmul
    if asked is not None:
        return asked
    return torch_geometric.backend.use_segment_matmul_heuristic(self.num_relations, parted.most, *self.weight.shape[1:])


def _part(edges: SortedEdges, edge_type: Tensor, num_targets: int, relations: int) -> _Parted | None:
    """Return the edges by target and relation; None if a relation is out of range, which waits for the device once."""
    if edge_type.numel() and bool(((edge_type < 0) | (edge_type >= relations)).any()):
        return None
    most = int(torch.bincount(edge_type).max()) if torch_geometric.typing.WITH_SEGMM and edge_type.numel() else 0
    place, order = torch.sort(edges.target * relations + edge_type, stable=True)
    return _Parted(compress_ids(place, num_targets * relations), edges.row.index_select(0, order), place, most)


RGCN = ConvSpec(conv.RGCNConv, forward, find_left=find_replaced)
FAST_RGCN = ConvSpec(conv.FastRGCNConv, forward, find_left=find_replaced)

"""Pairs of a relation and a target that have edges, relation after relation: RGCNConv where most pairs have none.

A matrix is multiplied with the sums of its relation's pairs, and their products are added up for the targets. So no row
is multiplied, or lies in memory, for pairs without edges, and none more than once for the edges of a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.nn.sorted import SortedEdges
from pyg_direct.ops.aggregate import Transposed, aggregate
from pyg_direct.ops.offsets import compress

# Edges a pair of a relation and a target, below which many pairs have none.
_MOST_EDGES = {"cuda": 0.5, "cpu": 0.75}
# Of rows without edges so many numbers, times the width of their matrix and a little, are a fair price for parting, and
# for a product more a relation, both ways. On an H200, whose host is what takes the time of less, and on two cores.
_PARTING = {"cuda": 1 << 33, "cpu": 1 << 25}
_A_RELATION = {"cuda": 1 << 30, "cpu": 1 << 21}
_WITHOUT_WIDTH = 96


class Segments(NamedTuple):
    """Edges by relation, then target, and their pairs P.

    Attributes:
        indptr: Offsets of the pairs' edges, `[P + 1]`.
        row: Source of each edge, `[E]`.
        pair: Pair of each edge, `[E]`.
        sizes: Pairs of each relation.
        offsets: Offsets of the targets' pairs, `[T + 1]`.
        order: Pairs by target, `[P]`.
        target: Their targets, `[P]`.
        back: The same by pair.
        given: The relations that edges were told to have; held so that no other tensor gets their address.
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
    given: Tensor
    most: int


def are_few(edges: Tensor, num_targets: int, relations: int, width: int) -> bool:
    """Whether so many edges leave many pairs of a relation and a target without one, and enough of them to matter."""
    num_edges, pairs, where = edges.numel(), num_targets * relations, "cuda" if edges.is_cuda else "cpu"
    if not 0 < num_edges < _MOST_EDGES[where] * pairs:
        return False
    return (pairs - num_edges) * width * (_WITHOUT_WIDTH + width) > _PARTING[where] + relations * _A_RELATION[where]


def part_by_relation(edges: SortedEdges, edge_type: Tensor, num_targets: int, relations: int) -> Segments | None:
    """The pairs of these edges; None if a relation lies outside. Waits for the device once."""
    # Narrow keys take fewer passes; edges come sorted by target, and stay so in a relation.
    inside = edge_type.clamp(0, relations - 1)
    kinds, order = torch.sort(inside.to(torch.int16 if relations <= 1 << 15 else torch.int64), stable=True)
    target = edges.target.index_select(0, order)
    begins = torch.ones_like(target, dtype=torch.bool)
    begins[1:] = (target[1:] != target[:-1]) | (kinds[1:] != kinds[:-1])
    ends = torch.cumsum(begins, 0)
    # Of each relation, where its edges begin, and its pairs.
    offsets = compress(kinds.long(), relations)
    counts = torch.stack([torch.cat([ends.new_zeros(1), ends]).index_select(0, offsets), offsets]).diff()
    strays = (edge_type != inside).sum().expand(2, 1)
    (strays, *sizes), (_, *most) = torch.cat([strays, counts], dim=1).tolist()
    if strays:
        return None
    num_pairs, pair = sum(sizes), ends - 1
    # Their number is known, so that nothing waits; edges that begin no pair write behind the last one.
    places = torch.arange(pair.numel(), device=pair.device)
    starts = pair.new_empty(num_pairs + 1).scatter_(0, torch.where(begins, pair, num_pairs), places)
    starts[num_pairs] = pair.numel()
    pair_target = target.index_select(0, starts[:num_pairs])
    by_target, pairs = torch.sort(pair_target, stable=True)
    each = torch.arange(num_pairs + 1, device=pairs.device)
    back = Transposed(each, pair_target, torch.empty_like(pairs).scatter_(0, pairs, each[:-1]))
    return Segments(starts, edges.row.index_select(0, order), pair, sizes, compress(by_target, num_targets), pairs,
                    by_target, back, edge_type, max(most))  # fmt: skip


def convolve_segments(x: Tensor, weight: Tensor, segments: Segments, num_targets: int, *, reduce: str,
                      num_blocks: int | None, max_degree: int | None) -> Tensor:  # fmt: skip
    """Sums over relations of the reduced rows times the matrix of each, `[T, out]`.

    Args:
        x: Rows of the sources, `[N, in]`.
        weight: `[R, in, out]`, or `[R, num_blocks, in / num_blocks, out / num_blocks]`.
    """
    reduced = aggregate(x, segments.indptr, segments.row, reduce=reduce, target=segments.pair, max_degree=max_degree)
    parts = zip(reduced.split(segments.sizes), weight.unbind(), strict=True)
    made = torch.cat([_multiply(rows, matrix, num_blocks) for rows, matrix in parts if rows.shape[0]])
    return aggregate(made, segments.offsets, segments.order, target=segments.target, num_targets=num_targets,
                     max_degree=len(segments.sizes), transposed=segments.back)  # fmt: skip


def _multiply(rows: Tensor, matrix: Tensor, num_blocks: int | None) -> Tensor:
    if num_blocks is None:
        return rows @ matrix
    blocks = rows.view(rows.shape[0], num_blocks, -1).transpose(0, 1)
    return torch.bmm(blocks, matrix).transpose(0, 1).reshape(rows.shape[0], -1)

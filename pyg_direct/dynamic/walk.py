"""Steps of DCRNN's diffusion, along the edges of a snapshot and against them, as one operator each.

They are those of PyTorch Geometric Temporal: a step along weighs an edge by the degree of its source; one against them
goes over the edges in the order of their targets, but takes the degrees in the order in which edges were given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyg_direct.dynamic.operator import Factors
from pyg_direct.dynamic.snapshot import Snapshot, order_edges
from pyg_direct.errors import ArgumentError


def _degrees(ends: Tensor, weight: Tensor | None, size: int) -> Tensor:
    weight = torch.ones(ends.numel(), device=ends.device) if weight is None else weight
    return weight.new_zeros(size).index_add_(0, ends, weight)


def _flatten(edge_weight: Tensor | None, num_edges: int) -> Tensor | None:
    """Weights as `[E]`."""
    if edge_weight is None or edge_weight.shape == (num_edges,):
        return edge_weight
    if edge_weight.shape != (num_edges, 1):
        raise ArgumentError(f"edge_weight must have shape [{num_edges}], got {tuple(edge_weight.shape)}")
    return edge_weight.squeeze(1)


def walk_along(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Edges (source, target), int64 `[2, E]`, and their weights `[E]` in a step along them.

    Args:
        edge_index: Edges, int64 `[2, E]`.
        edge_weight: Their weights as given, floats `[E]` or `[E, 1]`; None for 1.

    Raises:
        ArgumentError: there is another number of weights.
    """
    row = edge_index[0]
    size = int(edge_index.max()) + 1 if edge_index.numel() else 0
    return edge_index, _degrees(row, _flatten(edge_weight, row.numel()), size).reciprocal()[row]


def walk_against(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same of a step against them.

    Raises:
        ArgumentError: there is another number of weights.
        RuntimeError: an edge is there several times or weighs 0.
    """
    against, shares, refusal = _turn(edge_index, _flatten(edge_weight, edge_index.shape[1]))
    if refusal is not None:
        raise RuntimeError(refusal)
    return against, shares


def _turn(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor, str | None]:
    """What `walk_against` gives, and what is wrong with the edges, if anything is: then there are other numbers of
    edges and of weights.
    """
    row, col = edge_index
    size = int(edge_index.max()) + 1 if edge_index.numel() else 0
    weight = torch.ones(row.numel(), device=row.device) if edge_weight is None else edge_weight
    merged, place = torch.unique(row * size + col, return_inverse=True)
    value = weight.new_zeros(merged.numel()).index_add_(0, place, weight)
    source, target = merged // max(1, size), merged % max(1, size)
    order = torch.argsort(target[value != 0], stable=True)
    against = torch.stack([target[value != 0][order], source[value != 0][order]])
    refusal = None
    if against.shape[1] != row.numel():
        refusal = (f"edge_index must hold each edge once, with a weight other than 0: {row.numel()} edges are "
                   f"{against.shape[1]} different ones")  # fmt: skip
    return against, _degrees(target, value, size).reciprocal()[row], refusal


@dataclass(frozen=True)
class Walk:
    """A step along the edges, or with `is_against` one against them, of snapshots that know their edges as given."""

    is_against: bool = False
    # The last node that has an edge counts.
    is_local: ClassVar[bool] = False

    def factorise(self, snapshot: Snapshot) -> Factors:
        """The factors of one snapshot."""
        assert snapshot.given is not None, "the order in which edges were given counts"
        edges, weight = snapshot.given
        if self.is_against:
            edges, shares, refusal = _turn(edges, weight)
            if refusal is not None:
                return Factors(snapshot.keys[:0], None, None, None, None, refusal)
            ordered = order_edges(edges, shares, snapshot.num_nodes, dtype=shares.dtype)
            return Factors(ordered.keys, ordered.weight, None, None, None)
        # The edges of a source have one share, whatever they weigh: they are there as often as they were given.
        ordered, sources = order_edges(edges, None, snapshot.num_nodes), edges[0]
        column = _degrees(sources, weight, snapshot.num_nodes).reciprocal_()
        is_source = torch.zeros_like(column, dtype=torch.bool).index_fill_(0, sources, True)
        return Factors(ordered.keys, ordered.weight, None, column.masked_fill_(~is_source, 0), None)

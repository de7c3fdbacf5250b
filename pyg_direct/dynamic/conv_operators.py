"""Convolutions of a snapshot split into factors and edges, so that snapshots can share their edges.

Y = d * X + a * (W (b * X)). W holds the weights as given, a and b scale rows and columns, and d is a diagonal. Each of
a, b and d has one number per node. If an edge is shared, snapshots still differ in degrees, and so in normalized
weights. This difference lies in a, b and d. The rules equal PyG's convolutions, edge for edge.

Diffusion steps of DCRNN, along the edges of a snapshot (`walk_along`) and against them (`walk_against`), are one
operator each. They follow PyTorch Geometric Temporal. A step along weighs an edge by the degree of its source. A step
against visits the edges in the order of their targets, but takes the degrees in the given order of edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_direct.dynamic.snapshot import Snapshot, order_edges
from pyg_direct.errors import ArgumentError


class Factors(NamedTuple):
    """An operator on one snapshot.

    Attributes:
        keys: target * N + source of the edges of W, int64 `[E]`, ascending and unique.
        weight: Their weights, `[E]`, fp32 or float64 as all numbers here; None for ones.
        row, column, diagonal: a, b and d, `[N]`; None for ones, ones and zeros.
        refusal: Reason why the operator refuses a snapshot, or None. The edges of a refused snapshot are left out, so
            that others of its group can be aggregated.
    """

    keys: Tensor
    weight: Tensor | None
    row: Tensor | None
    column: Tensor | None
    diagonal: Tensor | None
    refusal: str | None = None


class Operator(Protocol):
    """A rule that turns a snapshot into factors; equal rules are equal as keys of a dictionary."""

    @property
    def is_local(self) -> bool:
        """Report whether factors of nodes and edges stay equal in a graph that has further parts without edges to
        them.
        """

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""


def _inverse_root(degree: Tensor) -> Tensor:
    root = degree.pow(-0.5)
    return root.masked_fill_(root == float("inf"), 0)


def _inverse(degree: Tensor) -> Tensor:
    inverse = degree.reciprocal()
    return inverse.masked_fill_(inverse == float("inf"), 0)


@dataclass(frozen=True)
class GCN:
    """GCNConv: D^-1/2 (A + I) D^-1/2 with degrees of targets, as `gcn_norm` has it.

    An existing loop keeps its weight, the last one given, instead of the filled one. The filled one is 2 under
    `improved`, but 1 in graphs without weights. Nodes of degree zero get zeros.
    """

    improved: bool = False
    add_self_loops: bool = True
    normalize: bool = True
    is_local: ClassVar[bool] = True

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""
        if not self.normalize:
            return Factors(snapshot.keys, snapshot.weight, None, None, None)
        if not self.add_self_loops:
            scale = _inverse_root(snapshot.sum_in())
            return Factors(snapshot.keys, snapshot.weight, scale, scale, None)
        given = snapshot.loop_weight
        loop = torch.full((snapshot.num_nodes,), 2.0 if self.improved and given is not None else 1.0,
                          dtype=snapshot.dtype, device=snapshot.device)  # fmt: skip
        if given is not None:
            loop[snapshot.loop_nodes] = given
        rest = snapshot.without_loops()
        scale = _inverse_root(rest.sum_in() + loop)
        return Factors(rest.keys, rest.weight, scale, scale, scale * loop * scale)


@dataclass(frozen=True)
class Sum:
    """Sums of weighted neighbors (GraphConv, and the neighbors of GINConv)."""

    is_local: ClassVar[bool] = True

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""
        return Factors(snapshot.keys, snapshot.weight, None, None, None)


@dataclass(frozen=True)
class Mean:
    """Sums of weighted neighbors over the number of edges, parallel ones counted (SAGEConv)."""

    is_local: ClassVar[bool] = True

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""
        return Factors(snapshot.keys, snapshot.weight, snapshot.num_in.clamp(min=1).reciprocal(), None, None)


@dataclass(frozen=True)
class Chebyshev:
    """ChebConv's scaled Laplacian 2 L / lambda - I, without loops and with degrees of sources.

    `normalization` is None, "sym" or "rw". Without a `lambda_max` it is twice the largest entry of L, as in PyG.
    """

    normalization: str | None = "sym"
    lambda_max: float | None = None

    def __post_init__(self) -> None:
        if self.normalization not in (None, "sym", "rw"):
            raise ArgumentError(f"normalization must be None, sym or rw, got {self.normalization!r}")

    @property
    def is_local(self) -> bool:
        """Report True if the largest entry is not needed, see `Operator`."""
        return self.lambda_max is not None

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""
        rest = snapshot.without_loops()
        degree = rest.sum_out()
        row, column = None, None
        loop = torch.ones_like(degree) if self.normalization else degree
        if self.normalization == "sym":
            row = column = _inverse_root(degree)
        elif self.normalization == "rw":
            column = _inverse(degree)
        largest = self._largest(rest, row, column, loop) if self.lambda_max is None else self.lambda_max
        # As in PyG, the result is a NaN if all entries are zero.
        factor = 2 / largest if largest else math.nan
        row = torch.full_like(degree, -factor) if row is None else row * -factor
        return Factors(rest.keys, rest.weight, row, column, factor * loop - 1)

    def _largest(self, rest: Snapshot, row: Tensor | None, column: Tensor | None, loop: Tensor) -> float:
        # Parallel edges are separate entries in PyG; without negative weights they are never the largest.
        keys, weight = rest.apart or (rest.keys, rest.weight)
        targets = torch.div(keys, max(1, rest.num_nodes), rounding_mode="floor")
        sources = keys - targets * rest.num_nodes
        entries = rest.num_in.new_ones(keys.numel()) if weight is None else weight
        if row is not None:
            entries = row[targets] * entries
        if column is not None:
            entries = entries * column[sources]
        if rest.apart is not None:
            # Loops too, which a Laplacian does not have.
            entries = entries[targets != sources]
        return 2 * float(torch.cat([-entries, loop]).max()) if loop.numel() else 1.0


def _degrees(ends: Tensor, weight: Tensor | None, size: int) -> Tensor:
    weight = torch.ones(ends.numel(), device=ends.device) if weight is None else weight
    return weight.new_zeros(size).index_add_(0, ends, weight)


def _flatten(edge_weight: Tensor | None, num_edges: int) -> Tensor | None:
    """Return weights as `[E]`."""
    if edge_weight is None or edge_weight.shape == (num_edges,):
        return edge_weight
    if edge_weight.shape != (num_edges, 1):
        raise ArgumentError(f"edge_weight must have shape [{num_edges}], got {tuple(edge_weight.shape)}")
    return edge_weight.squeeze(1)


def walk_along(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return edges (source, target), int64 `[2, E]`, and their weights `[E]` in a step along them.

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
    """Return edges and weights in a step against the edges.

    Raises:
        ArgumentError: there is another number of weights.
    """
    against, shares, refusal = _turn(edge_index, _flatten(edge_weight, edge_index.shape[1]))
    if refusal is not None:
        raise RuntimeError(refusal)
    return against, shares


def _turn(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor, str | None]:
    """Return the result of `walk_against`, and the error of the edges, if any: then there are different numbers of
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
    """A step along the edges, or with `is_against` one against them, for snapshots that keep their edges as given."""

    is_against: bool = False
    # The last node that has an edge counts.
    is_local: ClassVar[bool] = False

    def factorise(self, snapshot: Snapshot) -> Factors:
        """Return the factors of one snapshot."""
        assert snapshot.given is not None, "the order in which edges were given counts"
        edges, weight = snapshot.given
        if self.is_against:
            edges, shares, refusal = _turn(edges, weight)
            if refusal is not None:
                return Factors(snapshot.keys[:0], None, None, None, None, refusal)
            ordered = order_edges(edges, shares, snapshot.num_nodes, dtype=shares.dtype)
            return Factors(ordered.keys, ordered.weight, None, None, None)
        # The edges of a source have equal shares, whatever their weights: each counts as often as it was given.
        ordered, sources = order_edges(edges, None, snapshot.num_nodes), edges[0]
        column = _degrees(sources, weight, snapshot.num_nodes).reciprocal_()
        is_source = torch.zeros_like(column, dtype=torch.bool).index_fill_(0, sources, True)
        return Factors(ordered.keys, ordered.weight, None, column.masked_fill_(~is_source, 0), None)

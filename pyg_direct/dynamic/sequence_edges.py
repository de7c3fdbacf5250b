"""Ordered edges of a sequence of snapshots, and the factors that operators make of them: on the host, or earlier on a
GPU.

A convolution of a snapshot is split into factors and edges, so that snapshots can share their edges:
Y = d * X + a * (W (b * X)). W holds the weights as given, a and b scale rows and columns, and d is a diagonal. Each of
a, b and d has one number per node. If an edge is shared, snapshots still differ in degrees, and so in normalized
weights. This difference lies in a, b and d. The rules equal PyG's convolutions, edge for edge.

Diffusion steps of DCRNN, along the edges of a snapshot (`walk_along`) and against them (`walk_against`), are one
operator each. They follow PyTorch Geometric Temporal. A step along weighs an edge by the degree of its source. A step
against visits the edges in the order of their targets, but takes the degrees in the given order of edges.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from pyg_direct.dynamic.device_caches import Budget
from pyg_direct.dynamic.overlapped_work import Ahead
from pyg_direct.dynamic.snapshot import Joined, Snapshot, join_edges, order_edges
from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError, PygDirectError
from pyg_direct.ops.rows.upload import upload_large
from pyg_direct.ops.snapshots.slice_csr import slice_keys
from pyg_direct.runtime.host.threads import one_thread


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
        """Report whether factors stay equal in a graph that has further parts without edges to them."""

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
    """
    row = edge_index[0]
    size = int(edge_index.max()) + 1 if edge_index.numel() else 0
    return edge_index, _degrees(row, _flatten(edge_weight, row.numel()), size).reciprocal()[row]


def walk_against(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return edges and weights in a step against the edges."""
    against, shares, refusal = _turn(edge_index, _flatten(edge_weight, edge_index.shape[1]))
    if refusal is not None:
        raise RuntimeError(refusal)
    return against, shares


def _turn(edge_index: Tensor, edge_weight: Tensor | None) -> tuple[Tensor, Tensor, str | None]:
    """Return the result of `walk_against`, and an error if the numbers of edges and of weights differ."""
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


# Share of the free memory of a GPU that ordered edges may take. Then the kept bytes of an edge, and the temporary bytes
# of sorting it and finding it in a group of eight.
_SHARE, _EDGE_BYTES = 0.2, 128
# The host sorts so few edges in all before a GPU has begun with all the operations.
FEW = 2**15
# Upper bound of the keys target * N + source in the graph of all snapshots that are sorted at once.
_MOST_KEYS = 2**63
# One thread slices so few edges of some snapshots. A thread in parallel with training would make both wait for Python's
# lock, and all of torch's threads would be woken for each short loop.
FEW_AT_ONCE = 2**18


class Parts(NamedTuple):
    """Tensors of one snapshot, in host memory or on the device.

    Attributes:
        x: Features `[N, ...]`, or None.
        edge_index: int64 `[2, E]`.
        edge_weight: One weight an edge, or None.
        other_bytes: Bytes of the other attributes of a snapshot, mainly its targets.
    """

    x: Tensor | None
    edge_index: Tensor
    edge_weight: Tensor | None
    num_nodes: int
    other_bytes: int = 0


def is_weighted(part: Parts) -> bool:
    """Report whether edges of a snapshot have weights that layers can use."""
    return part.edge_weight is not None and part.edge_weight.is_floating_point()


def find_alike(parts: Sequence[Parts], time: int, first: int, last: int) -> tuple[int, int]:
    """Return the snapshots around `time` in [first, last) whose features have its width and that have any."""

    def width(part: Parts) -> Any:
        return None if part.x is None else (part.x.shape[1:], part.x.dtype)

    low, high = time, time + 1
    while low > first and width(parts[low - 1]) == width(parts[time]):
        low -= 1
    while high < last and width(parts[high]) == width(parts[time]):
        high += 1
    return low, high


def check_limit(parts: Sequence[Parts], memory: int | None) -> None:
    """Raise unless so many bytes hold the features of each snapshot: less keeps nothing. Other attributes of a snapshot
    lie beside them while it is trained on, and the message includes them.
    """
    time = max(range(len(parts)), key=lambda time: _count_features(parts[time]), default=None)
    if time is None or memory is None or memory >= _count_features(parts[time]):
        return
    largest = parts[time]
    weight = largest.edge_weight if is_weighted(largest) else None
    with _told_snapshot(time):
        edges = order_edges(largest.edge_index, weight, largest.num_nodes)
    structure = slice_keys(edges.keys, largest.num_nodes)
    weights = 0 if weight is None else 4 * structure.num_edges
    least, others = _count_features(largest), structure.num_bytes + weights + largest.other_bytes
    raise MemoryLimitError(
        f"memory must hold the features of one snapshot, {least} bytes ({least + others} with edges of "
        f"{structure.num_bytes}, weights of {weights}, and targets and others of {largest.other_bytes} bytes, that "
        f"lie beside them), got {memory}: give at least {least} bytes"
    )


@contextmanager
def _told_snapshot(time: int) -> Iterator[None]:
    """Make errors of a snapshot's edges name it."""
    try:
        yield
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{error}, at snapshot {time}") from error


def _count_features(part: Parts) -> int:
    return 0 if part.x is None else part.x.numel() * part.x.element_size()


class SequenceEdges:
    """Ordered edges of each snapshot, made at the first request.

    Args:
        parts: The snapshots, in order. Tensors that are the same object are the same in several snapshots.
        budget: Budget of the bytes kept there.
    """

    def __init__(self, parts: Sequence[Parts], num_nodes: int, device: torch.device, budget: Budget,
                 ahead: Ahead) -> None:  # fmt: skip
        self._parts, self._num_nodes, self._target, self._budget = parts, num_nodes, device, budget
        self._ahead = ahead
        self._ordered: dict[Hashable, Snapshot] = {}
        # Snapshots that are ordered as one graph, by the names of its parts.
        self._joined: dict[tuple[Hashable, ...], Joined] = {}
        self._factors: dict[Hashable, Factors] = {}
        self.moved_bytes = 0

    def __len__(self) -> int:
        return len(self._ordered) + sum(map(len, self._joined))

    @cached_property
    def device(self) -> torch.device:
        """Device that sorts edges: a GPU with room for all, if they are many or there already, without a limit."""
        given = {id(part.edge_index): part.edge_index for part in self._parts}.values()
        num_edges = sum(edges.shape[1] for edges in given)
        is_there = any(edges.is_cuda for edges in given)
        if (self._target.type == "cuda" and self._budget.limit is None and (is_there or num_edges >= FEW)
                and self._budget.has_room(_EDGE_BYTES * num_edges, _SHARE)):  # fmt: skip
            return self._target
        return torch.device("cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and factors: float64 if features are, as PyG normalizes edges for them, otherwise fp32."""
        is_double = any(part.x is not None and part.x.dtype == torch.float64 for part in self._parts)
        return torch.float64 if is_double else torch.float32

    @cached_property
    def _given_dtype(self) -> torch.dtype:
        """Dtype of weights for operators that normalize in a dtype: their own, if features have as many bits."""
        given = (part.edge_weight for part in self._parts)
        is_double = any(weight is not None and weight.dtype == torch.float64 for weight in given)
        return self.dtype if is_double else torch.float32

    @property
    def are_on_device(self) -> bool:
        """Report whether they are sorted on the device, and structures are made of them there."""
        return self.device.type != "cpu"

    def are_for_thread(self, low: int, high: int) -> bool:
        """Report whether a thread slices snapshots [low, high) ahead: if the host slices, a GPU trains, and they are
        many.

        On a CPU it would cost training as much as it gains. With it 24 snapshots of 5,000 edges took 40 ms instead of
        29, and 24 of 200,000 edges 378 instead of 290, on two cores.
        """
        if self.are_on_device or self._target.type != "cuda":
            return False
        return not self._are_few(low, high)

    def in_one_thread(self, low: int, high: int) -> one_thread:
        """Keep torch's loops over few edges of snapshots [low, high) that lie on the host to the calling thread."""
        return one_thread(not self.are_on_device and self._are_few(low, high))

    def _are_few(self, low: int, high: int) -> bool:
        return sum(part.edge_index.shape[1] for part in self._parts[low:high]) < FEW_AT_ONCE

    def join(self, times: range, weighted: bool = True) -> Snapshot | None:
        """Return the ordered edges of snapshots as one graph, in which node i of the t-th is t * N + i. None if the
        device does not sort, if some have other nodes or were sorted before, or if an edge is wrong, which `order`
        reports.
        """
        names = tuple(self._name(time, weighted) for time in times)
        with self._ahead.lock:
            if names not in self._joined:
                self._join_fresh(times, weighted)
            joined = self._joined.get(names)
        return None if joined is None else joined.graph

    def _join_fresh(self, times: range, weighted: bool) -> None:
        """Sort at once those among some snapshots that were not sorted before."""
        known = {*self._ordered, *chain.from_iterable(self._joined)}
        fresh = {self._name(t, weighted): t for t in times if self._parts[t].num_nodes == self._num_nodes}
        fresh = {name: time for name, time in fresh.items() if name not in known}
        weights = [self._weight_of(time, weighted) for time in fresh.values()]
        if (not fresh or not self.are_on_device or (len(fresh) * self._num_nodes) ** 2 >= _MOST_KEYS
                or any((weight is None) != (weights[0] is None) for weight in weights)):  # fmt: skip
            return
        edges = [self._parts[time].edge_index for time in fresh.values()]
        with suppress(PygDirectError):
            moved = self._move(*edges, *(weight for weight in weights if weight is not None))
            self._joined[tuple(fresh)] = join_edges(moved[: len(edges)], moved[len(edges) :] or weights,
                                                    self._num_nodes, self.dtype)  # fmt: skip

    def _weight_of(self, time: int, weighted: bool) -> Tensor | None:
        return self._parts[time].edge_weight if weighted else None

    def _name(self, time: int, weighted: bool) -> Hashable:
        """Return the key of a snapshot's edges."""
        return id(self._parts[time].edge_index), id(self._weight_of(time, weighted))

    def order(self, time: int, weighted: bool = True) -> Snapshot:
        """Return the edges of a snapshot in order."""
        part, weight, key = self._parts[time], self._weight_of(time, weighted), self._name(time, weighted)
        with self._ahead.lock:
            if key not in self._ordered:
                self._split(key)
            if key not in self._ordered:
                (edge_index,), moved = self._move(part.edge_index), None if weight is None else self._move(weight)[0]
                with _told_snapshot(time):
                    self._ordered[key] = order_edges(edge_index, moved, self._num_nodes, part.num_nodes, self.dtype)
            return self._ordered[key]

    def _split(self, name: Hashable) -> None:
        """Take a snapshot out of a graph of several, and with it the others."""
        names = next((names for names in self._joined if name in names), None)
        if names is not None:
            self._ordered.update(zip(names, self._joined.pop(names).split(), strict=True))

    def _move(self, *given: Tensor) -> list[Tensor]:
        """Return tensors on the device that sorts the edges."""
        if self.are_on_device:
            self.moved_bytes += sum(t.numel() * t.element_size() for t in given if not t.is_cuda)
        return upload_large(given, self.device)

    def factorise(self, operator: Operator, time: int, weighted: bool = True) -> Factors:
        """Factorize a snapshot with an operator."""
        snapshot = self.order(time, weighted)
        key = operator, id(snapshot)
        with self._ahead.lock:
            if key not in self._factors:
                given = self._read_given(time, weighted) if isinstance(operator, Walk) else None
                self._factors[key] = operator.factorise(replace(snapshot, given=given))
            return self._factors[key]

    def _read_given(self, time: int, weighted: bool) -> tuple[Tensor, Tensor | None]:
        """Return edges and weights of a snapshot in the given order."""
        part = self._parts[time]
        weight = part.edge_weight if weighted else None
        edge_index, *rest = self._move(part.edge_index, *(() if weight is None else (weight,)))
        return edge_index.long(), rest[0].reshape(-1).to(self._given_dtype) if rest else None

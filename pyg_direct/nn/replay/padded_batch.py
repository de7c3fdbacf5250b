"""Padded batches: their tensors keep their addresses and sizes, for any batch (`PaddedBatch`, `PaddedTypes`).

Nodes and edges of each hop have their own places. `PaddedTypes` also has places for each type of nodes and each
relation. In `PaddedBatch`, unused places hold nodes that lead only to themselves. In `PaddedTypes` they hold nodes that
lead only to such nodes. They change no result of a model that reads only nodes and their neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_direct.errors import ArgumentError
from pyg_direct.nn.sorted_edges import find_batch, register_sorted
from pyg_direct.ops.aggregate.build_edge_layout import Targets, fits, pad_edges

# Edges of a target without a known bound, in unused places.
FEW_EDGES = 16
# Batches with types have many counts, small ones too, and fit only if each of them does: so many times the square root
# of a count, and so many nodes or edges, are left free besides a share.
_SPREAD, _LEAST_SLACK = 4, 8


class Sizes(NamedTuple):
    """Nodes and edges of each hop, or places for them."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def is_like(self, other: Any) -> bool:
        """Report whether both have as many hops."""
        return isinstance(other, Sizes) and len(self.edges) == len(other.edges)

    def join(self, other: Sizes) -> Sizes:
        """Return the larger of both."""
        return Sizes(*(tuple(map(max, *pair)) for pair in zip(self, other, strict=True)))

    def widen(self, margin: float, num_seeds: int, most_edges: int) -> Sizes:
        """Return places for batches that are larger by a share, with as many seeds."""
        edges = tuple(count + math.ceil(count * margin) for count in self.edges)
        # Room for the padding edges of a smaller batch.
        spare = [math.ceil(4 * margin * count / most_edges) + 1 for count in edges]
        nodes = tuple(count + math.ceil(count * margin) for count in self.nodes)
        return Sizes((num_seeds + spare[0], *(max(place, count + extra) for place, count, extra in
                                              zip(nodes[1:], self.nodes[1:], [*spare[1:], 0], strict=True))),
                     edges)  # fmt: skip


def read_sizes(batch: Any) -> Sizes | None:
    """Read the sizes of a batch of pyg_direct loaders whose edges are known to be sorted; None for any other."""
    if type(batch) is not Data or not isinstance(getattr(batch, "edge_index", None), Tensor):
        return None
    known = find_batch(batch.edge_index)
    nodes, edges = getattr(batch, "num_sampled_nodes", None), getattr(batch, "num_sampled_edges", None)
    # Loaders of links report no seeds.
    if known is None or nodes is None or edges is None or not isinstance(getattr(batch, "batch_size", None), int):
        return None
    if sum(edges) != batch.edge_index.shape[1] or sum(nodes) != batch.num_nodes:
        return None
    return Sizes(tuple(nodes), tuple(edges))


class HopRows(NamedTuple):
    """Rows of a batch, their place, and the rows of each hop in both."""

    rows: Tensor
    place: Tensor
    counts: Sequence[int]
    room: Sequence[int]


# Bytes of a hop from which on it is copied alone: a GPU's launch for many tensors copies large ones at half the rate.
_COPIED_ALONE = 1 << 22


def copy_hops(parts: Iterable[HopRows]) -> None:
    """Copy rows of each hop to its places, the first of them; few rows of one dtype together."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for rows, place, counts, room in parts:
        if rows.dtype.itemsize == 1:
            # Not every device copies lists of float8.
            rows, place = rows.view(torch.uint8), place.view(torch.uint8)
        targets, sources = pairs.setdefault(rows.dtype, ([], []))
        first = begin = 0
        for count, size in zip(counts, room, strict=True):
            if count > 0:
                target, source = place.narrow(0, begin, count), rows.narrow(0, first, count)
                if source.numel() * source.element_size() >= _COPIED_ALONE:
                    target.copy_(source)
                else:
                    targets.append(target)
                    sources.append(source)
            first, begin = first + count, begin + size
    for targets, sources in pairs.values():
        if targets:
            torch._foreach_copy_(targets, sources)


class PaddedEdges:
    """Places for the edges of batches of up to some size.

    Args:
        largest: Nodes and edges of each hop of the largest batches known.
        max_degree: Upper bound of the edges of a target, None if it is not known.

    Attributes:
        edge_index: The edges that a model is given; they keep their memory.
        places: Places for nodes and edges of each hop.
    """

    def __init__(self, edge_index: Tensor, largest: Sizes, margin: float, num_seeds: int, max_degree: int | None
                 ) -> None:  # fmt: skip
        self._max_degree, self._most_edges = max_degree, max_degree or FEW_EDGES
        self.places = largest.widen(margin, num_seeds, self._most_edges)
        self.edge_index = edge_index.new_zeros(2, sum(self.places.edges))

    def fill(self, edge_index: Tensor, sizes: Sizes) -> bool:
        """Copy edges; False if they do not fit, or are of another kind."""
        if (
            edge_index.dtype != self.edge_index.dtype
            or edge_index.device != self.edge_index.device
            or len(sizes.edges) != len(self.places.edges)
            or not fits(*sizes, *self.places, self._most_edges)
        ):
            return False
        pad_edges(edge_index, *sizes, *self.places, self.edge_index)
        return True

    def register(self) -> None:
        """Register the edges as sorted, and forget results for the edges before."""
        # Padding gives a target no more edges than others.
        register_sorted(self.edge_index, *self.places, self._max_degree)


class PaddedBatch:
    """Places for batches of up to some size.

    Args:
        batch: A batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        names: Attributes to copy, rows of nodes or of edges.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory.
    """

    def __init__(self, batch: Data, largest: Sizes, margin: float, names: Sequence[str]) -> None:
        known = find_batch(batch.edge_index)
        assert known is not None, "edges are not known to be sorted"
        self._num_seeds, self._names = batch.batch_size, tuple(names)
        self._edges = PaddedEdges(batch.edge_index, largest, margin, self._num_seeds, known.max_degree)
        self.places = places = self._edges.places
        self.data, self._of_edges = Data(), dict[str, bool]()
        for name in self._names:
            rows = getattr(batch, name, None)
            if not isinstance(rows, Tensor) or not (batch.is_node_attr(name) or batch.is_edge_attr(name)):
                raise ArgumentError(f"names must be of tensors with a row for each node or edge, got {name!r}")
            self._of_edges[name] = batch.is_edge_attr(name)
            self.data[name] = rows.new_zeros(sum(self._read(name, places)), *rows.shape[1:])
        self.data.edge_index = self._edges.edge_index
        self.data.num_nodes = sum(places.nodes)
        self.data.batch_size = self._num_seeds
        self.data.num_sampled_nodes, self.data.num_sampled_edges = list(places.nodes), list(places.edges)

    def fill(self, batch: Data) -> bool:
        """Copy a batch; False if it does not fit, or is of another kind."""
        sizes = read_sizes(batch)
        if (
            sizes is None
            or batch.batch_size != self._num_seeds
            or not all(self._matches(name, batch, sizes) for name in self._names)
            or not self._edges.fill(batch.edge_index, sizes)
        ):
            return False
        self._edges.register()
        copy_hops(HopRows(batch[name], self.data[name], self._read(name, sizes), self._read(name, self.places))
                  for name in self._names)  # fmt: skip
        return True

    def _read(self, name: str, sizes: Sizes) -> tuple[int, ...]:
        """Return rows of an attribute in each hop."""
        return sizes.edges if self._of_edges[name] else sizes.nodes

    def _matches(self, name: str, batch: Data, sizes: Sizes) -> bool:
        given, own = getattr(batch, name, None), self.data[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        return given.shape == (sum(self._read(name, sizes)), *own.shape[1:])


Relation = tuple[str, str, str]


class TypedSizes(NamedTuple):
    """Nodes of each type and edges of each relation in each hop, or places for them."""

    nodes: dict[str, tuple[int, ...]]
    edges: dict[Relation, tuple[int, ...]]

    def find(self, key: Any) -> tuple[int, ...]:
        """Return the nodes of a type, or the edges of a relation, in each hop."""
        counts = self.nodes.get(key)
        return self.edges[key] if counts is None else counts

    def is_like(self, other: Any) -> bool:
        """Report whether both have the same types, relations and hops."""
        return isinstance(other, TypedSizes) and _shape(self) == _shape(other)

    def join(self, other: TypedSizes) -> TypedSizes:
        """Return the larger of both."""
        return TypedSizes(
            {key: tuple(map(max, counts, other.nodes[key])) for key, counts in self.nodes.items()},
            {key: tuple(map(max, counts, other.edges[key])) for key, counts in self.edges.items()},
        )

    def widen(self, margin: float, most_edges: dict[Relation, int]) -> TypedSizes:
        """Return places for batches that are larger by a share, with at least one unused node in each hop of each
        type.
        """
        edges = {kind: tuple(_widen(count, margin) for count in counts) for kind, counts in self.edges.items()}
        nodes = {}
        for kind, counts in self.nodes.items():
            # Room for the padding edges of a smaller batch.
            into = [
                [math.ceil(4 * _find_slack(count, margin) / most_edges[relation]) for count in self.edges[relation]]
                for relation in edges
                if relation[-1] == kind
            ]
            spare = [1 + max(hop, default=0) for hop in zip(*into, strict=True)] if into else [1] * (len(counts) - 1)
            nodes[kind] = tuple(max(_widen(count, margin), count + extra)
                                for count, extra in zip(counts, [*spare, 1], strict=True))  # fmt: skip
        return TypedSizes(nodes, edges)


def _widen(count: int, margin: float) -> int:
    return count + _find_slack(count, margin)


def _find_slack(count: int, margin: float) -> int:
    return math.ceil(count * margin) + math.ceil(_SPREAD * math.sqrt(count)) + _LEAST_SLACK


def _shape(sizes: TypedSizes) -> tuple[dict[Any, int], dict[Any, int]]:
    nodes, edges = ({key: len(counts) for key, counts in part.items()} for part in sizes)
    return nodes, edges


def read_typed_sizes(batch: Any) -> TypedSizes | None:
    """Read the sizes of a batch with types of pyg_direct loaders, whose edges are known to be sorted; None for any
    other.
    """
    if type(batch) is not HeteroData or find_input(batch) is None:
        return None
    nodes: dict[str, tuple[int, ...]] = {}
    edges: dict[Relation, tuple[int, ...]] = {}
    for kind, store in batch.node_items():
        counts = store._mapping.get("num_sampled_nodes")
        if counts is None or sum(counts) != store.num_nodes:
            return None
        nodes[kind] = tuple(counts)
    for relation, store in batch.edge_items():
        counts, edge_index = store._mapping.get("num_sampled_edges"), store._mapping.get("edge_index")
        if counts is None or not isinstance(edge_index, Tensor) or sum(counts) != edge_index.shape[1]:
            return None
        if edge_index.shape[1] > 0 and find_batch(edge_index) is None:
            return None
        edges[relation] = tuple(counts)
    return TypedSizes(nodes, edges) if edges else None


def find_input(batch: Any) -> str | None:
    """Return the type of the seeds; None if there is none, as in batches around links."""
    kinds = [kind for kind, store in batch.node_items() if isinstance(store._mapping.get("batch_size"), int)]
    return kinds[0] if len(kinds) == 1 else None


class PaddedRelations:
    """Places for the edges of batches with types, of up to some size.

    Args:
        edges: Edges of each relation of a batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.

    Attributes:
        edge_index: The edges of each relation that a model is given; they keep their memory.
        places: Places for nodes of each type and edges of each relation in each hop.
    """

    def __init__(self, edges: Mapping[Relation, Tensor], largest: TypedSizes, margin: float) -> None:
        known = {kind: find_batch(edge_index) for kind, edge_index in edges.items()}
        self._max_degree = {kind: None if one is None else one.max_degree for kind, one in known.items()}
        self._most_edges = {kind: degree or FEW_EDGES for kind, degree in self._max_degree.items()}
        self.places = largest.widen(margin, self._most_edges)
        self.edge_index = {kind: edge_index.new_zeros(2, sum(self.places.edges[kind]))
                           for kind, edge_index in edges.items()}  # fmt: skip

    def fill(self, edges: Mapping[Relation, Tensor], sizes: TypedSizes) -> bool:
        """Copy edges; False if they do not fit, or are of another kind."""
        places = self.places
        if not sizes.is_like(places):
            return False
        if any(count > room for kind, counts in sizes.nodes.items()
               for count, room in zip(counts, places.nodes[kind], strict=True)):  # fmt: skip
            return False
        for kind, out in self.edge_index.items():
            given = edges.get(kind)
            if given is None or given.dtype != out.dtype or given.device != out.device or not self._fits(kind, sizes):
                return False
        for kind, out in self.edge_index.items():
            pad_edges(edges[kind], sizes.nodes[kind[0]], sizes.edges[kind], places.nodes[kind[0]], places.edges[kind],
                      out, self._targets(kind, sizes))  # fmt: skip
        return True

    def register(self) -> None:
        """Register the edges as sorted, and forget results for the edges before."""
        for kind, out in self.edge_index.items():
            register_sorted(out, self.places.nodes[kind[0]], self.places.edges[kind], self._max_degree[kind],
                            self.places.nodes[kind[-1]])  # fmt: skip

    def _targets(self, kind: Relation, sizes: TypedSizes) -> Targets | None:
        """Return the targets of a relation between two types."""
        source, _, target = kind
        return None if source == target else Targets(sizes.nodes[target], self.places.nodes[target])

    def _fits(self, kind: Relation, sizes: TypedSizes) -> bool:
        source = kind[0]
        return fits(sizes.nodes[source], sizes.edges[kind], self.places.nodes[source], self.places.edges[kind],
                    self._most_edges[kind], self._targets(kind, sizes))  # fmt: skip


class PaddedTypes:
    """Places for batches with types, of up to some size.

    Args:
        batch: A batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        names: Attributes to copy, rows of nodes or of edges, of the types and relations that have them.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory.
    """

    def __init__(self, batch: HeteroData, largest: TypedSizes, margin: float, names: Sequence[str]) -> None:
        self._input = find_input(batch)
        assert self._input is not None, "a batch has seeds"
        self._num_seeds: int = batch[self._input].batch_size
        self._edges = PaddedRelations({kind: batch[kind].edge_index for kind in largest.edges}, largest, margin)
        self.places = places = self._edges.places
        self.data, self._names = HeteroData(), list[tuple[Any, str]]()
        kind: Any
        for kind, counts in (*places.nodes.items(), *places.edges.items()):
            store, given = self.data[kind], batch[kind]
            for name in names:
                rows = given._mapping.get(name)
                if rows is None:
                    continue
                if not isinstance(rows, Tensor) or not (
                    given.is_node_attr(name) if kind in places.nodes else given.is_edge_attr(name)
                ):
                    raise ArgumentError(f"names must be of tensors with a row for each node or edge, got {name!r} of "
                                        f"{kind!r}")  # fmt: skip
                store[name] = rows.new_zeros(sum(counts), *rows.shape[1:])
                self._names.append((kind, name))
            if kind in places.nodes:
                store.num_nodes, store.num_sampled_nodes = sum(counts), list(counts)
            else:
                store.edge_index = self._edges.edge_index[kind]
                store.num_sampled_edges = list(counts)
        missing = [name for name in names if all(name != own for _, own in self._names)]
        if missing:
            raise ArgumentError(f"names must be of tensors with a row for each node or edge, got {missing[0]!r}")
        self.data[self._input].batch_size = self._num_seeds

    def fill(self, batch: Any) -> bool:
        """Copy a batch; False if it does not fit, or is of another kind."""
        sizes, places = read_typed_sizes(batch), self.places
        if (
            sizes is None
            or not sizes.is_like(places)
            or find_input(batch) != self._input
            or batch[self._input].batch_size != self._num_seeds
            or not all(self._matches(kind, name, batch, sizes) for kind, name in self._names)
            or not self._edges.fill({kind: batch[kind].edge_index for kind in places.edges}, sizes)
        ):
            return False
        self._edges.register()
        copy_hops(HopRows(batch[key]._mapping[name], self.data[key]._mapping[name], sizes.find(key), places.find(key))
                  for key, name in self._names)  # fmt: skip
        return True

    def _matches(self, kind: Any, name: str, batch: HeteroData, sizes: TypedSizes) -> bool:
        given, own = batch[kind]._mapping.get(name), self.data[kind]._mapping[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        return given.shape == (sum(sizes.nodes[kind] if isinstance(kind, str) else sizes.edges[kind]), *own.shape[1:])

"""A batch whose tensors stay where they are and as large as they are, whatever batch they hold.

Nodes and edges of each hop have places of their own; places that a batch leaves over hold nodes that only lead to
themselves, so that they change no result of a model that looks at nodes and their neighbors alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError
from pyg_direct.nn.sorted import find_batch, register_sorted
from pyg_direct.ops.pad import fits, pad_edges

# Edges of a target of which no bound is known, in places that are left over.
FEW_EDGES = 16


class Sizes(NamedTuple):
    """Nodes and edges of each hop, or places for them."""

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def is_like(self, other: Any) -> bool:
        """Whether both have as many hops."""
        return isinstance(other, Sizes) and len(self.edges) == len(other.edges)

    def join(self, other: Sizes) -> Sizes:
        """The larger of both."""
        return Sizes(*(tuple(map(max, *pair)) for pair in zip(self, other, strict=True)))

    def widen(self, margin: float, num_seeds: int, most_edges: int) -> Sizes:
        """Places for batches that are larger by a share, the seeds as many as they are."""
        edges = tuple(count + math.ceil(count * margin) for count in self.edges)
        # Room for the edges that a smaller batch leaves over.
        spare = [math.ceil(4 * margin * count / most_edges) + 1 for count in edges]
        nodes = tuple(count + math.ceil(count * margin) for count in self.nodes)
        return Sizes((num_seeds + spare[0], *(max(place, count + extra) for place, count, extra in
                                              zip(nodes[1:], self.nodes[1:], [*spare[1:], 0], strict=True))),
                     edges)  # fmt: skip


def read_sizes(batch: Any) -> Sizes | None:
    """Sizes of a batch of our loaders whose edges are known to be sorted; None for any other."""
    if type(batch) is not Data or not isinstance(getattr(batch, "edge_index", None), Tensor):
        return None
    known = find_batch(batch.edge_index)
    nodes, edges = getattr(batch, "num_sampled_nodes", None), getattr(batch, "num_sampled_edges", None)
    # Loaders of links tell of no seeds.
    if known is None or nodes is None or edges is None or not isinstance(getattr(batch, "batch_size", None), int):
        return None
    if sum(edges) != batch.edge_index.shape[1] or sum(nodes) != batch.num_nodes:
        return None
    return Sizes(tuple(nodes), tuple(edges))


def copy_hops(rows: Tensor, out: Tensor, counts: Sequence[int], places: Sequence[int]) -> None:
    """Rows of each hop to its places, the first of them."""
    first = begin = 0
    for count, room in zip(counts, places, strict=True):
        if count > 0:
            out.narrow(0, begin, count).copy_(rows.narrow(0, first, count))
        first, begin = first + count, begin + room


class PaddedEdges:
    """Places for the edges of batches of up to some size.

    Args:
        edge_index: Edges like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        margin: How much larger batches may be.
        num_seeds: Seeds of a batch.
        max_degree: Upper bound of the edges of a target, None where it is not known.

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
        """Take edges over; False where they find no room, or are of another kind."""
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
        """Tell that the edges are sorted, and forget what was known of those before."""
        # Places left over give a target no more edges than others.
        register_sorted(self.edge_index, *self.places, self._max_degree)


class PaddedBatch:
    """Places for batches of up to some size.

    Args:
        batch: A batch like those to come.
        largest: Nodes and edges of each hop of the largest batches known.
        margin: How much larger batches may be.
        names: Attributes to take over, rows of nodes or of edges.

    Attributes:
        data: The batch that a model is given; its tensors keep their memory.

    Raises:
        ArgumentError: named argument, rule and value.
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
        """Take a batch over; False where it finds no room, or is of another kind."""
        sizes = read_sizes(batch)
        if (
            sizes is None
            or batch.batch_size != self._num_seeds
            or not all(self._matches(name, batch, sizes) for name in self._names)
            or not self._edges.fill(batch.edge_index, sizes)
        ):
            return False
        self._edges.register()
        for name in self._names:
            copy_hops(batch[name], self.data[name], self._read(name, sizes), self._read(name, self.places))
        return True

    def _read(self, name: str, sizes: Sizes) -> tuple[int, ...]:
        """Rows of an attribute in each hop."""
        return sizes.edges if self._of_edges[name] else sizes.nodes

    def _matches(self, name: str, batch: Data, sizes: Sizes) -> bool:
        given, own = getattr(batch, name, None), self.data[name]
        if not isinstance(given, Tensor) or given.dtype != own.dtype or given.device != own.device:
            return False
        return given.shape == (sum(self._read(name, sizes)), *own.shape[1:])

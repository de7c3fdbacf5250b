"""Edges of the relations of a layer, one relation behind the other: one launch goes over them instead of one each.

They are joined once for the layers that share them, and kept as long as the batch of the first relation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.nn.sorted import SortedBatch
from pyg_direct.ops.aggregate import Transposed, check_edges
from pyg_direct.ops.launch import runs_on_gpu
from pyg_direct.ops.offsets import compress


class Relation(NamedTuple):
    """A convolution of a layer, and what it is given.

    Attributes:
        conv: The convolution.
        batch: What is known of its edges, which fit its rows.
        edge_index: (source, target), `[2, E]`.
        sources, own: Rows of its sources `[N, C]` and of its targets `[T, D]`.
        edge_rows: What belongs to its edges, `[E, F]`, where it takes such.
    """

    conv: Any
    batch: SortedBatch
    edge_index: Tensor
    sources: Tensor
    own: Tensor
    edge_rows: Any = None


class Tables(NamedTuple):
    """Rows of sources by type, each once.

    Attributes:
        tables: Rows of each type, `[N, C]`.
        place_of: Which of them a tensor is, by its identity: relations of one type are given one tensor.
        places: Which of them has the sources of each relation.
        starts: Where those begin if the tables stand one behind the other.
        num_rows: Of all tables.
    """

    tables: list[Tensor]
    place_of: dict[int, int]
    places: list[int]
    starts: list[int]
    num_rows: int

    @classmethod
    def of(cls, relations: Sequence[Relation]) -> Tables:
        """The sources of relations."""
        tables = list({id(relation.sources): relation.sources for relation in relations}.values())
        place_of = {id(table): place for place, table in enumerate(tables)}
        begins = list(accumulate((len(table) for table in tables), initial=0))
        places = [place_of[id(relation.sources)] for relation in relations]
        return cls(tables, place_of, places, [begins[place] for place in places], begins[-1])

    def serve(self) -> list[list[int]]:
        """The relations whose sources each table has."""
        return [[i for i, its in enumerate(self.places) if its == place] for place in range(len(self.tables))]

    def add_own(self, relations: Sequence[Relation]) -> list[int]:
        """Which table has the own rows of the targets of each relation; those that no source lies in come last."""
        for relation in relations:
            if self.place_of.setdefault(id(relation.own), len(self.tables)) == len(self.tables):
                self.tables.append(relation.own)
        return [self.place_of[id(relation.own)] for relation in relations]


class _Edges(NamedTuple):
    """Edges of all relations, sorted by relation, then target."""

    indptr: Tensor
    row: Tensor
    target: Tensor


class JoinedEdges(NamedTuple):
    """Edges of all relations, sorted by relation, then target, in the words of `ops.aggregate`.

    Attributes:
        indptr, row, target: Sources begin where they were told to; the targets of all relations stand one behind the
            other.
        sizes: Targets of each relation.
        num_sources: Rows that edges may come from.
        max_degree: Upper bound of the edges of a target, None where it is not known.
        batch, key: What remembers that which is made of them, and by what name.
    """

    indptr: Tensor
    row: Tensor
    target: Tensor
    sizes: list[int]
    num_sources: int
    max_degree: int | None
    batch: SortedBatch
    key: tuple[Any, ...]

    def transpose(self, tracked: bool) -> Transposed | None:
        """The edges by source, where a gradient of the sources needs them: on a GPU for one in a fixed order alone."""
        if not tracked or (runs_on_gpu(self.row) and not torch.are_deterministic_algorithms_enabled()):
            return None
        made: Transposed = self.batch.remember(
            ("by source", *self.key), lambda: Transposed.of(self.row, self.target, self.num_sources)
        )
        return made


def join_edges(relations: Sequence[Relation], starts: Sequence[int], num_sources: int, *, name: str = "joined",
               pairs: Sequence[tuple[Tensor, Tensor]] | None = None, more: int = 0) -> JoinedEdges:  # fmt: skip
    """The edges of relations, whose sources begin at `starts` among so many.

    Args:
        relations: Those of one launch.
        starts: Where the sources of each begin.
        num_sources: Sources in all.
        name: What is joined, where it is not the edges as they were given.
        pairs: (source, target) of the edges of each relation, if they are others.
        more: How many edges of a target those may have beyond.
    """
    sizes = [relation.own.shape[0] for relation in relations]
    batch, degrees = relations[0].batch, [relation.batch.max_degree for relation in relations]
    # Batches tell their edges from others that came to the same memory, and must not keep each other alive.
    key = (
        name,
        num_sources,
        *(
            (weakref.ref(r.batch), r.edge_index.shape[1], start, size)
            for r, start, size in zip(relations, starts, sizes, strict=True)
        ),
    )
    given: Callable[[], Any] = lambda: (  # noqa: E731
        [relation.edge_index.unbind(0) for relation in relations] if pairs is None else pairs
    )
    edges: _Edges = batch.remember(key, lambda: _join(given(), starts, sizes, num_sources))
    bound = None if None in degrees else max(degree for degree in degrees if degree is not None) + more
    return JoinedEdges(*edges, sizes, num_sources, bound, batch, key)


def _join(pairs: Sequence[Any], starts: Sequence[int], sizes: Sequence[int], num_sources: int) -> _Edges:
    """Edges whose sources begin at `starts` among so many and whose targets take `sizes`."""
    rows, targets = zip(*pairs, strict=True)
    ends = list(accumulate(sizes, initial=0))
    row = torch.cat(torch._foreach_add(rows, list(starts)))
    target = torch.cat(torch._foreach_add(targets, ends[:-1]))
    joined = _Edges(compress(target, ends[-1]), row, target)
    if not runs_on_gpu(row):
        # A GPU is not waited for.
        check_edges(joined.indptr, row, num_sources, ends[-1])
    return joined


def begin_apart(relations: Sequence[Relation]) -> tuple[list[int], int]:
    """Where the sources of each relation begin if each has rows of its own, and how many these are."""
    begins = list(accumulate((len(relation.sources) for relation in relations), initial=0))
    return begins[:-1], begins[-1]

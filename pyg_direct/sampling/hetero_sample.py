"""`GeneralSample`: a sampled batch with types, in parts by node type and relation, and its bidirectional form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo
from pyg_direct.runtime.host.tensor_views import LazyDict
from pyg_direct.sampling.seeds import PlacedEnds


class PackedNodes:
    """Nodes of a batch, type after type in an array, and then their trees; parts are viewed at the first use.

    Args:
        nodes: Nodes of all batches that share the memory, and then their trees if trees are told apart.
        sizes: Nodes of each type.
        begin: Position of the first node of the batch.
        num_together: Nodes of all these batches.
    """

    def __init__(self, types: Sequence[str], nodes: Tensor, sizes: list[int], begin: int, num_together: int) -> None:
        self._types, self._nodes, self._sizes, self._begin, self._count = types, nodes, sizes, begin, num_together

    def view_nodes(self) -> dict[str, Tensor]:
        """Return the ids of the nodes, int64 `[M]`, by type."""
        return self._view(self._begin)

    def view_trees(self) -> dict[str, Tensor]:
        """Return the trees of the nodes, int64 `[M]`, by type."""
        return self._view(self._count + self._begin)

    def _view(self, begin: int) -> dict[str, Tensor]:
        parts = _split_apart(_narrow(self._nodes, begin, sum(self._sizes)), self._sizes)
        return dict(zip(self._types, parts, strict=True))


class PackedEdges:
    """Edges of a batch, relation after relation in two arrays; parts of the arrays are viewed at the first use.

    Args:
        relations: The relations, in the order of their edges.
        counts: Edges of each hop, int64 `[H, R]`.
        types: The node types.
        node_counts: Nodes of each hop, int64 `[H + 1, T]`.
        begin: Positions of the first pair and of the first id of the batch.

    Attributes:
        list_counts, list_nodes: Return the edges and the nodes of each hop, by relation and by type, as new lists; they
            do not hold the arrays.
    """

    def __init__(self, relations: Sequence[EdgeType], ends: Tensor, ids: Tensor, counts: np.ndarray,
                 types: Sequence[str], node_counts: np.ndarray, begin: tuple[int, int] = (0, 0)) -> None:  # fmt: skip
        self.relations, self.ends, self.begin = relations, ends, begin[0]
        self._ids, self._counts, self._first_id = ids, counts, begin[1]
        self.list_counts = partial(_list_counts, relations, counts)
        self.list_nodes = partial(_list_counts, types, node_counts)

    def view_all(self) -> tuple[Sequence[Tensor], Sequence[Tensor], list[list[int]]]:
        """Return (pairs, ids, edges of each hop) of all relations, see `view_pairs`, `view_ids` and `list_counts`."""
        return (_split_pairs(self.ends, self.begin, self.sizes), self._split_ids(), self._counts.T.tolist())

    def view_pairs(self) -> dict[EdgeType, Tensor]:
        """Return the local ids of sources and targets, int64 `[2, E']`, by relation."""
        return dict(zip(self.relations, _split_pairs(self.ends, self.begin, self.sizes), strict=True))

    def view_ids(self) -> dict[EdgeType, Tensor]:
        """Return the ids of edges, int64 `[E']`, by relation."""
        return dict(zip(self.relations, self._split_ids(), strict=True))

    @cached_property
    def sizes(self) -> list[int]:
        """Edges of each relation."""
        # Of a hundred relations, NumPy adds up faster than Python.
        sizes: list[int] = self._counts.sum(0).tolist()
        return sizes

    def _split_ids(self) -> Sequence[Tensor]:
        return _split_apart(_narrow(self._ids, self._first_id, sum(self.sizes)), self.sizes)


def _list_counts(names: Sequence[Any], counts: np.ndarray) -> dict[Any, list[int]]:
    return dict(zip(names, counts.T.tolist(), strict=True))


@dataclass
class GeneralSample:
    """A sampled batch, by node type and relation.

    Attributes:
        node: Ids of the nodes within their type, int64 `[M]`: seeds in the order given, then hop after hop. Ids ascend
            within a hop; if trees are disjoint, within a tree of a hop.
        edge_index: Local ids of sources and targets, int64 `[2, E']`: hop after hop, sorted by the node expanded.
        edge: Edge ids within the relation, int64 `[E']`; None if edges were merged with reverse ones of another
            relation.
        batch: Number of the seed whose tree a node belongs to, int64 `[M]`; None unless disjoint. Seeds of several
            types are numbered one type after the other, in the order given.
        num_sampled_nodes: Seeds, and new nodes of each hop; None for subgraphs that have no hops.
        num_sampled_edges: Edges of each hop; None likewise.
        memory: Tensors that own the memory of all types and relations; empty if each tensor has its own.
        sampled: Of a graph in parts: the sampled edges, if edges keep their ids in both directions; otherwise None.
        max_degree: Upper bound of the edges of one relation that an expanded node has; None for none.
        num_seeds: Nodes of each type that are seeds, the first ones.
        rows: Of a graph in parts: rows of the nodes by node type and attribute, if they came with the sample.
        packed: Edges of all relations, if they share memory.
        sizes: Nodes of each type; empty if they are not known.
        num_together: Nodes of all batches that share `memory`.
        starts, edge_starts: Words by which rows of the nodes, and of the edges, of all these batches are read, see
            `list_layout`; None if they are not known.
        seed_time: Times of the seeds as given, int64 on the device; None if they are not there.
        ends: Local ids of the ends of links that a plan on a GPU has drawn; None for other seeds.
    """

    node: dict[str, Tensor]
    edge_index: dict[EdgeType, Tensor]
    edge: dict[EdgeType, Tensor | None]
    batch: dict[str, Tensor] | None
    num_sampled_nodes: dict[str, list[int]] | None
    num_sampled_edges: dict[EdgeType, list[int]] | None
    memory: tuple[Tensor, ...] = ()
    sampled: GeneralSample | None = None
    max_degree: int | None = None
    num_seeds: dict[str, int] = field(default_factory=dict)
    rows: list[dict[str, Tensor]] | None = None
    packed: PackedEdges | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    num_together: int = 0
    starts: Tensor | None = None
    edge_starts: Tensor | None = None
    seed_time: Tensor | None = None
    ends: PlacedEnds | None = None

    @property
    def row(self) -> dict[EdgeType, Tensor]:
        """Local ids of sources, int64 `[E']`."""
        return {kind: pair[0] for kind, pair in self.edge_index.items()}

    @property
    def col(self) -> dict[EdgeType, Tensor]:
        """Local ids of targets, int64 `[E']`."""
        return {kind: pair[1] for kind, pair in self.edge_index.items()}

    def to_bidirectional(self, *, keep_ids: bool = False, keep_sampled: bool = False) -> GeneralSample:
        """Every edge in both directions, once each, sorted by target, then source, as PyG makes it.

        A relation (a, r, b) meets its reverse (b, rev_r, a); without one, a relation from a type to itself is its own
        reverse; otherwise the only relation from b to a is. Ids of merged edges are dropped. With `keep_ids`, for a
        graph of one relation, an edge sampled several times, or in both directions, keeps its first id. With
        `keep_sampled` the sample holds the sampled edges too.
        """
        row, col, edge = self.row, self.col, dict(self.edge)
        sources, targets = dict(row), dict(col)
        for edge_type in sources:
            name = edge_type[1]
            if name.startswith("rev_"):
                continue
            reverse = find_partner(edge_type, list(sources))
            if reverse is None:
                warn(f"{edge_type} has no reverse relation and keeps its direction", LoaderWarning)  # fmt: skip
                continue
            row[edge_type], col[edge_type], first = _merge(
                torch.cat([sources[edge_type], targets[reverse]]), torch.cat([targets[edge_type], sources[reverse]])
            )
            ids = self.edge[edge_type]
            edge[edge_type] = torch.cat([ids, ids])[first] if keep_ids and ids is not None else None
            if reverse[1] == f"rev_{name}":
                row[reverse], col[reverse], edge[reverse] = col[edge_type], row[edge_type], None
        pairs = {kind: torch.stack([row[kind], col[kind]]) for kind in row}
        return replace(self, edge_index=pairs, edge=edge, num_sampled_nodes=None, num_sampled_edges=None, memory=(),
                       packed=None, sampled=self if keep_sampled else None)  # fmt: skip


def find_partner(edge_type: EdgeType, edge_types: Sequence[EdgeType]) -> EdgeType | None:
    """Return the relation whose edges stand beside edges of another in both directions; None if none is known, or
    the other is named `rev_...`, which others find.
    """
    source, name, target = edge_type
    if name.startswith("rev_"):
        return None
    reverse = (target, f"rev_{name}", source)
    if reverse in edge_types:
        return reverse
    if source == target:
        return edge_type
    back = [kind for kind in edge_types if (kind[0], kind[2]) == (target, source)]
    return back[0] if len(back) == 1 else None


def _merge(row: Tensor, col: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct edges by target, then source; and the first place of each."""
    if not row.numel():
        return row, col, row
    # Both ends in one number: local ids take 31 bits.
    ends, order = ((col << 32) | row).sort(stable=True)
    is_first = torch.ones_like(ends, dtype=torch.bool)
    torch.ne(ends[1:], ends[:-1], out=is_first[1:])
    # A GPU is waited for once.
    places = is_first.nonzero().view(-1)
    ends = ends[places]
    return ends & 0xFFFFFFFF, ends >> 32, order[places]


def split_outputs(topo: HeteroTopo, outputs: tuple[Tensor, Tensor, Tensor], node_counts: np.ndarray,
                  num_edges: np.ndarray, num_batches: int, disjoint: bool, max_degree: int | None, *,
                  has_hops: bool = True, words: Sequence[int] = ()) -> list[GeneralSample]:  # fmt: skip
    """Return the batches whose types and relations stand one after the other in three arrays.

    Args:
        outputs: Nodes, batch after batch and type after type, int64 `[M]`, and then their trees if trees are told
            apart; pairs of ends, batch after batch and relation after relation, sources and then targets, with room
            for one if there is none; ids of edges likewise, int64 `[E']`.
        node_counts: Nodes of each hop, int64 `[H + 1, G * T]`.
        num_edges: Edges of each hop, int64 `[H, G * R]`.
        num_batches: Batches, G.
        max_degree: See `GeneralSample`.
        has_hops: True for batches of the edges of their hops, False for batches of the edges among their nodes.
        words: Sizes of what follows the nodes: `starts`, `edge_starts`, and then times of the seeds of each batch.
    """
    types, relations = topo.node_types, topo.edge_types
    nodes, ends, edge_ids = outputs
    sampled_nodes = node_counts.T.tolist()
    sizes = [*map(sum, sampled_nodes)]
    num_types, num_together = len(types), sum(sizes)
    # Parts of one type are viewed in the time that it takes to put it off.
    is_single = num_types == len(relations) == num_batches == 1
    heads = [num_together] * (1 + disjoint) if is_single else [num_together * (1 + disjoint)]
    # All that follows the nodes, in one step.
    parts = split_parts(nodes, [*heads, *words]) if words or is_single else ()
    starts, edge_starts, *times = parts[len(heads) :] or (None, None)
    if is_single:
        (kind,), (relation,), num_pairs = types, relations, edge_ids.shape[0]
        pair = ends.view(2, -1) if num_pairs else ends.as_strided((2, 0), (1, 1))
        of_hops, of_edges = sampled_nodes[0], num_edges[:, 0].tolist()
        return [GeneralSample(
            node={kind: parts[0]},
            edge_index={relation: pair},
            edge={relation: edge_ids},
            batch={kind: parts[1]} if disjoint else None,
            num_sampled_nodes={kind: of_hops} if has_hops else None,
            num_sampled_edges={relation: of_edges} if has_hops else None,
            memory=outputs,
            max_degree=max_degree,
            num_seeds={kind: of_hops[0]},
            packed=PackedEdges(relations, ends, edge_ids, num_edges, types, node_counts),
            sizes={kind: num_together},
            num_together=num_together,
            starts=starts,
            edge_starts=edge_starts,
            seed_time=times[0] if times else None,
        )]  # fmt: skip
    samples, begin, first = [], (0, 0), 0
    counts, of_nodes, own_sizes, own_counts = num_edges, node_counts, sizes, sampled_nodes
    for number in range(num_batches):
        if num_batches > 1:
            at, place = number * num_types, number * len(relations)
            counts, of_nodes = num_edges[:, place : place + len(relations)], node_counts[:, at : at + num_types]
            own_sizes, own_counts = sizes[at : at + num_types], sampled_nodes[at : at + num_types]
        own = PackedNodes(types, nodes, own_sizes, first, num_together)
        edges = PackedEdges(relations, ends, edge_ids, counts, types, of_nodes, begin)
        if num_batches > 1:
            of_relations, first = counts.sum(0), first + sum(own_sizes)
            begin = begin[0] + 2 * int(np.maximum(of_relations, 1).sum()), begin[1] + int(of_relations.sum())
        samples.append(GeneralSample(
            node=LazyDict(own.view_nodes),
            edge_index=LazyDict(edges.view_pairs),
            edge=LazyDict(edges.view_ids),
            batch=LazyDict(own.view_trees) if disjoint else None,
            num_sampled_nodes=dict(zip(types, own_counts, strict=True)) if has_hops else None,
            num_sampled_edges=LazyDict(edges.list_counts) if has_hops else None,
            memory=outputs,
            max_degree=max_degree,
            num_seeds={kind: of_hops[0] for kind, of_hops in zip(types, own_counts, strict=True)},
            packed=edges,
            sizes=dict(zip(types, own_sizes, strict=True)),
            num_together=num_together,
            starts=starts,
            edge_starts=edge_starts,
            seed_time=times[number] if number < len(times) else None,
        ))  # fmt: skip
    return samples


def split_parts(array: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Parts of an array that stand one after the other; torch counts writes to each on its own."""
    return torch.unsafe_split_with_sizes(array, sizes) if sizes else ()


def _split_pairs(ends: Tensor, place: int, sizes: list[int]) -> list[Tensor]:
    """Pairs `[2, E']` that stand one after the other from a place on, with room for one edge at least; torch counts
    writes to each on its own.
    """
    room = [2 * size or 2 for size in sizes]
    parts = _split_apart(_narrow(ends, place, sum(room)), room)
    # A view by shape takes torch less time than one by strides.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return [part.view(2, -1) if size else part.as_strided((2, 0), (1, 1))
                for part, size in zip(parts, sizes, strict=True)]  # fmt: skip


def _split_apart(array: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """As `split_parts`, without the links that torch keeps for views, which take it a third of the time."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return split_parts(array, sizes)


def _narrow(array: Tensor, begin: int, size: int) -> Tensor:
    """Return a part of an array; the array itself if it is all of it."""
    return array if array.shape[0] == size else array.narrow(0, begin, size)


def split_by(names: tuple, array: Tensor, sizes: list[int], dim: int = 0) -> dict:  # type: ignore[type-arg]
    """Parts of an array that stand one after the other along a dimension, by name."""
    return dict(zip(names, array.split(sizes, dim), strict=True)) if names else {}

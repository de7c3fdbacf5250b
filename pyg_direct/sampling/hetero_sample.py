"""`GeneralSample`: a sampled batch with types, in parts by node type and relation, and its bidirectional form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.graph.hetero_topo import EdgeType, HeteroTopo


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
                       sampled=self if keep_sampled else None)  # fmt: skip


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
    order = row.sort(stable=True).indices
    order = order[col[order].sort(stable=True).indices]
    row, col = row[order], col[order]
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
    return row[is_first], col[is_first], order[is_first]


def split_outputs(topo: HeteroTopo, outputs: tuple[Tensor, Tensor, Tensor], node_counts: np.ndarray,
                  num_edges: np.ndarray, num_batches: int, disjoint: bool, max_degree: int | None, *,
                  has_hops: bool = True) -> list[GeneralSample]:  # fmt: skip
    """Return the batches whose types and relations stand one after the other in three arrays.

    Args:
        topo: The graph.
        outputs: Nodes, batch after batch and type after type, int64 `[M]`, and then their trees if trees are told
            apart; pairs of ends, batch after batch and relation after relation, sources and then targets, with room
            for one if there is none; ids of edges likewise, int64 `[E']`.
        node_counts: Nodes of each hop, int64 `[H + 1, G * T]`.
        num_edges: Edges of each hop, int64 `[H, G * R]`.
        num_batches: Batches, G.
        disjoint: Whether trees are told apart.
        max_degree: See `GeneralSample`.
        has_hops: True for batches of the edges of their hops, False for batches of the edges among their nodes.
    """
    types, relations = topo.node_types, topo.edge_types
    nodes, ends, edge_ids = outputs
    sampled_nodes, sampled_edges = node_counts.T.tolist(), num_edges.T.tolist()
    sizes, edge_sizes = [*map(sum, sampled_nodes)], [*map(sum, sampled_edges)]
    parts = split_parts(nodes, sizes * 2 if disjoint else sizes)
    trees = parts[len(sizes) :]
    id_parts, pairs_of = split_parts(edge_ids, edge_sizes), _split_pairs(ends, edge_sizes)
    first_counts = [counts[0] for counts in sampled_nodes]
    samples = []
    for number in range(num_batches):
        if num_batches > 1:
            own, of_edges = (slice(number * len(kinds), (number + 1) * len(kinds)) for kinds in (types, relations))
        else:
            own = of_edges = slice(None)
        samples.append(GeneralSample(
            node=dict(zip(types, parts[own], strict=False)),
            edge_index=dict(zip(relations, pairs_of[of_edges], strict=True)),
            edge=dict(zip(relations, id_parts[of_edges], strict=True)),
            batch=dict(zip(types, trees[own], strict=True)) if disjoint else None,
            num_sampled_nodes=dict(zip(types, sampled_nodes[own], strict=True)) if has_hops else None,
            num_sampled_edges=dict(zip(relations, sampled_edges[of_edges], strict=True)) if has_hops else None,
            memory=outputs,
            max_degree=max_degree,
            num_seeds=dict(zip(types, first_counts[own], strict=True)),
        ))  # fmt: skip
    return samples


def split_parts(array: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Parts of an array that stand one after the other; torch counts writes to each on its own."""
    return torch.unsafe_split_with_sizes(array, sizes) if sizes else ()


def _split_pairs(ends: Tensor, sizes: list[int]) -> list[Tensor]:
    """Pairs `[2, E']` that stand one after the other, with room for one edge at least; torch counts writes to each on
    its own.
    """
    pairs, place, view = [], 0, ends.as_strided
    # Without the links that torch keeps for views: two thirds of the time of a split and a view of each part.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        for size in sizes:
            pairs.append(view((2, size), (size or 1, 1), place))
            place += 2 * size or 2
    return pairs


def split_by(names: tuple, array: Tensor, sizes: list[int], dim: int = 0) -> dict:  # type: ignore[type-arg]
    """Parts of an array that stand one after the other along a dimension, by name."""
    return dict(zip(names, array.split(sizes, dim), strict=True)) if names else {}

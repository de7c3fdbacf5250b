"""What the general sampler returns: PyG's sampler output in parts by type, and its bidirectional form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.graph.relation import EdgeType


@dataclass
class GeneralSample:
    """A sampled batch, by node type and relation.

    Attributes:
        node: Ids of the nodes within their type, int64 `[M]`: seeds in the order given, then hop after hop, ascending
            within a hop (by tree first, where trees are disjoint).
        edge_index: Local ids of sources and targets, int64 `[2, E']`: hop after hop, sorted by the node expanded.
        edge: Edge ids within the relation, int64 `[E']`; None where edges were merged with reverse ones of another
            relation.
        batch: Number of the seed whose tree a node belongs to, int64 `[M]`; None unless disjoint. Seeds of several
            types are numbered one type after the other, in the order given.
        num_sampled_nodes: Seeds, and new nodes of each hop; None for subgraphs that have no hops.
        num_sampled_edges: Edges of each hop; None likewise.
        memory: The tensors whose memory those of all types and relations share; empty where each has its own.
        sampled: What edges that kept their ids in both directions were made from, of a graph in parts; else None.
        max_degree: Upper bound of the edges of one relation that an expanded node has; None for none.
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
        reverse; else the only relation from b to a is. Ids of merged edges are dropped, or (`keep_ids`, for a graph of
        one relation) an edge sampled in both directions, or several times, keeps the first. With `keep_sampled` it
        holds this one too.
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
    """Return the relation whose edges stand beside those of another in both directions; None where none is known, or
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
    """Distinct edges by target, then source; and where each stands first."""
    if not row.numel():
        return row, col, row
    order = row.sort(stable=True).indices
    order = order[col[order].sort(stable=True).indices]
    row, col = row[order], col[order]
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = (row[1:] != row[:-1]) | (col[1:] != col[:-1])
    return row[is_first], col[is_first], order[is_first]

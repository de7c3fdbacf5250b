"""Edges among the nodes of a set, by looking at every edge of every row."""

from __future__ import annotations

from collections.abc import Sequence


def induce(indptr: Sequence[int], indices: Sequence[int], ids: Sequence[int], nodes: Sequence[int]
           ) -> list[tuple[int, int, int]]:  # fmt: skip
    """(place of the neighbor, place of the node, edge id) of each edge of the rows of `nodes` that stays among them."""
    place = {node: i for i, node in reversed(list(enumerate(nodes)))}
    return [(place[indices[e]], row, ids[e])
            for row, node in enumerate(nodes)
            for e in range(indptr[node], indptr[node + 1]) if indices[e] in place]  # fmt: skip

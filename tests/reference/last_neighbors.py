"""Latest neighbors of nodes in a growing graph of events, kept in lists."""

from __future__ import annotations

from collections.abc import Sequence


class LastNeighbors:
    """For each node its latest events, the latest first: (number of the event, other node)."""

    def __init__(self, num_nodes: int, size: int) -> None:
        self.size, self.count = size, 0
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]

    def insert(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Add events; an event of a node with itself counts twice."""
        for source, target in zip(src, dst, strict=True):
            for node, other in ((target, source), (source, target)):
                self.rows[node] = [(self.count, other), *self.rows[node]][: self.size]
            self.count += 1

    def read(self, n_id: Sequence[int]) -> tuple[list[int], list[list[int]], list[int]]:
        """Nodes and their neighbors, edges between their places, and the numbers of the events."""
        edges = [(other, node, event) for node in n_id for event, other in self.rows[node]]
        nodes = sorted({*n_id, *(other for other, _, _ in edges)})
        places = [[nodes.index(edge[end]) for edge in edges] for end in (0, 1)]
        return nodes, places, [event for _, _, event in edges]

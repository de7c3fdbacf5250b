"""Events of each node in the batch in which it came last, as source and as destination, kept in lists."""

from __future__ import annotations

from collections.abc import Sequence

Event = tuple[int, int, int, int]


class LastMessages:
    """For each role (0: source, 1: destination) the events (src, dst, t, number) of each node."""

    def __init__(self, num_nodes: int) -> None:
        self.count = 0
        self.events: list[list[list[Event]]] = [[[] for _ in range(num_nodes)] for _ in range(2)]

    def insert(self, src: Sequence[int], dst: Sequence[int], t: Sequence[int]) -> None:
        """Add a batch, which replaces the events of its nodes in either role."""
        batch = [(*event, self.count + i) for i, event in enumerate(zip(src, dst, t, strict=True))]
        self.count += len(batch)
        for role in range(2):
            for node in {event[role] for event in batch}:
                self.events[role][node] = [event for event in batch if event[role] == node]

    def list_events(self, role: int, n_id: Sequence[int]) -> list[int]:
        """Numbers of the events of nodes, node after node."""
        return [event[3] for node in n_id for event in self.events[role][node]]

    def choose(self, n_id: Sequence[int], last_update: Sequence[int], stand_in: tuple[int, Event] | None = None
               ) -> list[tuple[int, ...]]:  # fmt: skip
        """For each node (number of the event, own node, other node, elapsed time, latest time).

        A node without events takes the role and the event of `stand_in`.
        """
        found = []
        for node in n_id:
            own = [(event[2], role, event[3], event) for role in range(2) for event in self.events[role][node]]
            if not own and stand_in is None:
                found.append((-1, node, node, 0, 0))
                continue
            latest, role, _, event = max(own) if own else (0, stand_in[0], 0, stand_in[1])
            found.append((event[3], event[role], event[1 - role], event[2] - last_update[event[role]], latest))
        return found

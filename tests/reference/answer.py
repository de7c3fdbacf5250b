"""Edges of a hop as owners answer them, and in the order of the asking part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Edge = tuple[int, int]


def list_answer(edges: Mapping[tuple[int, int], Sequence[Edge]], types: Sequence[int], front: Sequence[Sequence[int]],
                owner_of: Sequence[int], owner: int) -> list[list[Edge]]:  # fmt: skip
    """Edges of each item that an owner answers: entry after entry, and node after node of the type that it expands.

    Args:
        edges: Edges (neighbor, edge id) of each (entry, place in the frontier).
        types: Type that each entry expands.
        front: Places in the frontier by type.
        owner_of: Owner of each place.
    """
    return [list(edges[entry, place]) for entry, kind in enumerate(types) for place in front[kind]
            if owner_of[place] == owner]  # fmt: skip


def join(edges: Mapping[tuple[int, int], Sequence[Edge]], types: Sequence[int], front: Sequence[Sequence[int]]
         ) -> list[list[Edge]]:  # fmt: skip
    """Edges of each item of the work list."""
    return [list(edges[entry, place]) for entry, kind in enumerate(types) for place in front[kind]]

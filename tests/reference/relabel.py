"""Local ids: seeds first in the order given, then new nodes ascending."""

from __future__ import annotations

from collections.abc import Sequence


def relabel(seeds: Sequence[int], neighbors: Sequence[int]) -> tuple[list[int], list[int]]:
    """(global id of every local id, local id of every neighbor); of a repeated seed, its first position."""
    n_id = list(seeds) + sorted(set(neighbors) - set(seeds))
    return n_id, [n_id.index(neighbor) for neighbor in neighbors]

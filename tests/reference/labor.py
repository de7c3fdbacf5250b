"""Neighbors that a node picks if sources have one key for all rows: the ones with the smallest keys."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.draw import draw

LABOR = 3
# Slot of the draws that give types keys of their own.
TYPE = 2**62 + 6


def labor_key(key: int, hop: int, same_keys: bool) -> int:
    """Key of the sources in hop `hop` of a batch."""
    return draw(key, 0 if same_keys else hop, LABOR)


def pick_places(sources: Sequence[int], fanout: int, key: int, hop: int, same_keys: bool, kind: int = 0) -> list[int]:
    """Places that a row of these sources, of type number `kind`, picks in a hop of the batch under `key`, ascending."""
    hop_key = labor_key(key, hop, same_keys)
    if kind > 0:
        hop_key = draw(hop_key, kind, TYPE)
    ranked = sorted(range(len(sources)), key=lambda place: (draw(hop_key, sources[place], 0), place))
    return sorted(ranked if fanout < 0 else ranked[:fanout])


def sample_neighbors(indptr: Sequence[int], indices: Sequence[int], seeds: Sequence[int], fanout: int, key: int,
                     hop: int = 0, same_keys: bool = False) -> list[list[int]]:  # fmt: skip
    """Positions of the edges that each seed picks in a hop of the batch under `key`."""
    rows = []
    for seed in seeds:
        start, end = indptr[seed], indptr[seed + 1]
        places = pick_places(indices[start:end], fanout, key, hop, same_keys)
        rows.append([start + place for place in places])
    return rows

"""Neighbors that a node picks if sources have one key for all rows: the ones with the smallest keys."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.draw import draw

LABOR = 3


def labor_key(key: int, hop: int, same_keys: bool) -> int:
    """Key of the sources in hop `hop` of a batch."""
    return draw(key, 0 if same_keys else hop, LABOR)


def sample_neighbors(indptr: Sequence[int], indices: Sequence[int], seeds: Sequence[int], fanout: int, key: int,
                     hop: int = 0, same_keys: bool = False) -> list[list[int]]:  # fmt: skip
    """Positions of the edges that each seed picks in a hop of the batch under `key`."""
    hop_key = labor_key(key, hop, same_keys)
    rows = []
    for seed in seeds:
        row = range(indptr[seed], indptr[seed + 1])
        ranked = sorted(row, key=lambda position: (draw(hop_key, indices[position], 0), position))
        rows.append(sorted(ranked if fanout < 0 else ranked[:fanout]))
    return rows

"""Neighbors that a node picks: Floyd's rule (Bentley and Floyd, CACM 30(9), 1987), slot after slot."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.draw import draw_below, hop_key


def pick_neighbors(degree: int, node: int, fanout: int, key: int, replace: bool) -> list[int]:
    """Positions picked among the `degree` neighbors of `node`, by slot; `key` is the key of the hop."""
    if degree == 0 or fanout == 0:
        return []
    if fanout > 0 and replace:
        return [draw_below(key, node, slot, degree) for slot in range(fanout)]
    if fanout < 0 or degree <= fanout:
        return list(range(degree))
    picks: list[int] = []
    taken: set[int] = set()
    for slot in range(fanout):
        last = degree - fanout + slot
        pick = draw_below(key, node, slot, last + 1)
        if pick in taken:
            pick = last
        picks.append(pick)
        taken.add(pick)
    return picks


def sample_neighbors(indptr: Sequence[int], seeds: Sequence[int], fanout: int, key: int, hop: int = 0,
                     replace: bool = False) -> list[list[int]]:  # fmt: skip
    """Positions of the edges that each seed picks in a hop of the batch under `key`."""
    rows = []
    for seed in seeds:
        start, degree = indptr[seed], indptr[seed + 1] - indptr[seed]
        picks = pick_neighbors(degree, seed, fanout, hop_key(key, hop), replace)
        rows.append([start + pick for pick in picks])
    return rows

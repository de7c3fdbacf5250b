"""Personalised PageRank: exactly, by all walks at once, and as walks that were drawn estimate it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from tests.reference.walks import walk

BITS = 20


def find_pagerank(rows: Sequence[Sequence[int]], seed: int, alpha: float, length: int | None = None) -> np.ndarray:
    """Chance of each node to be the end of a walk from `seed` at its restart; after `length` steps it restarts
    anyway.
    """
    place = np.zeros(len(rows))
    place[seed] = 1
    found = np.zeros(len(rows))
    for step in range(2000 if length is None else length):
        found += alpha * (1 - alpha) ** step * place
        following = np.zeros(len(rows))
        for node in np.flatnonzero(place):
            # One without neighbors keeps its walk.
            row = rows[node] or [node]
            for other in row:
                following[other] += place[node] / len(row)
        place = following
    return found if length is None else found + (1 - alpha) ** length * place


def count_visits(rows: Sequence[Sequence[int]], seed: int, place: int, alpha: float, num_walks: int, length: int,
                 key: int) -> Counter[int]:  # fmt: skip
    """Scores of nodes in 2**-20 of a walk, for the seed at this place in its batch."""
    left = [round(2**BITS * (1 - alpha) ** step) for step in range(length + 1)]
    found: Counter[int] = Counter()
    for number in range(place * num_walks, (place + 1) * num_walks):
        for step, node in enumerate(walk(rows, seed, length, (1, 1, 1), key, number)):
            found[node] += left[step] - (left[step + 1] if step < length else 0)
    return found


def find_neighbors(rows: Sequence[Sequence[int]], seeds: Sequence[int], num_neighbors: int, alpha: float,
                   num_walks: int, length: int, key: int) -> list[list[tuple[int, int]]]:  # fmt: skip
    """(node, score) of each seed: itself, then the others by falling score, of equal ones by id."""
    found = []
    for place, seed in enumerate(seeds):
        scores = count_visits(rows, seed, place, alpha, num_walks, length, key)
        own = scores.pop(seed)
        best = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:num_neighbors]
        found.append([(seed, own), *best])
    return found

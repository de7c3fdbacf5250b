"""Rows of a table by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def gather_rows(table: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Row `ids[i]` of the table at place i; a row of zeros for an id outside the table."""
    out = np.zeros((len(ids), *table.shape[1:]), table.dtype)
    for place, item in enumerate(ids):
        if 0 <= item < len(table):
            out[place] = table[item]
    return out


def find_first_bad(ids: Sequence[int], num_rows: int) -> int | None:
    """Lowest place of an id outside the table."""
    return next((place for place, item in enumerate(ids) if not 0 <= item < num_rows), None)


def make_directory(hot_ids: Sequence[int], num_rows: int) -> tuple[list[int], list[int]]:
    """(words of 32 bits, one bit an id; number of hot ids before each word)."""
    words = [[item for item in hot_ids if item // 32 == word] for word in range(-(-num_rows // 32))]
    bits = [sum(2 ** (item % 32) for item in word) for word in words]
    ranks = [sum(len(earlier) for earlier in words[:word]) for word in range(len(words))]
    return bits, ranks

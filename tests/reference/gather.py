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


def split_rows(table: np.ndarray, hot_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(hot rows, cold rows), each in ascending order of their ids."""
    hot = sorted(hot_ids)
    cold = [item for item in range(len(table)) if item not in set(hot)]
    return table[hot], table[cold]

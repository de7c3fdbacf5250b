"""Rows written into a table by id, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def scatter_rows(table: np.ndarray, ids: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """The table with each row replaced that is named; the last one counts."""
    out = table.copy()
    for item, row in zip(ids, rows, strict=True):
        if 0 <= item < len(table):
            out[item] = row
    return out

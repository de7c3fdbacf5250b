"""Searches in ascending values by halves, as steps of loops and grids."""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body


@body
def first_not_below(values, begin, end, value):
    """The first position of values[begin:end] that is not below `value`; `end` if there is none."""
    low, high = np.int64(begin), np.int64(end)
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@body
def first_above(values, begin, end, value):
    """The first position of values[begin:end] that is above `value`; `end` if there is none."""
    low, high = np.int64(begin), np.int64(end)
    while low < high:
        middle = (low + high) >> 1
        if values[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low


@body
def last_at_most(values, begin, end, value):
    """The last position of values[begin:end] that is at most `value`; values[begin] always is."""
    low, high = np.int64(begin), np.int64(end)
    while high - low > 1:
        middle = (low + high) >> 1
        if values[middle] <= value:
            low = middle
        else:
            high = middle
    return low

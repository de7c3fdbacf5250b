"""Which edges of a row a tree may use: a range, since rows of timed relations are sorted by time."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.excluded import restrict_to_left
from pyg_direct.kernels.jit import body
from pyg_direct.kernels.neighbor import num_picks
from pyg_direct.kernels.weighted import count_positive, count_positive_left
from pyg_direct.kernels.worklist import BATCH, BY_PLACE, FANOUT, FLAGS, ROWS, TIMED, WEIGHTED, frontier_place

_EARLIEST = -(2**63)


@body
def first_after(indices, node_time, edge_time, start, end, time):
    """The first position in [start, end) that is later than `time`; `end` where none is."""
    low, high = start, end
    while low < high:
        middle = (low + high) >> 1
        found = edge_time[middle] if edge_time.shape[0] > 0 else node_time[indices[middle]]
        if found > time:
            high = middle
        else:
            low = middle + 1
    return low


@body
def allowed_range(indices, node_time, edge_time, start, end, seed_time, strict, window):
    """[start, end) of the edges up to `seed_time` (before it if `strict`), and after `seed_time - window`.

    A negative window does not limit.
    """
    begin = start
    if window >= 0 and seed_time >= _EARLIEST + window:
        begin = first_after(indices, node_time, edge_time, start, end, seed_time - window)
    if strict and seed_time == _EARLIEST:
        return start, start
    latest = seed_time - 1 if strict else seed_time
    stop = first_after(indices, node_time, edge_time, start, end, latest)
    return begin, max(begin, stop)


@body
def count_picks(edge_weight, start, end, fanout, flags, replace):
    """How many edges are picked of [start, end); by weight none of weight zero, unless all are taken."""
    size = end - start
    count = num_picks(size, fanout, replace)
    if flags & WEIGHTED and fanout > 0 and (replace or fanout < size):
        if replace:
            count = fanout * count_positive(edge_weight, start, end, 1)
        else:
            count = count_positive(edge_weight, start, end, fanout)
    return count


@body
def count_picks_left(edge_weight, start, size, fanout, flags, replace, excluded, base):
    """As `count_picks` of the `size` edges that are left from `start` on."""
    count = num_picks(size, fanout, replace)
    if flags & WEIGHTED and fanout > 0 and (replace or fanout < size):
        wanted = np.int64(1) if replace else fanout
        count = count_positive_left(edge_weight, start, size, wanted, excluded, base)
        if replace:
            count *= fanout
    return count


@body
def row_of(item, entry, work, indptr, rows):
    """[start, end) of the row of an item."""
    segment = work[entry + ROWS] + rows[frontier_place(work, entry, item)]
    return indptr[segment], indptr[segment + 1]


@body
def restrict_row(item, entry, work, start, end, indices, node_time, edge_time, edge_weight, trees, seed_times, excluded,
                 replace, last, strict, window):  # fmt: skip
    """(first position, number of positions to pick from, number of picks) of the item whose row is [start, end)."""
    fanout, flags = work[entry + FANOUT], work[entry + FLAGS]
    most = end - start
    if flags & TIMED:
        place = frontier_place(work, entry, item)
        time = seed_times[place] if flags & BY_PLACE else seed_times[trees[place]]
        start, end = allowed_range(indices, node_time, edge_time, start, end, time, strict, window)
        if last and fanout >= 0:
            most = fanout
    size = end - start
    if excluded.shape[0] > 0:
        base = work[entry + BATCH] * indices.shape[0]
        start, size = restrict_to_left(excluded, base, start, size, most)
        return start, size, count_picks_left(edge_weight, start, size, fanout, flags, replace, excluded, base)
    if size > most:
        start, size = end - most, most
    return start, size, count_picks(edge_weight, start, end, fanout, flags, replace)

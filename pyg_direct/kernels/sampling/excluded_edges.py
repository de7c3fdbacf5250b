"""Edges that a batch leaves out, as edges between the nodes that it predicts: a row picks among its other edges.

`excluded` lists them, int64 `[X]`, ascending: the number of the batch times the number of all edges, plus the position
of the edge. It is empty if all edges may be picked. A draw is a position among the remaining edges of a row, so that
draws equal those in a graph without the excluded edges.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.binary_search import first_above, first_not_below


@body
def first_excluded(excluded, key):
    """Number of the first excluded edge that is not before `key`; their total if there is none."""
    return first_not_below(excluded, 0, excluded.shape[0], key)


@body
def skip_excluded(excluded, at, base, position):
    """(number of the next excluded edge, the first position from `position` on that remains).

    `at` is the number of the first excluded edge from base + position on.
    """
    while at < excluded.shape[0] and excluded[at] == base + position:
        at += 1
        position += 1
    return at, position


@body
def position_of(excluded, first, base, start, place):
    """Position of edge `place` among those that remain from `start` on.

    `first` is the number of the first excluded edge from base + start on.
    """
    low, high = np.int64(first), np.int64(excluded.shape[0])
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] - (middle - first) <= base + start + place:
            low = middle + 1
        else:
            high = middle
    return start + place + (low - first)


@body
def restrict_to_left(excluded, base, start, size, most):
    """(first position, number of edges) of the row [start, start + size) without excluded edges; the last `most`."""
    first = first_excluded(excluded, base + start)
    size -= first_excluded(excluded, base + start + size) - first
    if size > most:
        start = position_of(excluded, first, base, start, size - most)
        size = most
    return start, size


@body
def is_listed(value, values, begin, end):
    """Check whether values[begin:end], ascending, has a value."""
    place = first_not_below(values, begin, end, value)
    return place < end and values[place] == value


@body
def end_of_row(keys, i):
    """End of the pairs, from pair i on, that have its key; `i` unless it is the first of them."""
    if i > 0 and keys[i - 1] == keys[i]:
        return np.int64(i)
    return first_above(keys, i, keys.shape[0], keys[i])


@cpu_kernel
def find_edges_cpu(num_rows, indptr, indices, keys, neighbors, offsets, counts, found):
    """The edges of listed rows to listed neighbors, and their `counts` by pair, which the first of a row has; only
    counts if `found` is empty.

    `keys` are batch * num_rows + row, ascending, and neighbors ascend within a row.
    """
    for pair in prange(keys.shape[0]):
        i, at = np.int64(pair), np.int64(0)
        end = end_of_row(keys, i)
        if end > i:
            batch, row = keys[i] // num_rows, keys[i] % num_rows
            base = batch * indices.shape[0]
            for position in range(indptr[row], indptr[row + 1]):
                if is_listed(np.int64(indices[position]), neighbors, i, end):
                    if found.shape[0] > 0:
                        found[offsets[i] + at] = base + position
                    at += 1
        counts[i] = at


@gpu_kernel("i8 i8[] I[] i8[] i8[] i8[] i8 i8[]", I=("i4", "i8"))
def find_edges_gpu(num_rows, indptr, indices, keys, neighbors, counter, place, found):
    """As on the CPU, in any order; a block takes a row at a time. `counter[place]`, 0 before, receives their number; as
    many are written as there is room for.
    """
    i = np.int64(cuda.blockIdx.x)
    while i < keys.shape[0]:
        end = end_of_row(keys, i)
        if end > i:
            batch, row = keys[i] // num_rows, keys[i] % num_rows
            base, position = batch * indices.shape[0], indptr[row] + cuda.threadIdx.x
            while position < indptr[row + 1]:
                if is_listed(np.int64(indices[position]), neighbors, i, end):
                    at = cuda.atomic.add(counter, place, 1)
                    if at < found.shape[0]:
                        found[at] = base + position
                position += THREADS
        i += np.int64(cuda.gridDim.x)


@gpu_kernel("i8[] i8 i8[] i8[]")
def sort_edges_gpu(counter, place, found, excluded):
    """Write the counter[place] edges of `found`, all different, ascending to `excluded`, `[room]`, and then the largest
    int64.

    Each is compared with all others, which is faster than other ways for some thousands. If more were found than there
    is room for, as many are written.
    """
    count = min(counter[place], np.int64(found.shape[0]))
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < excluded.shape[0]:
        if i >= count:
            excluded[i] = np.int64(2**63 - 1)
        else:
            edge, smaller = found[i], np.int64(0)
            for j in range(count):
                if found[j] < edge:
                    smaller += 1
            excluded[smaller] = edge
        i += np.int64(cuda.gridDim.x) * THREADS

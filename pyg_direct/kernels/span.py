"""Which edges belong to a target, and how the edges of a long row are shared out in slices.

Rows longer than LONG_ROW are cut into slices of at least SLICE edges. `find_slices_gpu` lists them on the device, so
that nobody waits for their number: slices[2 s] is the target of slice s and slices[2 s + 1] its number within the
row, hubs[2 h] is a long row and hubs[2 h + 1] its first slice, counts = (slices, hubs) in use.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import SIMULATED, THREADS, body, cuda, gpu_kernel

SLICE = 4 if SIMULATED else 32
LONG_ROW = 4 * SLICE
# Where the result of an item goes, if not to a slice: to its row, or nowhere.
TO_ROW = -1
NOWHERE = -2


@body
def span_of(indptr, target, num_edges):
    """[first, last) edge of a target; offsets above `num_edges` belong to edges that were trimmed away."""
    return min(np.int64(indptr[target]), num_edges), min(np.int64(indptr[target + 1]), num_edges)


@body
def slice_length(degree):
    """Edges of a slice of a long row: about the root of its degree, so that slices and their sums are as many."""
    length = np.int64(SLICE)
    while length * length < degree:
        length *= 2
    return length


@body
def find_item(indptr, num_edges, num_targets, slices, counts, item):
    """(target, first edge, last edge, where to, edges of the whole row) of one piece of work.

    Items [0, num_targets) are rows and those behind are slices; without slices, rows of any length are one item.
    """
    if item < num_targets:
        first, last = span_of(indptr, item, num_edges)
        if last - first > LONG_ROW and slices.shape[0] > 0:
            return item, first, first, np.int64(NOWHERE), last - first
        return item, first, last, np.int64(TO_ROW), last - first
    place = item - num_targets
    if place >= counts[0]:
        return item, np.int64(0), np.int64(0), np.int64(NOWHERE), np.int64(0)
    target = np.int64(slices[2 * place])
    first, last = span_of(indptr, target, num_edges)
    degree = last - first
    length = slice_length(degree)
    first += length * np.int64(slices[2 * place + 1])
    return target, first, min(first + length, last), place, degree


@body
def find_hub(indptr, num_edges, hubs, hub):
    """(target, first slice, behind the last slice) of a long row."""
    target, place = np.int64(hubs[2 * hub]), np.int64(hubs[2 * hub + 1])
    first, last = span_of(indptr, target, num_edges)
    length = slice_length(last - first)
    return target, place, place + (last - first + length - 1) // length


@body
def sum_slices(partials, zero, place, end, width, f):
    """Item `f` of the slices [place, end), added in their order."""
    total = zero
    for s in range(place, end):
        total += partials[s * width + f]
    return total


@gpu_kernel("I[] i8 i8 i4[] i4[] i4[]", I=("i4", "i8"))
def find_slices_gpu(indptr, num_edges, num_targets, slices, hubs, counts):
    """Lists the slices of long rows; `counts` starts at zero."""
    target = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while target < num_targets:
        first, last = span_of(indptr, target, num_edges)
        if last - first > LONG_ROW:
            length = slice_length(last - first)
            num_slices = (last - first + length - 1) // length
            place = cuda.atomic.add(counts, 0, np.int32(num_slices))
            hub = cuda.atomic.add(counts, 1, np.int32(1))
            hubs[2 * hub] = target
            hubs[2 * hub + 1] = place
            for number in range(num_slices):
                slices[2 * (place + number)] = target
                slices[2 * (place + number) + 1] = number
        target += np.int64(cuda.gridDim.x) * THREADS

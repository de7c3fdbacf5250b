"""Offsets of the runs of ascending ids: out[r] = number of ids below r; and the order that edges are in.

Each offset is searched for by itself, as ids may leave out long ranges: those of a batch lead to none of the nodes that
were found last.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel

# Odd, so that no two numbers share a product: the multipliers of splitmix64 and of xxHash64.
_OF_PLACE, _OF_SOURCE, _OF_TARGET = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xC2B2AE3D27D4EB4F))
_SHIFT = np.uint64(29)


@body
def count_below(ordered, end, item):
    """Number of ids below `item` among the first `end`."""
    low, high = np.int64(0), np.int64(end)
    while low < high:
        middle = (low + high) >> 1
        if np.int64(ordered[middle]) < item:
            low = middle + 1
        else:
            high = middle
    return low


@gpu_kernel("I[] I[]", I=("i4", "i8"))
def find_offsets_gpu(ordered, out):
    row = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while row < out.shape[0]:
        out[row] = count_below(ordered, ordered.shape[0], row)
        row += np.int64(cuda.gridDim.x) * THREADS


@body
def mark_run(row, target, first, last):
    """A number that tells these edges, at their places, from any others."""
    mark, ids, ends = np.uint64(0), row[first:last], target[first:last]
    for e in range(ids.shape[0]):
        mixed = np.uint64(ids[e]) * _OF_SOURCE + np.uint64(ends[e]) * _OF_TARGET + np.uint64(first + e) * _OF_PLACE
        mark += mixed ^ (mixed >> _SHIFT)
    return mark


@cpu_kernel
def mark_edges_cpu(row, target, out):
    out[0] = mark_run(row, target, 0, row.shape[0])


@cpu_kernel
def read_hops_cpu(row, target, hops, marks):
    """`hops` [H, 3]: where each ends, and what its sources and targets lie below; `marks` [H + 1]: those of edges up to
    each end, and how often edges are out of order or bounds.
    """
    begin, mark, wrong = 0, np.uint64(0), np.uint64(0)
    for h in range(hops.shape[0]):
        end, sources, targets = hops[h, 0], np.uint64(hops[h, 1]), np.uint64(hops[h, 2])
        mark += mark_run(row, target, begin, end)
        marks[h] = mark
        ids, ends = row[begin:end], target[begin:end]
        for e in range(ids.shape[0]):
            # Negative ones are larger than all others.
            wrong += np.uint64(np.uint64(ids[e]) >= sources) + np.uint64(np.uint64(ends[e]) >= targets)
        begin = end
    for e in range(1, target.shape[0]):
        wrong += np.uint64(target[e] < target[e - 1])
    marks[hops.shape[0]] = wrong

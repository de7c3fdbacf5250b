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


@cpu_kernel
def mark_edges_cpu(row, target, first, out):
    """A number that tells edges, of which the first is the number `first`, from others and from others' orders."""
    mark, place = np.uint64(0), np.uint64(first)
    for e in range(row.shape[0]):
        mixed = np.uint64(row[e]) * _OF_SOURCE + np.uint64(target[e]) * _OF_TARGET + (place + np.uint64(e)) * _OF_PLACE
        mark += mixed ^ (mixed >> _SHIFT)
    out[0] = mark


@cpu_kernel
def read_order_cpu(row, target, out):
    """How often targets descend, and the largest source and target: negative ones are larger than all others."""
    falls, most_source, most_target = np.uint64(0), np.uint64(0), np.uint64(0)
    for e in range(row.shape[0]):
        most_source, most_target = max(most_source, np.uint64(row[e])), max(most_target, np.uint64(target[e]))
    for e in range(1, row.shape[0]):
        falls += np.uint64(target[e] < target[e - 1])
    out[0], out[1], out[2] = falls, most_source, most_target

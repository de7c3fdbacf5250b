"""Sums of row values over the nodes that the rows list: the contribution of a hop to each node."""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.sampling.uniform import find_row

# Edges of a block's turn. They belong to few rows, so that the row of each is soon found.
TURN = 16 * THREADS


@body
def find_row_among(offsets, first, last, item):
    """The row from `first` to `last` whose range of items, starting at offsets[row], holds `item`."""
    low, high = first, last + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[middle] <= item:
            low = middle
        else:
            high = middle
    return low


@cpu_kernel
def spread_values_cpu(indptr, indices, values, firsts, sums):
    """sums[p, node] += values[row] for every listing of a node by the rows from firsts[p] to firsts[p + 1].

    Rows whose value is 0 are not read. `firsts` is int64 `[P + 1]`, `sums` float32 `[P, N]`.
    """
    for p in prange(sums.shape[0]):
        for row in range(firsts[p], firsts[p + 1]):
            value = values[row]
            if value != 0:
                for e in range(indptr[row], indptr[row + 1]):
                    sums[p, indices[e]] += value


@gpu_kernel("i8[] I[] i8 f4[] f4[]", I=("i4", "i8"))
def spread_values_gpu(indptr, indices, step, values, sums):
    """sums[node] += values[row] for every listing of a node by a row; edge e is at indices[e * step].

    Threads share edges and not rows, of which few may list most. An invalid id is left out.
    """
    num_rows = np.int64(values.shape[0])
    num_edges = (np.int64(indices.shape[0]) + step - 1) // step
    begin = np.int64(cuda.blockIdx.x) * TURN
    while begin < num_edges:
        end = min(begin + TURN, num_edges)
        first = np.int64(find_row(indptr, num_rows, begin))
        last = np.int64(find_row(indptr, num_rows, end - 1))
        e = begin + cuda.threadIdx.x
        while e < end:
            value = values[find_row_among(indptr, first, last, e)]
            # If a hop does not expand the row, its ids are not read, and nothing is added.
            if value != 0:
                node = np.int64(indices[e * step])
                if np.uint64(node) < np.uint64(sums.shape[0]):
                    cuda.atomic.add(sums, node, value)
            e += THREADS
        begin += np.int64(cuda.gridDim.x) * TURN

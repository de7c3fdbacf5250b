"""Offsets of the runs of ascending ids: out[r] = number of ids below r.

Each offset is searched for by itself, as ids may leave out long ranges: those of a batch lead to none of the nodes that
were found last.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cuda, gpu_kernel


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

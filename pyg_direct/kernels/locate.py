"""Places of ids in a table that holds the rows of some: their rank among the ids that are there, or -1."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import has_bit, rank_of
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange


@body
def find_place(bits, ranks, item, num_items):
    """Rank of an id; -1 where it is absent or no id at all."""
    if np.uint64(item) >= np.uint64(num_items):
        return np.int64(-1)
    return np.int64(rank_of(bits, ranks, item)) if has_bit(bits, item) else np.int64(-1)


@cpu_kernel
def locate_items_cpu(items, num_items, bits, ranks, out):
    for i in prange(items.shape[0]):
        out[i] = find_place(bits, ranks, np.int64(items[i]), num_items)


@gpu_kernel("I[] i8 u4[] i4[] i8[]", I=("i4", "i8"))
def locate_items_gpu(items, num_items, bits, ranks, out):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < out.shape[0]:
        out[i] = find_place(bits, ranks, np.int64(items[i]), num_items)
        i += np.int64(cuda.gridDim.x) * THREADS

"""Edges put in an order by source without a sort: each is counted, and finds its place among those of its source.

The edges of a source come in any order, as atomics count them. rank[e] is the number of an edge within its source.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.aggregate import scale_of
from pyg_direct.kernels.jit import THREADS, cuda, gpu_kernel
from pyg_direct.kernels.span import span_of


@gpu_kernel("I[] i4[] i4[]", I=("i4", "i8"))
def rank_edges_gpu(row, counts, rank):
    """counts[s + 1] = edges of source s; it starts at zero."""
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < row.shape[0]:
        rank[e] = cuda.atomic.add(counts, np.int64(row[e]) + 1, np.int32(1))
        e += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("I[] I[] I[] T[] i4[] i4[] i8 i4 i4 i4[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def place_edges_gpu(indptr, row, target, weight, offsets, rank, num_edges, heads, mean, targets, shares):
    """Target of each edge in the order by source; also its weights times the scale of a mean, if `shares` has room."""
    one = shares.dtype.type(1)
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < num_edges:
        t = np.int64(target[e])
        place = np.int64(offsets[np.int64(row[e])]) + rank[e]
        targets[place] = np.int32(t)
        if shares.shape[0] > 0:
            first, last = span_of(indptr, t, num_edges)
            scale = scale_of(shares.dtype.type(last - first), mean, one)
            for h in range(heads):
                shares[place * heads + h] = weight[e * heads + h] * scale if weight.shape[0] > 0 else scale
        e += np.int64(cuda.gridDim.x) * THREADS

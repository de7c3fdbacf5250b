"""Edges by target with a loop after the edges of each target, and GCN's symmetric weights.

weight[e] = scale(row[e]) * scale(target[e]) with scale(n) = 1 / sqrt(1 + edges of n that are no loops). A node has
exactly one loop of weight above 0; loops that were there before have weight 0. Nodes that are no targets have no edges,
and scale 1.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.aggregate.sum import span_of


@body
def count_others(row, first, last, target):
    """Edges in [first, last) that are no loops of their target."""
    others = 0
    for e in range(first, last):
        if np.int64(row[e]) != target:
            others += 1
    return others


@body
def weigh_edge(indptr, row, target, scale, e, zero, one):
    """The weight of an edge, the last of whose target is its loop."""
    t, source = np.int64(target[e]), np.int64(row[e])
    if source == t and e + 1 != np.int64(indptr[t + 1]):
        return zero
    return scale[t] * (scale[source] if source < scale.shape[0] else one)


@cpu_kernel
def add_loops_cpu(indptr, row, num_edges, out_indptr, out_row, out_target, scale):
    one = scale.dtype.type(1)
    num_targets = out_indptr.shape[0] - 1
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        out_indptr[t] = first + t
        out_row[first + t : last + t] = row[first:last]
        out_target[first + t : last + t + 1] = t
        out_row[last + t] = t
        if scale.shape[0] > 0:
            scale[t] = one / math.sqrt(scale.dtype.type(1 + count_others(row, first, last, t)))
    out_indptr[num_targets] = num_edges + num_targets


@gpu_kernel("I[] I[] I[] i8 i8 I[] I[] I[] T[]", I=("i4", "i8"), T=("f4", "f8"))
def add_loops_gpu(indptr, row, target, num_edges, num_targets, out_indptr, out_row, out_target, scale):
    """As `add_loops_cpu`; a thread moves an edge, and appends the loop of a target."""
    one = scale.dtype.type(1)
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < max(num_edges, num_targets):
        if i < num_edges:
            place = i + np.int64(target[i])
            out_row[place] = row[i]
            out_target[place] = target[i]
        if i < num_targets:
            first, last = span_of(indptr, i, num_edges)
            out_indptr[i] = first + i
            if i + 1 == num_targets:
                out_indptr[num_targets] = num_edges + num_targets
            out_row[last + i] = i
            out_target[last + i] = i
            if scale.shape[0] > 0:
                scale[i] = one / math.sqrt(scale.dtype.type(1 + count_others(row, first, last, i)))
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def weigh_loops_cpu(indptr, row, target, scale, weight):
    zero, one = weight.dtype.type(0), weight.dtype.type(1)
    for e in prange(weight.shape[0]):
        weight[e] = weigh_edge(indptr, row, target, scale, e, zero, one)


@gpu_kernel("I[] I[] I[] T[] T[]", I=("i4", "i8"), T=("f4", "f8"))
def weigh_loops_gpu(indptr, row, target, scale, weight):
    zero, one = weight.dtype.type(0), weight.dtype.type(1)
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < weight.shape[0]:
        weight[e] = weigh_edge(indptr, row, target, scale, e, zero, one)
        e += np.int64(cuda.gridDim.x) * THREADS

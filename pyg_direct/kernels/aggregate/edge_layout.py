"""New layouts of the edges by target: a loop after the edges of each target, or places of fixed size.

Loops come with GCN's symmetric weights. weight[e] = scale(row[e]) * scale(target[e]) with scale(n) = 1 / sqrt(1 + edges
of n that are no loops). A node has exactly one loop of weight above 0; loops that were there before have weight 0.
Nodes that are no targets have no edges, and scale 1.

Padding puts the edges of a batch in places of fixed size, hop by hop, so that batches of any size have one layout.
`table` holds six lists of H + 2 offsets, int64. They are sources and edges of the batch before each hop, the places
before each hop for both, and the targets and their places. Places that no edge takes hold edges of padding nodes, a few
each, the last of their hop, so that edges stay sorted by target. They are loops; or, if sources and targets are of two
types, they come from sources that the next hop could have found.
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
    """As `add_loops_cpu`; a thread moves an edge, and appends the loop of a target.

    Edges that are not in order give wrong edges, all among the same nodes.
    """
    one = scale.dtype.type(1)
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < max(num_edges, num_targets):
        if i < num_edges:
            t = min(max(np.int64(target[i]), np.int64(0)), num_targets - 1)
            out_row[i + t] = row[i]
            out_target[i + t] = t
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


@body
def find_hop(table, begin, num_hops, item):
    """The hop that `item` belongs to, by offsets of hops at table[begin:]."""
    hop = 0
    while hop + 1 < num_hops and table[begin + hop + 1] <= item:
        hop += 1
    return hop


@body
def place_of(table, nodes, places, num_hops, node):
    """Place of a node of the batch, by the lists `nodes` and `places` of the table."""
    size = num_hops + 2
    hop = find_hop(table, nodes * size, num_hops + 1, node)
    return node - table[nodes * size + hop] + table[places * size + hop]


@body
def spare_place(table, nodes, places, num_hops, hop, number, count):
    """Place of an unused node in a hop, for the `number`-th of `count` edges that share them."""
    size = num_hops + 2
    first = table[places * size + hop] + table[nodes * size + hop + 1] - table[nodes * size + hop]
    return first + number * (table[places * size + hop + 1] - first) // count


@body
def pad_edge(row, target, table, num_hops, is_typed, place, out, num_places):
    """Write the edge of one place."""
    size = num_hops + 2
    hop = find_hop(table, 3 * size, num_hops, place)
    number, count = place - table[3 * size + hop], table[size + hop + 1] - table[size + hop]
    if number < count:
        e = table[size + hop] + number
        out[place] = place_of(table, 0, 2, num_hops, np.int64(row[e]))
        out[num_places + place] = place_of(table, 4, 5, num_hops, np.int64(target[e]))
    else:
        # Edges of a hop lead to nodes of the hop before; its unused places are shared by the padding edges.
        spare_edges = table[3 * size + hop + 1] - table[3 * size + hop] - count
        node = spare_place(table, 4, 5, num_hops, hop, number - count, spare_edges)
        out[num_places + place] = node
        if is_typed:
            node = spare_place(table, 0, 2, num_hops, hop + 1, number - count, spare_edges)
        out[place] = node


@cpu_kernel
def pad_edges_cpu(row, target, table, num_hops, is_typed, out):
    num_places = out.shape[0] // 2
    for place in prange(num_places):
        pad_edge(row, target, table, num_hops, is_typed, place, out, num_places)


@gpu_kernel("I[] I[] i8[] i8 i8 I[]", I=("i4", "i8"))
def pad_edges_gpu(row, target, table, num_hops, is_typed, out):
    num_places = np.int64(out.shape[0] // 2)
    place = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while place < num_places:
        pad_edge(row, target, table, num_hops, is_typed, place, out, num_places)
        place += np.int64(cuda.gridDim.x) * THREADS

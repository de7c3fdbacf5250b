"""Edges of a batch in places of fixed size, hop by hop, so that batches of any size have one layout.

`table` holds four lists of H + 2 offsets, int64: nodes and edges of the batch before each hop, and the places before
each hop for both. Places that no edge takes hold loops of nodes that the batch does not have, a few each, the last of
their hop: edges stay sorted by target.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange


@body
def find_hop(table, begin, num_hops, item):
    """The hop that `item` belongs to, by offsets of hops at table[begin:]."""
    hop = 0
    while hop + 1 < num_hops and table[begin + hop + 1] <= item:
        hop += 1
    return hop


@body
def place_of(table, num_hops, node):
    """Place of a node of the batch."""
    size = num_hops + 2
    hop = find_hop(table, 0, num_hops + 1, node)
    return node - table[hop] + table[2 * size + hop]


@body
def pad_edge(row, target, table, num_hops, place, out, num_places):
    """Write the edge of one place."""
    size = num_hops + 2
    hop = find_hop(table, 3 * size, num_hops, place)
    number, count = place - table[3 * size + hop], table[size + hop + 1] - table[size + hop]
    if number < count:
        e = table[size + hop] + number
        out[place] = place_of(table, num_hops, np.int64(row[e]))
        out[num_places + place] = place_of(table, num_hops, np.int64(target[e]))
    else:
        # Edges of a hop lead to the nodes that the hop before found; what is left of their places is shared out.
        spare_edges = table[3 * size + hop + 1] - table[3 * size + hop] - count
        first = table[2 * size + hop] + table[hop + 1] - table[hop]
        spare_nodes = table[2 * size + hop + 1] - first
        node = first + (number - count) * spare_nodes // spare_edges
        out[place] = node
        out[num_places + place] = node


@cpu_kernel
def pad_edges_cpu(row, target, table, num_hops, out):
    num_places = out.shape[0] // 2
    for place in prange(num_places):
        pad_edge(row, target, table, num_hops, place, out, num_places)


@gpu_kernel("I[] I[] i8[] i8 I[]", I=("i4", "i8"))
def pad_edges_gpu(row, target, table, num_hops, out):
    num_places = np.int64(out.shape[0] // 2)
    place = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while place < num_places:
        pad_edge(row, target, table, num_hops, place, out, num_places)
        place += np.int64(cuda.gridDim.x) * THREADS

"""Edges of a batch in places of fixed size, hop by hop, so that batches of any size have one layout.

`table` holds six lists of H + 2 offsets, int64. They are sources and edges of the batch before each hop, the places
before each hop for both, and the targets and their places. Places that no edge takes hold edges of padding nodes, a few
each, the last of their hop, so that edges stay sorted by target. They are loops; or, if sources and targets are of two
types, they come from sources that the next hop could have found.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange


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

"""Edges of a hop as the owners of nodes answer them, and their order for the asking part.

An answer is three runs of numbers: the edges of each item, the neighbors, the edge ids. Answers lie in one memory, one
after the other, of which `counts` and `words` are views. `table` holds their positions, int64 `[(P + 1) * PLACES]`: a
row for each answer, and one more with the numbers of all items and edges.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.sampling.uniform import find_row
from pyg_direct.kernels.sampling.worklist import (
    FIRST,
    LOCAL,
    SOURCE_BASE,
    SOURCE_START,
    find_entry,
    find_record,
    frontier_place,
    tree_of,
)

# The first item and the first edge of an answer among all, and the first positions of its three runs in the views.
ITEM, EDGE, COUNTS, SOURCES, IDS = range(5)
PLACES = 5
# A segment: items of one answer and one relation. Its columns are the first item; the first position of its nodes in
# the order of owners; the offset from a position in the frontier to an item; the first position of its counts.
BEGIN, ORDER, SHIFT, AT = range(4)
SEGMENT = 4


@body
def locate_item(segments, order, j):
    """(item of the work list, position of its count) of item `j` of the answers."""
    segment = find_record(segments, SEGMENT, BEGIN, j)
    place = j - segments[segment + BEGIN]
    return order[segments[segment + ORDER] + place] + segments[segment + SHIFT], segments[segment + AT] + place


@body
def read_edge(table, words, work, entry, item, trees, tree_shift, e):
    """(identity of the neighbor, edge id) of edge `e` of the answers, which belongs to `item`."""
    answer = find_record(table, PLACES, EDGE, e)
    place = e - table[answer + EDGE]
    tree = np.int64(tree_of(trees, frontier_place(work, entry, item)))
    base = work[entry + SOURCE_BASE] - work[entry + SOURCE_START] + (tree << np.int64(tree_shift))
    return np.int64(words[table[answer + SOURCES] + place]) + base, np.int64(words[table[answer + IDS] + place])


@cpu_kernel
def pack_edges_cpu(table, offsets, sources, ids, targets, trees, chunks, counts, words):
    """Edges in the order of the items become answers; the number of the tree, which the receiver knows, is removed from
    sources.
    """
    num_items = offsets.shape[0] - 1
    share = (num_items + chunks - 1) // chunks
    for c in prange(chunks):
        item, stop = min(c * share, num_items), min((c + 1) * share, num_items)
        while item < stop:
            answer = find_record(table, PLACES, ITEM, item)
            end = min(stop, table[answer + PLACES + ITEM])
            at = table[answer + COUNTS] - table[answer + ITEM]
            for i in range(item, end):
                counts[at + i] = offsets[i + 1] - offsets[i]
            source_at = table[answer + SOURCES] - table[answer + EDGE]
            id_at = table[answer + IDS] - table[answer + EDGE]
            for e in range(offsets[item], offsets[end]):
                words[source_at + e] = sources[e] - tree_of(trees, targets[e])
                words[id_at + e] = ids[e]
            item = end


@cpu_kernel
def place_counts_cpu(segments, order, counts, before, offsets, items):
    """Counts of the answers' items: before[1:] in their order, offsets[1:] in the order of the work list; and the
    items.
    """
    for j in prange(items.shape[0]):
        item, at = locate_item(segments, order, j)
        items[j] = item
        before[1 + j] = counts[at]
        offsets[1 + item] = counts[at]


@cpu_kernel
def join_edges_cpu(table, before, offsets, items, work, trees, tree_shift, words, chunks, sources, ids, targets):
    """Edges of answers in the order of the work list."""
    share = (items.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        j, stop = min(c * share, items.shape[0]), min((c + 1) * share, items.shape[0])
        while j < stop:
            answer = find_record(table, PLACES, ITEM, j)
            end = min(stop, table[answer + PLACES + ITEM])
            source_at = table[answer + SOURCES] - table[answer + EDGE]
            id_at = table[answer + IDS] - table[answer + EDGE]
            for i in range(j, end):
                item = items[i]
                entry = find_entry(work, item)
                tree = np.int64(tree_of(trees, frontier_place(work, entry, item)))
                base = work[entry + SOURCE_BASE] - work[entry + SOURCE_START] + (tree << np.int64(tree_shift))
                target = work[entry + LOCAL] + item - work[entry + FIRST]
                shift = offsets[item] - before[i]
                for e in range(before[i], before[i + 1]):
                    sources[e + shift] = words[source_at + e] + base
                    ids[e + shift] = words[id_at + e]
                    targets[e + shift] = target
            j = end


@gpu_kernel("i8[] i8[] i8[] i8[] i8[] i8[] i8 C[] W[]", C=("u1", "i4"), W=("i4", "i8"))
def pack_edges_gpu(table, offsets, sources, ids, targets, trees, num_edges, counts, words):
    first = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    i = first
    while i < offsets.shape[0] - 1:
        answer = find_record(table, PLACES, ITEM, i)
        counts[table[answer + COUNTS] + i - table[answer + ITEM]] = offsets[i + 1] - offsets[i]
        i += np.int64(cuda.gridDim.x) * THREADS
    e = first
    while e < num_edges:
        answer = find_record(table, PLACES, EDGE, e)
        place = e - table[answer + EDGE]
        words[table[answer + SOURCES] + place] = sources[e] - tree_of(trees, targets[e])
        words[table[answer + IDS] + place] = ids[e]
        e += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] C[] i8[] i8[] i8[]", C=("u1", "i4"))
def place_counts_gpu(segments, order, counts, before, offsets, items):
    j = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while j < items.shape[0]:
        item, at = locate_item(segments, order, j)
        items[j] = item
        before[1 + j] = counts[at]
        offsets[1 + item] = counts[at]
        j += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] i8[] i8[] i8[] i8 W[] i8[] i8[] i8[]", W=("i4", "i8"))
def join_edges_gpu(table, before, offsets, items, work, trees, tree_shift, words, sources, ids, targets):
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < sources.shape[0]:
        j = find_row(before, np.int64(items.shape[0]), e)
        item = items[j]
        entry = find_entry(work, item)
        at = offsets[item] + e - before[j]
        source, own_id = read_edge(table, words, work, entry, item, trees, tree_shift, e)
        sources[at], ids[at] = source, own_id
        targets[at] = work[entry + LOCAL] + item - work[entry + FIRST]
        e += np.int64(cuda.gridDim.x) * THREADS

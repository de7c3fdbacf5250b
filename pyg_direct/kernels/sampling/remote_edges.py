"""Edges of a hop as the owners of nodes answer them, and their order for the asking part.

An answer is three runs of numbers: the edges of each item, the neighbors, the edge ids. Answers lie in one memory, one
after the other, of which `counts` and `words` are views. `table` holds their positions, int64 `[(P + 1) * PLACES]`: a
row for each answer, and one more with the numbers of all items and edges.

Nodes are requested from the parts that own them, in buckets. Buckets are the other parts, ascending, then the asking
part, so that data to send is contiguous. `own` is the asking part, or -1 for a process that holds none. If a bucket has
several kinds, it is one bucket for each: the key of a node of kind `add` is `bucket * scale + add`.

`group_buckets_cpu` groups items by bucket. `cluster_edges_cpu` finds communities in one pass over a stream of
edges.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.binary_search import first_above
from pyg_direct.kernels.sampling.uniform import LOW_WORD, find_row
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


# The factors of splitmix64's finalizer by halves, because 64-bit constants do not compile everywhere, and the 31 bits
# that choose a part.
_HIGH_0, _LOW_0 = np.uint64(0xBF58476D), np.uint64(0x1CE4E5B9)
_HIGH_1, _LOW_1 = np.uint64(0x94D049BB), np.uint64(0x133111EB)
_SHIFT_0, _SHIFT_1, _HALF, _LAST = np.uint64(30), np.uint64(27), np.uint64(32), np.uint64(31)
_BITS = np.uint64(0x7FFFFFFF)


@body
def multiply(a, b_high, b_low):
    """Low 64 bits of a product, by halves: NumPy, which the simulator runs on, warns of overflow."""
    low = np.uint64((a & LOW_WORD) * b_low)
    first = np.uint64(((a >> _HALF) * b_low) & LOW_WORD)
    second = np.uint64(((a & LOW_WORD) * b_high) & LOW_WORD)
    high = np.uint64(np.uint64((low >> _HALF) + first + second) & LOW_WORD)
    return np.uint64((high << _HALF) | (low & LOW_WORD))


@body
def find_owner(item, num_parts, bounds, table):
    """The part of a node: by a table, by the first nodes of all parts but the first, or by a hash of its id."""
    if table.shape[0] > 0:
        return np.int64(table[item]) if np.uint64(item) < np.uint64(table.shape[0]) else np.int64(0)
    if bounds.shape[0] > 0:
        return first_above(bounds, 0, bounds.shape[0], item)
    word = np.uint64(item)
    word = multiply(np.uint64(word ^ (word >> _SHIFT_0)), _HIGH_0, _LOW_0)
    word = multiply(np.uint64(word ^ (word >> _SHIFT_1)), _HIGH_1, _LOW_1)
    return np.int64(np.uint64(np.uint64((word >> _HALF) & _BITS) * np.uint64(num_parts)) >> _LAST)


@body
def bucket_key(owner, own, num_parts, scale, add):
    """Key of a node of kind `add` that `owner` has."""
    bucket = owner
    if own >= 0 and owner >= own:
        bucket = num_parts - 1 if owner == own else owner - 1
    return bucket * scale + add


@cpu_kernel
def find_buckets_cpu(items, num_parts, bounds, table, own, scale, add, keys):
    for i in prange(items.shape[0]):
        keys[i] = bucket_key(find_owner(items[i], num_parts, bounds, table), own, num_parts, scale, add)


@gpu_kernel("i8[] i8 i8[] T[] i8 i8 i8 K[]", T=("u1", "i2"), K=("u1", "i4"))
def find_buckets_gpu(items, num_parts, bounds, table, own, scale, add, keys):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        keys[i] = bucket_key(find_owner(items[i], num_parts, bounds, table), own, num_parts, scale, add)
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def group_buckets_cpu(buckets, counts, order):
    """Positions of items, bucket after bucket, in the given order within each; counts `[chunks, B]` starts as zeros."""
    chunks, num_buckets = counts.shape
    share = (buckets.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        for i in range(c * share, min((c + 1) * share, buckets.shape[0])):
            counts[c, buckets[i]] += 1
    # Each count becomes the position of its first item.
    running = 0
    for b in range(num_buckets):
        for c in range(chunks):
            count = counts[c, b]
            counts[c, b] = running
            running += count
    for c in prange(chunks):
        for i in range(c * share, min((c + 1) * share, buckets.shape[0])):
            at = counts[c, buckets[i]]
            counts[c, buckets[i]] = at + 1
            order[at] = i


@body
def join_ends(a, b, degree, community, volume, largest):
    """Count an edge; the end in the smaller community joins the larger one, unless one has more than `largest`."""
    degree[a] += 1
    degree[b] += 1
    own, other = community[a], community[b]
    volume[own] += 1
    volume[other] += 1
    if own == other or volume[own] > largest or volume[other] > largest:
        return
    if volume[own] <= volume[other]:
        volume[other] += degree[a]
        volume[own] -= degree[a]
        community[a] = other
    else:
        volume[own] += degree[b]
        volume[other] -= degree[b]
        community[b] = own


@cpu_kernel
def cluster_edges_cpu(sources, targets, degree, community, volume, largest):
    """One pass of streaming clustering over edges (Hollocou et al., arXiv:1703.02955, algorithm 1).

    `community` starts as the ids of the nodes, `degree` and `volume` as zeros.
    """
    # Sequential: an edge depends on the results of those before it.
    for _ in prange(1):
        for e in range(sources.shape[0]):
            if sources[e] != targets[e]:
                join_ends(sources[e], targets[e], degree, community, volume, largest)


@cpu_kernel
def count_ties_cpu(sources, targets, table, labels, chunks, ties):
    """ties[label of a, part of b] += 1 and likewise for the other end, over edges that join two labels."""
    for c in prange(chunks):
        for e in range(sources.shape[0]):
            a, b = sources[e], targets[e]
            if labels[a] != labels[b]:
                if labels[a] % chunks == c:
                    ties[labels[a], table[b]] += 1
                if labels[b] % chunks == c:
                    ties[labels[b], table[a]] += 1

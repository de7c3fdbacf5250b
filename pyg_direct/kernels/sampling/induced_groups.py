"""Edges among the nodes of several sets at once: `induced.py` for the batches of a group.

The nodes of all G sets stand one after the other: set g has the places from begins[g] to begins[g + 1]. `offsets` is
the first candidate of each place, int64 `[M + 1]`. A table has W entries for each set. With `owners`, int32 `[N]`,
node v reads entry owners[v], and its local id is v plus this entry; `OUTSIDE` stands for none. Without, node v reads
entry v, which is its local id, below 0 for none.

Each set has as many blocks as every other one. So a block's sum belongs to one set, and the host learns the edges of
each set from the sums.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, scan_block, sum_block
from pyg_direct.kernels.sampling.induced import find_id
from pyg_direct.kernels.sampling.uniform import find_row

# Entry of an owner outside a set.
OUTSIDE = 2**31 - 1


@body
def find_in_set(neighbors, step, owners, table, width, which, position):
    """Local id, in a set, of the neighbor of an edge; below 0 for a neighbor outside, or an invalid one."""
    neighbor = np.int64(neighbors[position * step])
    if owners.shape[0] == 0:
        if np.uint64(neighbor) >= np.uint64(width):
            return np.int64(-1)
        return np.int64(table[which * width + neighbor])
    if np.uint64(neighbor) >= np.uint64(owners.shape[0]):
        return np.int64(-1)
    shift = np.int64(table[which * width + owners[neighbor]])
    return np.int64(-1) if shift == OUTSIDE else neighbor + shift


@body
def own_share(begins, offsets, num_sets):
    """(set, first candidate, end): the share of the set's candidates that belongs to this block."""
    blocks = np.int64(cuda.gridDim.x) // num_sets
    which = np.int64(cuda.blockIdx.x) // blocks
    first = offsets[begins[which]]
    count = offsets[begins[which + 1]] - first
    share = (count + blocks - 1) // blocks
    begin = min((np.int64(cuda.blockIdx.x) - which * blocks) * share, count)
    return which, first + begin, first + min(begin + share, count)


@body
def find_candidate_of_set(indptr, nodes, begins, offsets, which, i):
    """(place, position of the edge) of a candidate of a set."""
    place = last_at_most(offsets, begins[which], begins[which + 1], i)
    return place, indptr[nodes[place]] + i - offsets[place]


@gpu_kernel("i8[] i8[] i8[] i8[] i8[] i8[] i8[] i4[]")
def enter_ranges_gpu(indptr, firsts, shifts, entries, values, nodes, degrees, table):
    """Nodes of ranges of ids, and the edges of their rows.

    Range r has the places from firsts[r] to firsts[r + 1], and node i + shifts[r] at place i. Its owner's entry,
    table[entries[r]], becomes values[r], unless the range is empty. `degrees`, int64 `[M + 1]`, begins with 0.
    """
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        degrees[0] = 0
    while i < nodes.shape[0]:
        r = find_row(firsts, np.int64(shifts.shape[0]), i)
        node = i + shifts[r]
        nodes[i] = node
        degrees[i + 1] = indptr[node + 1] - indptr[node]
        if i == firsts[r]:
            table[entries[r]] = values[r]
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] i8 u4[] i8[]")
def enter_sets_gpu(indptr, nodes, begins, width, table, degrees):
    """Local ids of the nodes of sets, the first place of a node that repeats, and the edges of their rows.

    Nodes behind the last set do not count. `degrees`, int64 `[M + 1]`, begins with 0. Entries of nodes outside a set
    are the largest number, which is -1 as int32.
    """
    num_sets = np.int64(begins.shape[0]) - 1
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        degrees[0] = 0
    while i < nodes.shape[0]:
        degree = np.int64(0)
        node = nodes[i]
        if i < begins[num_sets] and np.uint64(node) < np.uint64(width):
            which = find_row(begins, num_sets, i)
            cuda.atomic.min(table, which * width + node, np.uint32(i - begins[which]))
            degree = indptr[node + 1] - indptr[node]
        degrees[i + 1] = degree
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] I[] i8 i8[] i8[] i8[] i4[] i4[] i8 i8[]", I=("i4", "i8"))
def count_in_sets_gpu(indptr, neighbors, step, nodes, begins, offsets, owners, table, width, block_sums):
    """Number of each block's candidates that are inside."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    which, begin, end = own_share(begins, offsets, np.int64(begins.shape[0]) - 1)
    count = np.int64(0)
    i = begin + cuda.threadIdx.x
    while i < end:
        _, position = find_candidate_of_set(indptr, nodes, begins, offsets, which, i)
        if find_in_set(neighbors, step, owners, table, width, which, position) >= 0:
            count += 1
        i += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8[] I[] J[] i8 i8[] i8[] i8[] i4[] i4[] i8 i8[] i8 i8[] i8[]", I=("i4", "i8"), J=("i4", "i8"))
def emit_in_sets_gpu(indptr, neighbors, ids, step, nodes, begins, offsets, owners, table, width, block_sums, rows_first,
                     ends, edges):  # fmt: skip
    """(local neighbor, row) and id of the candidates that are inside, set after set, in their order.

    In `ends`, a set with E' edges has 2 E' numbers: those of all its edges for one end, then for the other. If
    `rows_first` is 1, the rows stand first.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    num_sets = np.int64(begins.shape[0]) - 1
    blocks = np.int64(cuda.gridDim.x) // num_sets
    which, begin, end = own_share(begins, offsets, num_sets)
    # Of all sets before, of this set, and of its blocks before this one.
    earlier, own, before = np.int64(0), np.int64(0), np.int64(0)
    b = np.int64(cuda.threadIdx.x)
    while b < (which + 1) * blocks:
        part = block_sums[b]
        if b < which * blocks:
            earlier += part
        else:
            own += part
            if b < cuda.blockIdx.x:
                before += part
        b += THREADS
    earlier, own = sum_block(earlier, own, shared)
    before, _ = sum_block(before, np.int64(0), shared)
    others_at, rows_at = 2 * earlier + rows_first * own, 2 * earlier + (1 - rows_first) * own
    running, tile = before, begin
    while tile < end:
        i = tile + cuda.threadIdx.x
        place, position, local = np.int64(0), np.int64(0), np.int64(-1)
        if i < end:
            place, position = find_candidate_of_set(indptr, nodes, begins, offsets, which, i)
            local = find_in_set(neighbors, step, owners, table, width, which, position)
        is_inside = np.int64(local >= 0)
        rank, total = scan_block(is_inside, shared)
        if is_inside != 0:
            at = running + rank
            ends[others_at + at], ends[rows_at + at] = local, place - begins[which]
            edges[earlier + at] = find_id(ids, step, position)
        running += total
        tile += THREADS

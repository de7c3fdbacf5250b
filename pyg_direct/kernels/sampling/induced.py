"""Edges among the nodes of a set: the rows of its nodes without the neighbors outside it.

Candidates are the edges of the rows of all nodes, row after row: `offsets`, int64 `[M + 1]`, is the first edge of each
node. The neighbor of edge e is neighbors[e * step], and its id ids[e * step + step - 1], or e without ids. A neighbor
is inside if `local_of_node` has a local id of at least 0 for it.

The nodes of G sets at once stand one after the other: set g has the places from begins[g] to begins[g + 1]. A table has
W entries for each set. With `owners`, int32 `[N]`, node v reads entry owners[v], and its local id is v plus this entry;
`OUTSIDE` stands for none. Without, node v reads entry v, which is its local id, below 0 for none. Each set has as many
blocks as every other one. So a block's sum belongs to one set, and the host learns the edges of each set from the sums.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange, prefetch
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block
from pyg_direct.kernels.sampling.uniform import find_row

# Rows ahead that a CPU asks for, at most so many cache lines of each.
ROWS_AHEAD, LINES_AHEAD, LINE = 4, 8, 64


@body
def find_local(neighbors, step, local_of_node, position):
    """Local id of the neighbor of an edge; below 0 for a neighbor outside the set, or an invalid one."""
    neighbor = np.int64(neighbors[position * step])
    if np.uint64(neighbor) >= np.uint64(local_of_node.shape[0]):
        return np.int64(-1)
    return np.int64(local_of_node[neighbor])


@body
def find_id(ids, step, position):
    """Id of an edge."""
    return np.int64(ids[position * step + step - 1]) if ids.shape[0] > 0 else np.int64(position)


@body
def prefetch_row(indptr, neighbors, step, node):
    """Ask for the first cache lines of a row: rows of a set lie far apart."""
    begin, end = indptr[node], indptr[node + 1]
    address, width = neighbors.ctypes.data, np.int64(neighbors.itemsize * step)
    for at in range(begin * width, min(end * width, begin * width + LINES_AHEAD * LINE), LINE):
        prefetch(address + at)


@body
def look_up(indptr, neighbors, step, nodes, offsets, local_of_node, begin, end, found, rows, positions):
    """Gather (local neighbor, row, position) of the candidates [begin, end) that are inside, from place `begin` on;
    returns how many.
    """
    row, at, place = find_row(offsets, nodes.shape[0], begin), begin, begin
    while at < end:
        stop = min(end, offsets[row + 1])
        shift = indptr[nodes[row]] - offsets[row]
        prefetch_row(indptr, neighbors, step, nodes[min(row + ROWS_AHEAD, nodes.shape[0] - 1)])
        for i in range(at, stop):
            local = find_local(neighbors, step, local_of_node, i + shift)
            # Without a branch, which a processor would foresee wrongly; the next one inside writes over it.
            found[place], rows[place], positions[place] = local, row, i + shift
            place += np.int64(local >= 0)
        at = max(at, stop)
        row += 1
    return place - begin


@body
def emit_inside(ids, step, found, found_rows, positions, begin, count, at, others, rows, edges):
    """Write (local neighbor, row, edge id) of those that `look_up` gathered from place `begin` on, to place `at` on."""
    for i in range(count):
        others[at + i], rows[at + i] = found[begin + i], found_rows[begin + i]
        edges[at + i] = find_id(ids, step, positions[begin + i])


@cpu_kernel
def find_inside_cpu(indptr, neighbors, step, nodes, offsets, local_of_node, found, rows, positions, chunk_sums):
    """The candidates that are inside, gathered at the first place of each chunk, and their number in each."""
    chunks, total = chunk_sums.shape[0], offsets[nodes.shape[0]]
    share = (total + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, total), min((c + 1) * share, total)
        chunk_sums[c] = look_up(indptr, neighbors, step, nodes, offsets, local_of_node, begin, end, found, rows,
                                positions)  # fmt: skip


@cpu_kernel
def emit_inside_cpu(ids, step, total, found, found_rows, positions, chunk_sums, others, rows, edges):
    """The edges inside, in the order of the candidates."""
    chunks = chunk_sums.shape[0]
    share = (total + chunks - 1) // chunks
    for c in prange(chunks):
        at = np.int64(0)
        for b in range(c):
            at += chunk_sums[b]
        emit_inside(ids, step, found, found_rows, positions, min(c * share, total), chunk_sums[c], at, others, rows,
                    edges)  # fmt: skip


@gpu_kernel("i8[] i8[] i8[] u4[] i8[]")
def enter_set_gpu(indptr, nodes, num_nodes, local_of_node, degrees):
    """Places of the nodes of a set to their table, the first place of a node that repeats, and the edges of their rows.

    `num_nodes` says how many of the nodes count, the first ones; empty for all. `degrees`, int64 `[M + 1]`, begins with
    0. A node outside the set has the largest number in the table, which is -1 as int32.
    """
    count = np.int64(nodes.shape[0])
    if num_nodes.shape[0] > 0:
        count = num_nodes[0]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    if i == 0:
        degrees[0] = 0
    while i < nodes.shape[0]:
        degree = np.int64(0)
        node = nodes[i]
        if i < count and np.uint64(node) < np.uint64(local_of_node.shape[0]):
            cuda.atomic.min(local_of_node, node, np.uint32(i))
            degree = indptr[node + 1] - indptr[node]
        degrees[i + 1] = degree
        i += np.int64(cuda.gridDim.x) * THREADS


@body
def find_candidate(indptr, nodes, offsets, i):
    """(row, position of the edge) of a candidate."""
    row = np.int64(find_row(offsets, np.int64(nodes.shape[0]), i))
    return row, indptr[nodes[row]] + i - offsets[row]


@gpu_kernel("i8[] I[] i8 i8[] i8[] i4[] i8[]", I=("i4", "i8"))
def count_inside_gpu(indptr, neighbors, step, nodes, offsets, local_of_node, block_sums):
    """Number of each block's candidates that are inside. Threads share candidates and not rows, of which few may have
    most.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = own_range(np.int64(offsets[nodes.shape[0]]))
    count = np.int64(0)
    i = begin + cuda.threadIdx.x
    while i < end:
        _, position = find_candidate(indptr, nodes, offsets, i)
        if find_local(neighbors, step, local_of_node, position) >= 0:
            count += 1
        i += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8[] I[] J[] i8 i8[] i8[] i4[] i8[] i8[] i8[] i8[]", I=("i4", "i8"), J=("i4", "i8"))
def emit_inside_gpu(indptr, neighbors, ids, step, nodes, offsets, local_of_node, block_sums, others, rows, edges):
    """(local neighbor, row, edge id) of the candidates that are inside, in their order."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    before, _ = sum_before(block_sums, shared)
    begin, end = own_range(np.int64(offsets[nodes.shape[0]]))
    running, tile = before, begin
    while tile < end:
        i = tile + cuda.threadIdx.x
        row, position, local = np.int64(0), np.int64(0), np.int64(-1)
        if i < end:
            row, position = find_candidate(indptr, nodes, offsets, i)
            local = find_local(neighbors, step, local_of_node, position)
        is_inside = np.int64(local >= 0)
        place, total = scan_block(is_inside, shared)
        if is_inside != 0:
            at = running + place
            others[at], rows[at], edges[at] = local, row, find_id(ids, step, position)
        running += total
        tile += THREADS


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

"""Edges among the nodes of a set: the rows of its nodes without the neighbors outside it.

Candidates are the edges of the rows of all nodes, row after row: `offsets`, int64 `[M + 1]`, is the first edge of each
node. The neighbor of edge e is neighbors[e * step], and its id ids[e * step + step - 1], or e without ids. A neighbor
is inside if `local_of_node` has a local id of at least 0 for it.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block
from pyg_direct.kernels.sampling.uniform import find_row


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
def look_up(indptr, neighbors, step, nodes, offsets, local_of_node, begin, end, found):
    """Local ids of the neighbors of candidates [begin, end) to `found`; returns how many are inside."""
    row, at, count = find_row(offsets, nodes.shape[0], begin), begin, np.int64(0)
    while at < end:
        stop = min(end, offsets[row + 1])
        shift = indptr[nodes[row]] - offsets[row]
        for i in range(at, stop):
            local = find_local(neighbors, step, local_of_node, i + shift)
            found[i] = local
            count += np.int64(local >= 0)
        at = max(at, stop)
        row += 1
    return count


@body
def emit_inside(indptr, ids, step, nodes, offsets, found, begin, end, at, others, rows, edges):
    """Write (local neighbor, row, edge id) of the candidates [begin, end) that are inside, from place `at` on."""
    row, i = find_row(offsets, nodes.shape[0], begin), begin
    while i < end:
        stop = min(end, offsets[row + 1])
        shift = indptr[nodes[row]] - offsets[row]
        for j in range(i, stop):
            if found[j] >= 0:
                others[at], rows[at], edges[at] = found[j], row, find_id(ids, step, j + shift)
                at += 1
        i = max(i, stop)
        row += 1


@cpu_kernel
def find_inside_cpu(indptr, neighbors, step, nodes, offsets, local_of_node, found, chunk_sums):
    """Local ids of the neighbors of all candidates, int32, and the number inside in each chunk."""
    chunks, total = chunk_sums.shape[0], offsets[nodes.shape[0]]
    share = (total + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, total), min((c + 1) * share, total)
        chunk_sums[c] = look_up(indptr, neighbors, step, nodes, offsets, local_of_node, begin, end, found)


@cpu_kernel
def emit_inside_cpu(indptr, ids, step, nodes, offsets, found, chunk_sums, others, rows, edges):
    """The edges inside, in the order of the candidates."""
    chunks, total = chunk_sums.shape[0], offsets[nodes.shape[0]]
    share = (total + chunks - 1) // chunks
    for c in prange(chunks):
        at = np.int64(0)
        for b in range(c):
            at += chunk_sums[b]
        begin, end = min(c * share, total), min((c + 1) * share, total)
        emit_inside(indptr, ids, step, nodes, offsets, found, begin, end, at, others, rows, edges)


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

"""Random walks over rows of neighbors: uniform ones, and node2vec's (Grover and Leskovec, KDD 2016, section 3.2.2).

The neighbor of edge e is neighbors[e * step]. Draws of a walk are functions of (key, number of the walk, slot). A step
of node2vec weighs neighbors relative to the node before: `back` for that node, `near` for its own neighbors, `far` for
others; the largest weight is 2**31. It draws a neighbor and accepts it with a chance in proportion to its weight. After
TRIES refusals it adds up all weights and draws among them, so that no weight, however small, makes a step long.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, inlined, prange
from pyg_direct.kernels.sampling.random import draw, draw_below, draw_below_in_loop

TRIES = 24
# Draws of a step: a neighbor and a chance for each try, and one among all weights.
SLOTS = 2 * TRIES + 1
WEIGHT_BITS = 31
_SHIFT = np.uint64(64 - WEIGHT_BITS)
# Walks whose steps a CPU takes together.
BLOCK = 64


@body
def has_neighbor(indptr, neighbors, step, row, node, is_sorted):
    """Check whether a row lists a node."""
    low, high = indptr[row], indptr[row + 1]
    end = high
    if is_sorted:
        while low < high:
            middle = (low + high) >> 1
            if neighbors[middle * step] < node:
                low = middle + 1
            else:
                high = middle
        return low < end and neighbors[low * step] == node
    while low < end:
        if neighbors[low * step] == node:
            return True
        low += 1
    return False


@body
def weigh(indptr, neighbors, step, before, node, back, near, far, is_sorted):
    """Weight of a neighbor on a walk that came from `before`."""
    if node == before:
        return np.int64(back)
    if near == far:
        return np.int64(far)
    return np.int64(near) if has_neighbor(indptr, neighbors, step, before, node, is_sorted) else np.int64(far)


@body
def step_weighted(indptr, neighbors, step, row, before, back, near, far, is_sorted, key, walk, slot):
    """The next node of a walk at `row` that came from `before`; `row` has neighbors."""
    begin, degree = indptr[row], indptr[row + 1] - indptr[row]
    for t in range(TRIES):
        node = np.int64(neighbors[(begin + draw_below(key, walk, slot + 2 * t, degree)) * step])
        chance = np.int64(draw(key, walk, slot + 2 * t + 1) >> _SHIFT)
        # For the others the row of the node before need not be read.
        if chance < min(back, min(near, far)):
            return node
        if chance < weigh(indptr, neighbors, step, before, node, back, near, far, is_sorted):
            return node
    total = np.int64(0)
    for e in range(begin, begin + degree):
        total += weigh(indptr, neighbors, step, before, np.int64(neighbors[e * step]), back, near, far, is_sorted)
    left = draw_below(key, walk, slot + 2 * TRIES, total)
    for e in range(begin, begin + degree):
        node = np.int64(neighbors[e * step])
        left -= weigh(indptr, neighbors, step, before, node, back, near, far, is_sorted)
        if left < 0:
            return node
    return np.int64(-1)


@body
def pick_edge(indptr, row, key, walk, s):
    """Position of the edge that step `s` takes among all edges, each equally likely; -1 if there is none."""
    # An invalid node has no row: ids on a GPU are checked nowhere else.
    if row < 0 or row >= indptr.shape[0] - 1 or indptr[row + 1] == indptr[row]:
        return np.int64(-1)
    return indptr[row] + draw_below(key, walk, s * SLOTS, indptr[row + 1] - indptr[row])


@body
def follow(indptr, neighbors, step, row, node, before, stays, back, near, far, is_sorted, key, walk, s):
    """The node after `node`, whose row this is, on a walk that came from `before`, or begins at its step 0.

    Without neighbors a walk `stays`, or goes on as -1.
    """
    if s == 0 or before < 0 or (back == near and near == far):
        position = pick_edge(indptr, row, key, walk, s)
        if position >= 0:
            return np.int64(neighbors[position * step])
    elif row >= 0 and row < indptr.shape[0] - 1 and indptr[row + 1] > indptr[row]:
        return step_weighted(indptr, neighbors, step, row, before, back, near, far, is_sorted, key, walk, s * SLOTS)
    return np.int64(node) if stays else np.int64(-1)


pick_edge_in_loop = inlined(pick_edge, draw_below=draw_below_in_loop)


@body
def take_step(indptr, neighbors, step, first_row, stays, key, begin, end, s, length, out):
    """Step `s` of walks [begin, end), with all neighbors equally likely.

    Two loops without branches between walks: their reads, which miss the cache, are in flight together.
    """
    for walk in range(begin, end):
        at = walk * (length + 1) + s
        row = out[at] + first_row if out[at] >= 0 else np.int64(-1)
        out[at + 1] = pick_edge_in_loop(indptr, row, key, walk, s)
    for walk in range(begin, end):
        at = walk * (length + 1) + s
        position = out[at + 1]
        out[at + 1] = neighbors[position * step] if position >= 0 else out[at] if stays else np.int64(-1)


@body
def take_weighted_step(indptr, neighbors, step, first_row, stays, back, near, far, is_sorted, key, begin, end, s,
                       length, out):  # fmt: skip
    """Step `s` of walks [begin, end), with weighted neighbors."""
    for walk in range(begin, end):
        at = walk * (length + 1) + s
        node, before = out[at], out[at - 1] if s > 0 else np.int64(-1)
        row = node + first_row if node >= 0 else np.int64(-1)
        out[at + 1] = follow(indptr, neighbors, step, row, node, before, stays, back, near, far, is_sorted, key, walk,
                             s)  # fmt: skip


@cpu_kernel
def walk_cpu(indptr, neighbors, step, rows, stays, back, near, far, is_sorted, key, out):
    """Walks, int64 `[W, L + 1]` as one row of numbers, whose first nodes are there.

    `rows` holds for each step the offset from a node to its row. Walks advance together, a block at a time.
    """
    length = rows.shape[0]
    count = out.shape[0] // (length + 1)
    for b in prange((count + BLOCK - 1) // BLOCK):
        begin, end = b * BLOCK, min((b + 1) * BLOCK, count)
        for s in range(length):
            if back == near and near == far:
                take_step(indptr, neighbors, step, rows[s], stays, key, begin, end, s, length, out)
            else:
                take_weighted_step(indptr, neighbors, step, rows[s], stays, back, near, far, is_sorted, key, begin,
                                   end, s, length, out)  # fmt: skip


@gpu_kernel("i8[] I[] i8 i8[] i8 i8 i8 i8 i8 u8 i8[]", I=("i4", "i8"))
def walk_gpu(indptr, neighbors, step, rows, stays, back, near, far, is_sorted, key, out):
    """A thread for each walk."""
    length = np.int64(rows.shape[0])
    walk = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while walk < out.shape[0] // (length + 1):
        at = walk * (length + 1)
        node, before = np.int64(out[at]), np.int64(-1)
        for s in range(length):
            row = node + rows[s] if node >= 0 else np.int64(-1)
            following = follow(indptr, neighbors, step, row, node, before, stays, back, near, far, is_sorted, key, walk,
                               s)  # fmt: skip
            before, node = node, following
            out[at + s + 1] = node
        walk += np.int64(cuda.gridDim.x) * THREADS

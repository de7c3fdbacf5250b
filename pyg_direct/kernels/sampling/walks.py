"""Random walks over rows of neighbors: uniform ones, and node2vec's (Grover and Leskovec, KDD 2016, section 3.2.2).

The neighbor of edge e is neighbors[e * step]. Draws of a walk are functions of (key, number of the walk, slot). A step
of node2vec weighs neighbors relative to the node before: `back` for that node, `near` for its own neighbors, `far` for
others; the largest weight is 2**31. It draws a neighbor and accepts it with a chance in proportion to its weight. After
TRIES refusals it adds up all weights and draws among them, so that no weight, however small, makes a step long.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, inlined, prange
from pyg_direct.kernels.local_ids.thread_block import sync_team
from pyg_direct.kernels.sampling.random import draw, draw_below, draw_below_in_loop, scale_bits

TRIES = 24
# Draws of a step: a neighbor and a chance for each try, and one among all weights.
SLOTS = 2 * TRIES + 1
WEIGHT_BITS = 31
_SHIFT = np.uint64(64 - WEIGHT_BITS)
# Walks whose steps a CPU takes together.
BLOCK = 64
# Threads of a GPU that write the nodes of their walks together, and nodes of a walk that wait for it. Short walks are
# written as one run: a part of 32 bytes that is written in two goes costs a GPU as much as a random read.
TEAM, CHUNK = min(THREADS, 32), 23
STAGED = THREADS * CHUNK
# Blocks of a multiprocessor that walk, and the shared memory that they need, each with 1 KiB of the system: more would
# take its cache, in which the offsets of rows of many neighbors are found again.
RESIDENT = 4
SHARED, SHARED_WIDE = (RESIDENT * (STAGED * size + 1024) for size in (4, 8))


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
        if is_accepted(indptr, neighbors, step, before, node, back, near, far, is_sorted, key, walk, slot + 2 * t + 1):
            return node
    return draw_among_all(indptr, neighbors, step, begin, degree, before, back, near, far, is_sorted, key, walk,
                          slot + 2 * TRIES)  # fmt: skip


@body
def is_accepted(indptr, neighbors, step, before, node, back, near, far, is_sorted, key, walk, slot):
    """Accept a neighbor, for a walk that came from `before`, with a chance in proportion to its weight."""
    chance = np.int64(draw(key, walk, slot) >> _SHIFT)
    # For the others the row of the node before need not be read.
    if chance < min(back, min(near, far)):
        return True
    return chance < weigh(indptr, neighbors, step, before, node, back, near, far, is_sorted)


@body
def draw_among_all(indptr, neighbors, step, begin, degree, before, back, near, far, is_sorted, key, walk, slot):
    """A neighbor of a row, in proportion to the weights of all of them."""
    total = np.int64(0)
    for e in range(begin, begin + degree):
        total += weigh(indptr, neighbors, step, before, np.int64(neighbors[e * step]), back, near, far, is_sorted)
    left = draw_below(key, walk, slot, total)
    for e in range(begin, begin + degree):
        node = np.int64(neighbors[e * step])
        left -= weigh(indptr, neighbors, step, before, node, back, near, far, is_sorted)
        if left < 0:
            return node
    return np.int64(-1)


@body
def is_end(indptr, row):
    """Check that a row has no neighbors. An invalid node has no row: ids on a GPU are checked nowhere else."""
    return row < 0 or row >= indptr.shape[0] - 1 or indptr[row + 1] == indptr[row]


@body
def pick_edge(indptr, row, key, walk, s):
    """Position of the edge that step `s` takes among all edges, each equally likely; -1 if there is none."""
    if is_end(indptr, row):
        return np.int64(-1)
    return indptr[row] + draw_below(key, walk, s * SLOTS, indptr[row + 1] - indptr[row])


pick_edge_in_loop = inlined(pick_edge, is_end=inlined(is_end), draw_below=draw_below_in_loop)


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
def take_weighted_step(indptr, neighbors, step, back, near, far, is_sorted, key, begin, end, s, length, out):
    """Step `s` of walks [begin, end), with weighted neighbors. A walk without neighbors stays."""
    for walk in range(begin, end):
        at = walk * (length + 1) + s
        node = out[at]
        if is_end(indptr, node):
            out[at + 1] = node
        elif s == 0:
            out[at + 1] = neighbors[pick_edge(indptr, node, key, walk, s) * step]
        else:
            out[at + 1] = step_weighted(indptr, neighbors, step, node, out[at - 1], back, near, far, is_sorted, key,
                                        walk, s * SLOTS)  # fmt: skip


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
                take_weighted_step(indptr, neighbors, step, back, near, far, is_sorted, key, begin, end, s, length,
                                   out)  # fmt: skip


@body
def scale_to_row(bits, count):
    """As `scale_bits`, with half of its products unless a row has 2**32 neighbors."""
    if count >> 32 != 0:
        return scale_bits(bits, count)
    low, high = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)
    return np.int64((high * np.uint64(count) + ((low * np.uint64(count)) >> np.uint64(32))) >> np.uint64(32))


@body
def find_first_walk():
    """The first walk of this thread's team: teams go around all blocks, so that the last ones are spread over them."""
    team = np.int64(cuda.threadIdx.x // TEAM)
    return (team * cuda.gridDim.x + cuda.blockIdx.x) * TEAM


@body
def walk_evenly(staged, indptr, neighbors, step, rows, length, stays, key, start, out):
    """A thread for each walk, with all neighbors equally likely. Without `rows`, nodes are rows.

    A walk waits for its row, then for its neighbor. The draw of the step after is made while the row is on its way.
    Nodes go to shared memory first. A team of threads writes those of its walks together.
    """
    lane = np.uint32(cuda.threadIdx.x) % np.uint32(TEAM)
    # Nodes of short walks lie side by side, as in `out`.
    pitch = np.uint32(min(length + 1, CHUNK))
    # Places of this thread's walk in shared memory, and of the first walk of its team.
    mine = np.uint32(np.uint32(cuda.threadIdx.x) * pitch)
    base = np.uint32(mine - lane * pitch)
    first = find_first_walk()
    # The threads of a team leave this loop together, so that they may synchronize inside.
    while first < start.shape[0]:
        walk = first + lane
        node = np.int64(-1)
        if walk < start.shape[0]:
            node = start[walk]
        bits, s, waiting = draw(key, walk, 0), np.uint32(0), np.uint32(0)
        while True:
            staged[np.uint32(mine + waiting)] = node
            waiting = np.uint32(waiting + np.uint32(1))
            if waiting == pitch or s == length:
                sync_team(False)
                write_staged(
                    staged, base, pitch, lane, first, np.int64(s) + 1, waiting, length + 1, start.shape[0], out
                )
                sync_team(False)
                if s == length:
                    break
                waiting = np.uint32(0)
            row, begin, end = node, np.int64(0), np.int64(0)
            if rows.shape[0] > 0 and node >= 0:
                row += rows[s]
            # An invalid node has no row: ids on a GPU are checked nowhere else.
            if row >= 0 and row < indptr.shape[0] - 1:
                begin, end = indptr[row], indptr[row + 1]
            s = np.uint32(s + np.uint32(1))
            later = draw(key, walk, np.int64(s) * SLOTS)
            if begin < end:
                node = np.int64(neighbors[np.uint64((begin + scale_to_row(bits, end - begin)) * step)])
            elif stays == 0:
                node = np.int64(-1)
            bits = later
        first += np.int64(cuda.gridDim.x) * THREADS


@body
def walk_by_weight(staged, indptr, neighbors, step, length, back, near, far, is_sorted, key, start, out):
    """A thread for each walk, with weighted neighbors. A walk without neighbors stays.

    In a round each thread makes one try, at the step that its own walk has reached. So no thread waits for the one
    with the most tries at a step. A team waits once for all steps that it writes together.
    """
    lane, width = np.uint32(cuda.threadIdx.x) % np.uint32(TEAM), length + 1
    pitch = np.uint32(min(width, CHUNK))
    mine = np.uint32(np.uint32(cuda.threadIdx.x) * pitch)
    base = np.uint32(mine - lane * pitch)
    first = find_first_walk()
    while first < start.shape[0]:
        walk = first + lane
        node, before = np.int64(-1), np.int64(-1)
        if walk < start.shape[0]:
            node = start[walk]
        staged[mine] = node
        begin, degree, s, t, done = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        while done < width:
            end = min(done + pitch, width)
            while s + 1 < end:
                if t == 0:
                    degree = np.int64(0)
                    # An invalid node has no row: ids on a GPU are checked nowhere else.
                    if node >= 0 and node < indptr.shape[0] - 1:
                        begin = indptr[node]
                        degree = indptr[node + 1] - begin
                following, is_taken, slot = node, True, s * SLOTS + 2 * t
                if degree > 0:
                    following = np.int64(neighbors[(begin + draw_below(key, walk, slot, degree)) * step])
                    if s > 0:
                        is_taken = is_accepted(indptr, neighbors, step, before, following, back, near, far, is_sorted,
                                               key, walk, slot + 1)  # fmt: skip
                t += 1
                if not is_taken and t == TRIES:
                    following = draw_among_all(indptr, neighbors, step, begin, degree, before, back, near, far,
                                               is_sorted, key, walk, slot + 2)  # fmt: skip
                    is_taken = True
                if is_taken:
                    before, node = node, following
                    s, t = s + 1, np.int64(0)
                    staged[np.uint32(mine + np.uint32(s - done))] = node
            sync_team(False)
            write_staged(staged, base, pitch, lane, first, end, np.uint32(end - done), width, start.shape[0], out)
            sync_team(False)
            done = end
        first += np.int64(cuda.gridDim.x) * THREADS


@body
def write_staged(staged, base, pitch, lane, first, end, waiting, width, num_walks, out):
    """Write the nodes that wait, the last of `end`, of a team's walks of `width` nodes."""
    walks = np.uint32(min(num_walks - first, TEAM))
    if waiting == width:
        total, at, k = np.uint32(walks * waiting), first * width, lane
        while k < total:
            out[np.uint64(at + k)] = staged[np.uint32(base + k)]
            k = np.uint32(k + np.uint32(TEAM))
        return
    w = np.uint32(0)
    while w < walks:
        at, k = (first + w) * width + (end - waiting), lane
        while k < waiting:
            out[np.uint64(at + k)] = staged[np.uint32(base + w * pitch + k)]
            k = np.uint32(k + np.uint32(TEAM))
        w = np.uint32(w + np.uint32(1))


@gpu_kernel("i8[] i4[] i8 i8[] i8 i8 u8 i8[] i8[]", resident_blocks=RESIDENT, shared_bytes=SHARED)
def walk_evenly_gpu(indptr, neighbors, step, rows, length, stays, key, start, out):
    """See `walk_evenly`; nodes wait as int32, so that shared memory leaves room for other reads."""
    staged = cuda.shared.array(STAGED, np.int32)
    walk_evenly(staged, indptr, neighbors, step, rows, length, stays, key, start, out)


@gpu_kernel("i8[] i8[] i8 i8[] i8 i8 u8 i8[] i8[]", resident_blocks=RESIDENT, shared_bytes=SHARED_WIDE)
def walk_evenly_wide_gpu(indptr, neighbors, step, rows, length, stays, key, start, out):
    """The same for int64 neighbors."""
    staged = cuda.shared.array(STAGED, np.int64)
    walk_evenly(staged, indptr, neighbors, step, rows, length, stays, key, start, out)


@gpu_kernel("i8[] i4[] i8 i8 i8 i8 i8 i8 u8 i8[] i8[]", resident_blocks=RESIDENT, shared_bytes=SHARED)
def walk_by_weight_gpu(indptr, neighbors, step, length, back, near, far, is_sorted, key, start, out):
    """See `walk_by_weight`."""
    staged = cuda.shared.array(STAGED, np.int32)
    walk_by_weight(staged, indptr, neighbors, step, length, back, near, far, is_sorted, key, start, out)


@gpu_kernel("i8[] i8[] i8 i8 i8 i8 i8 i8 u8 i8[] i8[]", resident_blocks=RESIDENT, shared_bytes=SHARED_WIDE)
def walk_by_weight_wide_gpu(indptr, neighbors, step, length, back, near, far, is_sorted, key, start, out):
    """The same for int64 neighbors."""
    staged = cuda.shared.array(STAGED, np.int64)
    walk_by_weight(staged, indptr, neighbors, step, length, back, near, far, is_sorted, key, start, out)


# With as much shared memory as walks, beside which it runs.
@gpu_kernel("I[] i8 i8[]", I=("i4", "i8"), shared_bytes=SHARED)
def flag_outside_gpu(ids, upper, flag):
    """Set `flag`, which may be page-locked memory of the host, to 1 if an id is not in [0, upper)."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < ids.shape[0]:
        if ids[i] < 0 or ids[i] >= upper:
            flag[0] = 1
        i += np.int64(cuda.gridDim.x) * THREADS

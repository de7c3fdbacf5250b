"""Neighbor choice that rows share: LABOR-0 with sequential Poisson sampling (Balin & Catalyurek, "Layer-Neighbor
Sampling", NeurIPS 2023, section 3.2 and appendix A.3).

Every source has one key a hop, whichever row lists it, and a row picks the k of its d neighbors with the smallest keys
(of equal keys, as parallel edges have, the first in the list). Rows that list the same nodes so pick the same ones.
Picks stand in the order of the list.

On the GPU a team of lanes reads a row once and keeps, in order, the keys below a bound that a few more than k keys are
expected to lie under; with too few it doubles the bound. Long rows are read by a whole block, and rows whose keys a
bound cannot part, as many parallel edges have equal ones, are settled digit by digit of the keys.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.kernels.block import SCAN_WORDS, own_range, scan_block
from pyg_direct.kernels.draw import draw
from pyg_direct.kernels.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.neighbor import (
    LOW_WORD,
    PICKS,
    RESIDENT_BLOCKS,
    frontier_of,
    num_picks,
    open_hop,
    read_edge,
    store_edge,
)
from pyg_direct.kernels.state import KEY, LABOR_DRAW

# Threads that share a row; a warp, which needs no barrier of the block. The simulator has barriers of blocks alone.
LANES = THREADS if SIMULATED else 32
TEAMS = THREADS // LANES
# Keys below the bound that a team can hold.
CANDIDATES = 16 if SIMULATED else 96
BLOCK_CANDIDATES = TEAMS * CANDIDATES
# Rows longer than this are read by the whole block.
LONG_ROW = 24 if SIMULATED else 2048
# A digit has one bin a thread at most.
DIGIT_BITS = 2 if SIMULATED else 8
BINS = 1 << DIGIT_BITS
_LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)


@body
def labor_key(key, hop, same_keys):
    """Key of a hop's draws; hops of a batch that have the `same_keys` pick the same sources where they can."""
    return draw(key, np.int64(0) if same_keys else np.int64(hop), LABOR_DRAW)


@body
def source_key(row_key, source):
    """The key by which rows rank `source`: smaller comes first."""
    return draw(row_key, source, 0)


@body
def expect_candidates(fanout):
    """Keys to expect below the bound so that fewer than `fanout` are below it in few rows of a hundred."""
    return fanout + 2.0 * math.sqrt(np.float64(fanout)) + 2.0


@body
def bound_for(expected, degree):
    """The bound below which `expected` of `degree` keys are expected."""
    share = expected / degree
    if share >= 1.0:
        return _LARGEST
    return np.uint64(share * 18446744073709551616.0)


@body
def sink_key(heap, size, key):
    """Put `key` in the place of the largest key of a heap."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key


@body
def find_largest_pick(keys, degree, fanout, heap):
    """(largest key of the `fanout` smallest, how many of these have just that key)."""
    heap[:fanout] = _LARGEST
    for e in range(degree):
        if keys[e] < heap[0]:
            sink_key(heap, fanout, keys[e])
    largest, equal = heap[0], 0
    for slot in range(fanout):
        if heap[slot] == largest:
            equal += 1
    return largest, equal


@cpu_kernel
def pick_labor_cpu(indptr, indices, nodes, offsets, key, hop, fanout, same_keys, chunks, sources, positions):
    """Fanouts from 0."""
    row_key = labor_key(key, hop, same_keys)
    share = (nodes.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, nodes.shape[0]), min((c + 1) * share, nodes.shape[0])
        longest = 0
        for i in range(begin, end):
            longest = max(longest, indptr[nodes[i] + 1] - indptr[nodes[i]])
        keys, heap = np.empty(longest, np.uint64), np.empty(max(fanout, 1), np.uint64)
        for i in range(begin, end):
            start = indptr[nodes[i]]
            degree = indptr[nodes[i] + 1] - start
            row, at = indices[start : start + degree], offsets[i]
            if degree <= fanout:
                for e in range(degree):
                    sources[at + e] = row[e]
                    positions[at + e] = start + e
            elif fanout > 0:
                # A loop of its own, so that several keys are computed at once.
                for e in range(degree):
                    keys[e] = source_key(row_key, row[e])
                largest, equal = find_largest_pick(keys, degree, fanout, heap)
                for e in range(degree):
                    if keys[e] < largest or (keys[e] == largest and equal > 0):
                        equal -= np.int64(keys[e] == largest)
                        sources[at] = row[e]
                        positions[at] = start + e
                        at += 1


@body
def sync_team(is_block):
    """Barrier of the threads that share a row."""
    if SIMULATED or is_block:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


@body
def read_source(indices, pairs, position, shift):
    """The neighbor at a position; see `read_edge`."""
    if pairs.shape[0] > 0:
        return np.int64(np.uint64(pairs[np.uint64(position)]) & LOW_WORD)
    return np.int64(indices[np.uint64(position + shift)])


@body
def count_team(flag, is_block, shared):
    """(number of flags of lower threads of the team, of all its threads); every thread of it must call it."""
    if SIMULATED or is_block:
        # In long rows few keys pass.
        if cuda.syncthreads_or(flag) == 0:
            return np.int64(0), np.int64(0)
        return scan_block(np.int64(flag), shared)
    else:
        flags = cuda.ballot_sync(0xFFFFFFFF, flag)
        below = np.uint32((np.uint32(1) << np.uint32(cuda.threadIdx.x & 31)) - np.uint32(1))
        return np.int64(cuda.popc(np.uint32(flags) & below)), np.int64(cuda.popc(np.uint32(flags)))


@body
def key_at(row_key, indices, pairs, start, shift, degree, e):
    """Key of neighbor `e` of a row; the largest one past its end."""
    if e >= degree:
        return _LARGEST
    return source_key(row_key, read_source(indices, pairs, start + e, shift))


@body
def keep_key(key, e, degree, bound, count, is_block, base, capacity, keys, picks, shared):
    """Put the key of `e` behind the `count` kept so far if it is at most `bound`; returns their number after it."""
    passes = 1 if e < degree and key <= bound else 0
    before, total = count_team(passes, is_block, shared)
    at = count + before
    if passes and at < capacity:
        keys[base + at] = key
        picks[base + at] = e
    return count + total


@body
def collect_keys(row_key, indices, pairs, start, shift, degree, fanout, lane, lanes, is_block, base, capacity, keys,
                 picks, shared):  # fmt: skip
    """Keep the smallest keys of a row: their number, `fanout` to `capacity`, or 0 when no bound leaves so many."""
    expected = expect_candidates(fanout)
    while expected <= capacity:
        bound = bound_for(expected, degree)
        sync_team(is_block)
        count, e = np.int64(0), np.int64(lane)
        while e - lane < degree:
            # Two at once, so that their reads are on their way together.
            key = key_at(row_key, indices, pairs, start, shift, degree, e)
            key_2 = key_at(row_key, indices, pairs, start, shift, degree, e + lanes)
            count = keep_key(key, e, degree, bound, count, is_block, base, capacity, keys, picks, shared)
            count = keep_key(key_2, e + lanes, degree, bound, count, is_block, base, capacity, keys, picks, shared)
            e += 2 * lanes
        sync_team(is_block)
        if count >= fanout:
            return count if count <= capacity else np.int64(0)
        expected *= 2.0
    return np.int64(0)


@body
def rank_key(keys, base, size, c):
    """How many of the kept keys come before key `c`."""
    key, rank = keys[base + c], np.int32(0)
    for other in range(np.int32(size)):
        if keys[base + other] < key or (keys[base + other] == key and other < c):
            rank += np.int32(1)
    return rank


@body
def pick_by_bound(row_key, indices, edge_ids, pairs, start, shift, degree, fanout, lane, lanes, is_block, base, room,
                  keys, picks, shared, at, target, capacity, sources, ids, targets, fresh, touched):  # fmt: skip
    """Write the picks of a row as the edges from `at` on; False when no bound parts its keys."""
    size = collect_keys(row_key, indices, pairs, start, shift, degree, fanout, lane, lanes, is_block, base, room, keys,
                        picks, shared)  # fmt: skip
    c = np.int64(lane)
    while c - lane < size:
        is_chosen = 1 if c < size and rank_key(keys, base, size, c) < fanout else 0
        before, total = count_team(is_chosen, is_block, shared)
        if is_chosen and at + before < capacity:
            source, own_id = read_edge(indices, edge_ids, pairs, start + picks[base + c], shift)
            store_edge(at + before, source, own_id, target, sources, ids, targets, fresh, touched)
        at += total
        c += lanes
    return size > 0


@body
def find_largest_by_digits(row_key, indices, pairs, start, shift, degree, fanout, bins, found, shared):
    """As on the CPU, for any keys; every thread of the block must call it."""
    tid = cuda.threadIdx.x
    prefix, wanted, place = np.uint64(0), np.int64(fanout), 64
    while place > 0:
        place -= DIGIT_BITS
        if tid < BINS:
            bins[tid] = 0
        cuda.syncthreads()
        for e in range(tid, degree, THREADS):
            digits = source_key(row_key, read_source(indices, pairs, start + e, shift)) >> np.uint64(place)
            if digits >> np.uint64(DIGIT_BITS) == prefix:
                cuda.atomic.add(bins, np.int64(digits & np.uint64(BINS - 1)), 1)
        cuda.syncthreads()
        count = np.int64(bins[tid]) if tid < BINS else np.int64(0)
        before, _ = scan_block(count, shared)
        if before < wanted and wanted <= before + count:
            found[0] = tid
            found[1] = wanted - before
        cuda.syncthreads()
        prefix = (prefix << np.uint64(DIGIT_BITS)) | np.uint64(found[0])
        wanted = found[1]
    return prefix, wanted


@gpu_kernel(PICKS, I=("i4", "i8"), P=("i4", "i8"), resident_blocks=RESIDENT_BLOCKS)
def pick_labor_gpu(state, indptr, starts, indices, edge_ids, pairs, nodes, block_sums, hop, fanout, same_keys,
                   expand_all, capacity, sources, ids, targets, fresh, touched):  # fmt: skip
    """Fanouts from 0; rows lie as for `pick_neighbors_gpu`."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    row_starts = cuda.shared.array(THREADS, np.int64)
    shifts = cuda.shared.array(THREADS, np.int64)
    degrees = cuda.shared.array(THREADS, np.int64)
    offsets = cuda.shared.array(THREADS, np.int64)
    keys = cuda.shared.array(BLOCK_CANDIDATES, np.uint64)
    picks = cuda.shared.array(BLOCK_CANDIDATES, np.int32)
    taken = cuda.shared.array(TEAMS, np.int32)
    # [0] next row that a team takes, [1] rows left to the block.
    queue = cuda.shared.array(2, np.int32)
    left_rows = cuda.shared.array(THREADS, np.int32)
    bins = cuda.shared.array(BINS, np.int32)
    found = cuda.shared.array(2, np.int64)
    tid = cuda.threadIdx.x
    team, lane = tid // LANES, tid % LANES
    row_key = labor_key(state[KEY], hop, same_keys)
    begin, end = frontier_of(state, hop, expand_all)
    edge = open_hop(state, hop, block_sums, capacity, shared)
    own_begin, own_end = own_range(end - begin)
    for tile in range(own_begin, own_end, THREADS):
        num_rows = min(np.int64(THREADS), own_end - tile)
        count = np.int64(0)
        if tid < num_rows:
            node = nodes[begin + tile + tid]
            row_starts[tid] = indptr[node]
            shifts[tid] = starts[node] - indptr[node]
            degrees[tid] = indptr[node + 1] - indptr[node]
            count = num_picks(degrees[tid], fanout, 0)
        before, total = scan_block(count, shared)
        offsets[tid] = before
        if tid < 2:
            queue[tid] = 0
        cuda.syncthreads()
        while True:
            if lane == 0:
                taken[team] = cuda.atomic.add(queue, 0, 1)
            sync_team(False)
            row = np.int64(taken[team])
            sync_team(False)
            if row >= num_rows:
                break
            start, shift, degree = row_starts[row], shifts[row], degrees[row]
            at, target = edge + offsets[row], begin + tile + row
            if degree <= fanout:
                for e in range(lane, degree, LANES):
                    if at + e < capacity:
                        source, own_id = read_edge(indices, edge_ids, pairs, start + e, shift)
                        store_edge(at + e, source, own_id, target, sources, ids, targets, fresh, touched)
            elif fanout > 0:
                is_done = False
                if degree <= LONG_ROW:
                    is_done = pick_by_bound(row_key, indices, edge_ids, pairs, start, shift, degree, fanout, lane,
                                            LANES, False, team * CANDIDATES, CANDIDATES, keys, picks, shared, at,
                                            target, capacity, sources, ids, targets, fresh, touched)  # fmt: skip
                if not is_done and lane == 0:
                    left_rows[cuda.atomic.add(queue, 1, 1)] = row
        cuda.syncthreads()
        for left in range(queue[1]):
            row = np.int64(left_rows[left])
            start, shift, degree = row_starts[row], shifts[row], degrees[row]
            at, target = edge + offsets[row], begin + tile + row
            is_done = pick_by_bound(row_key, indices, edge_ids, pairs, start, shift, degree, fanout, tid, THREADS, True,
                                    0, BLOCK_CANDIDATES, keys, picks, shared, at, target, capacity, sources, ids,
                                    targets, fresh, touched)  # fmt: skip
            if not is_done:
                largest, equal = find_largest_by_digits(row_key, indices, pairs, start, shift, degree, fanout, bins,
                                                        found, shared)  # fmt: skip
                # Smaller keys in the low half of a word and equal ones in the high half, counted by one scan.
                so_far = np.int64(0)
                for first in range(np.int64(0), degree, THREADS):
                    e = first + tid
                    is_smaller, is_equal = np.int64(0), np.int64(0)
                    if e < degree:
                        key = source_key(row_key, read_source(indices, pairs, start + e, shift))
                        is_smaller, is_equal = np.int64(key < largest), np.int64(key == largest)
                    before, count = scan_block(is_smaller | is_equal << 32, shared)
                    before += so_far
                    num_equal = before >> 32
                    if is_smaller or (is_equal and num_equal < equal):
                        slot = (before & np.int64(0xFFFFFFFF)) + min(num_equal, equal)
                        if at + slot < capacity:
                            source, own_id = read_edge(indices, edge_ids, pairs, start + e, shift)
                            store_edge(at + slot, source, own_id, target, sources, ids, targets, fresh, touched)
                    so_far += count
            cuda.syncthreads()
        edge += total
        cuda.syncthreads()

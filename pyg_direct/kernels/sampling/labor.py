"""Neighbor choice that rows share: LABOR-0 with sequential Poisson sampling (Balin & Catalyurek, "Layer-Neighbor
Sampling", NeurIPS 2023, section 3.2 and appendix A.3).

Every source has one key a hop, for every row that lists it. A row picks the k of its d neighbors with the smallest
keys; among equal keys, as of parallel edges, the first in the list. So rows that list the same nodes pick the same
ones. Picks stand in the order of the list.

On the GPU a team of lanes reads a row once and keeps the keys below a bound. A few more than k keys are expected below
it. If there are too few, it doubles the bound. A whole block reads a long row. A bound cannot separate equal keys, for
example of many parallel edges. The block then finds the k-th smallest digit by digit.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, gpu_kernel, inlined, prange
from pyg_direct.kernels.batch_counters import KEY, LABOR_DRAW
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sync_team
from pyg_direct.kernels.sampling.excluded_edges import position_of
from pyg_direct.kernels.sampling.random import draw, draw_in_loop
from pyg_direct.kernels.sampling.uniform import (
    LOW_WORD,
    PICKS,
    RESIDENT_BLOCKS,
    frontier_of,
    num_picks,
    open_hop,
    read_edge,
    store_edge,
)

# Threads that share a row; a warp, which needs no barrier of the block. The simulator has only barriers of blocks.
LANES = THREADS if SIMULATED else 32
TEAMS = THREADS // LANES
# Keys below the bound that a team can hold.
CANDIDATES = 16 if SIMULATED else 96
BLOCK_CANDIDATES = TEAMS * CANDIDATES
# Rows longer than this are read by the whole block.
LONG_ROW = 24 if SIMULATED else 2048
# A digit has at most one bin a thread.
DIGIT_BITS = 2 if SIMULATED else 8
BINS = 1 << DIGIT_BITS


@body
def labor_key(key, hop, same_keys):
    """Key of a hop's draws; hops of a batch with `same_keys` pick the same sources if they can."""
    return draw(key, np.int64(0) if same_keys else np.int64(hop), LABOR_DRAW)


@body
def source_key(row_key, source):
    """The key by which rows rank `source`: smaller comes first."""
    return draw(row_key, source, 0)


source_key_in_loop = inlined(source_key, draw=draw_in_loop)


@body
def expect_candidates(fanout):
    """Number of keys to expect below the bound, so that rarely (in a few rows of a hundred) fewer than `fanout` are."""
    return fanout + 2.0 * math.sqrt(np.float64(fanout)) + 2.0


@body
def bound_for(expected, degree):
    """The bound below which `expected` of `degree` keys are expected."""
    share = expected / degree
    if share >= 1.0:
        return np.uint64(0xFFFFFFFFFFFFFFFF)
    return np.uint64(share * 18446744073709551616.0)


@body
def sink_key(heap, size, key):
    """Replace the largest key of a heap by `key`."""
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
    """(largest key of the `fanout` smallest, how many of these have exactly that key)."""
    heap[:fanout] = np.uint64(0xFFFFFFFFFFFFFFFF)
    for e in range(degree):
        if keys[e] < heap[0]:
            sink_key(heap, fanout, keys[e])
    largest, equal = heap[0], 0
    for slot in range(fanout):
        if heap[slot] == largest:
            equal += 1
    return largest, equal


@body
def find_limit(keys, near, degree, fanout, heap):
    """As `find_largest_pick`, mostly of fewer keys; `near` has room for all of them."""
    # Few keys lie below the bound that a GPU begins with, and mostly enough.
    bound, num_near = bound_for(expect_candidates(fanout), degree), 0
    for e in range(degree):
        near[num_near] = keys[e]
        num_near += np.int64(keys[e] < bound)
    if num_near >= fanout:
        return find_largest_pick(near, num_near, fanout, heap)
    return find_largest_pick(keys, degree, fanout, heap)


@body
def pick_labor_row(row_key, indices, type_start, excluded, first, base, start, size, fanout, keys, near, heap,
                   positions, at):  # fmt: skip
    """Write start + place of the `fanout` < `size` edges that a row picks to positions[at:], in the order of the list.

    `excluded` is None if the row has no excluded edge; `first` and `base` are as for `position_of`.
    """
    # A separate loop, so that several keys are computed at once.
    if excluded is None:
        for place in range(size):
            keys[place] = source_key_in_loop(row_key, indices[start + place] - type_start)
    else:
        for place in range(size):
            position = position_of(excluded, first, base, start, place)
            keys[place] = source_key(row_key, indices[position] - type_start)
    largest, equal = find_limit(keys, near, size, fanout, heap)
    for place in range(size):
        if keys[place] < largest or (keys[place] == largest and equal > 0):
            equal -= np.int64(keys[place] == largest)
            positions[at] = start + place
            at += 1


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
        keys, near = np.empty((2, longest), np.uint64)
        heap = np.empty(max(fanout, 1), np.uint64)
        for i in range(begin, end):
            start = indptr[nodes[i]]
            degree = indptr[nodes[i] + 1] - start
            row, at = indices[start : start + degree], offsets[i]
            if degree <= fanout:
                for e in range(degree):
                    sources[at + e] = row[e]
                    positions[at + e] = start + e
            elif fanout > 0:
                # A separate loop, so that several keys are computed at once.
                for e in range(degree):
                    keys[e] = source_key_in_loop(row_key, row[e])
                largest, equal = find_limit(keys, near, degree, fanout, heap)
                for e in range(degree):
                    if keys[e] < largest or (keys[e] == largest and equal > 0):
                        equal -= np.int64(keys[e] == largest)
                        sources[at] = row[e]
                        positions[at] = start + e
                        at += 1


@body
def read_source(indices, pairs, start, place, shift, left):
    """The neighbor at a place of a row.

    `left` is None for rows that lie as `read_edge` says. Otherwise it is (excluded, first, base, start of the type),
    `pairs` is None, and the place is one among the remaining edges; see `position_of`.
    """
    if left is not None:
        return np.int64(indices[np.uint64(position_of(left[0], left[1], left[2], start, place))]) - left[3]
    elif pairs is not None and pairs.shape[0] > 0:
        return np.int64(np.uint64(pairs[np.uint64(start + place)]) & LOW_WORD)
    return np.int64(indices[np.uint64(start + place + shift)])


@body
def collect_keys(row_key, indices, pairs, start, shift, left, degree, bound, lane, lanes, is_block, team, capacity,
                 keys, picks, counts):  # fmt: skip
    """Number of keys of a row that are at most `bound`; the first `capacity` found are left in the team's part."""
    base = team * CANDIDATES
    sync_team(is_block)
    if lane == 0:
        counts[team] = 0
    sync_team(is_block)
    for e in range(lane, degree, lanes):
        key = source_key(row_key, read_source(indices, pairs, start, e, shift, left))
        if key <= bound:
            at = cuda.atomic.add(counts, team, 1)
            if at < capacity:
                keys[base + at] = key
                picks[base + at] = e
    sync_team(is_block)
    return counts[team]


@body
def collect_candidates(row_key, indices, pairs, start, shift, left, degree, fanout, lane, lanes, is_block, team,
                       capacity, keys, picks, counts):  # fmt: skip
    """Number of collected keys, `fanout` to `capacity`; 0 if no bound leaves so many."""
    expected = expect_candidates(fanout)
    while expected <= capacity:
        count = collect_keys(row_key, indices, pairs, start, shift, left, degree, bound_for(expected, degree), lane,
                             lanes, is_block, team, capacity, keys, picks, counts)  # fmt: skip
        if count >= fanout:
            return count if count <= capacity else 0
        expected *= 2.0
    return 0


@body
def choose_candidates(count, fanout, lane, lanes, is_block, team, keys, picks, chosen):
    """Mark the `fanout` smallest of the collected keys."""
    base = team * CANDIDATES
    for c in range(base + lane, base + count, lanes):
        key, pick, rank = keys[c], picks[c], 0
        for other in range(base, base + count):
            if keys[other] < key or (keys[other] == key and picks[other] < pick):
                rank += 1
        chosen[c] = 1 if rank < fanout else 0
    sync_team(is_block)


@body
def place_candidate(c, count, team, picks, chosen):
    """Slot of the chosen candidate `c` in its row: the order of the list."""
    base, slot = team * CANDIDATES, 0
    for other in range(base, base + count):
        if chosen[other] and picks[other] < picks[c]:
            slot += 1
    return slot


@body
def find_largest_by_digits(row_key, indices, pairs, start, shift, left, degree, fanout, bins, found, shared):
    """As on the CPU, for any keys; every thread of the block must call it."""
    tid = cuda.threadIdx.x
    prefix, wanted, place = np.uint64(0), np.int64(fanout), 64
    while place > 0:
        place -= DIGIT_BITS
        if tid < BINS:
            bins[tid] = 0
        cuda.syncthreads()
        for e in range(tid, degree, THREADS):
            digits = source_key(row_key, read_source(indices, pairs, start, e, shift, left)) >> np.uint64(place)
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


@body
def find_slot(row_key, indices, pairs, start, shift, left, degree, e, largest, equal, so_far, shared):
    """(slot of edge `e` among the picks of its row, -1 if it is none; picks up to the last thread's edge).

    Threads have consecutive edges, and every thread of the block must call it. `so_far` is 0 for the first edges.
    """
    # Smaller keys in the low half of a word and equal ones in the high half, counted by one scan.
    is_smaller, is_equal, slot = np.int64(0), np.int64(0), np.int64(-1)
    if e < degree:
        key = source_key(row_key, read_source(indices, pairs, start, e, shift, left))
        is_smaller, is_equal = np.int64(key < largest), np.int64(key == largest)
    before, count = scan_block(is_smaller | is_equal << 32, shared)
    before += so_far
    num_equal = before >> 32
    if is_smaller or (is_equal and num_equal < equal):
        slot = (before & np.int64(0xFFFFFFFF)) + min(num_equal, equal)
    return slot, so_far + count


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
    chosen = cuda.shared.array(BLOCK_CANDIDATES, np.uint8)
    counts = cuda.shared.array(TEAMS, np.int32)
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
                size = 0
                if degree <= LONG_ROW:
                    size = collect_candidates(row_key, indices, pairs, start, shift, None, degree, fanout, lane, LANES,
                                              False, team, CANDIDATES, keys, picks, counts)  # fmt: skip
                if size > 0:
                    choose_candidates(size, fanout, lane, LANES, False, team, keys, picks, chosen)
                    for c in range(team * CANDIDATES + lane, team * CANDIDATES + size, LANES):
                        slot = place_candidate(c, size, team, picks, chosen)
                        if chosen[c] and at + slot < capacity:
                            source, own_id = read_edge(indices, edge_ids, pairs, start + picks[c], shift)
                            store_edge(at + slot, source, own_id, target, sources, ids, targets, fresh, touched)
                elif lane == 0:
                    left_rows[cuda.atomic.add(queue, 1, 1)] = row
        cuda.syncthreads()
        for left in range(queue[1]):
            row = np.int64(left_rows[left])
            start, shift, degree = row_starts[row], shifts[row], degrees[row]
            at, target = edge + offsets[row], begin + tile + row
            size = collect_candidates(row_key, indices, pairs, start, shift, None, degree, fanout, tid, THREADS, True,
                                      0, BLOCK_CANDIDATES, keys, picks, counts)  # fmt: skip
            if size > 0:
                choose_candidates(size, fanout, tid, THREADS, True, 0, keys, picks, chosen)
                for c in range(tid, size, THREADS):
                    slot = place_candidate(c, size, 0, picks, chosen)
                    if chosen[c] and at + slot < capacity:
                        source, own_id = read_edge(indices, edge_ids, pairs, start + picks[c], shift)
                        store_edge(at + slot, source, own_id, target, sources, ids, targets, fresh, touched)
            else:
                largest, equal = find_largest_by_digits(row_key, indices, pairs, start, shift, None, degree, fanout,
                                                        bins, found, shared)  # fmt: skip
                so_far = np.int64(0)
                for first in range(np.int64(0), degree, THREADS):
                    e = first + tid
                    slot, so_far = find_slot(row_key, indices, pairs, start, shift, None, degree, e, largest, equal,
                                             so_far, shared)  # fmt: skip
                    if slot >= 0 and at + slot < capacity:
                        source, own_id = read_edge(indices, edge_ids, pairs, start + e, shift)
                        store_edge(at + slot, source, own_id, target, sources, ids, targets, fresh, touched)
            cuda.syncthreads()
        edge += total
        cuda.syncthreads()

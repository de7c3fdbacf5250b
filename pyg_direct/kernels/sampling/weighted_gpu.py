"""Weighted choice on a GPU: in short rows a thread scores an edge and finds its rank; warps and blocks read longer
rows.

A warp, or a block if the row is long, keeps the lightest edges of its row so far. It reads as many scores at a time as
it has threads; scores below the largest kept one join the kept ones, and each finds its rank among them all. If shared
memory cannot hold the kept ones, the k-th smallest score is found digit by digit. The block counts the scores that
begin with each digit, and continues among those that begin as the k-th does. The picks equal those in
`kernels/sampling/weighted.py`. Only equal scores beyond shared memory could differ, and draws of 52 bits do not give
these in practice.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sync_team
from pyg_direct.kernels.sampling.excluded_edges import first_excluded, position_of
from pyg_direct.kernels.sampling.labor import LANES, TEAMS
from pyg_direct.kernels.sampling.uniform import find_row
from pyg_direct.kernels.sampling.weighted import (
    MARGIN,
    MOST,
    draw_unit,
    order_of,
    pick_with_replacement,
    score_of,
    score_of_unit,
    sift_up,
    sort_heap,
)
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    OWN_START,
    count_all_items,
    find_entry,
    frontier_place,
    is_weighted,
    row_key,
)

# Edges that a block scores together, and the most edges of a row that shares such a block.
TOGETHER, SHORT_ROW = (24, 6) if SIMULATED else (1024, 32)
# Edges of a row above which a block reads it, and picks that shared memory keeps for a warp and for a block.
LONG_ROW, WARP_PICKS, BLOCK_PICKS = (16, 4, 6) if SIMULATED else (2048, 32, 512)
# Kept scores and those that join them, of a warp and of all.
_WARP_PLACES = WARP_PICKS + LANES
_PLACES, _KEPT = max(TEAMS * _WARP_PLACES, BLOCK_PICKS + THREADS), max(TEAMS * WARP_PICKS, BLOCK_PICKS)
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_HIGHEST_DIGIT = 56


@body
def rank_in_row(scores, begin, end, own):
    """Number of scores[begin:end] before scores[own]; among equal ones the first comes first."""
    score, rank = scores[own], np.int64(0)
    for other in range(begin, end):
        if scores[other] < score or (scores[other] == score and other < own):
            rank += 1
    return rank


@body
def pick_lightest_by_team(key, row, start, size, count, edge_weight, excluded, base, lane, lanes, is_block, team, room,
                          kept, scores, places, kept_scores, kept_places, joined, draws, at):  # fmt: skip
    """The `count` positions with the smallest scores, smallest first, by a warp or a block; `joined[team]` is 0."""
    first_left = first_excluded(excluded, base + start)
    own, own_kept = team * room, team * kept
    filled, first = np.int64(0), np.int64(0)
    limit = np.float64(np.inf)
    while first < size:
        place = first + lane
        if place < size:
            weight = np.float64(edge_weight[position_of(excluded, first_left, base, start, place)])
            if weight > 0:
                unit = draw_unit(key, row, place)
                # -log(u) is at least 1 - u; scores beyond MOST are not in proportion to weights.
                if not limit < MOST or (1.0 - unit) * MARGIN < limit * weight:
                    score = score_of_unit(unit, weight)
                    if score < limit:
                        slot = own + filled + cuda.atomic.add(joined, team, 1)
                        scores[slot], places[slot] = score, np.int32(place)
        sync_team(is_block)
        total = filled + joined[team]
        sync_team(is_block)
        if lane == 0:
            joined[team] = 0
        if total > filled:
            c = own + lane
            while c < own + total:
                score, own_place, rank = scores[c], places[c], np.int64(0)
                for other in range(own, own + total):
                    if scores[other] < score or (scores[other] == score and places[other] < own_place):
                        rank += 1
                if rank < count:
                    kept_scores[own_kept + rank], kept_places[own_kept + rank] = score, own_place
                c += lanes
            sync_team(is_block)
            filled = min(total, np.int64(count))
            c = lane
            while c < filled:
                scores[own + c], places[own + c] = kept_scores[own_kept + c], kept_places[own_kept + c]
                c += lanes
            if filled == count:
                limit = kept_scores[own_kept + count - 1]
        sync_team(is_block)
        first += lanes
    slot = lane
    while slot < count:
        draws[at + slot] = np.int64(places[own + slot])
        slot += lanes
    sync_team(is_block)


@body
def find_digit(counts, wanted):
    """(digit of the score that is number `wanted` from below, scores with lower digits)."""
    before = np.int64(0)
    digit = np.int64(0)
    while before + counts[digit] < wanted:
        before += counts[digit]
        digit += 1
    return digit, before


@body
def pick_lightest_by_digits(
    key, row, start, size, count, edge_weight, excluded, base, counts, found, scores, draws, at
):
    """As `pick_lightest_by_team`, for any number of picks; every thread of the block must call it."""
    tid = np.int64(cuda.threadIdx.x)
    first = first_excluded(excluded, base + start)
    if tid == 0:
        found[0], found[1], found[2] = 0, count, 0
    shift = np.int64(_HIGHEST_DIGIT)
    is_narrowed = False
    while not is_narrowed:
        digit = tid
        while digit < _DIGITS:
            counts[digit] = 0
            digit += THREADS
        cuda.syncthreads()
        prefix = found[0]
        edge = tid
        while edge < size:
            weight = edge_weight[position_of(excluded, first, base, start, edge)]
            if weight > 0:
                order = order_of(score_of(key, row, edge, weight))
                if shift == _HIGHEST_DIGIT or order >> (shift + _DIGIT_BITS) == prefix:
                    cuda.atomic.add(counts, (order >> shift) & (_DIGITS - 1), 1)
            edge += THREADS
        cuda.syncthreads()
        wanted = found[1]
        digit, before = find_digit(counts, wanted)
        prefix = (prefix << _DIGIT_BITS) + digit
        is_narrowed = shift == 0 or before + counts[digit] == wanted
        cuda.syncthreads()
        if tid == 0:
            found[0], found[1] = prefix, wanted - before
        if not is_narrowed:
            shift -= _DIGIT_BITS
    cuda.syncthreads()
    edge = tid
    while edge < size:
        weight = edge_weight[position_of(excluded, first, base, start, edge)]
        if weight > 0:
            score = score_of(key, row, edge, weight)
            if order_of(score) >> shift <= found[0]:
                slot = cuda.atomic.add(found, 2, 1)
                if slot < count:
                    scores[at + slot], draws[at + slot] = score, edge
        edge += THREADS
    cuda.syncthreads()
    if tid == 0:
        for slot in range(count):
            sift_up(scores, draws, at, slot, scores[at + slot], draws[at + slot])
        sort_heap(scores, draws, at, count)
    cuda.syncthreads()


@gpu_kernel("i8 i8 i8[] W[] f8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[]", W=("f4", "f8"))
def pick_weighted_gpu(hop, replace, work, edge_weight, weight_before, excluded, rows, trees, starts, sizes, offsets,
                      draws):  # fmt: skip
    """The positions of items that choose by weight with replacement, or in short rows."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    entries = cuda.shared.array(THREADS, np.int64)
    keys = cuda.shared.array(THREADS, np.uint64)
    # First edge of each item among the edges of the tile, which are scored together.
    begins = cuda.shared.array(THREADS, np.int64)
    scores = cuda.shared.array(TOGETHER, np.float64)
    tid = np.int64(cuda.threadIdx.x)
    own_begin, own_end = own_range(count_all_items(work))
    tile = own_begin
    while tile < own_end:
        num_items = min(np.int64(THREADS), own_end - tile)
        amount = np.int64(0)
        if tid < num_items:
            item = tile + tid
            entry, size = find_entry(work, item), sizes[item]
            count = offsets[item + 1] - offsets[item]
            entries[tid] = entry
            if count > 0 and is_weighted(work, entry, size, replace) and (replace != 0 or size <= SHORT_ROW):
                keys[tid] = row_key(work, entry, hop, trees, frontier_place(work, entry, item))
                amount = count if replace != 0 else size
        before, total = scan_block(amount, shared)
        begins[tid] = before
        cuda.syncthreads()
        begin = np.int64(0)
        while begin < total:
            # As many whole items as fit.
            end = total
            if replace == 0 and total - begin > TOGETHER:
                end = begins[find_row(begins, num_items, begin + TOGETHER)]
            e = begin + tid
            while e < end:
                at = find_row(begins, num_items, e)
                item, entry = tile + at, entries[at]
                place = e - begins[at]
                row = rows[frontier_place(work, entry, item)] - work[entry + OWN_START]
                base = work[entry + BATCH] * edge_weight.shape[0]
                if replace != 0:
                    draws[offsets[item] + place] = pick_with_replacement(keys[at], row, starts[item], sizes[item],
                                                                         place, edge_weight, weight_before, excluded,
                                                                         base)  # fmt: skip
                else:
                    first_left = first_excluded(excluded, base + starts[item])
                    weight = edge_weight[position_of(excluded, first_left, base, starts[item], place)]
                    score = np.float64(np.inf)
                    if weight > 0:
                        score = score_of(keys[at], row, place, weight)
                    scores[e - begin] = score
                e += THREADS
            cuda.syncthreads()
            e = begin + tid
            while e < end and replace == 0:
                at = find_row(begins, num_items, e)
                item, first = tile + at, begins[at] - begin
                rank = rank_in_row(scores, first, first + sizes[item], e - begin)
                if rank < offsets[item + 1] - offsets[item]:
                    draws[offsets[item] + rank] = e - begins[at]
                e += THREADS
            cuda.syncthreads()
            begin = end
        tile += THREADS


@gpu_kernel("i8 i8[] W[] i8[] i8[] i8[] i8[] i8[] i8[] f8[] i8[]", W=("f4", "f8"))
def pick_long_rows_gpu(hop, work, edge_weight, excluded, rows, trees, starts, sizes, offsets, scores, draws):
    """The positions of items that choose by weight without replacement in rows that are not short."""
    entries = cuda.shared.array(THREADS, np.int64)
    shared_scores = cuda.shared.array(_PLACES, np.float64)
    shared_places = cuda.shared.array(_PLACES, np.int32)
    kept_scores = cuda.shared.array(_KEPT, np.float64)
    kept_places = cuda.shared.array(_KEPT, np.int32)
    joined = cuda.shared.array(TEAMS, np.int32)
    # Items of warps and of the block, from both ends; their numbers, and how many of the first are taken.
    listed = cuda.shared.array(THREADS, np.int32)
    numbers = cuda.shared.array(3, np.int32)
    taken = cuda.shared.array(TEAMS, np.int32)
    counts = cuda.shared.array(_DIGITS, np.int32)
    # The digits found so far, the number of wanted scores among those that begin with them, and picks so far.
    found = cuda.shared.array(3, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    own_begin, own_end = own_range(count_all_items(work))
    tile = own_begin
    while tile < own_end:
        if tid < 3:
            numbers[tid] = 0
        if tid < TEAMS:
            joined[tid] = 0
        cuda.syncthreads()
        if tile + tid < own_end:
            item = tile + tid
            entry, size, count = find_entry(work, item), sizes[item], offsets[item + 1] - offsets[item]
            entries[tid] = entry
            if count > 0 and size > SHORT_ROW and is_weighted(work, entry, size, 0):
                if size <= LONG_ROW and count <= WARP_PICKS:
                    listed[cuda.atomic.add(numbers, 0, 1)] = np.int32(tid)
                else:
                    listed[THREADS - 1 - cuda.atomic.add(numbers, 1, 1)] = np.int32(tid)
        cuda.syncthreads()
        # Warps take items one after the other; then the block takes the remaining ones.
        is_block = False
        left = np.int64(0)
        while True:
            team, lane, lanes, room = tid // LANES, tid % LANES, np.int64(LANES), np.int64(_WARP_PLACES)
            if not is_block:
                if lane == 0:
                    taken[team] = cuda.atomic.add(numbers, 2, 1)
                sync_team(False)
                number = np.int64(taken[team])
                sync_team(False)
                if number >= numbers[0]:
                    is_block = True
                    cuda.syncthreads()
            if is_block:
                if left >= numbers[1]:
                    break
                team, lane, lanes, room = np.int64(0), tid, np.int64(THREADS), np.int64(0)
                number = THREADS - 1 - left
                left += 1
            at = np.int64(listed[number])
            item, entry = tile + at, entries[at]
            place = frontier_place(work, entry, item)
            base = work[entry + BATCH] * edge_weight.shape[0]
            row, own_key = rows[place] - work[entry + OWN_START], row_key(work, entry, hop, trees, place)
            size, count = sizes[item], offsets[item + 1] - offsets[item]
            if is_block and count > BLOCK_PICKS:
                pick_lightest_by_digits(own_key, row, starts[item], size, count, edge_weight, excluded, base, counts,
                                        found, scores, draws, offsets[item])  # fmt: skip
            else:
                pick_lightest_by_team(own_key, row, starts[item], size, count, edge_weight, excluded, base, lane,
                                      lanes, is_block, team, room, WARP_PICKS, shared_scores, shared_places,
                                      kept_scores, kept_places, joined, draws, offsets[item])  # fmt: skip
        cuda.syncthreads()
        tile += THREADS

"""LABOR over a work list: positions of the items of any relation that choose by keys that rows share.

A source has one key a hop, for the rows of all relations and trees that list it (`sources_key`). Times and excluded
edges only restrict the edges that a row chooses from. `labor.py` holds the steps.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cuda, gpu_kernel
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, sync_team
from pyg_direct.kernels.sampling.excluded_edges import first_excluded
from pyg_direct.kernels.sampling.labor import (
    BINS,
    BLOCK_CANDIDATES,
    CANDIDATES,
    LANES,
    LONG_ROW,
    TEAMS,
    choose_candidates,
    collect_candidates,
    find_largest_by_digits,
    find_slot,
    place_candidate,
)
from pyg_direct.kernels.sampling.uniform import RESIDENT_BLOCKS
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    SOURCE_START,
    count_all_items,
    find_entry,
    is_shared,
    sources_key,
)


@gpu_kernel("i8 i8[] I[] i8[] i8[] i8[] i8[] i8[]", I=("i4", "i8"), resident_blocks=RESIDENT_BLOCKS)
def pick_labor_items_gpu(hop, work, indices, excluded, starts, sizes, offsets, draws):
    """Positions among the edges that an item may pick, in the order of the list.

    A team takes an item at a time; the block takes long rows, and those with many equal keys.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    row_keys = cuda.shared.array(THREADS, np.uint64)
    bases = cuda.shared.array(THREADS, np.int64)
    type_starts = cuda.shared.array(THREADS, np.int64)
    # Number of the first excluded edge of each item, their total if there is none.
    item_excluded = cuda.shared.array(THREADS, np.int64)
    keys = cuda.shared.array(BLOCK_CANDIDATES, np.uint64)
    picks = cuda.shared.array(BLOCK_CANDIDATES, np.int32)
    chosen = cuda.shared.array(BLOCK_CANDIDATES, np.uint8)
    counts = cuda.shared.array(TEAMS, np.int32)
    taken = cuda.shared.array(TEAMS, np.int32)
    # Items of teams and of the block; [0] number of the first, [1] those that teams took, [2] number of the others.
    listed = cuda.shared.array(THREADS, np.int32)
    left_items = cuda.shared.array(THREADS, np.int32)
    queue = cuda.shared.array(3, np.int32)
    bins = cuda.shared.array(BINS, np.int32)
    found = cuda.shared.array(2, np.int64)
    tid = cuda.threadIdx.x
    team, lane = tid // LANES, tid % LANES
    num_excluded = np.int64(excluded.shape[0])
    own_begin, own_end = own_range(count_all_items(work))
    for tile in range(own_begin, own_end, THREADS):
        if tid < 3:
            queue[tid] = 0
        cuda.syncthreads()
        if tile + tid < own_end:
            item = tile + tid
            entry, start, size = find_entry(work, item), starts[item], sizes[item]
            if offsets[item + 1] > offsets[item] and is_shared(work, entry, size):
                row_keys[tid] = sources_key(work, entry, hop)
                base, first = work[entry + BATCH] * indices.shape[0], num_excluded
                if num_excluded > 0:
                    first = first_excluded(excluded, base + start)
                    # Few rows have one, so that most reads need no search.
                    if first < num_excluded and excluded[first] >= base + start + size:
                        first = num_excluded
                bases[tid], item_excluded[tid], type_starts[tid] = base, first, work[entry + SOURCE_START]
                if size <= LONG_ROW:
                    listed[cuda.atomic.add(queue, 0, 1)] = tid
                else:
                    left_items[cuda.atomic.add(queue, 2, 1)] = tid
        cuda.syncthreads()
        while True:
            if lane == 0:
                taken[team] = cuda.atomic.add(queue, 1, 1)
            sync_team(False)
            number = np.int64(taken[team])
            sync_team(False)
            if number >= queue[0]:
                break
            row = np.int64(listed[number])
            at, start, size = offsets[tile + row], starts[tile + row], sizes[tile + row]
            fanout, row_key = offsets[tile + row + 1] - at, row_keys[row]
            left = excluded, item_excluded[row], bases[row], type_starts[row]
            count = collect_candidates(row_key, indices, None, start, 0, left, size, fanout, lane, LANES, False, team,
                                       CANDIDATES, keys, picks, counts)  # fmt: skip
            if count > 0:
                choose_candidates(count, fanout, lane, LANES, False, team, keys, picks, chosen)
                for c in range(team * CANDIDATES + lane, team * CANDIDATES + count, LANES):
                    slot = place_candidate(c, count, team, picks, chosen)
                    if chosen[c]:
                        draws[at + slot] = picks[c]
            elif lane == 0:
                left_items[cuda.atomic.add(queue, 2, 1)] = row
        cuda.syncthreads()
        for number in range(queue[2]):
            row = np.int64(left_items[number])
            at, start, size = offsets[tile + row], starts[tile + row], sizes[tile + row]
            fanout, row_key = offsets[tile + row + 1] - at, row_keys[row]
            left = excluded, item_excluded[row], bases[row], type_starts[row]
            count = collect_candidates(row_key, indices, None, start, 0, left, size, fanout, tid, THREADS, True, 0,
                                       BLOCK_CANDIDATES, keys, picks, counts)  # fmt: skip
            if count > 0:
                choose_candidates(count, fanout, tid, THREADS, True, 0, keys, picks, chosen)
                for c in range(tid, count, THREADS):
                    slot = place_candidate(c, count, 0, picks, chosen)
                    if chosen[c]:
                        draws[at + slot] = picks[c]
            else:
                largest, equal = find_largest_by_digits(row_key, indices, None, start, 0, left, size, fanout, bins,
                                                        found, shared)  # fmt: skip
                so_far = np.int64(0)
                for begin in range(np.int64(0), size, THREADS):
                    e = begin + tid
                    slot, so_far = find_slot(row_key, indices, None, start, 0, left, size, e, largest, equal, so_far,
                                             shared)  # fmt: skip
                    if slot >= 0:
                        draws[at + slot] = e
            cuda.syncthreads()
        cuda.syncthreads()

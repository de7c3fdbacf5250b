"""Hop over a work list: the number of edges that each item picks, and the edges.

The second step takes the offsets that the counts of the first add up to. It writes edges in the order of the items.
They are the identity of each source, the id of the edge in its relation, and the local id of its target.

`allowed_range` is the range of edges of a row that a tree may use. It is a range because rows of timed relations
are sorted by time.

LABOR has a kernel of its own, with the steps of `labor.py`. A source has one key a hop, for the rows of all relations
and trees that list it (`sources_key`). Times and excluded edges only restrict the edges that a row chooses from.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, sum_block, sync_team
from pyg_direct.kernels.sampling.excluded_edges import first_excluded, position_of, restrict_to_left
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
    pick_labor_row,
    place_candidate,
)
from pyg_direct.kernels.sampling.uniform import (
    RESIDENT_BLOCKS,
    SHORT_ROW,
    draw_pick,
    find_row,
    num_picks,
    pick_row_in_order,
    resolve_pick,
)
from pyg_direct.kernels.sampling.weighted import (
    count_positive,
    count_positive_left,
    pick_lightest_in_loop,
    pick_weighted_row,
)
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    BY_PLACE,
    COLUMNS,
    EDGES,
    FANOUT,
    FIRST,
    FIRST_TREE,
    FLAGS,
    FRONT,
    LOCAL,
    OWN_START,
    ROWS,
    SOURCE_BASE,
    SOURCE_START,
    TIMED,
    WEIGHTED,
    count_all_items,
    find_entry,
    frontier_place,
    identity,
    is_chosen,
    is_shared,
    is_weighted,
    relation_key,
    row_key,
    sources_key,
    tree_key,
    tree_of,
)

_EARLIEST = -(2**63)
# This length marks the seeds' own windows: a tree then has two times, the earliest and the latest of its edges.
BY_SEED = -2


@body
def first_after(indices, node_time, edge_time, start, end, time):
    """The first position in [start, end) that is later than `time`; `end` if there is none."""
    low, high = start, end
    while low < high:
        middle = (low + high) >> 1
        found = edge_time[middle] if edge_time.shape[0] > 0 else node_time[indices[middle]]
        if found > time:
            high = middle
        else:
            low = middle + 1
    return low


@body
def read_window(seed_times, tree, window):
    """(latest time, time that edges must be after, True if there is such a limit) of a tree; a window of -1 does not
    limit.
    """
    if window == BY_SEED:
        earliest = seed_times[2 * tree]
        is_limited = earliest > _EARLIEST
        return seed_times[2 * tree + 1], earliest - 1 if is_limited else earliest, is_limited
    seed_time = seed_times[tree]
    is_limited = window >= 0 and seed_time >= _EARLIEST + window
    return seed_time, seed_time - window if is_limited else seed_time, is_limited


@body
def allowed_range(indices, node_time, edge_time, start, end, seed_time, strict, after, is_limited):
    """[start, end) of the edges up to `seed_time` (before it if `strict`), and later than `after` if `is_limited`."""
    begin = start
    if is_limited:
        begin = first_after(indices, node_time, edge_time, start, end, after)
    if strict and seed_time == _EARLIEST:
        return start, start
    latest = seed_time - 1 if strict else seed_time
    stop = first_after(indices, node_time, edge_time, start, end, latest)
    return begin, max(begin, stop)


@body
def count_picks(edge_weight, start, end, fanout, flags, replace):
    """Number of edges picked of [start, end); by weight none of weight zero, unless all are taken."""
    size = end - start
    count = num_picks(size, fanout, replace)
    if flags & WEIGHTED and fanout > 0 and (replace or fanout < size):
        if replace:
            count = fanout * count_positive(edge_weight, start, end, 1)
        else:
            count = count_positive(edge_weight, start, end, fanout)
    return count


@body
def count_picks_left(edge_weight, start, size, fanout, flags, replace, excluded, base):
    """As `count_picks`, for the `size` edges that remain from `start` on."""
    count = num_picks(size, fanout, replace)
    if flags & WEIGHTED and fanout > 0 and (replace or fanout < size):
        wanted = np.int64(1) if replace else fanout
        count = count_positive_left(edge_weight, start, size, wanted, excluded, base)
        if replace:
            count *= fanout
    return count


@body
def node_of(item, entry, work, rows):
    """Id within its type of the node of an item."""
    return rows[frontier_place(work, entry, item)] - work[entry + OWN_START]


@body
def row_of(item, entry, work, indptr, rows):
    """[start, end) of the row of an item."""
    segment = work[entry + ROWS] + node_of(item, entry, work, rows)
    return indptr[segment], indptr[segment + 1]


@body
def restrict_row(item, entry, work, start, end, indices, node_time, edge_time, edge_weight, trees, seed_times, excluded,
                 replace, last, strict, window):  # fmt: skip
    """(first position, number of positions to pick from, number of picks) of the item whose row is [start, end)."""
    fanout, flags = work[entry + FANOUT], work[entry + FLAGS]
    most = end - start
    if flags & TIMED:
        place = frontier_place(work, entry, item)
        tree = place if flags & BY_PLACE else work[entry + FIRST_TREE] + trees[place]
        time, after, is_limited = read_window(seed_times, tree, window)
        start, end = allowed_range(indices, node_time, edge_time, start, end, time, strict, after, is_limited)
        if last and fanout >= 0:
            most = fanout
    size = end - start
    if excluded.shape[0] > 0:
        base = work[entry + BATCH] * indices.shape[0]
        start, size = restrict_to_left(excluded, base, start, size, most)
        return start, size, count_picks_left(edge_weight, start, size, fanout, flags, replace, excluded, base)
    if size > most:
        start, size = end - most, most
    return start, size, count_picks(edge_weight, start, end, fanout, flags, replace)


@body
def read_source(indices, edge_ids, work, entry, position, tree, tree_shift):
    """(identity of the neighbor, edge id) at a position."""
    start = work[entry + SOURCE_START]
    source = identity(np.int64(indices[position]), tree, tree_shift, start, work[entry + SOURCE_BASE])
    if edge_ids.shape[0] > 0:
        return source, np.int64(edge_ids[position])
    return source, np.int64(position - work[entry + EDGES])


@body
def read_rows(entry, begin, end, work, indptr, rows, starts, sizes):
    """First position and length of the rows of the items [begin, end) of an entry."""
    to_place, first_row = work[entry + FRONT] - work[entry + FIRST], work[entry + ROWS]
    for item in range(begin, end):
        segment = first_row + rows[to_place + item]
        start = indptr[segment]
        starts[item], sizes[item] = start, indptr[segment + 1] - start


@body
def restrict_by_time(entry, begin, end, work, indices, node_time, edge_time, trees, seed_times, last, strict, window,
                     starts, sizes, times):  # fmt: skip
    """The parts of the rows of the items [begin, end) of an entry that their trees may use."""
    # Separate loops without a branch, in which no read waits for another item: many cache misses in flight.
    last_edge = np.int64(indices.shape[0] - 1)
    if edge_time.shape[0] > 0:
        for item in range(begin, end):
            times[item] = edge_time[min(starts[item], last_edge)]
    elif last_edge >= 0:
        for item in range(begin, end):
            times[item] = node_time[indices[min(starts[item], last_edge)]]
    to_place, fanout = work[entry + FRONT] - work[entry + FIRST], work[entry + FANOUT]
    by_place = (work[entry + FLAGS] & BY_PLACE) != 0
    for item in range(begin, end):
        start, size = starts[item], sizes[item]
        if size > 0:
            place = to_place + item
            time, after, is_limited = read_window(seed_times, place if by_place else trees[place], window)
            if times[item] > time:
                size = 0
            elif size > 1 or strict or is_limited:
                start, stop = allowed_range(indices, node_time, edge_time, start, start + size, time, strict, after,
                                            is_limited)  # fmt: skip
                size = stop - start
            if last and fanout >= 0 and size > fanout:
                start, size = start + size - fanout, fanout
            starts[item], sizes[item] = start, size


@body
def restrict_rows(entry, begin, end, base, work, excluded, last, starts, sizes):
    """The parts of the rows of the items [begin, end) of an entry that remain without excluded edges."""
    fanout = work[entry + FANOUT]
    is_cut = last != 0 and fanout >= 0 and (work[entry + FLAGS] & TIMED) != 0
    for item in range(begin, end):
        most = fanout if is_cut else sizes[item]
        starts[item], sizes[item] = restrict_to_left(excluded, base, starts[item], sizes[item], most)


@body
def count_run(item, end, work, indptr, indices, node_time, edge_time, edge_weight, rows, trees, seed_times, excluded,
              replace, last, strict, window, starts, sizes, counts):  # fmt: skip
    """Find the edges that each of the items [item, end) picks from, and count its picks.

    `edge_weight` is None if nothing is weighted, and `excluded` is None if nothing is excluded either.
    """
    # If edges are excluded, the last ones are the last of the remaining.
    last_now = last
    if excluded is not None and excluded.shape[0] > 0:
        last_now = 0
    entry = find_entry(work, item)
    # Entry after entry: tests for each item alone take longer than its reads.
    while item < end:
        begin, item = item, min(end, work[entry + COLUMNS + FIRST])
        read_rows(entry, begin, item, work, indptr, rows, starts, sizes)
        if work[entry + FLAGS] & TIMED:
            restrict_by_time(entry, begin, item, work, indices, node_time, edge_time, trees, seed_times, last_now,
                             strict, window, starts, sizes, counts)  # fmt: skip
        fanout, flags = work[entry + FANOUT], work[entry + FLAGS]
        base = work[entry + BATCH] * indices.shape[0]
        if excluded is not None and excluded.shape[0] > 0:
            restrict_rows(entry, begin, item, base, work, excluded, last, starts, sizes)
        # A loop without weights is compiled without all steps that read them.
        if edge_weight is None:
            for i in range(begin, item):
                counts[i] = num_picks(sizes[i], fanout, replace)
        elif excluded.shape[0] > 0:
            for i in range(begin, item):
                counts[i] = count_picks_left(edge_weight, starts[i], sizes[i], fanout, flags, replace, excluded,
                                             base)  # fmt: skip
        else:
            for i in range(begin, item):
                counts[i] = count_picks(edge_weight, starts[i], starts[i] + sizes[i], fanout, flags, replace)
        entry += COLUMNS


@cpu_kernel
def count_items_cpu(work, indptr, indices, node_time, edge_time, edge_weight, rows, trees, seed_times, excluded,
                    replace, last, strict, window, chunks, starts, sizes, counts):  # fmt: skip
    share = (starts.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        item, end = min(c * share, starts.shape[0]), min((c + 1) * share, starts.shape[0])
        count_run(item, end, work, indptr, indices, node_time, edge_time, edge_weight, rows, trees, seed_times,
                  excluded, replace, last, strict, window, starts, sizes, counts)  # fmt: skip


@body
def pass_excluded(excluded, first, base, start, positions, begin, end):
    """Turn start + place in positions[begin:end] into the position of each place among the remaining edges."""
    for e in range(begin, end):
        positions[e] = position_of(excluded, first, base, start, positions[e] - start)


@body
def pick_run(item, end, hop, replace, tree_shift, work, indices, edge_ids, edge_weight, weight_before, scores, excluded,
             rows, trees, starts, sizes, offsets, longest, positions, sources, ids, targets):  # fmt: skip
    """The edges that the items [item, end) pick.

    `edge_weight` and `excluded` are as for `count_run`; `longest` is None if no items choose by shared keys.
    """
    entry = find_entry(work, item)
    drawn, units = np.empty(SHORT_ROW, np.int64), np.empty(SHORT_ROW, np.float64)
    if longest is not None:
        keys, near, heap = np.empty(longest, np.uint64), np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    while item < end:
        begin, item = item, min(end, work[entry + COLUMNS + FIRST])
        # Two draws for a relation, not for each of its items.
        key_of_relation = relation_key(work, entry, hop)
        to_place = work[entry + FRONT] - work[entry + FIRST]
        to_target = work[entry + LOCAL] - work[entry + FIRST]
        base = work[entry + BATCH] * indices.shape[0]
        type_start, type_base = work[entry + SOURCE_START], work[entry + SOURCE_BASE]
        if longest is not None:
            shared_key = sources_key(work, entry, hop)
        for i in range(begin, item):
            at, start, size, place = offsets[i], starts[i], sizes[i], to_place + i
            count, first, is_whole = offsets[i + 1] - at, np.int64(0), True
            # Of the first node of the type; the others follow it.
            own_first = identity(np.int64(0), tree_of(trees, place), tree_shift, type_start, type_base)
            if excluded is not None:
                if excluded.shape[0] > 0:
                    first = first_excluded(excluded, base + start)
                is_whole = first == excluded.shape[0] or excluded[first] >= base + start + size
            if longest is not None and count > 0 and is_shared(work, entry, size):
                if is_whole:
                    pick_labor_row(shared_key, indices, type_start, None, first, base, start, size, count, keys, near,
                                   heap, positions, at)  # fmt: skip
                else:
                    pick_labor_row(shared_key, indices, type_start, excluded, first, base, start, size, count, keys,
                                   near, heap, positions, at)  # fmt: skip
                for e in range(at, at + count):
                    targets[e], sources[e] = to_target + i, own_first
            elif count == size and not replace and not (work[entry + FLAGS] & WEIGHTED):
                # Taken whole, in order, which needs no draws.
                for slot in range(count):
                    positions[at + slot], targets[at + slot] = start + slot, to_target + i
                    sources[at + slot] = own_first
            elif count > 0:
                own_key = tree_key(key_of_relation, trees, place)
                if edge_weight is not None and is_weighted(work, entry, size, replace):
                    if replace or not is_whole:
                        pick_weighted_row(own_key, rows[place], start, size, count, replace, edge_weight,
                                          weight_before, excluded, base, start, scores, positions, at)  # fmt: skip
                    else:
                        pick_lightest_in_loop(own_key, rows[place], start, size, count, edge_weight, start, units,
                                              scores, positions, at)  # fmt: skip
                else:
                    pick_row_in_order(own_key, rows[place], start, size, work[entry + FANOUT], replace, drawn,
                                      positions, at)  # fmt: skip
                for e in range(at, at + count):
                    targets[e], sources[e] = to_target + i, own_first
            if excluded is not None and not is_whole:
                pass_excluded(excluded, first, base, start, positions, at, at + count)
        # Separate loops over all edges: many cache misses in flight instead of one after each draw, or row.
        begin_edges, end_edges = offsets[begin], offsets[item]
        for e in range(begin_edges, end_edges):
            sources[e] += indices[positions[e]]
        if edge_ids.shape[0] > 0:
            for e in range(begin_edges, end_edges):
                ids[e] = edge_ids[positions[e]]
        else:
            first_edge = work[entry + EDGES]
            for e in range(begin_edges, end_edges):
                ids[e] = positions[e] - first_edge
        entry += COLUMNS


@cpu_kernel
def pick_items_cpu(hop, replace, tree_shift, work, indices, edge_ids, edge_weight, weight_before, scores, excluded,
                   rows, trees, starts, sizes, offsets, longest, chunks, positions, sources, ids, targets):  # fmt: skip
    share = (starts.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        item, end = min(c * share, starts.shape[0]), min((c + 1) * share, starts.shape[0])
        pick_run(item, end, hop, replace, tree_shift, work, indices, edge_ids, edge_weight, weight_before, scores,
                 excluded, rows, trees, starts, sizes, offsets, longest, positions, sources, ids, targets)  # fmt: skip


@gpu_kernel("i8[] i8[] I[] i8[] i8[] W[] i8[] i8[] i8[] i8[] i8 i8 i8 i8 i8[] i8[] i8[] i8[]", I=("i4", "i8"),
            W=("f4", "f8"))  # fmt: skip
def count_items_gpu(work, indptr, indices, node_time, edge_time, edge_weight, rows, trees, seed_times, excluded,
                    replace, last, strict, window, starts, sizes, counts, block_sums):  # fmt: skip
    """As on the CPU; `block_sums`, unless empty, gets the picks of each block's items."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    own_begin, own_end = own_range(count_all_items(work))
    own_picks = np.int64(0)
    item = own_begin + cuda.threadIdx.x
    while item < own_end:
        entry = find_entry(work, item)
        start, end = row_of(item, entry, work, indptr, rows)
        start, size, count = restrict_row(item, entry, work, start, end, indices, node_time, edge_time, edge_weight,
                                          trees, seed_times, excluded, replace, last, strict, window)  # fmt: skip
        starts[item], sizes[item], counts[item] = start, size, count
        own_picks += count
        item += THREADS
    if block_sums.shape[0] > 0:
        total, _ = sum_block(own_picks, np.int64(0), shared)
        if cuda.threadIdx.x == 0:
            block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8 i8 i8 i8[] I[] P[] i8[] i8[] i8[] i8[] i8[] i8[] i8[] u1[] i8[] i8[] i8[] u4[] u1[] i8 i4[] i4[]",
            I=("i4", "i8"), P=("i4", "i8"))  # fmt: skip
def pick_items_gpu(hop, replace, tree_shift, work, indices, edge_ids, excluded, rows, trees, starts, sizes, offsets,
                   draws, repeats, sources, ids, targets, fresh, touched, bucket_shift, bucket_counts,
                   ranks):  # fmt: skip
    """A block takes a tile of items at a time, and has a thread for each of their edges.

    `draws` holds the positions of items that choose by weight or by shared keys already. Sources, which are ids of
    nodes here, are marked in the bitmap `fresh`, and their groups in `touched`, unless these are empty. If
    `bucket_counts` is not empty, the sources of each bucket are counted, and `ranks` gets the number of each within its
    bucket.
    """
    item_offsets = cuda.shared.array(THREADS, np.int64)
    item_keys = cuda.shared.array(THREADS, np.uint64)
    entries = cuda.shared.array(THREADS, np.int64)
    # Number of the first excluded edge of each item, their total if there is none.
    item_excluded = cuda.shared.array(THREADS, np.int64)
    num_excluded = np.int64(excluded.shape[0])
    tid = np.int64(cuda.threadIdx.x)
    own_begin, own_end = own_range(count_all_items(work))
    tile = own_begin
    while tile < own_end:
        num_items = min(np.int64(THREADS), own_end - tile)
        if tid < num_items:
            item = tile + tid
            entry = find_entry(work, item)
            entries[tid] = entry
            item_offsets[tid] = offsets[item]
            item_keys[tid] = row_key(work, entry, hop, trees, frontier_place(work, entry, item))
            if num_excluded > 0:
                begin = work[entry + BATCH] * indices.shape[0] + starts[item]
                found = first_excluded(excluded, begin)
                # Few rows have one, so that most picks need no search.
                if found < num_excluded and excluded[found] >= begin + sizes[item]:
                    found = num_excluded
                item_excluded[tid] = found
        cuda.syncthreads()
        first, end = offsets[tile], offsets[tile + num_items]
        e = first + tid
        while e < end:
            at = find_row(item_offsets, num_items, e)
            item, entry = tile + at, entries[at]
            if not is_chosen(work, entry, sizes[item], replace):
                row = node_of(item, entry, work, rows)
                draws[e] = draw_pick(item_keys[at], row, e - item_offsets[at], sizes[item], work[entry + FANOUT],
                                     replace)  # fmt: skip
            e += THREADS
        cuda.syncthreads()
        e = first + tid
        while e < end:
            at = find_row(item_offsets, num_items, e)
            fanout = work[entries[at] + FANOUT]
            taken = 0
            if replace == 0 and fanout >= 0 and fanout < sizes[tile + at]:
                for earlier in range(item_offsets[at], e):
                    if draws[earlier] == draws[e]:
                        taken = 1
                        break
            repeats[e] = taken
            e += THREADS
        cuda.syncthreads()
        e = first + tid
        while e < end:
            at = find_row(item_offsets, num_items, e)
            item, entry = tile + at, entries[at]
            fanout, size = work[entry + FANOUT], sizes[item]
            pick = draws[e]
            if replace == 0 and fanout >= 0 and fanout < size and not is_chosen(work, entry, size, replace):
                pick = resolve_pick(draws, repeats, item_offsets[at], e - item_offsets[at], size - fanout)
            position = starts[item] + pick
            if num_excluded > 0 and item_excluded[at] < num_excluded:
                base = work[entry + BATCH] * indices.shape[0]
                position = position_of(excluded, item_excluded[at], base, starts[item], pick)
            tree = tree_of(trees, frontier_place(work, entry, item))
            source, own_id = read_source(indices, edge_ids, work, entry, position, tree, tree_shift)
            sources[e], ids[e] = source, own_id
            targets[e] = work[entry + LOCAL] + item - work[entry + FIRST]
            if fresh.shape[0] > 0:
                cuda.atomic.or_(fresh, source >> 5, bit_of(source))
            if touched.shape[0] > 0:
                touched[source // (GROUP_WORDS * WORD)] = 1
            if bucket_counts.shape[0] > 0:
                ranks[e] = cuda.atomic.add(bucket_counts, source >> bucket_shift, 1)
            e += THREADS
        cuda.syncthreads()
        tile += THREADS


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

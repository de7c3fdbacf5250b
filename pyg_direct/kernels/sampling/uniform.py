"""Neighbor choice: k of d without replacement in O(k) (Floyd's algorithm, Bentley & Floyd, CACM 30(9), 1987), with
replacement, or all.

Slot j of a row draws t in [0, d - k + j]. The pick is t, or d - k + j if an earlier slot picked t. The CPU loop applies
the rule in order. On the GPU all slots of a tile draw at once. Then t is taken in two cases. Either an earlier slot
drew the same t; or t is the substitute d - k + m of an earlier slot m whose own draw was taken.

`spread_values_*` sum row values over the nodes that the rows list: the contribution of a hop to each node.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.batch_counters import EDGES, KEY, NEEDED_EDGES, NEIGHBOR_DRAW, NODES
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.bitmap import GROUP_WORDS, WORD, bit_of
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block
from pyg_direct.kernels.sampling.random import draw, draw_below, draw_below_in_loop

# Edges whose draws a block holds in shared memory at a time; a multiple of common fanouts (256 rows of 5).
TILE_EDGES = 64 if SIMULATED else 1280
# Rows up to this many picks are searched in place; longer ones through a small hash table.
SHORT_ROW = 64
# Picks of a row are drawn in multiples of so many, as vector instructions of the widest registers do.
DRAWN_TOGETHER = 8
# Blocks that a multiprocessor runs at once: more would leave each thread too few registers.
RESIDENT_BLOCKS = 4
LOW_WORD = np.uint64(0xFFFFFFFF)


@body
def num_picks(degree, fanout, replace):
    """Number of neighbors that a node of `degree` contributes; fanout -1 takes all."""
    if fanout < 0 or (degree <= fanout and not replace):
        return degree
    return fanout if degree > 0 else np.int64(0)


@body
def draw_pick(key, node, slot, degree, fanout, replace):
    """Draw of slot `slot` of `node`: a position among its `degree` neighbors, before the rule on repeats."""
    if replace and fanout >= 0:
        return draw_below(key, node, slot, degree)
    if fanout < 0 or degree <= fanout:
        return np.int64(slot)
    return draw_below(key, node, slot, degree - fanout + slot + 1)


@body
def resolve_pick(draws, repeats, first, slot, spare):
    """Final pick of a slot of a row whose draws start at `first`; `spare` is d - k."""
    at = slot
    while True:
        if repeats[first + at]:
            return spare + slot
        substitute = draws[first + at] - spare
        if substitute < 0 or substitute >= at:
            return np.int64(draws[first + slot])
        at = substitute


@body
def hop_key(key, hop):
    """Key of a hop's draws."""
    return draw(key, hop, NEIGHBOR_DRAW)


@body
def frontier_of(state, hop, expand_all):
    """[begin, end) of the nodes that a hop expands: the new ones of the last hop, or all so far."""
    end = state[NODES + hop]
    begin = np.int64(0)
    if hop > 0 and not expand_all:
        begin = state[NODES + hop - 1]
    return begin, end


@body
def find_row(offsets, num_rows, item):
    """The row whose range of items, starting at offsets[row], holds `item`."""
    return last_at_most(offsets, 0, num_rows, item)


@body
def pick_row_in_order(key, node, start, degree, fanout, replace, drawn, positions, at):
    """Write the positions that `node` picks to positions[at:]; Floyd's rule in order of the slots.

    `drawn` has room for SHORT_ROW.
    """
    count = num_picks(degree, fanout, replace)
    if replace or count == degree:
        for slot in range(count):
            positions[at + slot] = start + draw_pick(key, node, slot, degree, fanout, replace)
        return
    spare = degree - count
    if count <= SHORT_ROW:
        for slot in range((count + DRAWN_TOGETHER - 1) // DRAWN_TOGETHER * DRAWN_TOGETHER):
            drawn[slot] = draw_below_in_loop(key, node, slot, spare + slot + 1)
        for slot in range(count):
            pick = start + drawn[slot]
            for i in range(at, at + slot):
                if positions[i] == pick:
                    pick = start + spare + slot
                    break
            positions[at + slot] = pick
        return
    size = 4
    while size < 2 * count:
        size *= 2
    table = np.full(size, -1, np.int64)
    for slot in range(count):
        pick = start + draw_below(key, node, slot, spare + slot + 1)
        at_table = pick & (size - 1)
        while table[at_table] >= 0:
            if table[at_table] == pick:
                pick = start + spare + slot
                at_table = pick & (size - 1)
                while table[at_table] >= 0:
                    at_table = (at_table + 1) & (size - 1)
                break
            at_table = (at_table + 1) & (size - 1)
        table[at_table] = pick
        positions[at + slot] = pick


@cpu_kernel
def count_picks_cpu(indptr, nodes, fanout, replace, chunk_sums, offsets):
    """Running sum of the rows' picks, offsets[0] = 0 .. offsets[F] = their total."""
    chunks = chunk_sums.shape[0]
    share = (nodes.shape[0] + chunks - 1) // chunks
    offsets[0] = 0
    for c in prange(chunks):
        running = 0
        for i in range(c * share, min((c + 1) * share, nodes.shape[0])):
            # Offsets that are being written may decrease.
            running += num_picks(max(np.int64(0), indptr[nodes[i] + 1] - indptr[nodes[i]]), fanout, replace)
            offsets[i + 1] = running
        chunk_sums[c] = running
    for c in prange(1, chunks):
        before = 0
        for b in range(c):
            before += chunk_sums[b]
        for i in range(c * share, min((c + 1) * share, nodes.shape[0])):
            offsets[i + 1] += before


@body
def pick_rows(begin, end, indptr, indices, nodes, offsets, row_key, fanout, replace, sources, positions):
    """The picks of rows [begin, end); -1 for a row that was written since it was counted."""
    drawn = np.empty(SHORT_ROW, np.int64)
    for i in range(begin, end):
        start = indptr[nodes[i]]
        degree = indptr[nodes[i] + 1] - start
        is_within = start >= 0 and degree >= 0 and start + degree <= indices.shape[0]
        if not is_within or num_picks(degree, fanout, replace) != offsets[i + 1] - offsets[i]:
            for e in range(offsets[i], offsets[i + 1]):
                positions[e] = -1
            continue
        pick_row_in_order(row_key, nodes[i], start, degree, fanout, replace, drawn, positions, offsets[i])
    # A separate loop: many cache misses in flight instead of one after each draw.
    for e in range(offsets[begin], offsets[end]):
        sources[e] = indices[positions[e]] if positions[e] >= 0 else -1


@cpu_kernel
def pick_neighbors_cpu(indptr, indices, nodes, offsets, key, hop, fanout, replace, chunks, sources, positions):
    row_key = hop_key(key, hop)
    share = (nodes.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, nodes.shape[0]), min((c + 1) * share, nodes.shape[0])
        # A function: loops over arrays compile to faster code outside the parallel one.
        pick_rows(begin, end, indptr, indices, nodes, offsets, row_key, fanout, replace, sources, positions)


@gpu_kernel("i8[] i8[] I[] i8 i8 i8 i8 i4[] i8[]", I=("i4", "i8"))
def count_picks_gpu(state, indptr, nodes, hop, fanout, replace, expand_all, local_of_node, block_sums):
    """Picks of each block's rows; in hop 0 the rows are the seeds, the first of which claims its local id."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = frontier_of(state, hop, expand_all)
    own_begin, own_end = own_range(end - begin)
    count = np.int64(0)
    i = own_begin + cuda.threadIdx.x
    while i < own_end:
        node = nodes[begin + i]
        count += num_picks(indptr[node + 1] - indptr[node], fanout, replace)
        if hop == 0 and local_of_node.shape[0] > 0:
            cuda.atomic.min(local_of_node, node, np.int32(i))
        i += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@body
def open_hop(state, hop, block_sums, capacity, shared):
    """Index of the first edge of this block; one thread of the grid records the hop's edges."""
    before, total = sum_before(block_sums, shared)
    begin = state[EDGES + hop]
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        needed = begin + total
        if needed > capacity:
            state[NEEDED_EDGES] = max(state[NEEDED_EDGES], needed)
        state[EDGES + hop + 1] = min(needed, capacity)
    return begin + before


@body
def read_edge(indices, edge_ids, pairs, position, shift):
    """(neighbor, edge id) at a position; `shift` leads from it to the neighbor in `indices`.

    `pairs`, unless empty, holds both in one word: one access to memory instead of two.
    """
    if pairs.shape[0] > 0:
        pair = np.uint64(pairs[np.uint64(position)])
        return np.int64(pair & LOW_WORD), np.int64(pair >> np.uint64(32))
    source = np.int64(indices[np.uint64(position + shift)])
    if edge_ids.shape[0] > 0:
        return source, np.int64(edge_ids[np.uint64(position)])
    return source, position


@body
def store_edge(at, source, own_id, target, sources, ids, targets, fresh, touched):
    """Write edge `at` and mark its source (no marks for an empty `fresh` or `touched`)."""
    where = np.uint64(at)
    sources[where] = source
    ids[where] = own_id
    targets[where] = target
    if fresh.shape[0] > 0:
        cuda.atomic.or_(fresh, source >> 5, bit_of(source))
    if touched.shape[0] > 0:
        touched[source // (GROUP_WORDS * WORD)] = 1


@body
def resolve_item(owners, draws, repeats, offsets, degrees, item, fanout, replace):
    """(row in the tile, pick) of an item whose draws are known."""
    row = np.int64(owners[item])
    if replace or degrees[row] <= fanout:
        return row, np.int64(draws[item])
    return row, resolve_pick(draws, repeats, offsets[row], item - offsets[row], degrees[row] - fanout)


# Parameters of every kernel that picks.
PICKS = "i8[] i8[] i8[] I[] P[] i8[] I[] i8[] i8 i8 i8 i8 i8 I[] P[] i4[] u4[] u1[]"


@gpu_kernel(PICKS, I=("i4", "i8"), P=("i4", "i8"), resident_blocks=RESIDENT_BLOCKS)
def pick_neighbors_gpu(state, indptr, starts, indices, edge_ids, pairs, nodes, block_sums, hop, fanout, replace,
                       expand_all, capacity, sources, ids, targets, fresh, touched):  # fmt: skip
    """Fanouts up to TILE_EDGES, and -1. Row r's neighbors lie at indices[starts[r]:], its edges are indptr[r], ..."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    row_nodes = cuda.shared.array(THREADS, np.int64)
    row_starts = cuda.shared.array(THREADS, np.int64)
    shifts = cuda.shared.array(THREADS, np.int64)
    degrees = cuda.shared.array(THREADS, np.int64)
    offsets = cuda.shared.array(THREADS, np.int64)
    draws = cuda.shared.array(TILE_EDGES, np.int64)
    owners = cuda.shared.array(TILE_EDGES, np.uint8)
    repeats = cuda.shared.array(TILE_EDGES, np.uint8)
    tid = np.int64(cuda.threadIdx.x)
    key = hop_key(state[KEY], hop)
    begin, end = frontier_of(state, hop, expand_all)
    edge = open_hop(state, hop, block_sums, capacity, shared)
    own_begin, own_end = own_range(end - begin)
    rows = np.int64(THREADS) if fanout <= 0 else min(np.int64(THREADS), TILE_EDGES // fanout)
    tile = own_begin
    while tile < own_end:
        num_rows = min(rows, own_end - tile)
        count = np.int64(0)
        if tid < num_rows:
            node = np.int64(nodes[begin + tile + tid])
            start = indptr[node]
            row_nodes[tid] = node
            row_starts[tid] = start
            shifts[tid] = starts[node] - start
            degrees[tid] = indptr[node + 1] - start
            count = num_picks(degrees[tid], fanout, replace)
        before, total = scan_block(count, shared)
        offsets[tid] = before
        first = begin + tile
        if fanout < 0:
            cuda.syncthreads()
            e = tid
            while e < total and edge + e < capacity:
                row = find_row(offsets, num_rows, e)
                source, own_id = read_edge(indices, edge_ids, pairs, row_starts[row] + e - offsets[row], shifts[row])
                store_edge(edge + e, source, own_id, first + row, sources, ids, targets, fresh, touched)
                e += THREADS
        else:
            for slot in range(count):
                owners[before + slot] = tid
            cuda.syncthreads()
            e = tid
            while e < total:
                row = np.int64(owners[e])
                draws[e] = draw_pick(key, row_nodes[row], e - offsets[row], degrees[row], fanout, replace)
                e += THREADS
            cuda.syncthreads()
            e = tid
            while e < total:
                row = np.int64(owners[e])
                taken = 0
                if not replace and degrees[row] > fanout:
                    i = offsets[row]
                    while i < e:
                        if draws[i] == draws[e]:
                            taken = 1
                        i += 1
                repeats[e] = taken
                e += THREADS
            cuda.syncthreads()
            e = tid
            fitting = min(total, capacity - edge)
            while e < fitting:
                # Two edges at once, so that their reads are in flight together.
                other = e + THREADS if e + THREADS < fitting else e
                row, pick = resolve_item(owners, draws, repeats, offsets, degrees, e, fanout, replace)
                row_2, pick_2 = resolve_item(owners, draws, repeats, offsets, degrees, other, fanout, replace)
                source, own_id = read_edge(indices, edge_ids, pairs, row_starts[row] + pick, shifts[row])
                source_2, own_id_2 = read_edge(indices, edge_ids, pairs, row_starts[row_2] + pick_2, shifts[row_2])
                store_edge(edge + e, source, own_id, first + row, sources, ids, targets, fresh, touched)
                if other > e:
                    store_edge(edge + other, source_2, own_id_2, first + row_2, sources, ids, targets, fresh, touched)
                e += 2 * THREADS
        cuda.syncthreads()
        edge += total
        tile += rows


@gpu_kernel(PICKS, I=("i4", "i8"), P=("i4", "i8"))
def pick_many_neighbors_gpu(state, indptr, starts, indices, edge_ids, pairs, nodes, block_sums, hop, fanout, replace,
                            expand_all, capacity, sources, ids, targets, fresh, touched):  # fmt: skip
    """Fanouts above TILE_EDGES: a block takes a row at a time and keeps its draws in the output arrays."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tid = cuda.threadIdx.x
    key = hop_key(state[KEY], hop)
    begin, end = frontier_of(state, hop, expand_all)
    edge = open_hop(state, hop, block_sums, capacity, shared)
    own_begin, own_end = own_range(end - begin)
    for i in range(own_begin, own_end):
        node = nodes[begin + i]
        start = indptr[node]
        shift = starts[node] - start
        degree = indptr[node + 1] - start
        count = num_picks(degree, fanout, replace)
        spare = degree - fanout
        fitting = min(count, max(capacity - edge, np.int64(0)))
        for slot in range(tid, fitting, THREADS):
            ids[edge + slot] = draw_pick(key, node, slot, degree, fanout, replace)
            targets[edge + slot] = 0
        cuda.syncthreads()
        if not replace and spare > 0:
            for slot in range(tid, fitting, THREADS):
                for earlier in range(slot):
                    if ids[edge + earlier] == ids[edge + slot]:
                        targets[edge + slot] = 1
                        break
            cuda.syncthreads()
        # Two steps, so that no draw is overwritten while another slot still follows it.
        for slot in range(tid, fitting, THREADS):
            pick = np.int64(ids[edge + slot])
            if not replace and spare > 0:
                pick = resolve_pick(ids, targets, edge, np.int64(slot), spare)
            sources[edge + slot] = 0
            if pick != ids[edge + slot]:
                sources[edge + slot] = 1
        cuda.syncthreads()
        for slot in range(tid, fitting, THREADS):
            pick = np.int64(ids[edge + slot])
            if sources[edge + slot] == 1:
                pick = spare + slot
            source, own_id = read_edge(indices, edge_ids, pairs, start + pick, shift)
            store_edge(edge + slot, source, own_id, begin + i, sources, ids, targets, fresh, touched)
        cuda.syncthreads()
        edge += count


# Edges of a block's turn. They belong to few rows, so that the row of each is soon found.
TURN = 16 * THREADS


@cpu_kernel
def spread_values_cpu(indptr, indices, values, firsts, sums):
    """sums[p, node] += values[row] for every listing of a node by the rows from firsts[p] to firsts[p + 1].

    Rows whose value is 0 are not read. `firsts` is int64 `[P + 1]`, `sums` float32 `[P, N]`.
    """
    for p in prange(sums.shape[0]):
        for row in range(firsts[p], firsts[p + 1]):
            value = values[row]
            if value != 0:
                for e in range(indptr[row], indptr[row + 1]):
                    sums[p, indices[e]] += value


@gpu_kernel("i8[] I[] i8 f4[] f4[]", I=("i4", "i8"))
def spread_values_gpu(indptr, indices, step, values, sums):
    """sums[node] += values[row] for every listing of a node by a row; edge e is at indices[e * step].

    Threads share edges and not rows, of which few may list most. An invalid id is left out.
    """
    num_rows = np.int64(values.shape[0])
    num_edges = (np.int64(indices.shape[0]) + step - 1) // step
    begin = np.int64(cuda.blockIdx.x) * TURN
    while begin < num_edges:
        end = min(begin + TURN, num_edges)
        first = np.int64(find_row(indptr, num_rows, begin))
        last = np.int64(find_row(indptr, num_rows, end - 1))
        e = begin + cuda.threadIdx.x
        while e < end:
            value = values[last_at_most(indptr, first, last + 1, e)]
            # If a hop does not expand the row, its ids are not read, and nothing is added.
            if value != 0:
                node = np.int64(indices[e * step])
                if np.uint64(node) < np.uint64(sums.shape[0]):
                    cuda.atomic.add(sums, node, value)
            e += THREADS
        begin += np.int64(cuda.gridDim.x) * TURN

"""Neighbor choice: k of d without replacement in O(k) (Floyd's algorithm, Bentley & Floyd, CACM 30(9), 1987), with
replacement, or all.

Slot j of a row draws t in [0, d - k + j]; the pick is t, or d - k + j when t was picked by an earlier slot. The CPU
loop applies the rule in order. On the GPU all slots of a tile draw at once: t is taken exactly if an earlier slot drew
the same t, or if t is the substitute d - k + m of an earlier slot m whose own draw was taken.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import bit_of, has_bit
from pyg_direct.kernels.block import SCAN_WORDS, own_range, scan_block, sum_before
from pyg_direct.kernels.draw import draw, draw_below
from pyg_direct.kernels.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.state import EDGES, KEY, NEEDED_EDGES, NEIGHBOR_DRAW, NODES

# Edges whose draws a block holds in shared memory at a time; a multiple of common fanouts (256 rows of 5).
TILE_EDGES = 64 if SIMULATED else 1280
# Rows up to this many picks are searched in place; longer ones through a small hash table.
SHORT_ROW = 64


@body
def num_picks(degree, fanout, replace):
    """How many neighbors a node of `degree` contributes; fanout -1 takes all."""
    if fanout < 0 or (degree <= fanout and not replace):
        return degree
    return fanout if degree > 0 else np.int64(0)


@body
def draw_pick(key, node, slot, degree, fanout, replace):
    """What slot `slot` of `node` draws: a position among its `degree` neighbors, before the rule on repeats."""
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
    """[begin, end) of the nodes that a hop expands: those new in the last hop, or all so far."""
    end = state[NODES + hop]
    begin = np.int64(0)
    if hop > 0 and not expand_all:
        begin = state[NODES + hop - 1]
    return begin, end


@body
def find_row(offsets, num_rows, item):
    """The row whose range of items, starting at offsets[row], holds `item`."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) >> 1
        if offsets[middle] <= item:
            low = middle
        else:
            high = middle
    return low


@body
def pick_row_in_order(key, node, start, degree, fanout, replace, positions, at):
    """Write the positions that `node` picks to positions[at:]; Floyd's rule in order of the slots."""
    count = num_picks(degree, fanout, replace)
    if replace or count == degree:
        for slot in range(count):
            positions[at + slot] = start + draw_pick(key, node, slot, degree, fanout, replace)
        return
    spare = degree - count
    if count <= SHORT_ROW:
        for slot in range(count):
            pick = start + draw_below(key, node, slot, spare + slot + 1)
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
            running += num_picks(indptr[nodes[i] + 1] - indptr[nodes[i]], fanout, replace)
            offsets[i + 1] = running
        chunk_sums[c] = running
    for c in prange(1, chunks):
        before = 0
        for b in range(c):
            before += chunk_sums[b]
        for i in range(c * share, min((c + 1) * share, nodes.shape[0])):
            offsets[i + 1] += before


@cpu_kernel
def pick_neighbors_cpu(indptr, indices, nodes, offsets, key, hop, fanout, replace, chunks, sources, positions):
    row_key = hop_key(key, hop)
    share = (nodes.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, nodes.shape[0]), min((c + 1) * share, nodes.shape[0])
        for i in range(begin, end):
            start = indptr[nodes[i]]
            degree = indptr[nodes[i] + 1] - start
            pick_row_in_order(row_key, nodes[i], start, degree, fanout, replace, positions, offsets[i])
        # A loop of its own: many cache misses in flight instead of one behind each draw.
        for e in range(offsets[begin], offsets[end]):
            sources[e] = indices[positions[e]]


@gpu_kernel("i8[] i8[] I[] i8 i8 i8 i8 i8[]", I=("i4", "i8"))
def count_picks_gpu(state, indptr, nodes, hop, fanout, replace, expand_all, block_sums):
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = frontier_of(state, hop, expand_all)
    own_begin, own_end = own_range(end - begin)
    count = np.int64(0)
    for i in range(own_begin + cuda.threadIdx.x, own_end, THREADS):
        node = nodes[begin + i]
        count += num_picks(indptr[node + 1] - indptr[node], fanout, replace)
    _, total = scan_block(count, shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@body
def open_hop(state, hop, block_sums, capacity, shared):
    """Index of the first edge of this block; one thread of the grid books the hop's edges."""
    before, total = sum_before(block_sums, shared)
    begin = state[EDGES + hop]
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        needed = begin + total
        if needed > capacity:
            state[NEEDED_EDGES] = max(state[NEEDED_EDGES], needed)
        state[EDGES + hop + 1] = min(needed, capacity)
    return begin + before


@body
def store_edge(at, position, target, indices, sources, positions, targets, seen, fresh):
    """Write edge `at` and mark its source when it is new in this hop (no marks for an empty `fresh`)."""
    source = indices[position]
    sources[at] = source
    positions[at] = position
    targets[at] = target
    if fresh.shape[0] > 0 and not has_bit(seen, source) and not has_bit(fresh, source):
        cuda.atomic.or_(fresh, source >> 5, bit_of(source))


@gpu_kernel("i8[] i8[] I[] I[] i8[] i8 i8 i8 i8 i8 I[] i8[] i4[] u4[] u4[]", I=("i4", "i8"), resident_blocks=4)
def pick_neighbors_gpu(state, indptr, indices, nodes, block_sums, hop, fanout, replace, expand_all, capacity,
                       sources, positions, targets, seen, fresh):  # fmt: skip
    """Fanouts up to TILE_EDGES, and -1."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    starts = cuda.shared.array(THREADS, np.int64)
    degrees = cuda.shared.array(THREADS, np.int64)
    offsets = cuda.shared.array(THREADS, np.int64)
    draws = cuda.shared.array(TILE_EDGES, np.int64)
    owners = cuda.shared.array(TILE_EDGES, np.uint8)
    repeats = cuda.shared.array(TILE_EDGES, np.uint8)
    tid = cuda.threadIdx.x
    key = hop_key(state[KEY], hop)
    begin, end = frontier_of(state, hop, expand_all)
    edge = open_hop(state, hop, block_sums, capacity, shared)
    own_begin, own_end = own_range(end - begin)
    rows = np.int64(THREADS) if fanout <= 0 else min(np.int64(THREADS), TILE_EDGES // fanout)
    for tile in range(own_begin, own_end, rows):
        num_rows = min(rows, own_end - tile)
        count = np.int64(0)
        if tid < num_rows:
            node = nodes[begin + tile + tid]
            starts[tid] = indptr[node]
            degrees[tid] = indptr[node + 1] - indptr[node]
            count = num_picks(degrees[tid], fanout, replace)
        before, total = scan_block(count, shared)
        offsets[tid] = before
        cuda.syncthreads()
        if fanout < 0:
            for e in range(tid, total, THREADS):
                row = find_row(offsets, num_rows, e)
                if edge + e < capacity:
                    store_edge(edge + e, starts[row] + e - offsets[row], begin + tile + row, indices,
                               sources, positions, targets, seen, fresh)  # fmt: skip
        else:
            for e in range(tid, total, THREADS):
                row = find_row(offsets, num_rows, e)
                owners[e] = row
                draws[e] = draw_pick(key, nodes[begin + tile + row], e - offsets[row], degrees[row], fanout, replace)
            cuda.syncthreads()
            for e in range(tid, total, THREADS):
                row = owners[e]
                taken = 0
                if not replace and degrees[row] > fanout:
                    for i in range(offsets[row], e):
                        if draws[i] == draws[e]:
                            taken = 1
                repeats[e] = taken
            cuda.syncthreads()
            for e in range(tid, total, THREADS):
                row = owners[e]
                pick = draws[e]
                if not replace and degrees[row] > fanout:
                    pick = resolve_pick(draws, repeats, offsets[row], e - offsets[row], degrees[row] - fanout)
                if edge + e < capacity:
                    store_edge(edge + e, starts[row] + pick, begin + tile + row, indices,
                               sources, positions, targets, seen, fresh)  # fmt: skip
        cuda.syncthreads()
        edge += total


@gpu_kernel("i8[] i8[] I[] I[] i8[] i8 i8 i8 i8 i8 I[] i8[] i4[] u4[] u4[]", I=("i4", "i8"))
def pick_many_neighbors_gpu(state, indptr, indices, nodes, block_sums, hop, fanout, replace, expand_all, capacity,
                            sources, positions, targets, seen, fresh):  # fmt: skip
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
        degree = indptr[node + 1] - start
        count = num_picks(degree, fanout, replace)
        spare = degree - fanout
        fitting = min(count, max(capacity - edge, np.int64(0)))
        for slot in range(tid, fitting, THREADS):
            positions[edge + slot] = draw_pick(key, node, slot, degree, fanout, replace)
            targets[edge + slot] = 0
        cuda.syncthreads()
        if not replace and spare > 0:
            for slot in range(tid, fitting, THREADS):
                for earlier in range(slot):
                    if positions[edge + earlier] == positions[edge + slot]:
                        targets[edge + slot] = 1
                        break
            cuda.syncthreads()
        # Two steps, so that no draw is overwritten while another slot still follows it.
        for slot in range(tid, fitting, THREADS):
            pick = positions[edge + slot]
            if not replace and spare > 0:
                pick = resolve_pick(positions, targets, edge, np.int64(slot), spare)
            sources[edge + slot] = indices[start + pick]
            if pick != positions[edge + slot]:
                sources[edge + slot] = -1
        cuda.syncthreads()
        for slot in range(tid, fitting, THREADS):
            pick = positions[edge + slot]
            if sources[edge + slot] < 0:
                pick = spare + slot
            store_edge(edge + slot, start + pick, begin + i, indices, sources, positions, targets, seen, fresh)
        cuda.syncthreads()
        edge += count

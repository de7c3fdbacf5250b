"""New nodes of a batch, found by a hash table of identities, and the local ids that they get.

`table` holds identities, -1 for free slots, int64 `[S]`; a slot is a position in it. It consists of regions; S and
their size are powers of two. A search stays in the region it begins in. If identities index the local ids directly,
there is no table (`[0]`), and the identity is the slot.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.batch_counters import NODES
from pyg_direct.kernels.local_ids.bitmap import bit_of
from pyg_direct.kernels.local_ids.csr import count_below
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block
from pyg_direct.kernels.sampling.uniform import LOW_WORD, find_row

# Odd multipliers spread the halves of an identity over 64 bits (Knuth, TAOCP 3, section 6.4).
_LOW_SPREAD, _HIGH_SPREAD = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77)
_HALF = np.uint64(32)
_FREE = -1
# Attempts near the other nodes of a tree before a search continues far away: trees differ in size.
_NEAR = 8
_SMALLEST_BLOCK = 16


@body
def slot_at(table, region, tree_shift, tree_bits, item, attempt):
    """The slot that a search for an identity visits as number `attempt`.

    Each tree has a block of the table to begin in, so that nodes of a tree, which come together, lie together.
    """
    size, region, attempt = np.int64(table.shape[0]), np.int64(region), np.int64(attempt)
    word = np.uint64(item)
    spread = np.uint64((word & LOW_WORD) * _LOW_SPREAD) ^ np.uint64((word >> _HALF) * _HIGH_SPREAD)
    mixed = np.int64(np.uint64(spread ^ (spread >> _HALF)) >> np.uint64(8))
    block = size >> np.int64(tree_bits)
    home = np.int64(0)
    if block < _SMALLEST_BLOCK:
        block = size
    else:
        home = ((np.int64(item) >> np.int64(tree_shift)) & ((np.int64(1) << np.int64(tree_bits)) - 1)) * block
    home += mixed & (block - 1)
    span = min(block, region)
    if attempt < _NEAR or span == region:
        return home - (home & (span - 1)) + ((home + attempt) & (span - 1))
    return home - (home & (region - 1)) + (((mixed >> np.int64(20)) + attempt) & (region - 1))


@body
def find_slot(table, region, tree_shift, tree_bits, item):
    """The slot of an identity; -1 for an absent one."""
    if table.shape[0] == 0:
        return np.int64(item)
    for attempt in range(region + _NEAR):
        slot = slot_at(table, region, tree_shift, tree_bits, item, attempt)
        if table[slot] == item:
            return slot
        if table[slot] == _FREE:
            break
    return np.int64(-1)


@body
def settle_node(i, item, kind, begins, known, bases, tree_shift):
    """(id within its type, tree, local id) of the new identity `i` of a type; begins[t] is the first of type t."""
    place = item - bases[kind]
    tree = place >> np.int64(tree_shift)
    return place - (tree << np.int64(tree_shift)), tree, known[kind] + i - begins[kind]


@cpu_kernel
def settle_cpu(items, slots, begins, known, bases, tree_shift, chunks, rows, trees, local_of_slot):
    share = (items.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        begin, end = min(c * share, items.shape[0]), min((c + 1) * share, items.shape[0])
        kind = find_row(begins, known.shape[0], begin)
        for i in range(begin, end):
            while kind + 1 < known.shape[0] and begins[kind + 1] <= i:
                kind += 1
            row, tree, local = settle_node(i, items[i], kind, begins, known, bases, tree_shift)
            rows[i] = row
            if trees.shape[0] > 0:
                trees[i] = tree
            local_of_slot[slots[i]] = local


@gpu_kernel("i8[] i8[] i8[] i8 i8 i8[] i8[] i8[] i8[]")
def insert_gpu(ends, items, bases, tree_shift, tree_bits, table, slots, new, new_counts):
    """Insert the first identities, up to the last of `ends`, and record their slots.

    `new` gets the new ones in any order, new_counts[0] of them, new_counts[1 + t] of type t if the types are few.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    first = cuda.shared.array(1, np.int64)
    of_type = cuda.shared.array(THREADS, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    num_types = np.int64(new_counts.shape[0] - 1)
    counts_types = num_types <= THREADS
    of_type[tid] = 0
    begin, end = own_range(ends[ends.shape[0] - 1])
    tile = begin
    while tile < end:
        is_new = np.int64(0)
        item = np.int64(0)
        if tile + tid < end:
            item = items[tile + tid]
            attempt = np.int64(0)
            while True:
                slot = slot_at(table, table.shape[0], tree_shift, tree_bits, item, attempt)
                found = cuda.atomic.cas(table, slot, _FREE, item)
                if found == _FREE:
                    is_new = np.int64(1)
                if is_new != 0 or found == item:
                    slots[tile + tid] = slot
                    break
                attempt += 1
        before, total = scan_block(is_new, shared)
        if tid == 0:
            first[0] = cuda.atomic.add(new_counts, 0, total)
        cuda.syncthreads()
        if is_new != 0:
            new[first[0] + before] = item
            if counts_types:
                cuda.atomic.add(of_type, find_row(bases, num_types, item), 1)
        tile += THREADS
    cuda.syncthreads()
    if counts_types and tid < num_types and of_type[tid] > 0:
        cuda.atomic.add(new_counts, 1 + tid, of_type[tid])


@gpu_kernel("i8[] i8[] i8[] i8[] i8 i8 i8[] i8 i8[] i8[] i4[]")
def settle_gpu(items, begins, known, bases, tree_shift, tree_bits, table, region, rows, trees, local_of_slot):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        kind = find_row(begins, known.shape[0], i)
        row, tree, local = settle_node(i, items[i], kind, begins, known, bases, tree_shift)
        rows[i] = row
        if trees.shape[0] > 0:
            trees[i] = tree
        local_of_slot[find_slot(table, region, tree_shift, tree_bits, items[i])] = local
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i8 i8[] i8 i8[]")
def find_slots_gpu(items, tree_shift, tree_bits, table, region, slots):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        slots[i] = find_slot(table, region, tree_shift, tree_bits, items[i])
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] u4[]")
def mark_identities_gpu(ends, items, fresh):
    """Set the bits of the first items, up to the last of `ends`."""
    count = ends[ends.shape[0] - 1]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < count:
        cuda.atomic.or_(fresh, items[i] >> 5, bit_of(items[i]))
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i8[] i8[]")
def count_types_gpu(state, new, bases, new_counts):
    """new_counts of the new identities, ascending; state[NODES + 1] holds their number; one block."""
    count = state[NODES + 1]
    t = np.int64(cuda.threadIdx.x)
    while t < new_counts.shape[0] - 1:
        new_counts[1 + t] = count_below(new, count, bases[t + 1]) - count_below(new, count, bases[t])
        t += THREADS
    if cuda.threadIdx.x == 0:
        new_counts[0] = count


@gpu_kernel("i8[] u4[] i4[]")
def forget_gpu(items, seen, local_of_slot):
    """Clear the entries of identities in a bitmap and a table."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        seen[items[i] >> 5] = np.uint32(0)
        local_of_slot[items[i]] = -1
        i += np.int64(cuda.gridDim.x) * THREADS

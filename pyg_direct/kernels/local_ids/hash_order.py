"""New identities of a hop, found by a hash table and put into ascending order by kernels alone.

Identities fall into buckets by their highest bits. Each bucket is a range of the order. Tiles of the bucketed list are
sorted in shared memory, and the place of an identity is where its bucket begins plus the smaller ones of its bucket in
each tile that has some.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import EDGES, FAR, NODES, NUM_NEW
from pyg_direct.kernels.local_ids.hash_table import slot_at
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block
from pyg_direct.kernels.sampling.captured_hops import first_not_below

# Identities that a block sorts together.
TILE = 16 if SIMULATED else 2048
_FREE, _LARGEST = -1, 2**63 - 1


@gpu_kernel("i8[] i8 i8 i8 i8 i8[] i8[] i4[] i4[]")
def insert_sources_gpu(state, hop, tree_shift, tree_bits, bucket_shift, sources, table, new_slots, bucket_counts):
    """Enter the sources of a hop, which become slots; list the slots of new ones, in any order, and count them."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    first = cuda.shared.array(1, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    begin, end = own_range(state[EDGES + hop + 1] - state[EDGES + hop])
    offset = state[EDGES + hop]
    tile = begin
    while tile < end:
        is_new, slot, item = np.int64(0), np.int64(0), np.int64(0)
        if tile + tid < end:
            item = sources[offset + tile + tid]
            attempt = np.int64(0)
            while True:
                slot = slot_at(table, table.shape[0], tree_shift, tree_bits, item, attempt)
                found = cuda.atomic.cas(table, slot, _FREE, item)
                if found == _FREE:
                    is_new = np.int64(1)
                if is_new != 0 or found == item:
                    sources[offset + tile + tid] = slot
                    break
                attempt += 1
        before, total = scan_block(is_new, shared)
        if tid == 0:
            first[0] = cuda.atomic.add(state, NUM_NEW, total)
        cuda.syncthreads()
        if is_new != 0:
            new_slots[first[0] + before] = slot
            cuda.atomic.add(bucket_counts, item >> bucket_shift, 1)
        tile += THREADS


@gpu_kernel("i8[] i8 i4[] i4[] i8[]")
def scan_buckets_gpu(state, hop, bucket_counts, cursors, bucket_starts):
    """Where each bucket begins, and the end of the last; counts are cleared. The nodes of the next hop are booked. One
    block.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    num_buckets = np.int64(bucket_counts.shape[0])
    running = np.int64(0)
    first = np.int64(0)
    while first < num_buckets:
        b = first + cuda.threadIdx.x
        count = np.int64(0)
        if b < num_buckets:
            count = np.int64(bucket_counts[b])
            bucket_counts[b] = 0
        before, total = scan_block(count, shared)
        if b < num_buckets:
            bucket_starts[b] = running + before
            cursors[b] = running + before
        running += total
        first += THREADS
    if cuda.threadIdx.x == 0:
        bucket_starts[num_buckets] = running
        state[NODES + hop + 1] = state[NODES + hop] + running


@gpu_kernel("i8[] i8 i8[] i4[] i4[] i4[]")
def place_new_gpu(state, bucket_shift, table, new_slots, cursors, placed):
    """New slots bucket after bucket, in any order within one."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NUM_NEW]:
        slot = new_slots[i]
        at = cuda.atomic.add(cursors, table[slot] >> bucket_shift, 1)
        placed[at] = slot
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8[] i4[] i8[]")
def sort_tiles_gpu(state, table, placed, sorted_items):
    """Sort each tile of the placed slots by identity (bitonic sort, Batcher 1968), and note the identities."""
    items = cuda.shared.array(TILE, np.int64)
    slots = cuda.shared.array(TILE, np.int32)
    tid, total = np.int64(cuda.threadIdx.x), state[NUM_NEW]
    tile = np.int64(cuda.blockIdx.x) * TILE
    while tile < total:
        count = min(np.int64(TILE), total - tile)
        size = np.int64(2)
        while size < count:
            size *= 2
        i = tid
        while i < size:
            if i < count:
                slots[i] = placed[tile + i]
                items[i] = table[slots[i]]
            else:
                items[i] = _LARGEST
            i += THREADS
        cuda.syncthreads()
        run = np.int64(2)
        while run <= size:
            step = run >> 1
            while step > 0:
                i = tid
                while i < size >> 1:
                    low = 2 * i - (i & (step - 1))
                    high = low + step
                    ascends = (low & run) == 0
                    if (items[low] > items[high]) == ascends:
                        items[low], items[high] = items[high], items[low]
                        slots[low], slots[high] = slots[high], slots[low]
                    i += THREADS
                cuda.syncthreads()
                step >>= 1
            run *= 2
        i = tid
        while i < count:
            placed[tile + i] = slots[i]
            sorted_items[tile + i] = items[i]
            i += THREADS
        cuda.syncthreads()
        tile += np.int64(cuda.gridDim.x) * TILE


@gpu_kernel("i8[] i8 i8 i8 i8 i8[] i4[] i8[] i4[] i8[] i8[] i4[]")
def settle_new_gpu(state, hop, tree_shift, tree_bits, bucket_shift, sorted_items, placed, bucket_starts, place_of_slot,
                   nodes, trees, slots):  # fmt: skip
    """New identities become the nodes of hop `hop + 1`, ascending."""
    base = state[NODES + hop]
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NUM_NEW]:
        item, slot = sorted_items[i], placed[i]
        bucket = item >> bucket_shift
        begin, end = bucket_starts[bucket], bucket_starts[bucket + 1]
        place = base + begin
        low = begin
        while low < end:
            high = min(end, (low // TILE + 1) * TILE)
            if i >= low and i < high:
                place += i - low
            else:
                place += first_not_below(sorted_items, low, high, item) - low
            low = high
        nodes[place] = item & ((np.int64(1) << tree_shift) - 1)
        if trees.shape[0] > 0:
            trees[place] = (item >> tree_shift) & ((np.int64(1) << tree_bits) - 1)
        slots[place] = slot
        place_of_slot[slot] = place
        i += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("i8[] i8 i4[] i8[] i4[]")
def clear_slots_gpu(state, num_hops, slots, table, place_of_slot):
    """Empty what the nodes of a batch left in the table."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < state[NODES + num_hops]:
        slot = slots[i]
        table[slot] = _FREE
        place_of_slot[slot] = FAR
        i += np.int64(cuda.gridDim.x) * THREADS

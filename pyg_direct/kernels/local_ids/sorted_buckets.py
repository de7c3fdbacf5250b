"""New identities of a hop, found and sorted in buckets that each fit the shared memory of a block.

A bucket holds the identities that are equal in their highest bits: a class, a tree, and a range of its nodes. So
buckets are in the order of the identities. Nodes of a bucket are looked up only among nodes of earlier hops in the same
bucket. `ranks` holds the position of each source of a hop within its bucket, and later among all sources of the hop.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.batch_counters import EDGES, NODES
from pyg_direct.kernels.binary_search import last_at_most
from pyg_direct.kernels.local_ids.bitmap import WORD, bit_of, count_bits
from pyg_direct.kernels.local_ids.thread_block import (
    SCAN_WORDS,
    WARP,
    own_range,
    scan_block,
    sum_before,
    sum_block,
    sync_team,
)

# Sources that a block sorts; for more it reads windows of the nodes, of so many words of a bitmap.
TILE = 16 if SIMULATED else 2048
# Most bits of a node within its bucket.
KEY_BITS = 31
_WINDOW = TILE * WORD
_NO_KEY = 2**32 - 1


@gpu_kernel("i4[] i8[]")
def sum_buckets_gpu(counts, block_sums):
    """The sum over the buckets of each block."""
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = own_range(np.int64(counts.shape[0]))
    count = np.int64(0)
    b = begin + cuda.threadIdx.x
    while b < end:
        count += counts[b]
        b += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("i8[] i8 i8 i8[] i4[] i8[]")
def place_buckets_gpu(state, hop, is_new, block_sums, counts, starts):
    """First position of each bucket, and the end of the last, by a grid equal to the summing grid; counts are cleared.

    New ones are the nodes of the next hop, which are recorded in the state.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    running, total = sum_before(block_sums, shared)
    begin, end = own_range(np.int64(counts.shape[0]))
    first = begin
    while first < end:
        b = first + cuda.threadIdx.x
        count = np.int64(0)
        if b < end:
            count = np.int64(counts[b])
            counts[b] = 0
        before, of_tile = scan_block(count, shared)
        if b < end:
            starts[b] = running + before
        running += of_tile
        first += THREADS
    if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        starts[counts.shape[0]] = total
        if is_new != 0:
            state[NODES + hop + 1] = state[NODES + hop] + total


@gpu_kernel("i8[] i8 i8 i8[] i4[] i8[] u4[]")
def fill_buckets_gpu(state, hop, bucket_shift, sources, ranks, starts, keys):
    """Keys, which are nodes within their buckets, bucket after bucket, in any order within one."""
    begin = state[EDGES + hop]
    e = begin + np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < state[EDGES + hop + 1]:
        item = sources[e]
        bucket = item >> bucket_shift
        place = starts[bucket] + ranks[e]
        ranks[e] = place
        keys[place] = np.uint32(item - (bucket << bucket_shift))
        e += np.int64(cuda.gridDim.x) * THREADS


@body
def find_known(state, hop, num_classes, num_buckets, bucket, kind, first_node, key, new_starts, begins, totals, nodes,
               known, is_near):  # fmt: skip
    """Local id of a node that an earlier hop, or `hop` itself, has in a bucket; -1 if none has.

    `known` has the keys of these nodes, hop after hop, if they are near.
    """
    before = np.int64(0)
    for h in range(1, hop + 1):
        row = (h - 1) * (num_buckets + 1) + bucket
        place, count = state[NODES + h - 1] + new_starts[row], new_starts[row + 1] - new_starts[row]
        low, high = np.int64(0), count
        while low < high:
            middle = (low + high) >> 1
            other = np.int64(known[before + middle]) if is_near else nodes[place + middle] - first_node
            if other < key:
                low = middle + 1
            else:
                high = middle
        if low < count:
            other = np.int64(known[before + low]) if is_near else nodes[place + low] - first_node
            if other == key:
                return totals[h * num_classes + kind] + place + low - begins[h * (num_classes + 1) + kind]
        before += count
    return np.int64(-1)


@body
def find_node(state, hop, num_classes, num_buckets, range_bits, tree_bits, tree_shift, bucket_shift, first_trees,
              new_starts, begins, totals, nodes, keys, item):  # fmt: skip
    """Local id of an identity among the seeds and the nodes of the hops up to `hop`; -1 if it is absent."""
    bucket = item >> bucket_shift
    kind = bucket >> (range_bits + tree_bits)
    tree = (bucket >> range_bits) & ((np.int64(1) << tree_bits) - 1)
    first_node = (bucket << bucket_shift) & ((np.int64(1) << tree_shift) - 1)
    key = item - (bucket << bucket_shift)
    seed_place = begins[kind] + tree - first_trees[kind]
    if begins[kind] <= seed_place and seed_place < begins[kind + 1] and nodes[seed_place] - first_node == key:
        return seed_place - begins[kind]
    return find_known(state, hop, num_classes, num_buckets, bucket, kind, first_node, key, new_starts, begins, totals,
                      nodes, keys, False)  # fmt: skip


@body
def sort_tile(keys, size):
    """Sort the first `size` of shared keys, a power of two (bitonic sort, Batcher 1968); one block."""
    # Indices of 32 bits: indices of 64 bits take several instructions each.
    tid, half = np.int32(cuda.threadIdx.x), np.int32(size >> 1)
    run = np.int32(2)
    while run <= size:
        step = np.int32(run >> 1)
        while step > 0:
            i = tid
            while i < half:
                low = np.int32(2 * i - (i & np.int32(step - 1)))
                high = np.int32(low + step)
                lower, upper = keys[low], keys[high]
                if (lower > upper) == (np.int32(low & run) == 0):
                    keys[low], keys[high] = upper, lower
                i = np.int32(i + THREADS)
            # Only the warp that writes a number reads it in the next step, unless one of the two steps reaches further.
            sync_team(step > WARP or (step == 1 and run > WARP))
            step = np.int32(step >> 1)
        run = np.int32(run << 1)
    cuda.syncthreads()


@gpu_kernel("i8[] i8 i8 i8 i8 i8 i8 i8[] i8[] i8[] i8[] i8[] i8[] u4[] i4[] i4[]")
def sort_buckets_gpu(state, hop, num_classes, range_bits, tree_bits, tree_shift, bucket_shift, first_trees, new_starts,
                     begins, totals, nodes, starts, keys, found, counts):  # fmt: skip
    """Result of each key, and the number of new ones in each bucket; a block takes a bucket at a time.

    `new_starts` has a row for each hop: first position of each bucket's new ones among all of the hop, and their end.
    `found` gets the number of a new key within its bucket, ascending; for a known node it gets -1 - local id.
    """
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    tile = cuda.shared.array(TILE, np.uint32)
    ordered = cuda.shared.array(TILE, np.uint32)
    tid, num_buckets = np.int64(cuda.threadIdx.x), np.int64(counts.shape[0])
    bucket = np.int64(cuda.blockIdx.x)
    while bucket < num_buckets:
        begin, end = starts[bucket], starts[bucket + 1]
        count = end - begin
        kind = bucket >> (range_bits + tree_bits)
        tree = (bucket >> range_bits) & ((np.int64(1) << tree_bits) - 1)
        first_node = (bucket << bucket_shift) & ((np.int64(1) << tree_shift) - 1)
        is_short = count <= TILE
        size = np.int64(2)
        while size < count:
            size *= 2
        # The seed of the tree, if it is of this class, and then the nodes of earlier hops.
        seed_place = begins[kind] + tree - first_trees[kind]
        has_seed = begins[kind] <= seed_place and seed_place < begins[kind + 1]
        seed_key = nodes[seed_place] - first_node if has_seed else np.int64(-1)
        num_known = np.int64(0)
        for h in range(1, hop + 1):
            row = (h - 1) * (num_buckets + 1) + bucket
            num_known += new_starts[row + 1] - new_starts[row]
        is_near = num_known <= TILE
        if is_near and count > 0:
            before = np.int64(0)
            for h in range(1, hop + 1):
                row = (h - 1) * (num_buckets + 1) + bucket
                place, num_of_hop = state[NODES + h - 1] + new_starts[row], new_starts[row + 1] - new_starts[row]
                i = tid
                while i < num_of_hop:
                    ordered[before + i] = np.uint32(nodes[place + i] - first_node)
                    i += THREADS
                before += num_of_hop
            cuda.syncthreads()
        i = tid
        while i < count:
            key = np.int64(keys[begin + i])
            known = seed_place - begins[kind]
            if key != seed_key:
                known = find_known(state, hop, num_classes, num_buckets, bucket, kind, first_node, key, new_starts,
                                   begins, totals, nodes, ordered, is_near)  # fmt: skip
            found[begin + i] = -1 - known if known >= 0 else 0
            if is_short:
                tile[i] = np.uint32(_NO_KEY) if known >= 0 else keys[begin + i]
            i += THREADS
        running = np.int64(0)
        if is_short and count > 0:
            i = count + tid
            while i < size:
                tile[i] = np.uint32(_NO_KEY)
                i += THREADS
            cuda.syncthreads()
            sort_tile(tile, size)
            first = np.int64(0)
            while first < count:
                i = first + tid
                is_new = np.int64(0)
                if i < count and tile[i] != np.uint32(_NO_KEY) and (i == 0 or tile[i - 1] != tile[i]):
                    is_new = np.int64(1)
                before, total = scan_block(is_new, shared)
                if is_new != 0:
                    ordered[running + before] = tile[i]
                running += total
                first += THREADS
            cuda.syncthreads()
            i = tid
            while i < count:
                if found[begin + i] == 0:
                    found[begin + i] = last_at_most(ordered, 0, running, keys[begin + i])
                i += THREADS
        window = np.int64(0)
        while not is_short and window < np.int64(1) << bucket_shift:
            w = tid
            while w < TILE:
                tile[w] = np.uint32(0)
                w += THREADS
            cuda.syncthreads()
            i = tid
            while i < count:
                key = np.int64(keys[begin + i]) - window
                if key >= 0 and key < _WINDOW and found[begin + i] >= 0:
                    cuda.atomic.or_(tile, key >> 5, bit_of(key))
                i += THREADS
            cuda.syncthreads()
            first = np.int64(0)
            while first < TILE:
                before, total = scan_block(np.int64(count_bits(tile[first + tid])), shared)
                ordered[first + tid] = np.uint32(running + before)
                running += total
                first += THREADS
            cuda.syncthreads()
            i = tid
            while i < count:
                key = np.int64(keys[begin + i]) - window
                if key >= 0 and key < _WINDOW and found[begin + i] >= 0:
                    below = np.uint32(tile[key >> 5] & np.uint32(bit_of(key) - np.uint32(1)))
                    found[begin + i] = np.int64(ordered[key >> 5]) + count_bits(below)
                i += THREADS
            cuda.syncthreads()
            window += _WINDOW
        if tid == 0:
            counts[bucket] = running
        cuda.syncthreads()
        bucket += np.int64(cuda.gridDim.x)


@gpu_kernel("i8[] i8 i8 i8 i8 i8 i8 i8[] i4[] i4[] i8[] i8[] i8[] i8[]")
def settle_sources_gpu(state, hop, num_classes, range_bits, tree_bits, tree_shift, bucket_shift, sources, ranks, found,
                       new_starts, totals, nodes, trees):  # fmt: skip
    """Sources of a hop become local ids, and the new ones among them the nodes of the next hop, ascending.

    `new_starts` is the row of the hop.
    """
    base = state[NODES + hop]
    of_class = range_bits + tree_bits
    e = state[EDGES + hop] + np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < state[EDGES + hop + 1]:
        item, number = sources[e], np.int64(found[ranks[e]])
        if number < 0:
            sources[e] = -1 - number
        else:
            bucket = item >> bucket_shift
            kind = bucket >> of_class
            first = new_starts[bucket]
            # Equal sources write the same.
            nodes[base + first + number] = item & ((np.int64(1) << tree_shift) - 1)
            trees[base + first + number] = (item >> tree_shift) & ((np.int64(1) << tree_bits) - 1)
            sources[e] = totals[(hop + 1) * num_classes + kind] + first - new_starts[kind << of_class] + number
        e += np.int64(cuda.gridDim.x) * THREADS

"""Ranked bitmap: bits of present ids, and per word the number of present ids before it; one lookup, no hash.

`bits` is uint32 `[W]` and `ranks` is int32 `[W]`, with W = ceil(N / 32). The rank of a present id is its position
among the present ids in ascending order.

`locate_items_*` find ids in a table that holds the rows of some ids: the rank, or -1 if absent. `rank_items_*` find
the places of ids in a union of lists: the rank among the present ids.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.local_ids.thread_block import SCAN_WORDS, own_range, scan_block, sum_before, sum_block

WORD = 32
# Words of a group that is skipped if none of them was touched: 1,024 ids on a GPU.
GROUP_WORDS = min(32, THREADS)


@body
def count_bits(word):
    """Number of set bits of a uint32."""
    word = np.uint32(word)
    word = word - ((word >> np.uint32(1)) & np.uint32(0x55555555))
    word = (word & np.uint32(0x33333333)) + ((word >> np.uint32(2)) & np.uint32(0x33333333))
    word = (word + (word >> np.uint32(4))) & np.uint32(0x0F0F0F0F)
    return np.int32(np.uint64(np.uint64(word) * np.uint64(0x01010101) >> np.uint64(24)) & np.uint64(0xFF))


@body
def lowest_bit(word):
    """Number of the lowest set bit of a uint32 that is not 0."""
    lowest = np.uint32(word & (~word + np.uint32(1)))
    return count_bits(np.uint32(lowest - np.uint32(1)))


@body
def has_bit(bits, item):
    """Check whether `item` is present."""
    return (bits[item >> 5] >> np.uint32(item & 31)) & np.uint32(1) != np.uint32(0)


@body
def bit_of(item):
    """The word that holds only the bit of `item`."""
    return np.uint32(np.uint32(1) << np.uint32(item & 31))


@body
def rank_of(bits, ranks, item):
    """Number of present ids below `item`."""
    below = np.uint32(bits[item >> 5] & np.uint32(bit_of(item) - np.uint32(1)))
    return ranks[item >> 5] + count_bits(below)


@cpu_kernel
def rank_words_cpu(bits, ranks, chunk_sums):
    chunks = chunk_sums.shape[0]
    share = (bits.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        total = 0
        for w in range(c * share, min((c + 1) * share, bits.shape[0])):
            total += count_bits(bits[w])
        chunk_sums[c] = total
    for c in prange(chunks):
        running = 0
        for b in range(c):
            running += chunk_sums[b]
        for w in range(c * share, min((c + 1) * share, bits.shape[0])):
            ranks[w] = running
            running += count_bits(bits[w])


@gpu_kernel("u4[] i8[]")
def sum_words_gpu(bits, block_sums):
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    begin, end = own_range(np.int64(bits.shape[0]))
    count = np.int64(0)
    w = begin + cuda.threadIdx.x
    while w < end:
        count += count_bits(bits[w])
        w += THREADS
    total, _ = sum_block(count, np.int64(0), shared)
    if cuda.threadIdx.x == 0:
        block_sums[cuda.blockIdx.x] = total


@gpu_kernel("u4[] i8[] i4[]")
def rank_words_gpu(bits, block_sums, ranks):
    shared = cuda.shared.array(SCAN_WORDS, np.int64)
    running, _ = sum_before(block_sums, shared)
    begin, end = own_range(np.int64(bits.shape[0]))
    tile = begin
    while tile < end:
        w = tile + cuda.threadIdx.x
        count = np.int64(count_bits(bits[w])) if w < end else np.int64(0)
        before, total = scan_block(count, shared)
        if w < end:
            ranks[w] = running + before
        running += total
        tile += THREADS


@body
def find_place(bits, ranks, item, num_items):
    """Rank of an id; -1 if it is absent or out of range."""
    if np.uint64(item) >= np.uint64(num_items):
        return np.int64(-1)
    return np.int64(rank_of(bits, ranks, item)) if has_bit(bits, item) else np.int64(-1)


@cpu_kernel
def locate_items_cpu(items, num_items, bits, ranks, out):
    for i in prange(items.shape[0]):
        out[i] = find_place(bits, ranks, np.int64(items[i]), num_items)


@gpu_kernel("I[] i8 u4[] i4[] i8[]", I=("i4", "i8"))
def locate_items_gpu(items, num_items, bits, ranks, out):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < out.shape[0]:
        out[i] = find_place(bits, ranks, np.int64(items[i]), num_items)
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def rank_items_cpu(items, bits, ranks, out):
    for i in prange(items.shape[0]):
        out[i] = rank_of(bits, ranks, items[i])


@gpu_kernel("i8[] u4[] i4[] i8[]")
def rank_items_gpu(items, bits, ranks, out):
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, out.shape[0], cuda.gridDim.x * THREADS):
        out[i] = rank_of(bits, ranks, items[i])

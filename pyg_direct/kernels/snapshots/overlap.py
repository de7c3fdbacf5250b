"""Union of two ascending lists of edges, with a byte for each edge that marks the snapshots in which it is present.

Edges are keys target * N + source. Lists are cut into blocks at equal keys, so that blocks are merged in parallel.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import body, cpu_kernel, prange


@body
def find_key(keys, key):
    """Number of `keys` below `key`."""
    low, high = 0, keys.shape[0]
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@body
def cut_block(first, second, block, num_blocks):
    """First position of a block in both lists; block `num_blocks` begins at their ends."""
    if block == 0:
        return 0, 0
    if block == num_blocks or first.shape[0] == 0:
        return first.shape[0], second.shape[0]
    at = first.shape[0] * block // num_blocks
    return at, find_key(second, first[at])


@cpu_kernel
def count_union_cpu(first, second, sizes):
    """sizes[b] = keys of the union in block b."""
    num_blocks = sizes.shape[0]
    for b in prange(num_blocks):
        i, j = cut_block(first, second, b, num_blocks)
        i_end, j_end = cut_block(first, second, b + 1, num_blocks)
        size = 0
        while i < i_end and j < j_end:
            left, right = first[i], second[j]
            i += left <= right
            j += right <= left
            size += 1
        sizes[b] = size + (i_end - i) + (j_end - j)


@cpu_kernel
def merge_union_cpu(first, first_presence, second, second_presence, shift, begins, keys, presence):
    """Union of two lists; the bits of the second list's snapshots are shifted by `shift`."""
    num_blocks = begins.shape[0] - 1
    for b in prange(num_blocks):
        i, j = cut_block(first, second, b, num_blocks)
        i_end, j_end = cut_block(first, second, b + 1, num_blocks)
        for at in range(begins[b], begins[b + 1]):
            from_first = i < i_end and (j >= j_end or first[i] <= second[j])
            from_second = j < j_end and (i >= i_end or second[j] <= first[i])
            bits = np.uint8(0)
            if from_first:
                keys[at] = first[i]
                bits |= first_presence[i]
            else:
                keys[at] = second[j]
            if from_second:
                bits |= np.uint8(second_presence[j] << shift)
            presence[at] = bits
            i += from_first
            j += from_second

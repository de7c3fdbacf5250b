"""Which part of a graph owns each node, as the bucket that the node is asked for in.

Buckets are those of the other parts, ascending, then that of the part that asks, so that what is sent away lies in one
piece. `own` is the part that asks, -1 for one that holds none. A bucket of several kinds is one for each of them: the
key of a node of kind `add` is `bucket * scale + add`.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.neighbor import LOW_WORD

# The factors of splitmix64's finaliser by halves, as constants of 64 bits do not compile everywhere, and the 31 bits
# that choose a part.
_HIGH_0, _LOW_0 = np.uint64(0xBF58476D), np.uint64(0x1CE4E5B9)
_HIGH_1, _LOW_1 = np.uint64(0x94D049BB), np.uint64(0x133111EB)
_SHIFT_0, _SHIFT_1, _HALF, _LAST = np.uint64(30), np.uint64(27), np.uint64(32), np.uint64(31)
_BITS = np.uint64(0x7FFFFFFF)


@body
def multiply(a, b_high, b_low):
    """Low 64 bits of a product, by halves: NumPy, which the simulator runs on, warns of what overflows."""
    low = np.uint64((a & LOW_WORD) * b_low)
    first = np.uint64(((a >> _HALF) * b_low) & LOW_WORD)
    second = np.uint64(((a & LOW_WORD) * b_high) & LOW_WORD)
    high = np.uint64(np.uint64((low >> _HALF) + first + second) & LOW_WORD)
    return np.uint64((high << _HALF) | (low & LOW_WORD))


@body
def find_owner(item, num_parts, bounds, table):
    """The part of a node: by a table, by the first nodes of all parts but the first, or by a hash of its id."""
    if table.shape[0] > 0:
        return np.int64(table[item]) if np.uint64(item) < np.uint64(table.shape[0]) else np.int64(0)
    if bounds.shape[0] > 0:
        low, high = np.int64(0), np.int64(bounds.shape[0])
        while low < high:
            middle = (low + high) >> 1
            if bounds[middle] <= item:
                low = middle + 1
            else:
                high = middle
        return low
    word = np.uint64(item)
    word = multiply(np.uint64(word ^ (word >> _SHIFT_0)), _HIGH_0, _LOW_0)
    word = multiply(np.uint64(word ^ (word >> _SHIFT_1)), _HIGH_1, _LOW_1)
    return np.int64(np.uint64(np.uint64((word >> _HALF) & _BITS) * np.uint64(num_parts)) >> _LAST)


@body
def bucket_key(owner, own, num_parts, scale, add):
    """Key of a node of kind `add` that `owner` has."""
    bucket = owner
    if own >= 0 and owner >= own:
        bucket = num_parts - 1 if owner == own else owner - 1
    return bucket * scale + add


@cpu_kernel
def find_buckets_cpu(items, num_parts, bounds, table, own, scale, add, keys):
    for i in prange(items.shape[0]):
        keys[i] = bucket_key(find_owner(items[i], num_parts, bounds, table), own, num_parts, scale, add)


@gpu_kernel("i8[] i8 i8[] T[] i8 i8 i8 K[]", T=("u1", "i2"), K=("u1", "i4"))
def find_buckets_gpu(items, num_parts, bounds, table, own, scale, add, keys):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        keys[i] = bucket_key(find_owner(items[i], num_parts, bounds, table), own, num_parts, scale, add)
        i += np.int64(cuda.gridDim.x) * THREADS

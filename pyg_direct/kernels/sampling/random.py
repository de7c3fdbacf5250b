"""Random numbers as a pure function of (key, id, slot): Philox4x32-10 (Salmon et al., SC 2011, table 2)."""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, inlined, prange
from pyg_direct.kernels.binary_search import first_above

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)


@body
def draw(key, item, slot):
    """64 random bits for (key, item, slot); counter (item, slot), all of them taken as unsigned 64-bit words."""
    item, slot, key = np.uint64(item), np.uint64(slot), np.uint64(key)
    # Words of 32 bits: a GPU multiplies them in one instruction, masked 64-bit words in several.
    c0, c1 = np.uint32(item & _MASK), np.uint32(item >> _HALF)
    c2, c3 = np.uint32(slot & _MASK), np.uint32(slot >> _HALF)
    k0, k1 = key & _MASK, key >> _HALF
    for _ in range(10):
        low = np.uint64(c0) * _MULTIPLIER_0
        high = np.uint64(c2) * _MULTIPLIER_1
        c0 = np.uint32(np.uint32(high >> _HALF) ^ c1 ^ np.uint32(k0))
        c1 = np.uint32(high & _MASK)
        c2 = np.uint32(np.uint32(low >> _HALF) ^ c3 ^ np.uint32(k1))
        c3 = np.uint32(low & _MASK)
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return np.uint64(c0) | (np.uint64(c1) << _HALF)


@body
def scale_bits(bits, bound):
    """An integer in [0, bound) of 64 random bits, uniform to within bound / 2**64: the high word of bits * bound."""
    bound = np.uint64(bound)
    low, high = bits & _MASK, bits >> _HALF
    bound_low, bound_high = bound & _MASK, bound >> _HALF
    middle = high * bound_low + ((low * bound_low) >> _HALF)
    other = low * bound_high + (middle & _MASK)
    return np.int64(high * bound_high + (middle >> _HALF) + (other >> _HALF))


@body
def draw_below(key, item, slot, bound):
    """An integer in [0, bound), uniform to within bound / 2**64."""
    return scale_bits(draw(key, item, slot), bound)


# For loops over slots or items on a CPU.
draw_in_loop = inlined(draw)
draw_below_in_loop = inlined(draw_below, draw=draw_in_loop, scale_bits=inlined(scale_bits))


@cpu_kernel
def draw_bits_cpu(key, items, slot, out):
    for i in prange(out.shape[0]):
        out[i] = np.int64(draw_in_loop(key, items[i], slot))


@gpu_kernel("u8 i8[] i8 i8[]")
def draw_bits_gpu(key, items, slot, out):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < out.shape[0]:
        out[i] = np.int64(draw(key, items[i], slot))
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def draw_bounded_cpu(key, items, slot, bound, out):
    for i in prange(out.shape[0]):
        out[i] = draw_below_in_loop(key, items[i], slot, bound)


@gpu_kernel("u8 i8[] i8 i8 i8[]")
def draw_bounded_gpu(key, items, slot, bound, out):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < out.shape[0]:
        out[i] = draw_below(key, items[i], slot, bound)
        i += np.int64(cuda.gridDim.x) * THREADS


@cpu_kernel
def draw_until_cpu(key, items, slot, times, order, until, out, is_timely):
    """One of the entries whose `times`, ascending, are not later than `until`, as `order` names them; the first if
    there is none.
    """
    for i in prange(out.shape[0]):
        bound = first_above(times, 0, times.shape[0], until[i])
        out[i] = order[draw_below(key, items[i], slot, max(bound, np.int64(1)))]
        is_timely[i] = bound > 0


@gpu_kernel("u8 i8[] i8 i8[] i8[] i8[] i8[] u1[]")
def draw_until_gpu(key, items, slot, times, order, until, out, is_timely):
    """As on the CPU."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < out.shape[0]:
        bound = first_above(times, 0, times.shape[0], until[i])
        out[i] = order[draw_below(key, items[i], slot, max(bound, np.int64(1)))]
        is_timely[i] = bound > 0
        i += np.int64(cuda.gridDim.x) * THREADS

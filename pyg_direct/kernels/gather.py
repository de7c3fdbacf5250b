"""Gather of table rows by id, from one table or from hot rows over cold rows in one pass.

`bits` and `ranks` are the ranked bitmap of hot ids: a hot row lies at its rank among the hot ones, a cold one at its
id, as the cold table holds all rows. Empty `bits` mean one table, passed as `hot`. A row whose id is outside
[0, num_rows) is filled with zeros, and the lowest such position is left in errors[0].
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import has_bit, rank_of
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange

copy_row_16 = device_function("copy_row_16", "u8 u8 i4 i4 i4")


@body
def find_row_slot(bits, ranks, item):
    """(slot, is hot) of a row."""
    if bits.shape[0] == 0:
        return np.int64(item), True
    if has_bit(bits, item):
        return np.int64(rank_of(bits, ranks, item)), True
    return np.int64(item), False


@cpu_kernel
def gather_rows_cpu(hot, cold, bits, ranks, ids, out):
    for i in prange(ids.shape[0]):
        slot, is_hot = find_row_slot(bits, ranks, ids[i])
        if is_hot:
            for f in range(out.shape[1]):
                out[i, f] = hot[slot, f]
        else:
            for f in range(out.shape[1]):
                out[i, f] = cold[slot, f]


@body
def check_item(ids, i, num_rows, lane, errors):
    """Id `i`, or -1 when it is out of range (and the lowest such position is noted)."""
    item = np.int64(ids[i])
    if item < 0 or item >= num_rows:
        if lane == 0:
            cuda.atomic.min(errors, 0, np.int64(i))
        return np.int64(-1)
    return item


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i4 i4 T[] i8[]", T=("u1", "u4", "i8"), I=("i4", "i8"), resident_blocks=5)
def gather_rows_gpu(hot, cold, bits, ranks, ids, num_rows, width, lane_bits, out, errors):
    """Rows of `width` items of any alignment; 2**lane_bits threads share a row, four items each at once."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    step = (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits
    zero = out.dtype.type(0)
    i = thread >> lane_bits
    while i < ids.shape[0]:
        item = check_item(ids, i, num_rows, lane, errors)
        slot, is_hot = np.int64(0), True
        if item >= 0:
            slot, is_hot = find_row_slot(bits, ranks, item)
        table = hot if is_hot else cold
        source, target = slot * width, i * width
        f = lane
        while f < width:
            g, h, j = np.int32(f + lanes), np.int32(f + 2 * lanes), np.int32(f + 3 * lanes)
            a, b, c, d = zero, zero, zero, zero
            if item >= 0:
                a = table[source + f]
                if g < width:
                    b = table[source + g]
                if h < width:
                    c = table[source + h]
                if j < width:
                    d = table[source + j]
            out[target + f] = a
            if g < width:
                out[target + g] = b
            if h < width:
                out[target + h] = c
            if j < width:
                out[target + j] = d
            f = np.int32(f + 4 * lanes)
        i += step


@gpu_kernel("u8 u8 u4[] i4[] I[] i8 i4 i4 i8[] i8[]", I=("i4", "i8"), sources=("rows",), resident_blocks=6)
def gather_wide_rows_gpu(hot, cold, bits, ranks, ids, num_rows, pieces, lane_bits, out, errors):
    """Rows of `pieces` times 16 bytes, 16-byte aligned; `hot` and `cold` are addresses, `out` is read as int64."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    step = (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits
    row_bytes = np.int64(pieces) * 16
    base = np.uint64(out.ctypes.data)
    i = thread >> lane_bits
    while i < ids.shape[0]:
        item = check_item(ids, i, num_rows, lane, errors)
        source = np.uint64(0)
        if item >= 0:
            slot, is_hot = find_row_slot(bits, ranks, item)
            source = (hot if is_hot else cold) + np.uint64(slot * row_bytes)
        copy_row_16(base + np.uint64(i * row_bytes), source, pieces, lane, lanes)
        i += step

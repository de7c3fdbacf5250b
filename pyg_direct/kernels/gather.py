"""Gather of table rows by id, from one table or from hot rows over cold rows in one pass.

`bits` and `ranks` are the ranked bitmap of hot ids: a hot row lies at its rank among the hot ones, a cold one at its id,
as the cold table holds all rows. Empty `bits` mean one table, passed as `hot`. A row whose id is outside [0, num_rows)
is filled with zeros, and the lowest such position is left in errors[0].
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import has_bit, rank_of
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange

copy_rows_16 = device_function("copy_rows_16", "u8 u8 u8 u8 u8 i8 i8 i8 i8")


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


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i8 i8 T[] i8[]", T=("u1", "u4", "i8"), I=("i4", "i8"))
def gather_rows_gpu(hot, cold, bits, ranks, ids, num_rows, width, lanes, out, errors):
    """Rows of `width` items of any alignment; `lanes` (a power of two) threads share a row."""
    thread = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    lane = thread & (lanes - 1)
    step = cuda.gridDim.x * THREADS // lanes
    i = thread // lanes
    while i < ids.shape[0]:
        item = check_item(ids, i, num_rows, lane, errors)
        slot, is_hot = np.int64(0), True
        if item >= 0:
            slot, is_hot = find_row_slot(bits, ranks, item)
        f = lane
        while f < width:
            value = out.dtype.type(0)
            if item >= 0:
                value = hot[slot * width + f] if is_hot else cold[slot * width + f]
            out[i * width + f] = value
            f += lanes
        i += step


@body
def row_address(hot, cold, bits, ranks, item, row_bytes):
    """Address of a row; 0 for item -1."""
    if item < 0:
        return np.uint64(0)
    slot, is_hot = find_row_slot(bits, ranks, item)
    base = hot if is_hot else cold
    return base + np.uint64(slot * row_bytes)


@gpu_kernel("u8 u8 u4[] i4[] I[] i8 i8 i8 i8[] i8[]", I=("i4", "i8"), sources=("rows",))
def gather_wide_rows_gpu(hot, cold, bits, ranks, ids, num_rows, pieces, lanes, out, errors):
    """Rows of `pieces` times 16 bytes, 16-byte aligned; `hot` and `cold` are addresses; four rows at a time."""
    thread = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    lane = np.int64(thread & (lanes - 1))
    step = cuda.gridDim.x * THREADS // lanes * 4
    last = ids.shape[0] - 1
    i = thread // lanes * 4
    while i <= last:
        count = min(np.int64(4), last + 1 - i)
        item_0 = check_item(ids, i, num_rows, lane, errors)
        item_1 = check_item(ids, min(i + 1, last), num_rows, lane, errors)
        item_2 = check_item(ids, min(i + 2, last), num_rows, lane, errors)
        item_3 = check_item(ids, min(i + 3, last), num_rows, lane, errors)
        from_0 = row_address(hot, cold, bits, ranks, item_0, 16 * pieces)
        from_1 = row_address(hot, cold, bits, ranks, item_1, 16 * pieces)
        from_2 = row_address(hot, cold, bits, ranks, item_2, 16 * pieces)
        from_3 = row_address(hot, cold, bits, ranks, item_3, 16 * pieces)
        target = np.uint64(out.ctypes.data) + np.uint64(i * pieces * 16)
        copy_rows_16(target, from_0, from_1, from_2, from_3, count, pieces, lane, lanes)
        i += step

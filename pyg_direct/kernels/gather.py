"""Gather of table rows by id, from one table or from hot rows over cold rows in one pass.

`bits` and `ranks` are the ranked bitmap of hot ids: a hot row lies at its rank among the hot ones, a cold one at its
id, as the cold table holds all rows. Empty `bits` mean one table, passed as `hot`. A row whose id is outside
[0, num_rows) is filled with zeros, and the lowest such position is left in errors[0]. Rows that are stored in fewer
bits are widened to float32 on the way (see `kernels/widen.py`).
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.bitmap import has_bit, rank_of
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.widen import widen_bits

# How a piece of a row is read where it is only copied; the same numbers as in cuda_src/rows.cu.
ALIGNED, WORDS, BYTES = 0, 1, 2
PIECE = 16
# A thread of `gather_pieces_gpu` copies two pieces at once, one of `gather_groups_gpu` pieces of four rows.
TILE = 2 * PIECE * THREADS
ROWS = 4

copy_two_pieces = device_function("copy_two_pieces", "i4 u8 i8 u8 u8 i4 i4 i4 i4 u8 u8 i4 i4 i4 i4")
copy_four_rows = device_function("copy_four_rows", "i4 u8 i8 i4 i4 i4 i4 u8 u8 u8 u8 i4 i4 i4 i4")


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


@cpu_kernel
def widen_rows_cpu(hot, cold, bits, ranks, ids, kind, exponents, out):
    for i in prange(ids.shape[0]):
        slot, is_hot = find_row_slot(bits, ranks, ids[i])
        exponent = exponents[ids[i]] if exponents.shape[0] > 0 else 0
        for f in range(out.shape[1]):
            out[i, f] = widen_bits(kind, hot[slot, f] if is_hot else cold[slot, f], exponent)


@body
def check_item(ids, i, num_rows, errors):
    """Id `i`, or -1 when it is out of range (and the lowest such position is noted)."""
    item = np.int64(ids[i])
    if item < 0 or item >= num_rows:
        cuda.atomic.min(errors, 0, np.int64(i))
        return np.int64(-1)
    return item


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i4 T[] i8[]", T=("u1", "i2", "u4"), I=("i4", "i8"))
def gather_items_gpu(hot, cold, bits, ranks, ids, num_rows, width, out, errors):
    """Rows of `width` items, a thread an item: for rows shorter than a piece."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    total = np.int64(ids.shape[0]) * width
    while at < total:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = check_item(ids, i, num_rows, errors)
        value = out.dtype.type(0)
        if item >= 0:
            slot, is_hot = find_row_slot(bits, ranks, item)
            place = slot * width + (at - i * width)
            value = hot[place] if is_hot else cold[place]
        out[at] = value
        at += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("T[] T[] u4[] i4[] I[] i8 i4 i4 u1[] u4[] i8[]", T=("u1", "i2"), I=("i4", "i8"))
def widen_items_gpu(hot, cold, bits, ranks, ids, num_rows, width, kind, exponents, out, errors):
    """Rows of `width` numbers stored in fewer bits, a thread a number: for rows shorter than a piece."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    total = np.int64(ids.shape[0]) * width
    while at < total:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = check_item(ids, i, num_rows, errors)
        value = np.uint32(0)
        if item >= 0:
            slot, is_hot = find_row_slot(bits, ranks, item)
            place = slot * width + (at - i * width)
            exponent = exponents[item] if exponents.shape[0] > 0 else 0
            value = widen_bits(kind, hot[place] if is_hot else cold[place], exponent)
        out[at] = value
        at += np.int64(cuda.gridDim.x) * THREADS


@body
def find_row(hot, cold, bits, ranks, ids, i, num_rows, row_bytes, exponents, errors):
    """(address, exponent) of row `i` of the output; the address is 0 when there is no such row."""
    if i >= ids.shape[0]:
        return np.uint64(0), np.int32(0)
    item = check_item(ids, i, num_rows, errors)
    if item < 0:
        return np.uint64(0), np.int32(0)
    slot, is_hot = find_row_slot(bits, ranks, item)
    exponent = np.int32(exponents[item]) if exponents.shape[0] > 0 else np.int32(0)
    return (hot if is_hot else cold) + np.uint64(slot * row_bytes), exponent


@body
def split_offset(offset, row_bytes):
    """(rows, bytes) that an offset is further on."""
    rows = np.uint32(np.uint32(offset) // np.uint32(row_bytes))
    return np.int64(rows), np.int32(np.uint32(offset) - rows * np.uint32(row_bytes))


@gpu_kernel("u8 u8 u4[] i4[] I[] i8 i4 i4 i4 u1[] u8 i8[]", I=("i4", "i8"), sources=("rows",))
def gather_pieces_gpu(hot, cold, bits, ranks, ids, num_rows, source_bytes, row_bytes, kind, exponents, out, errors):
    """The output in order, a thread two pieces at a time, so that every store is whole: for GPU memory.

    Rows take `source_bytes` in the tables and `row_bytes` in `out`, at least so many that a piece meets two of them.
    `hot`, `cold` and `out` are addresses; `out` is a multiple of a piece.
    """
    total = np.int64(ids.shape[0]) * row_bytes
    begin = np.int64(cuda.blockIdx.x) * TILE
    while begin < total:
        # One long division for both pieces.
        first = np.int64(np.uint64(begin) // np.uint64(row_bytes))
        offset = begin - first * row_bytes + PIECE * cuda.threadIdx.x
        rows_a, offset_a = split_offset(offset, row_bytes)
        rows_b, offset_b = split_offset(offset + PIECE * THREADS, row_bytes)
        cut_a, cut_b = np.int32(row_bytes - offset_a), np.int32(row_bytes - offset_b)
        row_a, exponent_a = find_row(hot, cold, bits, ranks, ids, first + rows_a, num_rows, source_bytes, exponents,
                                     errors)  # fmt: skip
        row_b, exponent_b = find_row(hot, cold, bits, ranks, ids, first + rows_b, num_rows, source_bytes, exponents,
                                     errors)  # fmt: skip
        next_a, next_exponent_a = np.uint64(0), np.int32(0)
        if cut_a < PIECE:
            next_a, next_exponent_a = find_row(hot, cold, bits, ranks, ids, first + rows_a + 1, num_rows, source_bytes,
                                               exponents, errors)  # fmt: skip
        next_b, next_exponent_b = np.uint64(0), np.int32(0)
        if cut_b < PIECE:
            next_b, next_exponent_b = find_row(hot, cold, bits, ranks, ids, first + rows_b + 1, num_rows, source_bytes,
                                               exponents, errors)  # fmt: skip
        at = begin + PIECE * cuda.threadIdx.x
        copy_two_pieces(kind, out + np.uint64(at), total - at, row_a, next_a, offset_a, cut_a, exponent_a,
                        next_exponent_a, row_b, next_b, offset_b, cut_b, exponent_b, next_exponent_b)  # fmt: skip
        begin += np.int64(cuda.gridDim.x) * TILE


@gpu_kernel("u8 u8 u4[] i4[] I[] i8 i4 i4 i4 i4 u1[] u8 i8[]", I=("i4", "i8"), sources=("rows",))
def gather_groups_gpu(hot, cold, bits, ranks, ids, num_rows, source_bytes, row_bytes, lane_bits, kind, exponents, out,
                      errors):  # fmt: skip
    """Groups of 2**lane_bits threads, each four rows at a time, so that a row is asked for at once: for the link."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    groups = (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits
    num_ids = np.int64(ids.shape[0])
    i = thread >> lane_bits
    while i < num_ids:
        row_a, exponent_a = find_row(hot, cold, bits, ranks, ids, i, num_rows, source_bytes, exponents, errors)
        row_b, exponent_b = find_row(hot, cold, bits, ranks, ids, i + groups, num_rows, source_bytes, exponents, errors)
        row_c, exponent_c = find_row(hot, cold, bits, ranks, ids, i + 2 * groups, num_rows, source_bytes, exponents,
                                     errors)  # fmt: skip
        row_d, exponent_d = find_row(hot, cold, bits, ranks, ids, i + 3 * groups, num_rows, source_bytes, exponents,
                                     errors)  # fmt: skip
        count = np.int32(1 + (i + groups < num_ids) + (i + 2 * groups < num_ids) + (i + 3 * groups < num_ids))
        copy_four_rows(kind, out + np.uint64(i * row_bytes), groups * row_bytes, count, row_bytes, lane, lanes, row_a,
                       row_b, row_c, row_d, exponent_a, exponent_b, exponent_c, exponent_d)  # fmt: skip
        i += ROWS * groups

"""Gather of table rows over the link with few registers, beside a model: through a ring in shared memory.

A multiprocessor whose registers a long read holds has room for fewer blocks of a matrix product, which then runs in one
more wave. Here a block is one warp, and what it waits for lies in shared memory (`cuda_src/ring.cu`).
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.gather import find_address, find_address_of_two, read_id, report_id
from pyg_direct.kernels.jit import cuda, device_function, gpu_kernel

# Threads of a block. The other numbers are the same as in cuda_src/ring.cu: rows that are read at once, each by all
# lanes, and the most bytes of a row that are.
WARP = 32
ROWS = 32
PART = 512

begin_rows = device_function("begin_rows", "i4 u8 i4 i4 i4")
finish_rows = device_function("finish_rows", "i4 i4 u8 i8 i4 i4 i4")


@gpu_kernel("u8 u8 u4[] i4[] I[] i8 i4 u8 i8[]", I=("i4", "i8"), sources=("ring",), threads=WARP)
def gather_ring_gpu(hot, cold, bits, ranks, ids, num_rows, row_bytes, out, errors):
    """32 rows at a time, part by part, while those before them are written; empty `bits` mean that `hot` has all.

    `hot`, `cold` and `out` are addresses, multiples of 16 as `row_bytes` is.
    """
    lane = np.int32(cuda.threadIdx.x)
    num_ids, step = np.int64(ids.shape[0]), np.int64(cuda.gridDim.x) * ROWS
    i = np.int64(cuda.blockIdx.x) * ROWS
    if i >= num_ids:
        return
    item = read_id(ids, i + lane)
    if bits.shape[0] > 0:
        row = find_address_of_two(hot, cold, bits, ranks, item, num_rows, row_bytes)
    else:
        row = find_address(hot, item, num_rows, row_bytes)
    report_id(ids, i + lane, item, num_rows, errors)
    item = read_id(ids, i + step + lane)
    part, half = np.int32(0), np.int32(0)
    count, size = np.int32(min(num_ids - i, ROWS)), np.int32(min(row_bytes, PART))
    begin_rows(half, row, count, size, lane)
    while i < num_ids:
        # What is begun next: another part of these rows, or the next ones.
        next_i, next_part, next_row = i, np.int32(part + PART), row
        if next_part >= row_bytes:
            next_i, next_part = i + step, np.int32(0)
            if bits.shape[0] > 0:
                next_row = find_address_of_two(hot, cold, bits, ranks, item, num_rows, row_bytes)
            else:
                next_row = find_address(hot, item, num_rows, row_bytes)
            report_id(ids, next_i + lane, item, num_rows, errors)
            # On its way while the rows are.
            item = read_id(ids, next_i + step + lane)
        next_count = np.int32(max(np.int64(0), min(num_ids - next_i, ROWS)))
        next_size = np.int32(min(row_bytes - next_part, PART))
        if next_count > 0:
            from_here = next_row + np.uint64(next_part) if next_row != 0 else np.uint64(0)
            begin_rows(np.int32(1 - half), from_here, next_count, next_size, lane)
        is_more = np.int32(1) if next_count > 0 else np.int32(0)
        finish_rows(half, is_more, out + np.uint64(i * row_bytes + part), np.int64(row_bytes), count, size, lane)
        i, part, row, count, size = next_i, next_part, next_row, next_count, next_size
        half = np.int32(1 - half)

"""Rows of several tables by one list of ids, where rows are of 1, 2, 4, 8 or 16 bytes: labels and masks, say."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.gather import is_row, read_id, report_id
from pyg_direct.kernels.jit import THREADS, cuda, device_function, gpu_kernel

MOST_TABLES = 4

copy_items = device_function("copy_items", "i8 i8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4")


@gpu_kernel("I[] i8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i8[]", I=("i4", "i8"), sources=("narrow",))
def gather_narrow_gpu(ids, num_rows, table_a, table_b, table_c, table_d, out_a, out_b, out_c, out_d, bits_a, bits_b,
                      bits_c, bits_d, errors):  # fmt: skip
    """A thread an id. Tables and outputs are addresses, 0 where there are fewer than four; rows take 2**bits bytes."""
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < ids.shape[0]:
        item = read_id(ids, i)
        report_id(ids, i, item, num_rows, errors)
        copy_items(i, item if is_row(item, num_rows) else np.int64(-1), table_a, table_b, table_c, table_d, out_a,
                   out_b, out_c, out_d, bits_a, bits_b, bits_c, bits_d)  # fmt: skip
        i += np.int64(cuda.gridDim.x) * THREADS

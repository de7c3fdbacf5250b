"""Rows written into a table by id. Rows are lists of items; each id comes once, so that no row is written twice.

Ids outside [0, num_rows) are not written, and the lowest such position is left in errors[0].
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.rows.gather import is_row, read_id, report_id


@cpu_kernel
def scatter_rows_cpu(rows, ids, table):
    for i in prange(ids.shape[0]):
        for f in range(rows.shape[1]):
            table[ids[i], f] = rows[i, f]


@gpu_kernel("T[] I[] i8 i8 T[] i8[]", T=("u1", "i2", "u4", "i8"), I=("i4", "i8"))
def scatter_items_gpu(rows, ids, num_rows, width, table, errors):
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < rows.shape[0]:
        i = np.int64(np.uint64(at) // np.uint64(width))
        item = read_id(ids, i)
        if is_row(item, num_rows):
            table[item * width + at - i * width] = rows[at]
        report_id(ids, i, item, num_rows, errors)
        at += np.int64(cuda.gridDim.x) * THREADS

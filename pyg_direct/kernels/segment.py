"""Segments of arrays put into another order: items begins[s], begins[s] + 1, ... of segment s move by shifts[s].

Three arrays of one length move at once; the second and the third may be empty.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import THREADS, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.neighbor import find_row


@cpu_kernel
def move_segments_cpu(begins, shifts, first, second, third, out_first, out_second, out_third):
    for s in prange(shifts.shape[0]):
        low, high, shift = begins[s], begins[s + 1], shifts[s]
        out_first[low + shift : high + shift] = first[low:high]
        if second.shape[0] > 0:
            out_second[low + shift : high + shift] = second[low:high]
        if third.shape[0] > 0:
            out_third[low + shift : high + shift] = third[low:high]


@gpu_kernel("i8[] i8[] i8[] i8[] i8[] i8[] i8[] i8[]")
def move_segments_gpu(begins, shifts, first, second, third, out_first, out_second, out_third):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < first.shape[0]:
        at = i + shifts[find_row(begins, shifts.shape[0], i)]
        out_first[at] = first[i]
        if second.shape[0] > 0:
            out_second[at] = second[i]
        if third.shape[0] > 0:
            out_third[at] = third[i]
        i += np.int64(cuda.gridDim.x) * THREADS

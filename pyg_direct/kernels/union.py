"""Places of ids in a union of lists: their rank among the present ids of a ranked bitmap."""

from __future__ import annotations

from pyg_direct.kernels.bitmap import rank_of
from pyg_direct.kernels.jit import THREADS, cpu_kernel, cuda, gpu_kernel, prange


@cpu_kernel
def rank_items_cpu(items, bits, ranks, out):
    for i in prange(items.shape[0]):
        out[i] = rank_of(bits, ranks, items[i])


@gpu_kernel("i8[] u4[] i4[] i8[]")
def rank_items_gpu(items, bits, ranks, out):
    for i in range(cuda.blockIdx.x * THREADS + cuda.threadIdx.x, out.shape[0], cuda.gridDim.x * THREADS):
        out[i] = rank_of(bits, ranks, items[i])

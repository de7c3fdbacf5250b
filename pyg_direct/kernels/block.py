"""What the threads of one GPU block compute together: sums and running sums, and the share of work a block owns."""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import SIMULATED, THREADS, body, cuda

WARP = 32
WARPS = max(1, THREADS // WARP)
SCAN_WORDS = THREADS + 1
_ALL = np.uint32(0xFFFFFFFF)
# The simulator has no warp shuffles; it scans through shared memory.
_SHUFFLES = not SIMULATED


@body
def scan_block(value, shared):
    """(sum of the values of lower threads, sum over the block); every thread of the block must call it.

    `shared` is shared memory of the kernel, int64 `[SCAN_WORDS]`; a barrier on entry makes consecutive calls safe.
    """
    tid = cuda.threadIdx.x
    cuda.syncthreads()
    if _SHUFFLES:
        lane, warp = tid & 31, tid >> 5
        running = np.int64(value)
        step = 1
        while step < 32:
            below = cuda.shfl_up_sync(_ALL, running, step)
            if lane >= step:
                running += below
            step *= 2
        if lane == 31:
            shared[warp] = running
        cuda.syncthreads()
        before, total = np.int64(0), np.int64(0)
        for w in range(WARPS):
            part = shared[w]
            if w < warp:
                before += part
            total += part
        return before + running - value, total
    else:
        shared[tid] = value
        cuda.syncthreads()
        if tid == 0:
            running = np.int64(0)
            for t in range(THREADS):
                part = shared[t]
                shared[t] = running
                running += part
            shared[THREADS] = running
        cuda.syncthreads()
        return shared[tid], shared[THREADS]


@body
def own_range(count):
    """[begin, end): the consecutive share of `count` items that belongs to this block."""
    share = (count + cuda.gridDim.x - 1) // cuda.gridDim.x
    begin = min(np.int64(cuda.blockIdx.x) * share, count)
    return begin, min(begin + share, count)


@body
def sum_before(block_sums, shared):
    """(sum over the blocks before this one, sum over all blocks) of what each block left in `block_sums`."""
    before, total = np.int64(0), np.int64(0)
    for b in range(cuda.threadIdx.x, cuda.gridDim.x, THREADS):
        part = block_sums[b]
        total += part
        if b < cuda.blockIdx.x:
            before += part
    _, before = scan_block(before, shared)
    _, total = scan_block(total, shared)
    return before, total

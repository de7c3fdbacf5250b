"""Collective steps of the threads of one GPU block: sums and running sums, and the share of work a block owns."""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda

WARP = 32
WARPS = max(1, THREADS // WARP)
# The simulator has no warp shuffles; it scans through shared memory.
_SHUFFLES = not SIMULATED
SCAN_WORDS = 2 * THREADS if SIMULATED else 2 * WARPS
_ALL = np.uint32(0xFFFFFFFF)


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
def sum_block(first, second, shared):
    """The sums of both values over the block; every thread must call it, with `shared` as for `scan_block`."""
    tid = cuda.threadIdx.x
    first, second = np.int64(first), np.int64(second)
    slots = THREADS
    cuda.syncthreads()
    if _SHUFFLES:
        step = 16
        while step > 0:
            first += cuda.shfl_xor_sync(_ALL, first, step)
            second += cuda.shfl_xor_sync(_ALL, second, step)
            step //= 2
        slots = WARPS
        if tid & 31 == 0:
            shared[tid >> 5] = first
            shared[WARPS + (tid >> 5)] = second
    else:
        shared[tid] = first
        shared[THREADS + tid] = second
    cuda.syncthreads()
    first, second = np.int64(0), np.int64(0)
    for s in range(slots):
        first += shared[s]
        second += shared[slots + s]
    return first, second


@body
def own_range(count):
    """[begin, end): the consecutive share of `count` items that belongs to this block."""
    share = (count + cuda.gridDim.x - 1) // cuda.gridDim.x
    begin = min(np.int64(cuda.blockIdx.x) * share, count)
    return begin, min(begin + share, count)


@body
def sum_before(block_sums, shared):
    """(sum over the blocks before this one, sum over all blocks) of the numbers that blocks left in `block_sums`."""
    before, total = np.int64(0), np.int64(0)
    b = np.int64(cuda.threadIdx.x)
    while b < cuda.gridDim.x:
        part = block_sums[b]
        total += part
        if b < cuda.blockIdx.x:
            before += part
        b += THREADS
    return sum_block(before, total, shared)


@body
def sync_team(is_block):
    """Barrier of the block, or of a warp if that is enough and there are warps."""
    if SIMULATED or is_block:
        cuda.syncthreads()
    else:
        cuda.syncwarp()

"""GE-SpMM (Huang et al., SC 2020), a peer for sums of one snapshot after the other.

Written after the paper: a warp multiplies a row of CSR, each lane for a column of the dense matrix. Column ids are read
together and kept in shared memory, 32 at a time, for all lanes (coalesced row caching). With more than 32 columns a
lane takes two of them, so that ids are staged once for both (coarse-grained warp merging). The case of at most 16
columns, with idle lanes, is our own. Neighboring rows then share a warp, which stages the ids of all of them, 32 for
each row. Values are ones, and not read.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda, gpu_kernel
from pyg_direct.ops.run_kernel import run_gpu

# Threads of a warp.
TEAM = min(THREADS, 32)
_TEAMS = THREADS // TEAM
# Minimum of lanes per row, which limits the staging memory of rows that share a warp.
_FEWEST = 2
_STAGED = THREADS * TEAM // _FEWEST


@body
def wait_for_team():
    """Wait for all threads of the warp; in the simulator, of the block."""
    if SIMULATED:
        cuda.syncthreads()
    else:
        cuda.syncwarp()


@gpu_kernel("i4[] i4[] f4[] i4 f4[]")
def multiply_wide_rows_gpu(indptr, indices, z, width, out):
    """Multiply a row and 64 of its columns per warp."""
    staged = cuda.shared.array(THREADS, np.int32)
    lane = np.int32(cuda.threadIdx.x % TEAM)
    base = np.int32(cuda.threadIdx.x) - lane
    team = np.int64(cuda.blockIdx.x) * _TEAMS + cuda.threadIdx.x // TEAM
    tiles = (width + 2 * TEAM - 1) // (2 * TEAM)
    row = team // tiles
    if row < indptr.shape[0] - 1:
        column = (team - row * tiles) * (2 * TEAM) + lane
        is_two = column - lane + TEAM < width
        # Lanes without a column read another lane's data, since a branch would separate loads.
        one, two = min(column, np.int64(width - 1)), min(column + TEAM, np.int64(width - 1))
        total = other = out.dtype.type(0)
        end = indptr[row + 1]
        for first in range(indptr[row], end, TEAM):
            if first + lane < end:
                staged[base + lane] = indices[first + lane]
            wait_for_team()
            count = min(np.int32(TEAM), np.int32(end - first))
            if is_two:
                for k in range(count):
                    at = np.int64(staged[base + k]) * width
                    total += z[at + one]
                    other += z[at + two]
            else:
                for k in range(count):
                    total += z[np.int64(staged[base + k]) * width + one]
            wait_for_team()
        if column < width:
            out[row * width + column] = total
        if column + TEAM < width:
            out[row * width + column + TEAM] = other


@gpu_kernel("i4[] i4[] f4[] i4 i4 f4[]")
def multiply_narrow_rows_gpu(indptr, indices, z, width, lane_bits, out):
    """Multiply several neighboring rows per warp, with 2**lane_bits threads each."""
    staged = cuda.shared.array(_STAGED, np.int32)
    lane = np.int32(cuda.threadIdx.x % TEAM)
    sharing = np.int32(TEAM >> lane_bits)
    window = np.int32(TEAM) * sharing
    base = np.int32(cuda.threadIdx.x // TEAM) * window
    num_rows = np.int64(indptr.shape[0] - 1)
    first_row = (np.int64(cuda.blockIdx.x) * _TEAMS + cuda.threadIdx.x // TEAM) * sharing
    if first_row < num_rows:
        row, column = first_row + (lane >> lane_bits), lane & ((1 << lane_bits) - 1)
        total = out.dtype.type(0)
        is_one = row < num_rows and column < width
        mine = until = np.int32(0)
        if is_one:
            mine, until = indptr[row], indptr[row + 1]
        end = indptr[min(first_row + sharing, num_rows)]
        # All lanes iterate over these windows, and wait for each other.
        first = indptr[first_row]
        while first < end:
            last = min(first + window, end)
            for e in range(first + lane, last, TEAM):
                staged[base + e - first] = indices[e]
            wait_for_team()
            for e in range(max(mine, first), min(until, last)):
                total += z[np.int64(staged[base + e - first]) * width + column]
            wait_for_team()
            first += window
        if is_one:
            out[row * width + column] = total


def multiply_csr(indptr: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Multiply a matrix of ones in CSR with a dense matrix.

    Args:
        indptr: Row offsets, int32 `[N + 1]`.
        indices: Columns, int32 `[E]`.
        x: The dense matrix, fp32 `[M, F]`, on the same GPU.

    Returns:
        fp32 `[N, F]`.
    """
    num_rows, width = indptr.numel() - 1, x.shape[1]
    out = x.new_empty(num_rows, width)
    if width > TEAM // 2:
        teams = num_rows * -(-width // (2 * TEAM))
        run_gpu(multiply_wide_rows_gpu, _blocks_of(teams), indptr, indices, x, width, out)
    else:
        lane_bits = max(_FEWEST - 1, width - 1).bit_length()
        teams = -(-num_rows // (TEAM >> lane_bits))
        run_gpu(multiply_narrow_rows_gpu, _blocks_of(teams), indptr, indices, x, width, lane_bits, out)
    return out


def _blocks_of(teams: int) -> int:
    return max(1, -(-teams // _TEAMS))

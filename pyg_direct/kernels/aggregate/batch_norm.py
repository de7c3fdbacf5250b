"""Batch normalization after a ReLU, over the nodes of each snapshot, and its gradient, on a GPU.

Rows `[N, W, H]` hold the W snapshots of a node side by side. Sums add distances, to the first node or to the mean, in
fp32 over few rows and in fp64 over all. For numbers of any offset they are as exact as sums in fp64. A block has all
rows of a few columns, which suits few nodes.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda, gpu_kernel

_ZERO = np.float32(0)
# Threads of a block, its columns, and threads that share a column's rows.
GPU_THREADS, GPU_COLUMNS = (THREADS, 2) if SIMULATED else (1024, 8)
_LANES = GPU_THREADS // GPU_COLUMNS


@body
def rectify(x):
    """ReLU; a NaN stays a NaN."""
    return _ZERO if x < _ZERO else x


@body
def distance(x, center):
    """Distance of a rectified number to a center."""
    return rectify(x) - center


@body
def square(x, center):
    """Square of `distance`."""
    apart = rectify(x) - center
    return apart * apart


@body
def sum_lanes(value, sums):
    """Sum of a column's threads, returned to each of them; `sums` has room for a number of each thread."""
    i = cuda.threadIdx.x
    sums[i] = value
    cuda.syncthreads()
    half = _LANES * GPU_COLUMNS // 2
    while half >= GPU_COLUMNS:
        if i < half:
            sums[i] += sums[i + half]
        cuda.syncthreads()
        half //= 2
    total = sums[i % GPU_COLUMNS]
    cuda.syncthreads()
    return total


@gpu_kernel("f4[] f4[] f4[] f8 f4[] f4[] i8[] f8 i4 i4 i4 f4[] f4[]", threads=GPU_THREADS, resident_blocks=1)
def normalise_gpu(rows, scale, shift, eps, running_mean, running_variance, visited, momentum, count, window, size,
                  moments, out):  # fmt: skip
    """Write to `out` `[N, W, H]`; `moments` `[2, W, H]` become means and 1 / standard deviations. Running statistics
    `[H]`, which may be empty, see the snapshot, which is then the only one, and `visited` counts it.
    """
    sums = cuda.shared.array(GPU_THREADS, np.float64)
    pieces = (size + GPU_COLUMNS - 1) // GPU_COLUMNS
    width = window * size
    lane = cuda.threadIdx.x // GPU_COLUMNS
    if running_mean.shape[0] > 0 and cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
        visited[0] += 1
    piece = cuda.blockIdx.x
    while piece < window * pieces:
        t = piece // pieces
        own = (piece - t * pieces) * GPU_COLUMNS + cuda.threadIdx.x % GPU_COLUMNS
        # Threads beyond the last column take part in it too, and write nothing.
        c = min(own, size - 1)
        at = t * size + c
        first = rectify(rows[at])
        part = _ZERO
        r = lane
        while r < count:
            part += distance(rows[r * width + at], first)
            r += _LANES
        mean = sum_lanes(np.float64(part), sums) / count + first
        center = np.float32(mean)
        part = _ZERO
        r = lane
        while r < count:
            part += square(rows[r * width + at], center)
            r += _LANES
        rest = mean - center
        variance = sum_lanes(np.float64(part), sums) / count - rest * rest
        inverse = 1 / math.sqrt(variance + eps)
        if lane == 0 and own < size:
            moments[at] = np.float32(mean)
            moments[width + at] = np.float32(inverse)
            if running_mean.shape[0] > 0:
                seen = np.float64(running_mean[c])
                running_mean[c] = np.float32(seen + momentum * (mean - seen))
                seen = np.float64(running_variance[c])
                unbiased = variance * count / max(1, count - 1)
                running_variance[c] = np.float32(seen + momentum * (unbiased - seen))
        factor = np.float32(inverse * scale[c])
        plus = np.float32(shift[c] - rest * inverse * scale[c])
        r = lane
        while r < count and own < size:
            out[r * width + at] = distance(rows[r * width + at], center) * factor + plus
            r += _LANES
        piece += cuda.gridDim.x


@body
def add_grads(grad, more, i):
    """Add gradients that came by two ways, or by one if `more` is empty."""
    return grad[i] + more[i] if more.shape[0] > 0 else grad[i]


@gpu_kernel("f4[] f4[] f4[] f4[] f4[] i4 i4 i4 i4 i4 f4[] f4[]", threads=GPU_THREADS, resident_blocks=1)
def pull_normalise_gpu(grad, more, rows, moments, scale, count, window, begin, seen, size, out, parts):
    """Gradient of `rows` for the `seen` snapshots from `begin` on, `[N, S, H]`, from the gradients of the normalized
    rows, `grad` and `more`. `parts` `[3, S, H]` become the gradients of scale and shift, and the sums of `out`.
    """
    sums = cuda.shared.array(GPU_THREADS, np.float64)
    pieces = (size + GPU_COLUMNS - 1) // GPU_COLUMNS
    lane = cuda.threadIdx.x // GPU_COLUMNS
    piece = cuda.blockIdx.x
    while piece < seen * pieces:
        s = piece // pieces
        own = (piece - s * pieces) * GPU_COLUMNS + cuda.threadIdx.x % GPU_COLUMNS
        c = min(own, size - 1)
        at = (begin + s) * size + c
        mean = moments[at]
        inverse = moments[window * size + at]
        part = _ZERO
        other = _ZERO
        r = lane
        while r < count:
            given = add_grads(grad, more, (r * seen + s) * size + c)
            part += given
            other += given * (distance(rows[r * window * size + at], mean) * inverse)
            r += _LANES
        of_shift = sum_lanes(np.float64(part), sums)
        of_scale = sum_lanes(np.float64(other), sums)
        shared = np.float32(of_shift / count)
        slope = np.float32(of_scale / count)
        factor = scale[c] * inverse
        part = _ZERO
        r = lane
        while r < count:
            i = (r * seen + s) * size + c
            x = rows[r * window * size + at]
            value = (add_grads(grad, more, i) - shared - distance(x, mean) * inverse * slope) * factor
            value = _ZERO if x <= _ZERO else value
            if own < size:
                out[i] = value
            part += value
            r += _LANES
        of_rows = sum_lanes(np.float64(part), sums)
        if lane == 0 and own < size:
            i = s * size + c
            parts[i] = np.float32(of_scale)
            parts[seen * size + i] = np.float32(of_shift)
            parts[2 * seen * size + i] = np.float32(of_rows)
        piece += cuda.gridDim.x

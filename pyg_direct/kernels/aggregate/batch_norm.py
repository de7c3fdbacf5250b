"""Batch normalization after a ReLU, over the nodes of each snapshot, and its gradient on a GPU.

Rows `[N, W, H]` hold the W snapshots of a node side by side. Sums add distances, to the first node or to the mean, in
fp32 over few rows and in fp64 over all. For numbers of any offset they are as exact as sums in fp64. On a GPU a block
has all rows of a few columns, which suits few nodes.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, gpu_kernel, inlined

# Columns of one pass, and rows between two sums in fp64.
_COLUMNS, _ROWS = 32, 64
_ZERO = np.float32(0)
# On a GPU: threads of a block, its columns, and threads that share a column's rows.
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
def add_distances(given, count, width, first, center, part, total):
    """Add the distances of `count` rows from `first` on to `total`, column by column; `part` is memory for sums."""
    # Each loop over columns writes to one array, because only such loops are vectorized. It reads four rows, because
    # adding to a number that was just written takes longer than a read.
    columns = np.uint64(center.shape[0])
    for low in range(0, count, _ROWS):
        high = min(low + _ROWS, count)
        fours = high - (high - low) % 4
        for c in range(columns):
            part[c] = _ZERO
        for r in range(low, fours, 4):
            a = np.uint64(r) * width + first
            b, d, e = a + width, a + width + width, a + width + width + width
            for c in range(columns):
                m = center[c]
                part[c] += (distance(given[a + c], m) + distance(given[b + c], m)) + (
                    distance(given[d + c], m) + distance(given[e + c], m)
                )
        for r in range(fours, high):
            a = np.uint64(r) * width + first
            for c in range(columns):
                part[c] += distance(given[a + c], center[c])
        for c in range(columns):
            total[c] += part[c]


add_squares = inlined(add_distances, distance=square)


@cpu_kernel
def normalise_cpu(rows, scale, shift, eps, running_mean, running_variance, momentum, moments, out, beside, at):
    """Write to `out` `[N, W, H]`, which may be empty, and by time to columns of `beside` `[W, N, C]` from `at` on.

    `moments` `[2, W, H]` become means and 1 / standard deviations. Running statistics `[H]`, which may be empty, see
    the snapshot, which is then the only one.
    """
    count, window, size = rows.shape
    # Unsigned indices never count from the end of an array, so loops need no test for each number.
    width, row_size = np.uint64(window * size), np.uint64(beside.shape[2])
    given, together, by_time = rows.reshape(-1), out.reshape(-1), beside.reshape(-1)
    pieces = -(-size // _COLUMNS)
    for piece in range(window * pieces):
        t, begin = piece // pieces, piece % pieces * _COLUMNS
        columns, of_layer = np.uint64(min(_COLUMNS, size - begin)), np.uint64(begin)
        first = np.uint64(t * size + begin)
        part, center = np.empty(columns, np.float32), np.empty(columns, np.float32)
        factor, plus = np.empty(columns, np.float32), np.empty(columns, np.float32)
        mean, total = np.zeros(columns, np.float64), np.zeros(columns, np.float64)
        for c in range(columns):
            center[c] = rectify(given[first + c])
        add_distances(given, count, width, first, center, part, mean)
        for c in range(columns):
            mean[c] = mean[c] / count + center[c]
        for c in range(columns):
            center[c] = mean[c]
        add_squares(given, count, width, first, center, part, total)
        for c in range(columns):
            rest = mean[c] - center[c]
            variance = total[c] / count - rest * rest
            inverse = 1 / np.sqrt(variance + eps)
            moments[0, t, of_layer + c], moments[1, t, of_layer + c] = mean[c], inverse
            factor[c] = inverse * scale[of_layer + c]
            plus[c] = shift[of_layer + c] - rest * inverse * scale[of_layer + c]
            total[c] = variance
        if running_mean.shape[0] > 0:
            for c in range(columns):
                u = of_layer + c
                running_mean[u] += momentum * (mean[c] - running_mean[u])
                running_variance[u] += momentum * (total[c] * (count / max(1, count - 1)) - running_variance[u])
        to = np.uint64(t * count) * row_size + np.uint64(at) + of_layer
        for r in range(count):
            a, b = np.uint64(r) * width + first, np.uint64(r) * row_size + to
            for c in range(columns):
                by_time[b + c] = (rectify(given[a + c]) - center[c]) * factor[c] + plus[c]
            if out.shape[0] > 0:
                for c in range(columns):
                    together[a + c] = by_time[b + c]


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
    """As `normalise_cpu`, to `out` alone; `visited` counts snapshots that running statistics saw."""
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

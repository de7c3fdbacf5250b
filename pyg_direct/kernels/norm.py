"""Batch normalisation of what is rectified, over the nodes of each snapshot, on a CPU.

Rows `[N, W, H]` hold the W snapshots of a node side by side. Sums are those of distances, to the first node or to the
mean, in fp32 over few rows and in fp64 over all: wherever numbers lie, as exact as sums in fp64.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.jit import body, cpu_kernel, inlined

# Columns of one pass, and rows between two sums in fp64.
_COLUMNS, _ROWS = 32, 64
_ZERO = np.float32(0)


@body
def rectify(x):
    """What is no number stays so."""
    return _ZERO if x < _ZERO else x


@body
def distance(x, center):
    """Of what is rectified."""
    return rectify(x) - center


@body
def square(x, center):
    """Its square."""
    apart = rectify(x) - center
    return apart * apart


@body
def add_distances(given, count, width, first, center, part, total):
    """Add the distances of `count` rows from `first` on to `total`, column by column; `part` is room for sums."""
    # Each loop over columns writes to one place, as only such are done for several numbers at once, and reads four
    # rows, as adding to what was just written takes longer than to read.
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
    """To `out` `[N, W, H]`, which may be empty, and by time to columns of `beside` `[W, N, C]` from `at` on.

    `moments` `[2, W, H]` become means and 1 / standard deviations. Running ones `[H]`, which may be empty, see the
    snapshot, the only one then.
    """
    count, window, size = rows.shape
    # Unsigned ones never count from the end of an array, which loops would have to ask for each number.
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

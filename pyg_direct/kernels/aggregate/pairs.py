"""Sums over edges of functions of a target's and a source's row, item by item, so that no message is kept.

Each function of an edge has two shares, which are summed apart: out[t, 0, f] and out[t, 1, f]. The target's row has the
parts a and b, the source's x, y and z; parts that a function does not read are empty. The same kernel computes adjoints
over the edges of each source, with the roles of both ends exchanged.

| function | shares | read |
| --- | --- | --- |
| GATE | g y, g (1 - g) y with g = sigmoid(a + x) | a; x, y |
| AFFINE | w, w x with w = 1 if a x + b > 0, otherwise the slope | a, b; x |
| PULL_AFFINE | w z with w = 1 if x a + y > 0, otherwise the slope; none | a; x, y, z |
| SOFTMAX | w, w y with w = exp(x - a) | a; x, y |
| PULL_SOFTMAX | s, s (b - z) with s = exp(a - x) y | a, b; x, y, z |
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.aggregate.sum import NOWHERE, TO_ROW, find_item, quotient, span_of

# Numbers as in `cuda_src/pairs.cu`.
GATE, AFFINE, PULL_AFFINE, SOFTMAX, PULL_SOFTMAX = range(5)

sum_pairs_16 = device_function("sum_pairs_16", "i4 u8 u8 u8 u8 u8 u8 u8 u8 i4 i8 i8 i4 f4")


@body
def share_pair(function, a, b, x, y, z, slope, one):
    """The shares of one item of an edge."""
    if function == GATE:
        gate = one / (one + math.exp(-(a + x)))
        share = gate * y
        return share, share * (one - gate)
    if function == AFFINE:
        weight = one if a * x + b > 0 else slope
        return weight, weight * x
    if function == PULL_AFFINE:
        weight = one if x * a + y > 0 else slope
        return weight * z, one - one
    if function == SOFTMAX:
        weight = math.exp(x - a)
        return weight, weight * y
    share = math.exp(a - x) * y
    return share, share * (b - z)


@cpu_kernel
def sum_pairs_cpu(function, a, b, x, y, z, indptr, row, num_edges, slope, out):
    """`a` and `b` [T, F], `x`, `y` and `z` [N, F], none empty; `out` [T, 2, F]."""
    one = out.dtype.type(1)
    for t in prange(out.shape[0]):
        first, last = span_of(indptr, t, num_edges)
        out[t] = 0
        for e in range(first, last):
            s = np.int64(row[e])
            for f in range(out.shape[2]):
                share, other = share_pair(function, a[t, f], b[t, f], x[s, f], y[s, f], z[s, f], slope, one)
                out[t, 0, f] += share
                out[t, 1, f] += other


@body
def read_part(part, at, zero):
    """Item of a part, zero if the part is empty."""
    return part[at] if part.shape[0] > 0 else zero


@gpu_kernel("i4 T[] T[] T[] T[] T[] I[] I[] i8 i8 i4 i4 f8 i4[] i4[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def sum_pairs_gpu(function, a, b, x, y, z, indptr, row, num_edges, num_targets, width, lane_bits, slope, slices, counts,
                  partials, out):  # fmt: skip
    """Rows of any width; 2**lane_bits threads share a row, two edges in flight. `out` is [T, 2, F]."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    step = (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits
    one, zero, below = out.dtype.type(1), out.dtype.type(0), out.dtype.type(slope)
    item = thread >> lane_bits
    while item < num_targets + slices.shape[0] // 2:
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            f = lane
            while f < width:
                own, beside = a[target * width + f], read_part(b, target * width + f, zero)
                total, other = zero, zero
                e = first
                while e < last:
                    # The last edge is read again where there is no next one.
                    at = np.int64(row[e]) * width + f
                    after = np.int64(row[min(e + 1, last - 1)]) * width + f
                    x0, y0, z0 = x[at], read_part(y, at, zero), read_part(z, at, zero)
                    x1, y1, z1 = x[after], read_part(y, after, zero), read_part(z, after, zero)
                    share0, other0 = share_pair(function, own, beside, x0, y0, z0, below, one)
                    total += share0
                    other += other0
                    if e + 1 < last:
                        share1, other1 = share_pair(function, own, beside, x1, y1, z1, below, one)
                        total += share1
                        other += other1
                    e += 2
                if place == TO_ROW:
                    out[2 * target * width + f] = total
                    out[(2 * target + 1) * width + f] = other
                else:
                    partials[2 * place * width + f] = total
                    partials[(2 * place + 1) * width + f] = other
                f += lanes
        item += step


@body
def place_of(part, offset):
    """Address of a piece of a part, zero if the part is empty."""
    return part + np.uint64(offset) if part != 0 else np.uint64(0)


@gpu_kernel("i4 u8 u8 u8 u8 u8 I[] u8 i4 i8 i8 i4 f4 i4[] i4[] u8 u8", I=("i4", "i8"), sources=("aggregate", "pairs"))
def sum_wide_pairs_gpu(function, a, b, x, y, z, indptr, row, index_bytes, num_edges, num_targets, pieces, slope, slices,
                       counts, partials, out):  # fmt: skip
    """As `sum_pairs_gpu`, for fp32 rows of `pieces` times 16 bytes, aligned; all but `indptr`, `slices` and `counts` by
    address. A thread computes one piece of a target, or of a slice.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    item = np.int64(quotient(np.uint64(thread), pieces))
    if item < num_targets + slices.shape[0] // 2:
        piece = thread - item * pieces
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            to = out + np.uint64((2 * target * pieces + piece) * 16)
            if place != TO_ROW:
                to = partials + np.uint64((2 * place * pieces + piece) * 16)
            own, of_piece = (target * pieces + piece) * 16, piece * 16
            sum_pairs_16(function, to, to + np.uint64(np.int64(pieces) * 16), place_of(a, own), place_of(b, own),
                         place_of(x, of_piece), place_of(y, of_piece), place_of(z, of_piece), row, index_bytes, first,
                         last, pieces, slope)  # fmt: skip

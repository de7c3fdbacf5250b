"""Weighted sums of rows over the edges of each target, of which a softmax over these edges makes the weights.

out[t, f] = sum over the edges e of t of alpha[e, f // channels] * x[row[e], f], with alpha as `kernels/softmax.py` has
it, which is written too where it is asked for. A thread meets the edges of a target once: the largest score so far
makes the weights, and when a larger one comes, what was added up shrinks; at the end it is divided by the sum of the
weights.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.kernels.aggregate import add_share, quotient
from pyg_direct.kernels.jit import THREADS, body, cuda, device_function, gpu_kernel
from pyg_direct.kernels.softmax import TINY, add_scores, is_counted, leaky
from pyg_direct.kernels.span import span_of

attend_run_16 = device_function(
    "attend_run_16", "u8 u8 u8 u8 i4 u8 u8 u8 i8 i8 i8 i8 i4 i4 i4 i4 i4 f4 i4"
)  # fmt: skip

# Less than every score, and a number: two of them are zero apart.
LEAST = float(np.finfo(np.float32).min)


@body
def find_score(source, target, edge, row, e, t, h, heads, last, loops, slope):
    """The score of an edge of target t behind `leaky`; minus infinity where it weighs nothing or is not there."""
    if e >= last or not is_counted(row, e, t, last, loops):
        return np.float32(-np.inf)
    return leaky(add_scores(source, target, edge, row, e, t, h, heads, np.float32(0)), slope)


@body
def read_item(x, row, e, last, width, f):
    """Item f of the row that an edge brings; 0 where it is not there."""
    return x[np.int64(row[e]) * width + f] if e < last else np.float32(0)


@body
def scale_back(total, has_edges):
    """What is multiplied with where weights add up to `total`."""
    # Nothing but scores of minus infinity is no number, as those of the softmax are not.
    if total == 0 and has_edges:
        return np.float32(np.nan)
    return np.float32(1) / (total + np.float32(TINY))


@gpu_kernel("f4[] f4[] f4[] f4[] I[] I[] i8 i8 i4 i4 i4 i4 f4 f4[] f4[]", I=("i4", "i8"))
def attend_rows_gpu(x, source, target, edge, indptr, row, num_edges, num_targets, width, channels, lane_bits, loops,
                    slope, alpha, out):  # fmt: skip
    """Rows of any width and alignment; 2**lane_bits threads share a row, four edges in flight. The threads of a head
    write its weights by turns, unless `alpha` is empty.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    heads = width // channels
    t = thread >> lane_bits
    while t < num_targets:
        first, last = span_of(indptr, t, num_edges)
        f = lane
        while f < width:
            h = f // channels
            best, weights, total = np.float32(LEAST), np.float32(0), np.float32(0)
            e = first
            while e < last:
                v0 = read_item(x, row, e, last, width, f)
                v1 = read_item(x, row, e + 1, last, width, f)
                v2 = read_item(x, row, e + 2, last, width, f)
                v3 = read_item(x, row, e + 3, last, width, f)
                w0 = find_score(source, target, edge, row, e, t, h, heads, last, loops, slope)
                w1 = find_score(source, target, edge, row, e + 1, t, h, heads, last, loops, slope)
                w2 = find_score(source, target, edge, row, e + 2, t, h, heads, last, loops, slope)
                w3 = find_score(source, target, edge, row, e + 3, t, h, heads, last, loops, slope)
                largest = max(max(max(w0, w1), max(w2, w3)), best)
                shrink = np.float32(math.exp(best - largest))
                w0, w1 = np.float32(math.exp(w0 - largest)), np.float32(math.exp(w1 - largest))
                w2, w3 = np.float32(math.exp(w2 - largest)), np.float32(math.exp(w3 - largest))
                weights = weights * shrink + ((w0 + w1) + (w2 + w3))
                total = add_share(add_share(total * shrink, v0, w0), v1, w1)
                total = add_share(add_share(total, v2, w2), v3, w3)
                best = largest
                e += 4
            scale = scale_back(weights, first < last)
            out[t * width + f] = total * scale
            if alpha.shape[0] > 0:
                e = first + (f - h * channels)
                while e < last:
                    score = find_score(source, target, edge, row, e, t, h, heads, last, loops, slope)
                    alpha[e * heads + h] = np.float32(math.exp(score - best)) * scale
                    e += channels
            f += lanes
        t += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("u8 I[] u8 u8 i4 u8 u8 i8 i8 i8 i4 i4 i4 i4 f4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "attend"),
            resident_blocks=4)  # fmt: skip
def attend_wide_rows_gpu(x, indptr, ends, row, index_bytes, scores, own, num_edges, num_targets, num_runs, run, lanes,
                         heads, loops, slope, kind, alpha, out):  # fmt: skip
    """As `attend_rows_gpu`, for heads of `lanes` times 16 bytes, aligned; all but `indptr` by address.

    `scores` are those of sources, and `own` those of targets, or `scores` those of edges, and `own` is zero, as `alpha`
    is where nobody asks for it. A thread sees to one piece of `run` targets in a row.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    pieces = lanes * heads
    group = np.int64(quotient(np.uint64(thread), pieces))
    piece = np.int32(thread - group * pieces)
    if group < num_runs:
        target = group * run
        first, last = span_of(indptr, target, num_edges)
        count = np.int32(min(np.int64(run), num_targets - target))
        attend_run_16(out, x, ends, row, index_bytes, scores, own, alpha, num_edges, first, last, target, count, heads,
                      lanes, piece, loops, slope, kind)  # fmt: skip

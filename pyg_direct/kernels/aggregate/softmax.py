"""Softmax over the edges of each target, the sums of rows weighted by it, and their adjoints.

score(e, h) = leaky(source[row[e], h] + target[t, h] + edge[e, h]); empty arrays count as zero.

alpha[e, h] = exp(score(e, h) - best) / (1e-16 + the sum of exp(score - best) over the edges of t); best is the largest
score. With `loops` the last edge of each target is its loop, and other loops have weight 0.

`attend_rows_gpu`: out[t, f] = sum over the edges e of t of alpha[e, f // channels] * x[row[e], f]. If requested, it
writes alpha too. A thread reads the edges of a target once, with weights relative to the largest score so far. If a
larger score comes, the sum so far is scaled down. At the end the sum is divided by the sum of the weights.
"""

from __future__ import annotations

import math

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.aggregate.sum import quotient, span_of

# PyG's addend of the sum, so that it is never zero.
TINY = 1e-16


@body
def add_scores(source, target, edge, row, e, t, h, heads, zero):
    """The score of an edge before `leaky`."""
    score = zero
    if source.shape[0] > 0:
        score += source[np.int64(row[e]) * heads + h]
    if target.shape[0] > 0:
        score += target[t * heads + h]
    if edge.shape[0] > 0:
        score += edge[e * heads + h]
    return score


@body
def leaky(score, slope):
    """The score, times `slope` if it is negative."""
    return score if score > 0 else score * slope


@body
def is_counted(row, e, t, last, loops):
    """Check whether an edge of target t has a weight; `last` is the end of its edges."""
    return loops == 0 or e + 1 == last or np.int64(row[e]) != t


@body
def pull_back(alpha, grad, total, score, slope):
    """Gradient of a score before `leaky`; `total` is the sum of alpha times grad over the edges of the target."""
    share = alpha * (grad - total)
    return share if score > 0 else share * slope


# On a CPU heads are the innermost dimension, as in memory. torch computes the exponentials in between with vector
# instructions, which Numba's loops lack.
@cpu_kernel
def add_scores_cpu(source, target, edge, indptr, row, num_edges, num_targets, heads, scores):
    """Scores of edges before `leaky`, [E, H]. Not by `add_scores`: a call would take longer than the additions."""
    zero = scores.dtype.type(0)
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        for e in range(first, last):
            for h in range(heads):
                score = zero
                if source.shape[0] > 0:
                    score += source[np.int64(row[e]) * heads + h]
                if target.shape[0] > 0:
                    score += target[t * heads + h]
                if edge.shape[0] > 0:
                    score += edge[e * heads + h]
                scores[e * heads + h] = score


@cpu_kernel
def shift_scores_cpu(indptr, row, num_edges, num_targets, heads, loops, slope, best, scores):
    """Scores after `leaky` minus the largest of their target and head, `best` [T, H], in place; minus infinity for
    edges that do not count.
    """
    lowest = -scores.dtype.type(np.inf)
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        own = t * heads
        for h in range(heads):
            best[own + h] = lowest
        for e in range(first, last):
            # As `is_counted`, without a call.
            if loops == 0 or e + 1 == last or np.int64(row[e]) != t:
                for h in range(heads):
                    score = leaky(scores[e * heads + h], slope)
                    scores[e * heads + h] = score
                    best[own + h] = max(best[own + h], score)
        for e in range(first, last):
            if loops == 0 or e + 1 == last or np.int64(row[e]) != t:
                for h in range(heads):
                    scores[e * heads + h] -= best[own + h]
            else:
                for h in range(heads):
                    scores[e * heads + h] = lowest


@cpu_kernel
def divide_shares_cpu(indptr, num_edges, num_targets, heads, total, shares):
    """Divide shares of edges [E, H] by the sums of their targets, `total` [T, H], in place."""
    zero, tiny = shares.dtype.type(0), shares.dtype.type(TINY)
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        own = t * heads
        for h in range(heads):
            total[own + h] = zero
        for e in range(first, last):
            for h in range(heads):
                total[own + h] += shares[e * heads + h]
        for e in range(first, last):
            for h in range(heads):
                shares[e * heads + h] /= total[own + h] + tiny


@gpu_kernel("T[] T[] T[] I[] I[] i8 i8 i4 i4 i4 f8 T[]", T=("f4", "f8"), I=("i4", "i8"))
def softmax_edges_gpu(source, target, edge, indptr, row, num_edges, num_targets, heads, lane_bits, loops, slope, alpha):
    """2**lane_bits threads share a target and head, and divide its edges among them."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    # The lanes of a group leave its loop together; the groups of a warp need not.
    mask = np.uint32(((1 << lanes) - 1) << ((cuda.threadIdx.x & 31) - lane))
    zero, bend = alpha.dtype.type(0), alpha.dtype.type(slope)
    pair = thread >> lane_bits
    while pair < num_targets * heads:
        t = pair // heads
        h = pair - t * heads
        first, last = span_of(indptr, t, num_edges)
        best = -alpha.dtype.type(np.inf)
        e = first + lane
        while e < last:
            if is_counted(row, e, t, last, loops):
                best = max(best, leaky(add_scores(source, target, edge, row, e, t, h, heads, zero), bend))
            e += lanes
        step = lanes >> 1
        while step > 0:
            best = max(best, cuda.shfl_xor_sync(mask, best, step))
            step >>= 1
        total = zero
        e = first + lane
        while e < last:
            share = zero
            if is_counted(row, e, t, last, loops):
                score = leaky(add_scores(source, target, edge, row, e, t, h, heads, zero), bend)
                share = alpha.dtype.type(math.exp(score - best))
            alpha[e * heads + h] = share
            total += share
            e += lanes
        step = lanes >> 1
        while step > 0:
            total += cuda.shfl_xor_sync(mask, total, step)
            step >>= 1
        scale = alpha.dtype.type(1) / (total + alpha.dtype.type(TINY))
        e = first + lane
        while e < last:
            alpha[e * heads + h] *= scale
            e += lanes
        pair += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@cpu_kernel
def pull_softmax_cpu(grad, alpha, indptr, num_edges, num_targets, heads, slope, total, to_edges, to_targets):
    """Gradients of scores before `leaky` [E, H] in place of these scores, and their sums `to_targets` [T, H]; `total`
    is memory for as many.
    """
    zero = alpha.dtype.type(0)
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        own = t * heads
        for h in range(heads):
            total[own + h] = to_targets[own + h] = zero
        for e in range(first, last):
            for h in range(heads):
                total[own + h] += alpha[e * heads + h] * grad[e * heads + h]
        for e in range(first, last):
            for h in range(heads):
                at = e * heads + h
                share = pull_back(alpha[at], grad[at], total[own + h], to_edges[at], slope)
                to_edges[at] = share
                to_targets[own + h] += share


@gpu_kernel("T[] T[] T[] T[] T[] I[] I[] i8 i8 i4 i4 f8 T[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def pull_softmax_gpu(grad, alpha, source, target, edge, indptr, row, num_edges, num_targets, heads, lane_bits, slope,
                     to_edges, to_targets, to_sources):  # fmt: skip
    """As `pull_softmax_cpu`; `to_sources` gets their sums by source, by atomics, unless it or they are empty."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    mask = np.uint32(((1 << lanes) - 1) << ((cuda.threadIdx.x & 31) - lane))
    zero, bend = alpha.dtype.type(0), alpha.dtype.type(slope)
    pair = thread >> lane_bits
    while pair < num_targets * heads:
        t = pair // heads
        h = pair - t * heads
        first, last = span_of(indptr, t, num_edges)
        total = zero
        e = first + lane
        while e < last:
            total += alpha[e * heads + h] * grad[e * heads + h]
            e += lanes
        step = lanes >> 1
        while step > 0:
            total += cuda.shfl_xor_sync(mask, total, step)
            step >>= 1
        own = zero
        e = first + lane
        while e < last:
            score = add_scores(source, target, edge, row, e, t, h, heads, zero)
            share = pull_back(alpha[e * heads + h], grad[e * heads + h], total, score, bend)
            if to_edges.shape[0] > 0:
                to_edges[e * heads + h] = share
            if to_sources.shape[0] > 0 and share != zero:
                cuda.atomic.add(to_sources, np.int64(row[e]) * heads + h, share)
            own += share
            e += lanes
        step = lanes >> 1
        while step > 0:
            own += cuda.shfl_xor_sync(mask, own, step)
            step >>= 1
        if lane == 0 and to_targets.shape[0] > 0:
            to_targets[t * heads + h] = own
        pair += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


attend_run_16 = device_function(
    "attend_run_16", "u8 u8 u8 u8 i4 u8 u8 u8 i8 i8 i8 i8 i4 i4 i4 i4 i4 f4 i4 i4"
)  # fmt: skip


@gpu_kernel("u8 I[] u8 u8 i4 u8 u8 i8 i8 i8 i4 i4 i4 i4 f4 i4 i4 u8 u8", I=("i4", "i8"),
            sources=("aggregate", "attend"), resident_blocks=4)  # fmt: skip
def attend_rows_gpu(x, indptr, ends, row, index_bytes, scores, own, num_edges, num_targets, num_runs, run, lanes,
                         heads, loops, slope, kind, to_kind, alpha, out):  # fmt: skip
    """For heads of `lanes` times 16 bytes, aligned; all but `indptr` by address.

    `scores` are the scores of sources and `own` of targets; or `scores` are of edges, and `own` is zero. The address of
    `alpha` is zero if it is not requested. A thread computes one piece of `run` consecutive targets.
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
                      lanes, piece, loops, slope, kind, to_kind)  # fmt: skip

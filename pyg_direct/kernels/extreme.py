"""Largest and smallest items of rows over the edges of each target, and their adjoint.

out[t, f] = the largest (sign = 1) or smallest (sign = -1) x[row[e], f] over the edges e of t, 0 where t has none.
winner[t, f] is the first edge that brings it, or -2 - e where edges behind e bring it too, or -1 where t has no edge:
a gradient is shared evenly among equals, to which torch counts the zero that it starts from, and so do we. What is not
a number wins.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.aggregate import source_of
from pyg_direct.kernels.jit import THREADS, body, cpu_kernel, cuda, gpu_kernel, prange
from pyg_direct.kernels.span import NOWHERE, TO_ROW, find_item, slice_length, span_of

NO_EDGE = np.int32(-1)


@body
def take_larger(best, winner, value, edge, sign):
    """The step: (best so far, its edge) after `value`, which edge `edge` brings."""
    if winner == NO_EDGE or sign * value > sign * best or (value != value and best == best):
        return value, np.int32(edge)
    if value == best and winner >= 0:
        return best, np.int32(-2 - winner)
    return best, winner


@body
def first_edge(winner):
    """The first of the edges that bring the best item."""
    return winner if winner >= 0 else -2 - winner


@body
def spread_item(winner, best, given, x, row, last, width, f):
    """How much each of the edges that bring `best` to a target gets of its gradient `given`."""
    equals = 1 if best == 0 else 0
    if winner >= 0:
        equals += 1
    else:
        for e in range(first_edge(winner), last):
            if x[source_of(row, e) * width + f] == best:
                equals += 1
    return given / equals if equals > 0 else given


@cpu_kernel
def extreme_rows_cpu(x, indptr, row, num_edges, width, sign, out, winner):
    num_targets = out.shape[0] // width if width > 0 else 0
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        at = t * width
        out[at : at + width] = 0
        winner[at : at + width] = NO_EDGE
        for e in range(first, last):
            source = source_of(row, e) * width
            for f in range(width):
                out[at + f], winner[at + f] = take_larger(out[at + f], winner[at + f], x[source + f], e, sign)


@gpu_kernel("T[] I[] I[] i8 i8 i4 i4 i4 i4[] i4[] T[] i4[] T[] i4[]", T=("f4", "f8"), I=("i4", "i8"))
def extreme_rows_gpu(x, indptr, row, num_edges, num_targets, width, lane_bits, sign, slices, counts, partials,
                     partial_winner, out, winner):  # fmt: skip
    """2**lane_bits threads share a row, four edges in flight."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    zero = out.dtype.type(0)
    item = thread >> lane_bits
    while item < num_targets + slices.shape[0] // 2:
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            f = np.int32(thread & (lanes - 1))
            while f < width:
                best, edge = zero, np.int32(NO_EDGE)
                e = first
                while e < last:
                    v1, v2, v3 = zero, zero, zero
                    v0 = x[source_of(row, e) * width + f]
                    if e + 1 < last:
                        v1 = x[source_of(row, e + 1) * width + f]
                    if e + 2 < last:
                        v2 = x[source_of(row, e + 2) * width + f]
                    if e + 3 < last:
                        v3 = x[source_of(row, e + 3) * width + f]
                    best, edge = take_larger(best, edge, v0, e, sign)
                    if e + 1 < last:
                        best, edge = take_larger(best, edge, v1, e + 1, sign)
                    if e + 2 < last:
                        best, edge = take_larger(best, edge, v2, e + 2, sign)
                    if e + 3 < last:
                        best, edge = take_larger(best, edge, v3, e + 3, sign)
                    e += 4
                if place == TO_ROW:
                    out[target * width + f] = best
                    winner[target * width + f] = edge
                else:
                    partials[place * width + f] = best
                    partial_winner[place * width + f] = edge
                f += lanes
        item += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("I[] i8 i4 i4 i4[] i4[] T[] i4[] T[] i4[]", T=("f4", "f8"), I=("i4", "i8"))
def merge_slices_gpu(indptr, num_edges, width, sign, hubs, counts, partials, partial_winner, out, winner):
    """The best of the slices of every long row; a warp shares a row."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    hub = thread // lanes
    while hub < counts[1]:
        target, place = np.int64(hubs[2 * hub]), np.int64(hubs[2 * hub + 1])
        first, last = span_of(indptr, target, num_edges)
        length = slice_length(last - first)
        end = place + (last - first + length - 1) // length
        f = np.int64(thread % lanes)
        while f < width:
            best, edge = out.dtype.type(0), np.int32(NO_EDGE)
            for s in range(place, end):
                value, own = partials[s * width + f], partial_winner[s * width + f]
                before = edge
                best, edge = take_larger(best, edge, value, first_edge(own), sign)
                # Equals inside the slice that brought the best.
                if own < NO_EDGE and edge >= 0 and edge != before:
                    edge = own
            out[target * width + f] = best
            winner[target * width + f] = edge
            f += lanes
        hub += np.int64(cuda.gridDim.x) * THREADS // lanes


@cpu_kernel
def spread_extremes_cpu(grad, x, best, winner, indptr, row, num_edges, width, out):
    """Adjoint in `x`; `out` starts at zero. Columns are independent, targets are not."""
    for f in prange(width):
        for t in range(grad.shape[0] // width):
            at = t * width + f
            if winner[at] != NO_EDGE:
                _, last = span_of(indptr, t, num_edges)
                share = spread_item(winner[at], best[at], grad[at], x, row, last, width, f)
                first = first_edge(winner[at])
                for e in range(first, first + 1 if winner[at] >= 0 else last):
                    if winner[at] >= 0 or x[source_of(row, e) * width + f] == best[at]:
                        out[source_of(row, e) * width + f] += share


@gpu_kernel("T[] T[] T[] i4[] I[] I[] i8 i4 i4 T[]", T=("f4", "f8"), I=("i4", "i8"))
def spread_extremes_gpu(grad, x, best, winner, indptr, row, num_edges, width, to_edges, out):
    """As `spread_extremes_cpu`, by atomics; with `to_edges` the rows of `out` belong to edges, so that none meet."""
    at = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while at < grad.shape[0]:
        if winner[at] != NO_EDGE:
            t = at // width
            f = at - t * width
            _, last = span_of(indptr, t, num_edges)
            share = spread_item(winner[at], best[at], grad[at], x, row, last, width, f)
            first = np.int64(first_edge(winner[at]))
            for e in range(first, first + 1 if winner[at] >= 0 else last):
                if winner[at] >= 0 or x[source_of(row, e) * width + f] == best[at]:
                    to = e if to_edges != 0 else source_of(row, e)
                    cuda.atomic.add(out, to * width + f, share)
        at += np.int64(cuda.gridDim.x) * THREADS

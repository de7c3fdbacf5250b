"""Largest and smallest items of rows over the edges of each target, and their adjoint.

out[t, f] = the largest (sign = 1) or smallest (sign = -1) x[row[e], f] over the edges e of t; 0 if t has none. A NaN
wins, and a zero comes out positive, because a GPU's instructions do not order zeros. For a gradient, the edges that
give an item are found again from the item. Storing them would take as many bytes as the result, and more for 16-bit
items. A gradient is shared evenly among equals; as in torch, the initial zero counts as one of them.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.aggregate.sum import (
    LONG_ROW,
    NOWHERE,
    TO_ROW,
    find_hub,
    find_item,
    quotient,
    source_of,
    span_of,
    sum_slices,
)

extreme_run_16 = device_function("extreme_run_16", "u8 u8 u8 u8 i4 i8 i8 i8 i4 i4 i4 i4 i4 i4 i4")
spread_equals_16 = device_function("spread_equals_16", "u8 u8 u8 u8 u8 i4 u8 i8 i8 i8 i4 i4 i4 i4 i4")

# A CPU thread computes gradients of a multiple of so many columns: a cache line.
COLUMNS = 16
# Work of the adjoint on one item: a whole row; count the equals of a slice; spread the gradient of a slice.
WHOLE, COUNT, SPREAD = 0, 1, 2


@body
def take_larger(best, value, sign):
    """Return the best so far after `value`."""
    return value if best == best and not sign * value <= sign * best else best


@body
def is_best(value, best):
    """Check whether an item is the best of its target; if the best is a NaN, each is."""
    return not value < best and not value > best


@body
def share_of(given, best, equals):
    """Share of the gradient `given` for each edge that gives `best` to a target."""
    return given / (equals + (1 if best == 0 else 0)) if best == best else best


@cpu_kernel
def extreme_rows_cpu(x, indptr, row, num_edges, width, sign, out):
    num_targets, zero, side = out.shape[0] // width if width > 0 else 0, out.dtype.type(0), out.dtype.type(sign)
    for t in prange(num_targets):
        first, last = span_of(indptr, t, num_edges)
        top = out[t * width : (t + 1) * width]
        if first == last:
            top[:] = 0
        for e in range(first, last):
            source = source_of(row, e) * width
            values = x[source : source + width]
            # The sum of two zeros is the positive one.
            if e == first:
                for f in range(width):
                    top[f] = values[f] + zero
            else:
                for f in range(width):
                    top[f] = take_larger(top[f], values[f] + zero, side)


@gpu_kernel("T[] I[] I[] i8 i8 i4 i4 i4 i4[] i4[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def extreme_rows_gpu(x, indptr, row, num_edges, num_targets, width, lane_bits, sign, slices, counts, partials,
                     out):  # fmt: skip
    """Rows of any width and alignment; 2**lane_bits threads share a row, four edges in flight."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    zero, side = out.dtype.type(0), out.dtype.type(sign)
    item = thread >> lane_bits
    while item < num_targets + slices.shape[0] // 2:
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            f = np.int32(thread & (lanes - 1))
            while f < width:
                best = x[source_of(row, first) * width + f] if first < last else zero
                e = first + 1
                while e < last:
                    # Edges after the last repeat the best.
                    v1, v2, v3 = best, best, best
                    v0 = x[source_of(row, e) * width + f]
                    if e + 1 < last:
                        v1 = x[source_of(row, e + 1) * width + f]
                    if e + 2 < last:
                        v2 = x[source_of(row, e + 2) * width + f]
                    if e + 3 < last:
                        v3 = x[source_of(row, e + 3) * width + f]
                    best = take_larger(take_larger(best, v0, side), v1, side)
                    best = take_larger(take_larger(best, v2, side), v3, side)
                    e += 4
                if place == TO_ROW:
                    out[target * width + f] = best + zero
                else:
                    partials[place * width + f] = best + zero
                f += lanes
        item += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("u8 I[] u8 u8 i4 i8 i8 i8 i4 i4 i4 i4 i4 i4[] i4[] u8 u8", I=("i4", "i8"), sources=("aggregate",),
            resident_blocks=5)  # fmt: skip
def extreme_wide_rows_gpu(x, indptr, ends, row, index_bytes, num_edges, num_targets, num_runs, run, pieces, sign, kind,
                          out_kind, slices, counts, partials, out):  # fmt: skip
    """Rows of `pieces` times 16 bytes, as `sum_wide_rows_gpu` of `kernels/aggregate/sum.py` reads them."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    group = np.int64(quotient(np.uint64(thread), pieces))
    piece = np.int32(thread - group * pieces)
    if group < num_runs + slices.shape[0] // 2:
        items = np.int64(4 if kind == 0 else 8)
        longest, place = np.int32(0x7FFFFFFF), np.int64(TO_ROW)
        if group < num_runs:
            target = group * run
            first, last = span_of(indptr, target, num_edges)
            count, to_kind = np.int32(min(run, num_targets - target)), out_kind
            to = out + np.uint64(target * pieces * items * (4 if out_kind == 0 else 2))
            if slices.shape[0] > 0:
                longest = np.int32(LONG_ROW)
        else:
            item = num_targets + group - num_runs
            target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
            count, to_kind = np.int32(1), np.int32(0)
            to = partials + np.uint64(place * pieces * items * 4)
        if place != NOWHERE:
            ends += np.uint64(target * index_bytes)
            extreme_run_16(to, x, ends, row, index_bytes, num_edges, first, last, count, longest, pieces, piece, sign,
                           kind, to_kind)  # fmt: skip


@gpu_kernel("I[] i8 i4 i4 i4[] i4[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def merge_slices_gpu(indptr, num_edges, width, sign, hubs, counts, partials, out):
    """The best of the slices of every long row; a warp shares a row."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    hub = thread // lanes
    while hub < min(counts[1], hubs.shape[0] // 2):
        target, place, end = find_hub(indptr, num_edges, hubs, hub)
        f = np.int64(thread % lanes)
        while f < width:
            best = partials[place * width + f]
            for s in range(place + 1, end):
                best = take_larger(best, partials[s * width + f], out.dtype.type(sign))
            out[target * width + f] = best
            f += lanes
        hub += np.int64(cuda.gridDim.x) * THREADS // lanes


@cpu_kernel
def spread_extremes_cpu(grad, x, best, indptr, row, num_edges, width, columns, out):
    """Adjoint in `x`; `out` starts at zero. Columns are independent, `columns` a thread at a time; targets are not."""
    for block in prange((width + columns - 1) // columns):
        begin, num_columns = block * columns, min(columns, width - block * columns)
        equals, share, zero = np.empty(columns, np.int32), np.empty(columns, out.dtype), out.dtype.type(0)
        for t in range(grad.shape[0] // width):
            first, last = span_of(indptr, t, num_edges)
            at = t * width + begin
            top, given = best[at : at + num_columns], grad[at : at + num_columns]
            equals[:] = 0
            for e in range(first, last):
                source = source_of(row, e) * width + begin
                values = x[source : source + num_columns]
                for f in range(num_columns):
                    equals[f] += is_best(values[f], top[f])
            for f in range(num_columns):
                share[f] = share_of(given[f], top[f], equals[f])
            for e in range(first, last):
                source = source_of(row, e) * width + begin
                values, sums = x[source : source + num_columns], out[source : source + num_columns]
                # No branch, because edges would take it in an unpredictable way.
                for f in range(num_columns):
                    sums[f] += share[f] if is_best(values[f], top[f]) else zero


@gpu_kernel("T[] T[] T[] I[] I[] i8 i8 i4 i4 i4 i4 i4[] i4[] i4[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def spread_extremes_gpu(grad, x, best, indptr, row, num_edges, num_targets, width, lane_bits, of_slices, to_edges,
                        slices, counts, equals, out):  # fmt: skip
    """As `spread_extremes_cpu`, by atomics; with `to_edges` the rows of `out` belong to edges, so that none collide.

    Whole rows are finished, and the equals in slices counted; with `of_slices` gradients are spread over slices.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    item = thread >> lane_bits
    if of_slices != 0:
        item += num_targets
    while item < num_targets + slices.shape[0] // 2:
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            f = np.int32(thread & (lanes - 1))
            while f < width:
                at = target * width + f
                top, same = best[at], np.int32(0)
                if of_slices != 0:
                    same = equals[(place - slices[2 * place + 1]) * width + f]
                else:
                    for e in range(first, last):
                        same += np.int32(is_best(x[source_of(row, e) * width + f], top))
                if place != TO_ROW and of_slices == 0:
                    equals[place * width + f] = same
                else:
                    share = share_of(grad[at], top, same)
                    for e in range(first, last):
                        source = source_of(row, e)
                        if is_best(x[source * width + f], top):
                            cuda.atomic.add(out, (e if to_edges != 0 else source) * width + f, share)
                f += lanes
        item += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("u8 u8 u8 I[] u8 i4 i8 i8 i4 i4 i4 i4 i4 i4[] i4[] u8 u8", I=("i4", "i8"), sources=("spread",))
def spread_wide_extremes_gpu(grad, x, best, indptr, row, index_bytes, num_edges, num_targets, pieces, lane_bits, kind,
                             of_slices, to_edges, slices, counts, equals, out):  # fmt: skip
    """As `spread_extremes_gpu`, for rows of `pieces` times 16 bytes, aligned; `out` is fp32, `equals` int32."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    tiles = np.int64((pieces + lanes - 1) >> lane_bits)
    group = thread >> lane_bits
    item = group // tiles
    piece = np.int32(group - item * tiles) * lanes + np.int32(thread & (lanes - 1))
    if of_slices != 0:
        item += num_targets
    if item < num_targets + slices.shape[0] // 2 and piece < pieces:
        target, first, last, place, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE and first < last:
            what, of = np.int32(WHOLE), np.int64(0)
            if place != TO_ROW:
                what, of = np.int32(COUNT), place
                if of_slices != 0:
                    what, of = np.int32(SPREAD), place - slices[2 * place + 1]
            own = equals + np.uint64(of * pieces * (4 if kind == 0 else 8) * 4)
            spread_equals_16(out, x, best, grad, row, index_bytes, own, first, last, target, pieces, piece, kind, what,
                             to_edges)  # fmt: skip


@gpu_kernel("I[] i8 i4 i4[] i4[] i4[]", I=("i4", "i8"))
def add_equals_gpu(indptr, num_edges, width, hubs, counts, equals):
    """Sum of the equals in all slices of every long row, written to its first slice; a warp shares a row."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    hub = thread // lanes
    while hub < min(counts[1], hubs.shape[0] // 2):
        _, place, end = find_hub(indptr, num_edges, hubs, hub)
        f = np.int64(thread % lanes)
        while f < width:
            equals[place * width + f] = sum_slices(equals, np.int32(0), place, end, width, f)
            f += lanes
        hub += np.int64(cuda.gridDim.x) * THREADS // lanes

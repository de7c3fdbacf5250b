"""Sums over CSR of rows that several snapshots hold side by side, scaled before and after in one pass.

out[i, t] = rest[i, t] + scale[i, t] * sum over the edges e of i of weight(e, t) * column[row[e], t] * x[row[e], t].
`rest` is diagonal[i, t] * own[i, t], or with `adds` the old `out`. Only edges of snapshot t count: with a `shift`, bit
`shift` + `low` + t of an entry of `row` marks them. Rows are fp32, aligned, a multiple of 16 bytes wide. Addresses of
zero stand for ones, a `diagonal` of zero for zeros. Equal calls give equal results; see `kernels/aggregate/sum.py` for
long rows.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cuda, device_function, gpu_kernel
from pyg_direct.kernels.aggregate.sum import find_hub, find_item, quotient, span_of, sum_slices

sum_scaled_16 = device_function(
    "sum_scaled_16", "u8 u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4"
)


@gpu_kernel("u8 i4[] u8 u8 u8 i4 u8 u8 u8 u8 i4 i4 i8 i8 i8 i4 i4 i4 i4 i4 i4 i4[] i4[] i4 u8 u8",
            sources=("aggregate", "scaled"), resident_blocks=4)  # fmt: skip
def sum_scaled_rows_gpu(x, indptr, ends, row, weight, num_weights, column, scale, own, diagonal, shift, low,
                        num_edges, num_targets, num_runs, run, size, channels, pieces, longest, adds, slices, counts,
                        helpers, partials, out):  # fmt: skip
    """`x`, `ends` (of `indptr`), `row` and all factors are addresses, `out` and `partials` too.

    A thread computes one piece of `run` consecutive targets. `helpers` more for each piece share the slices of rows of
    more than `longest` edges, whose plain sums go to `partials`. `weight` begins at the first snapshot that `x` holds.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    group = np.int64(quotient(np.uint64(thread), pieces))
    piece = np.int32(thread - group * pieces)
    if group < num_runs + helpers:
        # A slice's number, below zero for runs.
        place = np.int32(group - num_runs)
        while place < 0 or (helpers > 0 and place < counts[0]):
            if place < 0:
                target = np.int64(place + num_runs) * run
                first, last = span_of(indptr, target, num_edges)
                count = np.int32(min(np.int64(run), num_targets - target))
            else:
                item = num_targets + place
                target, first, last, _, _ = find_item(indptr, num_edges, num_targets, slices, counts, item)
                count = np.int32(1)
            sum_scaled_16(out, partials, x, own, ends, row, weight, column, scale, diagonal, num_weights, size,
                          channels, pieces, piece, longest, adds, shift, low, place, np.int32(target), np.int32(first),
                          np.int32(last), count)  # fmt: skip
            if place < 0:
                break
            place += np.int32(helpers)


@gpu_kernel("f4[] i4[] f4[] f4[] i8 i4 i4 i4 i4[] i4[] f4[] f4[]")
def add_scaled_slices_gpu(own, indptr, scale, diagonal, num_edges, size, channels, adds, hubs, counts, partials,
                          out):  # fmt: skip
    """The result of every long row from the sums of its slices, in their order; a warp shares a row. Empty arrays stand
    for ones, an empty `diagonal` for zeros.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    width = size * channels
    hub = thread // lanes
    while hub < counts[1]:
        target, place, end = find_hub(indptr, num_edges, hubs, hub)
        f = np.int64(thread % lanes)
        while f < width:
            total = sum_slices(partials, np.float32(0), place, end, width, f)
            factor = target * size + f // channels
            at = target * width + f
            if scale.shape[0] > 0:
                total *= scale[factor]
            if adds != 0:
                total += out[at]
            elif diagonal.shape[0] > 0:
                total += diagonal[factor] * own[at]
            out[at] = total
            f += lanes
        hub += np.int64(cuda.gridDim.x) * THREADS // lanes

"""Sums and means of weighted rows over the edges of each target, and their adjoints.

out[t, f] = scale(t) * sum over the edges e of t of weight[e, f // channels] * x[row[e], f]. For a mean scale(t) is
one over the number of edges; for a sum it is 1. An empty `weight` stands for ones. An empty `row` stands for rows
that belong to edges (row[e] = e). Edges are sorted by target.

Rows longer than LONG_ROW are cut into slices of at least SLICE edges. `find_slices_gpu` lists them on the device,
without a wait for their number:

- slices[2 s] is the target of slice s, and slices[2 s + 1] its number within the row.
- hubs[2 h] is a long row, and hubs[2 h + 1] its first slice.
- counts = (slices, hubs) in use.

`rank_edges_gpu` and `place_edges_gpu` order edges by source without a sort. Each edge is counted and placed among the
edges of its source. rank[e] is the number of an edge within its source. The edges of a source come in any order,
because atomics count them.

`sum_messages_gpu` sums the messages relu(x[row[e]] + edge_rows[e]) of GINEConv without a row for each (Hu et al.,
"Strategies for Pre-training Graph Neural Networks", equation A.2). Rows are read in pieces of 16 bytes. For each item
of a message the adjoint needs one bit, which is set if the item is above zero.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import (
    SIMULATED,
    THREADS,
    body,
    cpu_kernel,
    cpu_reduction,
    cuda,
    device_function,
    gpu_kernel,
    prange,
)

SLICE = 4 if SIMULATED else 32
LONG_ROW = 4 * SLICE
# Destination of an item that is not a slice: its row, or none.
TO_ROW = -1
NOWHERE = -2


@body
def span_of(indptr, target, num_edges):
    """[first, last) edge of a target; offsets above `num_edges` belong to edges that were trimmed away."""
    return min(np.int64(indptr[target]), num_edges), min(np.int64(indptr[target + 1]), num_edges)


@body
def slice_length(degree):
    """Edges of a slice of a long row: about the root of its degree, so that slices and their sums are as many."""
    length = np.int64(SLICE)
    while length * length < degree:
        length *= 2
    return length


@body
def find_item(indptr, num_edges, num_targets, slices, counts, item):
    """(target, first edge, last edge, destination, edges of the whole row) of one item of work.

    Items [0, num_targets) are rows and those after them are slices; without slices, rows of any length are one item.
    """
    if item < num_targets:
        first, last = span_of(indptr, item, num_edges)
        if last - first > LONG_ROW and slices.shape[0] > 0:
            return item, first, first, np.int64(NOWHERE), last - first
        return item, first, last, np.int64(TO_ROW), last - first
    place = item - num_targets
    if place >= counts[0]:
        return item, np.int64(0), np.int64(0), np.int64(NOWHERE), np.int64(0)
    target = np.int64(slices[2 * place])
    first, last = span_of(indptr, target, num_edges)
    degree = last - first
    length = slice_length(degree)
    first += length * np.int64(slices[2 * place + 1])
    return target, first, min(first + length, last), place, degree


@body
def find_hub(indptr, num_edges, hubs, hub):
    """(target, first slice, end of the slices) of a long row."""
    target, place = np.int64(hubs[2 * hub]), np.int64(hubs[2 * hub + 1])
    first, last = span_of(indptr, target, num_edges)
    length = slice_length(last - first)
    return target, place, place + (last - first + length - 1) // length


@body
def sum_slices(partials, zero, place, end, width, f):
    """Item `f` of the slices [place, end), added in their order."""
    total = zero
    for s in range(place, end):
        total += partials[s * width + f]
    return total


@gpu_kernel("I[] i8 i8 i4[] i4[] i4[]", I=("i4", "i8"))
def find_slices_gpu(indptr, num_edges, num_targets, slices, hubs, counts):
    """Lists the slices of long rows; `counts` starts at zero.

    If edges are not in order, rows overlap: slices and rows that find no place are left out.
    """
    capacity = slices.shape[0] // 2
    target = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while target < num_targets:
        first, last = span_of(indptr, target, num_edges)
        if last - first > LONG_ROW:
            length = slice_length(last - first)
            num_slices = (last - first + length - 1) // length
            place = cuda.atomic.add(counts, 0, np.int32(num_slices))
            if place + num_slices <= capacity:
                hub = cuda.atomic.add(counts, 1, np.int32(1))
                if hub < hubs.shape[0] // 2:
                    hubs[2 * hub] = target
                    hubs[2 * hub + 1] = place
            for number in range(min(num_slices, max(capacity - place, 0))):
                slices[2 * (place + number)] = target
                slices[2 * (place + number) + 1] = number
        target += np.int64(cuda.gridDim.x) * THREADS


sum_run_16 = device_function("sum_run_16", "u8 u8 u8 u8 i4 u8 i8 i8 i8 i4 i4 i4 i4 i4 f4 i4 i4")
quotient = device_function("quotient", "u8 i4")
dot_edges_16 = device_function("dot_edges_16", "u8 u8 u8 u8 u8 u8 i4 i8 i8 i4 i4 i4 i4 i4 u4 i4 i4")
store_narrowed = device_function("store_narrowed", "u8 i8 f4 i4")
spread_span_16 = device_function("spread_span_16", "u8 u8 u8 i4 u8 i8 i8 i8 i4 i4 i4 f4 i4")


@body
def source_of(row, edge):
    """Row of `x` for an edge."""
    return np.int64(row[edge]) if row.shape[0] > 0 else np.int64(edge)


@body
def add_share(total, value, weight):
    """The step of every sum: `total` and the share of one edge."""
    return total + value * weight


@body
def scale_of(degree, mean, one):
    """Factor of the sum over `degree` edges."""
    return one / degree if mean != 0 and degree > 1 else one


@cpu_kernel
def sum_rows_cpu(x, indptr, row, weight, num_edges, mean, out):
    """`x` [N, H, C], `weight` [E, H] or empty, `out` [T, H, C]; four edges are in flight at once."""
    one = out.dtype.type(1)
    for t in prange(out.shape[0]):
        first, last = span_of(indptr, t, num_edges)
        out[t] = 0
        fours = first + (last - first) // 4 * 4
        for e in range(first, fours, 4):
            a, b, c, d = source_of(row, e), source_of(row, e + 1), source_of(row, e + 2), source_of(row, e + 3)
            for h in range(out.shape[1]):
                if weight.shape[0] > 0:
                    p, q, r, s = weight[e, h], weight[e + 1, h], weight[e + 2, h], weight[e + 3, h]
                    for f in range(out.shape[2]):
                        out[t, h, f] += (x[a, h, f] * p + x[b, h, f] * q) + (x[c, h, f] * r + x[d, h, f] * s)
                else:
                    for f in range(out.shape[2]):
                        out[t, h, f] += (x[a, h, f] + x[b, h, f]) + (x[c, h, f] + x[d, h, f])
        for e in range(fours, last):
            source = source_of(row, e)
            for h in range(out.shape[1]):
                share = weight[e, h] if weight.shape[0] > 0 else one
                for f in range(out.shape[2]):
                    out[t, h, f] = add_share(out[t, h, f], x[source, h, f], share)
        scale = scale_of(out.dtype.type(last - first), mean, one)
        if scale != one:
            out[t] *= scale


@gpu_kernel("T[] I[] I[] T[] i8 i8 i4 i4 i4 i4 i4[] i4[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def sum_rows_gpu(x, indptr, row, weight, num_edges, num_targets, width, channels, lane_bits, mean, slices, counts,
                 partials, out):  # fmt: skip
    """Rows of any width and alignment; 2**lane_bits threads share a row, four edges in flight."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    step = (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits
    heads = width // channels
    one, zero = out.dtype.type(1), out.dtype.type(0)
    item = thread >> lane_bits
    while item < num_targets + slices.shape[0] // 2:
        target, first, last, place, degree = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE:
            scale = scale_of(out.dtype.type(degree), mean, one)
            f = lane
            while f < width:
                head = f // channels
                total = zero
                e = first
                while e < last:
                    v0, v1, v2, v3 = zero, zero, zero, zero
                    w0, w1, w2, w3 = one, one, one, one
                    v0 = x[source_of(row, e) * width + f]
                    if e + 1 < last:
                        v1 = x[source_of(row, e + 1) * width + f]
                    if e + 2 < last:
                        v2 = x[source_of(row, e + 2) * width + f]
                    if e + 3 < last:
                        v3 = x[source_of(row, e + 3) * width + f]
                    if weight.shape[0] > 0:
                        w0 = weight[e * heads + head]
                        if e + 1 < last:
                            w1 = weight[(e + 1) * heads + head]
                        if e + 2 < last:
                            w2 = weight[(e + 2) * heads + head]
                        if e + 3 < last:
                            w3 = weight[(e + 3) * heads + head]
                    total = add_share(add_share(total, v0, w0), v1, w1)
                    total = add_share(add_share(total, v2, w2), v3, w3)
                    e += 4
                if place == TO_ROW:
                    out[target * width + f] = total * scale
                else:
                    partials[place * width + f] = total * scale
                f += lanes
        item += step


@gpu_kernel("u8 I[] u8 u8 i4 u8 i8 i8 i8 i4 i4 i4 i4 i4 i4 i4[] i4[] u8 u8", I=("i4", "i8"), sources=("aggregate",),
            resident_blocks=4)  # fmt: skip
def sum_wide_rows_gpu(x, indptr, ends, row, index_bytes, weight, num_edges, num_targets, num_runs, run, pieces, heads,
                      mean, kind, out_kind, slices, counts, partials, out):  # fmt: skip
    """Rows of `pieces` times 16 bytes, aligned. `x`, `ends`, `row`, `weight`, `partials` (both fp32) and `out` are
    addresses; `ends` is the address of `indptr`.

    A thread computes one piece of `run` consecutive targets, or of a slice; without slices, rows of any length are
    whole.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    group = np.int64(quotient(np.uint64(thread), pieces))
    piece = np.int32(thread - group * pieces)
    if group < num_runs + slices.shape[0] // 2:
        # A piece of 16 bytes holds four fp32 or eight 16-bit items.
        items = np.int64(4 if kind == 0 else 8)
        scale, longest, place = np.float32(0 if mean != 0 else 1), np.int32(0x7FFFFFFF), np.int64(TO_ROW)
        if group < num_runs:
            target = group * run
            first, last = span_of(indptr, target, num_edges)
            count, to_kind = np.int32(min(run, num_targets - target)), out_kind
            to = out + np.uint64(target * pieces * items * (4 if out_kind == 0 else 2))
            if slices.shape[0] > 0:
                longest = np.int32(LONG_ROW)
        else:
            item = num_targets + group - num_runs
            target, first, last, place, degree = find_item(indptr, num_edges, num_targets, slices, counts, item)
            count, to_kind = np.int32(1), np.int32(0)
            to = partials + np.uint64(place * pieces * items * 4)
            scale = scale_of(np.float32(degree), mean, np.float32(1))
        if place != NOWHERE:
            ends += np.uint64(target * index_bytes)
            sum_run_16(to, x, ends, row, index_bytes, weight, num_edges, first, last, count, longest, heads, pieces,
                       piece, scale, kind, to_kind)  # fmt: skip


@gpu_kernel("I[] i8 i4 i4[] i4[] T[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def add_slices_gpu(indptr, num_edges, width, hubs, counts, partials, out):
    """out[t] = the sum of the slices of t, in their order, for every long row t; a warp has a piece of a row."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    pieces = np.int64(width + lanes - 1) // lanes
    item = thread // lanes
    while item < pieces * min(counts[1], hubs.shape[0] // 2):
        hub = item // pieces
        target, place, end = find_hub(indptr, num_edges, hubs, hub)
        f = (item - hub * pieces) * lanes + thread % lanes
        if f < width:
            out[target * width + f] = sum_slices(partials, out.dtype.type(0), place, end, width, f)
        item += np.int64(cuda.gridDim.x) * THREADS // lanes


@gpu_kernel("I[] i8 i4 i4 i4[] i4[] f4[] u8", I=("i4", "i8"), sources=("aggregate",))
def add_narrowed_slices_gpu(indptr, num_edges, width, kind, hubs, counts, partials, out):
    """As `add_slices_gpu`; `out` is the address of 16-bit items."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = min(THREADS, 32)
    pieces = np.int64(width + lanes - 1) // lanes
    item = thread // lanes
    while item < pieces * min(counts[1], hubs.shape[0] // 2):
        hub = item // pieces
        target, place, end = find_hub(indptr, num_edges, hubs, hub)
        f = (item - hub * pieces) * lanes + thread % lanes
        if f < width:
            total = sum_slices(partials, np.float32(0), place, end, width, f)
            store_narrowed(out, target * width + f, total, kind)
        item += np.int64(cuda.gridDim.x) * THREADS // lanes


@gpu_kernel("T[] I[] I[] I[] T[] i8 i4 i4 i4 i4 T[]", T=("f4", "f8"), I=("i4", "i8"))
def spread_rows_gpu(grad, indptr, row, target, weight, num_edges, width, channels, lane_bits, mean, out):
    """Adjoint in `x`: out[row[e]] += scale * weight[e] * grad[target[e]], by atomics; `out` starts at zero."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    heads = width // channels
    one = out.dtype.type(1)
    e = thread >> lane_bits
    while e < num_edges:
        t, source = np.int64(target[e]), source_of(row, e)
        first, last = span_of(indptr, t, num_edges)
        scale = scale_of(out.dtype.type(last - first), mean, one)
        f = np.int32(thread & (lanes - 1))
        while f < width:
            share = weight[e * heads + f // channels] * scale if weight.shape[0] > 0 else scale
            cuda.atomic.add(out, source * width + f, grad[t * width + f] * share)
            f += lanes
        e += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("u8 I[] u8 i4 u8 i8 i8 i4 i4 i4 i4 i4 i4[] i4[] u8", I=("i4", "i8"), sources=("spread",))
def spread_wide_rows_gpu(grad, indptr, row, index_bytes, weight, num_edges, num_targets, pieces, heads, lane_bits, mean,
                         kind, slices, counts, out):  # fmt: skip
    """As `spread_rows_gpu`, for rows of `pieces` times 16 bytes, aligned, each read once; `out` is fp32."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    tiles = np.int64((pieces + lanes - 1) >> lane_bits)
    group = thread >> lane_bits
    item = group // tiles
    piece = np.int32(group - item * tiles) * lanes + np.int32(thread & (lanes - 1))
    if item < num_targets + slices.shape[0] // 2 and piece < pieces:
        target, first, last, place, degree = find_item(indptr, num_edges, num_targets, slices, counts, item)
        if place != NOWHERE and first < last:
            scale = scale_of(np.float32(degree), mean, np.float32(1))
            spread_span_16(out, grad, row, index_bytes, weight, first, last, target, heads, pieces, piece, scale, kind)


@cpu_reduction
def dot_rows_cpu(grad, x, indptr, row, target, num_edges, mean, out):
    """Adjoint in `weight`: out[e, h] = scale * grad[target[e], h] . x[row[e], h]."""
    one = out.dtype.type(1)
    for e in prange(num_edges):
        t, source = target[e], source_of(row, e)
        first, last = span_of(indptr, t, num_edges)
        scale = scale_of(out.dtype.type(last - first), mean, one)
        for h in range(out.shape[1]):
            total = out.dtype.type(0)
            for c in range(x.shape[2]):
                total = add_share(total, grad[t, h, c], x[source, h, c])
            out[e, h] = total * scale


@gpu_kernel("T[] T[] I[] I[] I[] i8 i4 i4 i4 i4 T[]", T=("f4", "f8"), I=("i4", "i8"))
def dot_rows_gpu(grad, x, indptr, row, target, num_edges, width, channels, lane_bits, mean, out):
    """As `dot_rows_cpu`; 2**lane_bits threads share an edge and head."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    heads = width // channels
    # The lanes of a group leave its loop together; the groups of a warp need not.
    mask = np.uint32(((1 << lanes) - 1) << ((cuda.threadIdx.x & 31) - lane))
    one = out.dtype.type(1)
    pair = thread >> lane_bits
    while pair < num_edges * heads:
        e = pair // heads
        t, source = np.int64(target[e]), source_of(row, e)
        first, last = span_of(indptr, t, num_edges)
        total = out.dtype.type(0)
        c = np.int64(lane)
        at = (pair - e * heads) * channels
        while c < channels:
            total = add_share(total, grad[t * width + at + c], x[source * width + at + c])
            c += lanes
        step = lanes >> 1
        while step > 0:
            total += cuda.shfl_xor_sync(mask, total, step)
            step >>= 1
        if lane == 0:
            out[pair] = total * scale_of(out.dtype.type(last - first), mean, one)
        pair += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel("u8 u8 u8 u8 u8 i4 i8 i4 i4 i4 i4 i4 f4[] u8", sources=("aggregate", "dot"))
def dot_wide_rows_gpu(grad, x, indptr, row, target, index_bytes, num_edges, pieces, heads, lane_bits, mean, kind, like,
                      out):  # fmt: skip
    """As `dot_rows_gpu`, for rows of `pieces` times 16 bytes, aligned; all arrays but the empty `like` by address.

    2**lane_bits threads share a head of four edges, whose rows are all in flight at once.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    # All lanes of a group are active or none; the groups of a warp may differ.
    mask = np.uint32(((np.int64(1) << lanes) - 1) << ((cuda.threadIdx.x & 31) - lane))
    group = thread >> lane_bits
    four = np.int64(quotient(np.uint64(group), heads))
    if 4 * four < num_edges:
        dot_edges_16(out, grad, x, indptr, row, target, index_bytes, num_edges, 4 * four, heads,
                     np.int32(group - four * heads), pieces, lane, lanes, mask, mean, kind)  # fmt: skip


@gpu_kernel("I[] i4[] i4[]", I=("i4", "i8"))
def rank_edges_gpu(row, counts, rank):
    """counts[s + 1] = edges of source s; it starts at zero."""
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < row.shape[0]:
        rank[e] = cuda.atomic.add(counts, np.int64(row[e]) + 1, np.int32(1))
        e += np.int64(cuda.gridDim.x) * THREADS


@gpu_kernel("I[] I[] I[] T[] i4[] i4[] i8 i4 i4 i4[] T[]", T=("f4", "f8"), I=("i4", "i8"))
def place_edges_gpu(indptr, row, target, weight, offsets, rank, num_edges, heads, mean, targets, shares):
    """Target of each edge in the order by source; also its weights times the scale of a mean, if `shares` has room."""
    one = shares.dtype.type(1)
    e = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while e < num_edges:
        t = np.int64(target[e])
        place = np.int64(offsets[np.int64(row[e])]) + rank[e]
        targets[place] = np.int32(t)
        if shares.shape[0] > 0:
            first, last = span_of(indptr, t, num_edges)
            scale = scale_of(shares.dtype.type(last - first), mean, one)
            for h in range(heads):
                shares[place * heads + h] = weight[e * heads + h] * scale if weight.shape[0] > 0 else scale
        e += np.int64(cuda.gridDim.x) * THREADS


sum_messages_16 = device_function("sum_messages_16", "u8 u8 u8 u8 i4 u8 i8 i8 i4 f4 i4")
pull_message_16 = device_function("pull_message_16", "u8 u8 u8 u8 i4")


@gpu_kernel("u8 u8 u8 i4 I[] i8 i8 i4 i4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "messages"))
def sum_messages_gpu(x, edge_rows, row, index_bytes, indptr, num_edges, num_targets, pieces, mean, kind, kept, out):
    """Rows of `pieces` times 16 bytes, aligned; all but `indptr` by address. A thread computes one piece of a target.

    `kept` takes a byte for each piece of an edge, whose bits mark the items of the message above zero; its address is
    zero if it is not requested.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    target = np.int64(quotient(np.uint64(thread), pieces))
    if target < num_targets:
        piece = thread - target * pieces
        of_piece, kept_piece = np.uint64(piece * 16), np.uint64(0)
        if kept != 0:
            kept_piece = kept + np.uint64(piece)
        first, last = span_of(indptr, target, num_edges)
        scale = scale_of(np.float32(last - first), mean, np.float32(1))
        sum_messages_16(out + np.uint64(thread * 16), x + of_piece, edge_rows + of_piece, row, index_bytes, kept_piece,
                        first, last, pieces, scale, kind)  # fmt: skip


@gpu_kernel("u8 u8 I[] I[] i8 i4 i4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "messages"))
def pull_messages_gpu(grad, kept, row, target, num_edges, pieces, item_bytes, kind, to_edges, to_x):
    """The adjoint, for the gradients of sums times their scale; a thread computes one piece of an edge.

    `to_edges` are written, and `to_x`, fp32, are added to by atomics; zero stands for neither.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    e = np.int64(quotient(np.uint64(thread), pieces))
    if e < num_edges:
        piece = thread - e * pieces
        to_edge, to_source = np.uint64(0), np.uint64(0)
        if to_edges != 0:
            to_edge = to_edges + np.uint64(thread * 16)
        if to_x != 0:
            # A piece of 16 bytes takes four bytes of fp32 for each of its items.
            to_source = to_x + np.uint64((np.int64(row[e]) * pieces + piece) * (64 // item_bytes))
        pull_message_16(to_source, to_edge, grad + np.uint64((np.int64(target[e]) * pieces + piece) * 16),
                        kept + np.uint64(thread), kind)  # fmt: skip

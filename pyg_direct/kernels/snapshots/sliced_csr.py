"""Sums of rows of several snapshots at once over sliced edges (PiPAD, section 4.2), and their adjoint.

out[i, t, f] += scale[i, t] * sum over the edges e of i that snapshot t has of weight(e, t) * z[col[e], t, f]. Rows of
`z` and `out` hold the S snapshots of a node side by side. So a shared edge is read once for all of them. `weight` has 0
(ones), 1 or S numbers an edge, `presence` one bit a snapshot, and `snapshot` is the snapshot of a slice. Empty arrays
stand for ones and for all. `low` is the first snapshot of the group that `z` holds.

`sum_scaled_*` sum over CSR instead, with rows scaled before and after in the same pass:
out[i, t] = rest[i, t] + scale[i, t] * sum over the edges e of i of weight(e, t) * column[row[e], t] * x[row[e], t].
`rest` is diagonal[i, t] * own[i, t], or with `adds` the old `out`. Only edges of snapshot t count: with a `shift`, bit
`shift` + `low` + t of an entry of `row` marks them. Rows are fp32, aligned, a multiple of 16 bytes wide. Addresses of
zero stand for ones, a `diagonal` of zero for zeros. Equal calls give equal results; see `kernels/aggregate/sum.py` for
long rows.

The union of two ascending lists of edges has a byte for each edge that marks the snapshots in which it is present.
Edges are keys target * N + source. Lists are cut into blocks at equal keys, so that blocks are merged in parallel.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cpu_kernel, cuda, device_function, gpu_kernel, prange
from pyg_direct.kernels.aggregate.sum import add_share, find_hub, find_item, quotient, span_of, sum_slices
from pyg_direct.kernels.binary_search import first_not_below

SLICE = 32
# Threads that stage the edges of their slices together.
TEAM = min(THREADS, 32)
# Most slices that a team processes at once.
COALESCED = 16 if TEAM == 32 else 4
STAGED = COALESCED * SLICE * (THREADS // TEAM)

sum_slice_16 = device_function("sum_slice_16", "u8 u8 u8 u8 i4 u8 u8 i4 i4 i4 i4 i4 i4")


@body
def row_of(slice_row):
    """Target of a slice without the bit for several slices."""
    return np.int64(slice_row) & np.int64(0x7FFFFFFF)


@body
def share_of(weight, num_weights, presence, edge, snapshot, one):
    """Factor of an edge's row in a snapshot of the group; 0 if the snapshot has no such edge."""
    if presence.shape[0] > 0 and (np.int64(presence[edge]) >> snapshot) & 1 == 0:
        return one - one
    if num_weights == 0:
        return one
    return weight[edge * num_weights + (snapshot if num_weights > 1 else 0)]


@body
def begins_run(rows, snapshot, slice_id):
    """Check whether a slice is the first of its target, or of its target in its snapshot."""
    if slice_id == 0 or rows[slice_id - 1] != rows[slice_id]:
        return True
    return snapshot.shape[0] > 0 and snapshot[slice_id - 1] != snapshot[slice_id]


@body
def find_edges(rows, offsets, snapshot, slice_id, whole):
    """[first, last) edge of a slice; with `whole` of its whole run, none for a slice that begins no run."""
    first = np.int64(offsets[slice_id])
    last = slice_id + 1
    if whole != 0:
        if not begins_run(rows, snapshot, slice_id):
            return first, first
        while last < rows.shape[0] and not begins_run(rows, snapshot, last):
            last += 1
    return first, np.int64(offsets[last])


@cpu_kernel
def sum_slices_cpu(z, rows, offsets, cols, weight, num_weights, snapshot, presence, low, row, column, at, size,
                   channels, width, out):  # fmt: skip
    """`z` and `out` [N * width]; each row holds the group's `size` snapshots from `low` on, beginning at number `at`.
    `row` and `column` [N, size] scale targets and sources here; empty ones do not.
    """
    # Unsigned indices never count from the end of an array, and no loop over arrays calls a function with them. Either
    # would prevent vector instructions.
    width, channels = np.uint64(width), np.uint64(channels)
    one, several = out.dtype.type(1), snapshot.shape[0] > 0
    for s in prange(rows.shape[0]):
        # As `find_edges` of whole runs. Runs of one target in several snapshots write to different numbers.
        if s > 0 and rows[s - 1] == rows[s] and not (several and snapshot[s - 1] != snapshot[s]):
            continue
        end = s + 1
        while end < rows.shape[0] and rows[end] == rows[s] and not (several and snapshot[end] != snapshot[s]):
            end += 1
        target, until = row_of(rows[s]), size
        begin = 0
        if several:
            begin = np.int64(snapshot[s]) - low
            until = min(begin + 1, size)
            begin = max(begin, 0)
        for t in range(begin, until):
            start = np.uint64(at + t) * channels
            total = np.uint64(target) * width + start
            scale = row[target, t] if row.shape[0] > 0 else one
            for e in range(np.int64(offsets[s]), np.int64(offsets[end])):
                # As `share_of`. An absent edge adds nothing, not even a NaN.
                if presence.shape[0] > 0 and (np.int64(presence[e]) >> (t + low)) & 1 == 0:
                    continue
                share = one
                if num_weights > 0:
                    share = weight[e * num_weights + (t + low if num_weights > 1 else 0)]
                if share != 0:
                    share *= scale
                    if column.shape[0] > 0:
                        share *= column[cols[e], t]
                    source = np.uint64(cols[e]) * width + start
                    for f in range(channels):
                        out[total + f] = add_share(out[total + f], z[source + f], share)


_ARRAYS = "T[] i4[] i4[] i4[] T[] i4 u1[] u1[] T[]"


@gpu_kernel(f"{_ARRAYS} i4 i4 i4 i4 i4 T[]", T=("f4", "f8"))
def sum_slices_gpu(z, rows, offsets, cols, weight, num_weights, snapshot, presence, scale, low, size, channels,
                   lane_bits, whole, out):  # fmt: skip
    """Any width and alignment; 2**lane_bits threads share a slice, or with `whole` all slices of a target."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    lane = np.int32(thread & (lanes - 1))
    one, zero = out.dtype.type(1), out.dtype.type(0)
    slice_id = thread >> lane_bits
    while slice_id < rows.shape[0]:
        first, last = find_edges(rows, offsets, snapshot, slice_id, whole)
        target = row_of(rows[slice_id])
        width, shift = size * channels, np.int64(0)
        if snapshot.shape[0] > 0:
            width, shift = channels, np.int64(snapshot[slice_id]) - low
        if last > first and 0 <= shift < size:
            f = shift * channels + lane
            while f < shift * channels + width:
                t = np.int64(f // channels)
                total = zero
                e = first
                while e < last:
                    v0, v1, v2, v3 = zero, zero, zero, zero
                    w0 = share_of(weight, num_weights, presence, e, t + low, one)
                    w1, w2, w3 = zero, zero, zero
                    if w0 != zero:
                        v0 = z[np.int64(cols[e]) * (size * channels) + f]
                    if e + 1 < last:
                        w1 = share_of(weight, num_weights, presence, e + 1, t + low, one)
                        if w1 != zero:
                            v1 = z[np.int64(cols[e + 1]) * (size * channels) + f]
                    if e + 2 < last:
                        w2 = share_of(weight, num_weights, presence, e + 2, t + low, one)
                        if w2 != zero:
                            v2 = z[np.int64(cols[e + 2]) * (size * channels) + f]
                    if e + 3 < last:
                        w3 = share_of(weight, num_weights, presence, e + 3, t + low, one)
                        if w3 != zero:
                            v3 = z[np.int64(cols[e + 3]) * (size * channels) + f]
                    total = add_share(add_share(total, v0, w0), v1, w1)
                    total = add_share(add_share(total, v2, w2), v3, w3)
                    e += 4
                if scale.shape[0] > 0:
                    total *= scale[target * size + t]
                at = target * (size * channels) + f
                if whole == 0 and rows[slice_id] < 0:
                    cuda.atomic.add(out, at, total)
                else:
                    out[at] += total
                f += lanes
        slice_id += (np.int64(cuda.gridDim.x) * THREADS) >> lane_bits


@gpu_kernel(f"{_ARRAYS} i4 i4 i4 i4 T[]", T=("f4", "f8"))
def sum_narrow_slices_gpu(z, rows, offsets, cols, weight, num_weights, snapshot, presence, scale, low, size, channels,
                          coalesced, out):  # fmt: skip
    """Narrow rows, as in Algorithm 1 of the paper. A warp stages the columns of `coalesced` slices in shared memory,
    side by side. As many threads as a slice has numbers process each slice.
    """
    staged = cuda.shared.array(STAGED, np.int32)
    lane = np.int32(cuda.threadIdx.x % TEAM)
    base = np.int32(cuda.threadIdx.x // TEAM) * (coalesced * SLICE)
    one = out.dtype.type(1)
    width = channels if snapshot.shape[0] > 0 else size * channels
    mine = lane // width
    block_slices = (THREADS // TEAM) * coalesced
    block_first = np.int64(cuda.blockIdx.x) * block_slices
    # The threads of a block leave this loop together, so that they may synchronize inside.
    while block_first < rows.shape[0]:
        first_slice = block_first + (cuda.threadIdx.x // TEAM) * coalesced
        # Neighboring threads read neighboring slices; each keeps to its own.
        if lane < coalesced * (TEAM // coalesced):
            staging = first_slice + lane % coalesced
            if staging < rows.shape[0]:
                begin, count = offsets[staging], offsets[staging + 1] - offsets[staging]
                off = lane // coalesced
                while off < count:
                    staged[base + off * coalesced + lane % coalesced] = cols[begin + off]
                    off += TEAM // coalesced
        if SIMULATED:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        slice_id = first_slice + mine
        if mine < coalesced and slice_id < rows.shape[0]:
            target, shift = row_of(rows[slice_id]), np.int64(0)
            if snapshot.shape[0] > 0:
                shift = np.int64(snapshot[slice_id]) - low
            if 0 <= shift < size:
                f = shift * channels + lane % width
                t = f // channels
                begin, count = np.int64(offsets[slice_id]), offsets[slice_id + 1] - offsets[slice_id]
                total = out.dtype.type(0)
                for off in range(count):
                    share = share_of(weight, num_weights, presence, begin + off, t + low, one)
                    if share != 0:
                        source = np.int64(staged[base + off * coalesced + mine])
                        total = add_share(total, z[source * (size * channels) + f], share)
                if scale.shape[0] > 0:
                    total *= scale[target * size + t]
                at = target * (size * channels) + f
                if rows[slice_id] < 0:
                    cuda.atomic.add(out, at, total)
                else:
                    out[at] += total
        if SIMULATED:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        block_first += np.int64(cuda.gridDim.x) * block_slices


@gpu_kernel("u8 i4[] i4[] u8 u8 i4 u1[] u8 u8 i4 i4 i4 i4 i4 i4 u8", sources=("sliced",))
def sum_wide_slices_gpu(z, rows, offsets, cols, weight, num_weights, snapshot, presence, scale, low, size, channels,
                        lane_bits, whole, fresh, out):  # fmt: skip
    """fp32 rows of a multiple of 16 bytes, aligned; addresses of zero stand for empty arrays. `fresh`: `out` is zero.

    2**lane_bits threads share as many pieces of a slice; another group computes the rest of a wider row.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    lanes = np.int32(1 << lane_bits)
    width = channels if snapshot.shape[0] > 0 else size * channels
    pieces = width // 4
    tiles = np.int64((pieces + lanes - 1) >> lane_bits)
    group = thread >> lane_bits
    slice_id = group // tiles
    piece = np.int32(group - slice_id * tiles) * lanes + np.int32(thread & (lanes - 1))
    if slice_id < rows.shape[0] and piece < pieces:
        first, last = find_edges(rows, offsets, snapshot, slice_id, whole)
        shift = np.int64(0)
        if snapshot.shape[0] > 0:
            shift = np.int64(snapshot[slice_id]) - low
        if last > first and 0 <= shift < size:
            target = row_of(rows[slice_id])
            items = size * channels
            write = np.int32(1 if whole == 0 and rows[slice_id] < 0 else 2 if fresh != 0 else 0)
            number = np.int32(shift * channels) + 4 * piece
            shares = weight if weight == 0 else weight + np.uint64(first * num_weights * 4)
            bits = presence if presence == 0 else presence + np.uint64(first)
            scales = scale if scale == 0 else scale + np.uint64(target * size * 4)
            sum_slice_16(
                out + np.uint64(target * items * 4),
                z,
                cols + np.uint64(first * 4),
                shares,
                num_weights,
                bits,
                scales,
                np.int32(last - first),
                items,
                number,
                channels,
                low,
                write,
            )


@body
def cut_block(first, second, block, num_blocks):
    """First position of a block in both lists; block `num_blocks` begins at their ends."""
    if block == 0:
        return 0, 0
    if block == num_blocks or first.shape[0] == 0:
        return first.shape[0], second.shape[0]
    at = first.shape[0] * block // num_blocks
    return at, first_not_below(second, 0, second.shape[0], first[at])


@cpu_kernel
def count_union_cpu(first, second, sizes):
    """sizes[b] = keys of the union in block b."""
    num_blocks = sizes.shape[0]
    for b in prange(num_blocks):
        i, j = cut_block(first, second, b, num_blocks)
        i_end, j_end = cut_block(first, second, b + 1, num_blocks)
        size = 0
        while i < i_end and j < j_end:
            left, right = first[i], second[j]
            i += left <= right
            j += right <= left
            size += 1
        sizes[b] = size + (i_end - i) + (j_end - j)


@cpu_kernel
def merge_union_cpu(first, first_presence, second, second_presence, shift, begins, keys, presence):
    """Union of two lists; the bits of the second list's snapshots are shifted by `shift`."""
    num_blocks = begins.shape[0] - 1
    for b in prange(num_blocks):
        i, j = cut_block(first, second, b, num_blocks)
        i_end, j_end = cut_block(first, second, b + 1, num_blocks)
        for at in range(begins[b], begins[b + 1]):
            from_first = i < i_end and (j >= j_end or first[i] <= second[j])
            from_second = j < j_end and (i >= i_end or second[j] <= first[i])
            bits = np.uint8(0)
            if from_first:
                keys[at] = first[i]
                bits |= first_presence[i]
            else:
                keys[at] = second[j]
            if from_second:
                bits |= np.uint8(second_presence[j] << shift)
            presence[at] = bits
            i += from_first
            j += from_second


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

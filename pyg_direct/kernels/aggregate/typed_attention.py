"""Attention over many relations, and its gradients: a row is read once, and no row of an edge is stored.

With the weights alpha of `kernels/aggregate/softmax.py`, out[t] = sum over the edges e of t of alpha[e] * v[row[e]].
Each relation has sources, targets and a vector of its own. Relations into one type are added up, and share the
gradients of its rows. For the gradient g[t] of a sum:

- total(t, h) = g[t, h] . out[t, h], which is the sum of alpha[e, h] * (g[t, h] . v[row[e], h]) over the edges of t.
- The gradient of a score before `leaky` is alpha[e, h] * (g[t, h] . v[row[e], h] - total(t, h)), times `slope` if the
  score is negative.
- The gradient of v[s] is the sum of alpha[e] * g[t] over its edges.

Scores of `attend_groups_gpu` are v[s, h] . vector[h] plus a number of the target, as of GATConv. `pull_scores_gpu`
makes their gradients by target, and those of vectors, and `pull_attention_gpu` the gradients of v by source. These
include the gradients of scores times `vector`.

Scores of `*_pairs_*`, `*_keys_*` and `*_queries_*` need rows of both ends. With keys k and values v of sources and
queries q of targets, score(e, h) is, of the columns of head h,

- of GATv2Conv: vector . leaky(k[row[e]] + q[t]), with a vector for each relation; values are the keys;
- of products: k[row[e]] . q[t]; values follow the keys in each row, and `vectors` is zero.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cuda, device_function, gpu_kernel
from pyg_direct.kernels.aggregate.sum import LONG_ROW, NOWHERE, TO_ROW, find_item, quotient, span_of
from pyg_direct.kernels.binary_search import last_at_most

dot_head_16 = device_function("dot_head_16", "u8 u8 u8 i4 i4 u4 i4")
attend_lines_16 = device_function(
    "attend_lines_16", "u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 i4 f4 i4 i4"
)
pull_scores_16 = device_function("pull_scores_16", "u8 u8 u8 u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 i4 i4 f4 i4")
pull_rows_16 = device_function("pull_rows_16", "u8 u8 u8 u8 u8 u8 u8 u8 i4 i4 i4 i4 i4 i4 i4 i4 i4")
pull_row_16 = device_function("pull_row_16", "u8 i4 u8 u8 u8 u8 u8 u8 i8 i8 i8 i4 i4 i4")


@body
def mask_of(lane, lanes, pieces, thread_of_warp):
    """Mask for the shuffles of a group of lanes, a power of two.

    It has all threads of a warp if they belong to one row of `pieces` threads, and so take the same way.
    """
    if pieces % 32 == 0:
        return np.uint32(0xFFFFFFFF)
    ones = np.uint32(0xFFFFFFFF) if lanes == 32 else np.uint32((1 << lanes) - 1)
    return np.uint32(ones << np.uint32(thread_of_warp - lane))


@body
def warps_of_row(heads, lanes):
    """Warps that share a row with heads of `lanes` pieces: a thread has two pieces of long rows."""
    of_warp = 64 if lanes > 1 and heads * lanes > 32 else 32
    return (heads * lanes + of_warp - 1) // of_warp


@gpu_kernel("u8 u8 i8[] i8[] i8 i4 i4 i4 u8", sources=("aggregate", "typed_attention"))
def total_gradients_gpu(grad, out, bounds, shifts, num_targets, heads, lanes, kind, totals):
    """totals[t, h] of the targets of all relations. Those of relation r begin at bounds[r], and shifts[r] from there
    leads to their rows of `grad`. All but `bounds` and `shifts` are addresses.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    pieces = heads * lanes
    target = np.int64(quotient(np.uint64(thread), pieces))
    if target < num_targets:
        piece = np.int32(thread - target * pieces)
        head = piece // lanes
        lane = piece - head * lanes
        mask = mask_of(lane, lanes, pieces, cuda.threadIdx.x & 31)
        line = target + shifts[last_at_most(bounds, 0, bounds.shape[0] - 1, target)]
        # A piece of 16 bytes takes four bytes of fp32 for each of its items.
        bytes_of_piece = 16 if kind == 0 else 32
        dot_head_16(totals + np.uint64((target * heads + head) * 4), grad + np.uint64((line * pieces + piece) * 16),
                    out + np.uint64(thread * bytes_of_piece), lane, lanes, mask, kind)  # fmt: skip


@gpu_kernel("u8 u8 u8 u8 u8 u8 i8[] i8[] i8[] u8 i8 i8 i8 i4 i4 f4 i4 i4 u8 u8",
            sources=("aggregate", "typed_attention"), resident_blocks=2)  # fmt: skip
def attend_groups_gpu(x, ends, row, by_target, vectors, bias, firsts, members, kept, parts, num_rows, num_edges, run,
                      heads, lanes, slope, has_relu, kind, alpha, totals):  # fmt: skip
    """Sums of the attention of the relations into one type, fp32, and its row of `bias` unless this is zero. With
    `has_relu` sums below zero become zero, in the kind of `x`.

    All but arrays are addresses; `ends` and `row` are int32. The rows of type g begin at firsts[g] of `totals`, and the
    first kept[g] of them have targets. Its relations are those from members[g] to members[g + 1]. `parts` has the
    number of each of these, then the first target of each, then the number of targets of each. The address `alpha` is
    zero if weights are not kept; a weight has its sign bit set if its score is not above zero. A warp computes its part
    of `run` rows, with heads of `lanes` times 16 bytes.
    """
    warp = (np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) >> 5
    warps = np.int32(warps_of_row(heads, lanes))
    number = np.int64(quotient(np.uint64(warp), warps))
    if number * run < num_rows:
        # Fewer than 2^31 rows: numbers of 64 bits take two registers each.
        line = np.int32(number * run)
        end = np.int32(min(number * run + run, num_rows))
        of_row = np.int32(warp - number * warps)
        group = np.int32(last_at_most(firsts, 0, firsts.shape[0] - 1, line))
        num_relations = np.int32(members[members.shape[0] - 1])
        while line < end:
            while firsts[group + 1] <= line:
                group = np.int32(group + 1)
            first = np.int32(firsts[group])
            until = np.int32(min(np.int64(end), firsts[group + 1]))
            attend_lines_16(totals, alpha, x, by_target, vectors, bias, ends, row, parts, num_relations,
                            np.int32(members[group]), np.int32(members[group + 1]), first, np.int32(line - first),
                            np.int32(until - first), np.int32(kept[group]), group, np.int32(num_edges), heads, lanes,
                            of_row, np.int32(cuda.threadIdx.x & 31), slope, has_relu, kind)  # fmt: skip
            line = until


@gpu_kernel("u8 u8 u8 u8 u8 u8 u8 i8[] i8[] i8[] i8 i8 i8 i4 i4 f4 i4 u8 u8 u8 u8",
            sources=("aggregate", "typed_attention"), resident_blocks=2)  # fmt: skip
def pull_scores_gpu(x, grad, ends, row, alpha, vectors, indptr, bounds, begins, shifts, length, num_slices, num_edges,
                    heads, lanes, slope, kind, to_edges, to_targets, to_x, partials):  # fmt: skip
    """Gradients of the scores of edges before `leaky`, and their sums by target.

    Each slice of targets also sums the rows of its edges, fp32, each head times the gradient of its score. It writes
    the gradients of rows whose source has one edge. All but arrays are addresses; `ends`, `row` and `indptr` are int32.
    See `attend_groups_gpu` for `alpha`, `total_gradients_gpu` for `bounds` and `shifts`, and `pull_attention_gpu` for
    `indptr`. A slice is `length` targets of one relation, the last of it fewer. The slices of relation r begin at
    begins[r]. A warp reads its part of rows.
    """
    warp = (np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x) >> 5
    warps = np.int32(warps_of_row(heads, lanes))
    number = np.int64(quotient(np.uint64(warp), warps))
    if number < num_slices:
        # Fewer than 2^31 rows: numbers of 64 bits take two registers each.
        relation = last_at_most(begins, 0, begins.shape[0] - 1, number)
        target = np.int32(bounds[relation] + (number - begins[relation]) * length)
        end = np.int32(min(np.int64(target) + length, bounds[relation + 1]))
        bytes_of_row = heads * lanes * (16 if kind == 0 else 32)
        pull_scores_16(partials + np.uint64(number * bytes_of_row), to_edges, to_targets, to_x, alpha, x, grad,
                       vectors + np.uint64(relation * bytes_of_row), ends, row, indptr, np.int32(num_edges), target,
                       end, np.int32(shifts[relation]), heads, lanes, np.int32(warp - number * warps),
                       np.int32(cuda.threadIdx.x & 31), slope, kind)  # fmt: skip


@gpu_kernel("u8 i4[] u8 u8 u8 u8 u8 u8 i8[] i8[] i8 i8 i8 i4 i4 i4 i4[] i4[] u8 u8",
            sources=("aggregate", "typed_attention"), resident_blocks=2)  # fmt: skip
def pull_attention_gpu(grad, indptr, indptr_at, target, edge, alpha, shares, vectors, bounds, shifts, num_edges,
                       num_sources, run, heads, lanes, kind, slices, counts, partials, to_x):  # fmt: skip
    """Gradients of rows of sources, for heads of `lanes` times 16 bytes.

    `pull_scores_gpu` has written those of sources with one edge. All but arrays are addresses; `indptr_at` is the
    address of `indptr`, the offsets of the sources in the order of edges by source. In this order `target` and `edge`
    give the target and the number of each edge, int32. `shares` are the gradients of scores. The sources of relation r
    begin at bounds[r]; its vector is row r of `vectors`. A warp computes its part of `run` items, each a source or a
    slice of its edges.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    warps = np.int32(warps_of_row(heads, lanes))
    number = np.int64(quotient(np.uint64(thread >> 5), warps))
    num_items = num_sources + slices.shape[0] // 2
    if number * run < num_items:
        # Fewer than 2^31 rows: numbers of 64 bits take two registers each.
        item = np.int32(number * run)
        end = np.int32(min(number * run + run, num_items))
        of_row = np.int32((thread >> 5) - number * warps)
        pieces = heads * lanes
        bytes_of_piece = 16 if kind == 0 else 32
        relation = np.int32(0)
        if item < num_sources:
            relation = np.int32(last_at_most(bounds, 0, bounds.shape[0] - 1, item))
        most = np.int32(LONG_ROW if slices.shape[0] > 0 else 2147483647)
        while item < end and item < num_sources:
            while bounds[relation + 1] <= item:
                relation = np.int32(relation + 1)
            until = np.int32(min(np.int64(end), bounds[relation + 1]))
            pull_rows_16(to_x, np.uint64(np.int64(grad) + shifts[relation] * pieces * 16), indptr_at, target, edge,
                         alpha, shares, vectors + np.uint64(relation * pieces * bytes_of_piece), np.int32(num_edges),
                         item, until, most, heads, lanes, of_row, np.int32(cuda.threadIdx.x & 31), kind)  # fmt: skip
            item = until
        while item < end:
            source, first, last, place, _ = find_item(indptr, num_edges, num_sources, slices, counts, np.int64(item))
            if place != NOWHERE:
                relation = np.int32(last_at_most(bounds, 0, bounds.shape[0] - 1, source))
                piece = np.int32(of_row + (cuda.threadIdx.x & 31) * warps)
                while piece < pieces:
                    of_head = np.uint64(piece // lanes * 4)
                    pull_row_16(partials + np.uint64((place * pieces + piece) * bytes_of_piece), np.int32(0),
                                grad + np.uint64(piece * 16), target, edge, alpha + of_head, shares + of_head,
                                vectors + np.uint64((relation * pieces + piece) * bytes_of_piece), first, last,
                                shifts[relation], heads, pieces, kind)  # fmt: skip
                    piece = np.int32(piece + 32 * warps)
            item += np.int32(1)


join_rows_16 = device_function("join_rows_16", "u8 u8 u8 u8 i8 i8 i8 i4 i4")
add_parts_4 = device_function("add_parts_4", "u8 u8 u8 u8 u8 i8 i8 i8 i4")


@gpu_kernel("u8 u8 i8 i8 i8 i8 i4 i4 u8 u8", sources=("aggregate", "typed_attention"))
def join_rows_gpu(grad, out, num_rows, num_kept, length, num_slices, pieces, kind, joined, partials):
    """partials[i] = sum of the rows of slice i of `grad`, fp32, each of `length` rows; the first `num_kept` rows are
    also written to `joined` in their kind.

    The gradient is fp32 if the address `out` is zero; otherwise of kind `kind`, and of the results `out` of a ReLU.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    number = np.int64(quotient(np.uint64(thread), pieces))
    if number < num_slices:
        piece = np.int32(thread - number * pieces)
        first = number * length
        last = min(first + length, num_rows)
        bytes_of_piece = 16 if kind == 0 else 32
        of_out = np.uint64(0)
        if out != 0:
            of_out = out + np.uint64(piece * 16)
        of_grad = np.uint64(piece * (bytes_of_piece if out == 0 else 16))
        join_rows_16(joined + np.uint64(piece * 16), partials + np.uint64(thread * bytes_of_piece), grad + of_grad,
                     of_out, first, last, num_kept, pieces, kind)  # fmt: skip


@gpu_kernel("u8 u8 i8[] i8[] u8 u8 i8 i4 u8", sources=("aggregate", "typed_attention"))
def add_groups_gpu(out, bias, firsts, members, starts, sizes, num_rows, pieces, totals):
    """Sums of the results of relations into one type, fp32, and its row of `bias` unless this is zero.

    The rows of type g begin at firsts[g] of `totals`. Its relations are members[g] to members[g + 1]; relation k has
    sizes[k] rows of `out`, from starts[k] on. A thread computes four numbers.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    row = np.int64(quotient(np.uint64(thread), pieces))
    if row < num_rows:
        piece = thread - row * pieces
        kind = last_at_most(firsts, 0, firsts.shape[0] - 1, row)
        of_bias = np.uint64(0)
        if bias != 0:
            of_bias = bias + np.uint64((kind * pieces + piece) * 16)
        add_parts_4(totals + np.uint64(thread * 16), out + np.uint64(piece * 16), of_bias, starts, sizes, members[kind],
                    members[kind + 1], row - firsts[kind], pieces)  # fmt: skip


attend_pair_16 = device_function("attend_pair_16", "u8 u8 u8 u8 u8 u8 i8 i8 i4 i4 i4 i4 u4 f4 i4")
pull_key_16 = device_function("pull_key_16", "u8 i4 u8 u8 u8 u8 u8 u8 u8 u8 u8 i8 i8 i8 i4 i4 i4 i4 u4 f4 i4")
pull_query_16 = device_function("pull_query_16", "u8 u8 u8 u8 u8 u8 u8 i8 i8 i4 i4 f4 i4")


@gpu_kernel("u8 u8 u8 I[] u8 i8[] i8 i8 i4 i4 f4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "pair_attention"),
            resident_blocks=4)  # fmt: skip
def attend_pairs_gpu(keys, queries, vectors, indptr, row, bounds, num_edges, num_targets, heads, lanes, slope, kind,
                     alpha, out):  # fmt: skip
    """Sums of the targets of all relations; those of relation r begin at bounds[r]. All but arrays are addresses; `row`
    is int32, and `alpha` is zero if weights are not kept. A thread computes one piece of a target, with heads of
    `lanes` times 16 bytes.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    pieces = heads * lanes
    target = np.int64(quotient(np.uint64(thread), pieces))
    if target < num_targets:
        piece = np.int32(thread - target * pieces)
        head = piece // lanes
        lane = piece - head * lanes
        mask = mask_of(lane, lanes, pieces, cuda.threadIdx.x & 31)
        first, last = span_of(indptr, target, num_edges)
        vector, weights = np.uint64(0), np.uint64(0)
        if vectors != 0:
            # A piece of 16 bytes takes four bytes of fp32 for each of its items.
            place = (last_at_most(bounds, 0, bounds.shape[0] - 1, target) * pieces + piece) * (16 if kind == 0 else 32)
            vector = vectors + np.uint64(place)
        if alpha != 0:
            weights = alpha + np.uint64(head * 4)
        attend_pair_16(out + np.uint64(thread * (16 if kind == 0 else 32)), weights, keys + np.uint64(piece * 16),
                       queries + np.uint64(thread * 16), vector, row, first, last, heads, pieces, lane, lanes, mask,
                       slope, kind)  # fmt: skip


@gpu_kernel("u8 u8 u8 u8 i4[] u8 u8 u8 u8 i8[] i8[] i8 i8 i4 i4 f4 i4 i4[] i4[] u8 u8 u8",
            sources=("aggregate", "pair_attention"), resident_blocks=4)  # fmt: skip
def pull_keys_gpu(keys, queries, grad, vectors, indptr, target, edge, alpha, totals, bounds, shifts, num_edges,
                  num_sources, heads, lanes, slope, kind, slices, counts, partials, to_edges, to_keys):  # fmt: skip
    """Gradients of rows of sources, and of scores of edges, as `pull_attention_gpu`."""
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    pieces = heads * lanes
    item = np.int64(quotient(np.uint64(thread), pieces))
    if item < num_sources + slices.shape[0] // 2:
        piece = np.int32(thread - item * pieces)
        head = piece // lanes
        lane = piece - head * lanes
        mask = mask_of(lane, lanes, pieces, cuda.threadIdx.x & 31)
        source, first, last, place, _ = find_item(indptr, num_edges, num_sources, slices, counts, item)
        if place != NOWHERE:
            relation = last_at_most(bounds, 0, bounds.shape[0] - 1, source)
            bytes_of_piece, stride = 16 if kind == 0 else 32, pieces
            vector = vectors
            if vectors != 0:
                vector = vectors + np.uint64((relation * pieces + piece) * bytes_of_piece)
            else:
                stride = 2 * pieces
            of_source = np.uint64((source * stride + piece) * 16)
            to, to_kind = to_keys + of_source, np.int32(kind)
            if place != TO_ROW:
                to, to_kind = partials + np.uint64((place * stride + piece) * bytes_of_piece), np.int32(0)
            of_head, of_piece = np.uint64(head * 4), np.uint64(piece * 16)
            pull_key_16(to, to_kind, to_edges + of_head, keys + of_source, queries + of_piece, grad + of_piece, vector,
                        target, edge, alpha + of_head, totals + of_head, first, last, shifts[relation], heads, pieces,
                        lane, lanes, mask, slope, kind)  # fmt: skip


@gpu_kernel("u8 u8 u8 u8 I[] u8 i8[] i8 i8 i4 i4 f4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "pair_attention"))
def pull_queries_gpu(shares, keys, queries, vectors, indptr, row, bounds, num_edges, num_targets, heads, lanes, slope,
                     kind, to_vectors, to_queries):  # fmt: skip
    """Gradients of queries from the gradients `shares` of scores, and for each target its part in the gradient of the
    vector, fp32, if there are vectors. All but arrays are addresses; `row` is int32.
    """
    thread = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    pieces = heads * lanes
    target = np.int64(quotient(np.uint64(thread), pieces))
    if target < num_targets:
        piece = np.int32(thread - target * pieces)
        first, last = span_of(indptr, target, num_edges)
        bytes_of_piece = 16 if kind == 0 else 32
        vector, to_vector = np.uint64(0), np.uint64(0)
        if vectors != 0:
            vector = vectors + np.uint64(
                (last_at_most(bounds, 0, bounds.shape[0] - 1, target) * pieces + piece) * bytes_of_piece
            )
            to_vector = to_vectors + np.uint64(thread * bytes_of_piece)
        of_piece = np.uint64(thread * 16)
        pull_query_16(to_queries + of_piece, to_vector, shares + np.uint64(piece // lanes * 4),
                      keys + np.uint64(piece * 16), queries + of_piece, vector, row, first, last, heads, pieces, slope,
                      kind)  # fmt: skip

"""Attention over many relations whose scores are made of rows of both ends of an edge, and its gradients.

With keys k and values v of sources and queries q of targets, score(e, h) is, of the columns of head h,

- of GATv2Conv: vector . leaky(k[row[e]] + q[t]), with a vector for each relation; values are the keys;
- of products: k[row[e]] . q[t]; values follow the keys in each row.

out[t] = sum over the edges e of t of alpha[e] * v[row[e]]; alpha is the softmax of `kernels/aggregate/softmax.py`. As
in `pull_attention.py`, gradients of keys and values are made by source, and then gradients of queries by target. No row
of an edge is stored. `vectors` of zero stands for products.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cuda, device_function, gpu_kernel
from pyg_direct.kernels.aggregate.pull_attention import find_relation, mask_of
from pyg_direct.kernels.aggregate.sum import NOWHERE, TO_ROW, find_item, quotient, span_of

attend_pair_16 = device_function("attend_pair_16", "u8 i4 u8 u8 u8 u8 u8 i8 i8 i4 i4 i4 i4 u4 f4 i4")
pull_key_16 = device_function("pull_key_16", "u8 i4 u8 u8 u8 u8 u8 u8 u8 u8 u8 i8 i8 i8 i4 i4 i4 i4 u4 f4 i4")
pull_query_16 = device_function("pull_query_16", "u8 u8 u8 u8 u8 u8 u8 i8 i8 i4 i4 f4 i4")


@gpu_kernel("u8 u8 u8 I[] u8 i8[] i8 i8 i4 i4 f4 i4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "pair_attention"),
            resident_blocks=4)  # fmt: skip
def attend_pairs_gpu(keys, queries, vectors, indptr, row, bounds, num_edges, num_targets, heads, lanes, slope, kind,
                     to_kind, alpha, out):  # fmt: skip
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
        mask = mask_of(lane, lanes, cuda.threadIdx.x & 31)
        first, last = span_of(indptr, target, num_edges)
        vector, weights = np.uint64(0), np.uint64(0)
        if vectors != 0:
            # A piece of 16 bytes takes four bytes of fp32 for each of its items.
            place = (find_relation(bounds, target) * pieces + piece) * (16 if kind == 0 else 32)
            vector = vectors + np.uint64(place)
        if alpha != 0:
            weights = alpha + np.uint64(head * 4)
        bytes_of_piece = 32 if kind != 0 and to_kind == 0 else 16
        attend_pair_16(out + np.uint64(thread * bytes_of_piece), to_kind, weights, keys + np.uint64(piece * 16),
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
        mask = mask_of(lane, lanes, cuda.threadIdx.x & 31)
        source, first, last, place, _ = find_item(indptr, num_edges, num_sources, slices, counts, item)
        if place != NOWHERE:
            relation = find_relation(bounds, source)
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
            vector = vectors + np.uint64((find_relation(bounds, target) * pieces + piece) * bytes_of_piece)
            to_vector = to_vectors + np.uint64(thread * bytes_of_piece)
        of_piece = np.uint64(thread * 16)
        pull_query_16(to_queries + of_piece, to_vector, shares + np.uint64(piece // lanes * 4),
                      keys + np.uint64(piece * 16), queries + of_piece, vector, row, first, last, heads, pieces, slope,
                      kind)  # fmt: skip

"""Messages of edges, made and summed for each target without storing a row for each, and their adjoint.

out[t] = scale(t) * sum over the edges e of t of relu(x[row[e]] + edge_rows[e]), with scale(t) as in
`kernels/aggregate/sum.py`. These are the messages of GINEConv (Hu et al., "Strategies for Pre-training Graph Neural
Networks", equation A.2). Rows are read in pieces of 16 bytes. For each item of a message the adjoint needs one bit,
which is set if the item is above zero.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, cuda, device_function, gpu_kernel
from pyg_direct.kernels.aggregate.sum import quotient, scale_of, span_of

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

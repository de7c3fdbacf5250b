"""Weighted sums of rows over the edges of each target, of which a softmax over these edges makes the weights.

out[t, f] = sum over the edges e of t of alpha[e, f // channels] * x[row[e], f], with alpha as `kernels/softmax.py` has
it, which is written too where it is asked for. A thread meets the edges of a target once: the largest score so far
makes the weights, and when a larger one comes, what was added up shrinks; at the end it is divided by the sum of the
weights.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.kernels.aggregate import quotient
from pyg_direct.kernels.jit import THREADS, cuda, device_function, gpu_kernel
from pyg_direct.kernels.span import span_of

attend_run_16 = device_function(
    "attend_run_16", "u8 u8 u8 u8 i4 u8 u8 u8 i8 i8 i8 i8 i4 i4 i4 i4 i4 f4 i4"
)  # fmt: skip


@gpu_kernel("u8 I[] u8 u8 i4 u8 u8 i8 i8 i8 i4 i4 i4 i4 f4 i4 u8 u8", I=("i4", "i8"), sources=("aggregate", "attend"),
            resident_blocks=4)  # fmt: skip
def attend_rows_gpu(x, indptr, ends, row, index_bytes, scores, own, num_edges, num_targets, num_runs, run, lanes,
                         heads, loops, slope, kind, alpha, out):  # fmt: skip
    """For heads of `lanes` times 16 bytes, aligned; all but `indptr` by address.

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

"""Weighted choice on a GPU: short rows by a thread each, long ones by a block that narrows the scores down.

A block finds the k-th smallest score digit by digit: it counts how many scores begin with each digit, and goes on among
those that begin as the k-th does. The picks are those of `kernels/sampling/weighted.py` but for equal scores, which
draws of 52 bits do not give in practice.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import SIMULATED, THREADS, body, cuda, gpu_kernel
from pyg_direct.kernels.sampling.excluded_edges import first_excluded, position_of
from pyg_direct.kernels.sampling.weighted import order_of, pick_weighted_row, score_of, sift_up, sort_heap
from pyg_direct.kernels.sampling.worklist import (
    BATCH,
    OWN_START,
    count_all_items,
    find_entry,
    frontier_place,
    is_weighted,
    row_key,
)

# Edges above which a block reads a row together.
LONG_ROW = 16 if SIMULATED else 1024
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_HIGHEST_DIGIT = 56


@body
def is_long(size, replace):
    """Whether a row is read by a block; draws with replacement read few edges of any row."""
    return replace == 0 and size > LONG_ROW


@gpu_kernel("i8 i8 i8[] W[] f8[] i8[] i8[] i8[] i8[] i8[] i8[] f8[] i8[]", W=("f4", "f8"))
def pick_weighted_gpu(hop, replace, work, edge_weight, weight_before, excluded, rows, trees, starts, sizes, offsets,
                      scores, draws):  # fmt: skip
    """The places of items that choose by weight; a thread reads a row, unless that is long."""
    item = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    num_items = count_all_items(work)
    while item < num_items:
        entry = find_entry(work, item)
        count = offsets[item + 1] - offsets[item]
        if count > 0 and is_weighted(work, entry, sizes[item], replace) and not is_long(sizes[item], replace):
            place = frontier_place(work, entry, item)
            own_key = row_key(work, entry, hop, trees, place)
            base = work[entry + BATCH] * edge_weight.shape[0]
            node = rows[place] - work[entry + OWN_START]
            pick_weighted_row(own_key, node, starts[item], sizes[item], count, replace, edge_weight, weight_before,
                              excluded, base, np.int64(0), scores, draws, offsets[item])  # fmt: skip
        item += np.int64(cuda.gridDim.x) * THREADS


@body
def find_digit(counts, wanted):
    """(digit of the score that is number `wanted` from below, scores with lower digits)."""
    before = np.int64(0)
    digit = np.int64(0)
    while before + counts[digit] < wanted:
        before += counts[digit]
        digit += 1
    return digit, before


@gpu_kernel("i8 i8[] W[] i8[] i8[] i8[] i8[] i8[] i8[] f8[] i8[]", W=("f4", "f8"))
def pick_long_rows_gpu(hop, work, edge_weight, excluded, rows, trees, starts, sizes, offsets, scores, draws):
    """The places of items without replacement whose rows are long; a block takes an item at a time."""
    counts = cuda.shared.array(_DIGITS, np.int32)
    # The digits found so far, how many scores are wanted among those that begin with them, and picks so far.
    found = cuda.shared.array(3, np.int64)
    tid = np.int64(cuda.threadIdx.x)
    item = np.int64(cuda.blockIdx.x)
    num_items = count_all_items(work)
    while item < num_items:
        entry = find_entry(work, item)
        size, count, at = sizes[item], offsets[item + 1] - offsets[item], offsets[item]
        if count > 0 and is_long(size, 0) and is_weighted(work, entry, size, 0):
            place = frontier_place(work, entry, item)
            row, own_key = rows[place] - work[entry + OWN_START], row_key(work, entry, hop, trees, place)
            base = work[entry + BATCH] * edge_weight.shape[0]
            first = first_excluded(excluded, base + starts[item])
            if tid == 0:
                found[0], found[1], found[2] = 0, count, 0
            shift = np.int64(_HIGHEST_DIGIT)
            is_narrowed = False
            while not is_narrowed:
                digit = tid
                while digit < _DIGITS:
                    counts[digit] = 0
                    digit += THREADS
                cuda.syncthreads()
                prefix = found[0]
                edge = tid
                while edge < size:
                    weight = edge_weight[position_of(excluded, first, base, starts[item], edge)]
                    if weight > 0:
                        order = order_of(score_of(own_key, row, edge, weight))
                        if shift == _HIGHEST_DIGIT or order >> (shift + _DIGIT_BITS) == prefix:
                            cuda.atomic.add(counts, (order >> shift) & (_DIGITS - 1), 1)
                    edge += THREADS
                cuda.syncthreads()
                wanted = found[1]
                digit, before = find_digit(counts, wanted)
                prefix = (prefix << _DIGIT_BITS) + digit
                is_narrowed = shift == 0 or before + counts[digit] == wanted
                cuda.syncthreads()
                if tid == 0:
                    found[0], found[1] = prefix, wanted - before
                if not is_narrowed:
                    shift -= _DIGIT_BITS
            cuda.syncthreads()
            edge = tid
            while edge < size:
                weight = edge_weight[position_of(excluded, first, base, starts[item], edge)]
                if weight > 0:
                    score = score_of(own_key, row, edge, weight)
                    if order_of(score) >> shift <= found[0]:
                        slot = cuda.atomic.add(found, 2, 1)
                        if slot < count:
                            scores[at + slot], draws[at + slot] = score, edge
                edge += THREADS
            cuda.syncthreads()
            if tid == 0:
                for slot in range(count):
                    sift_up(scores, draws, at, slot, scores[at + slot], draws[at + slot])
                sort_heap(scores, draws, at, count)
            cuda.syncthreads()
        item += cuda.gridDim.x

"""Offsets of the runs of ascending ids, compressed rows from an edge list, and segments in another order.

out[r] = number of ids below r (`find_offsets_gpu`). Each offset is searched for separately, because ids may skip long
ranges: no edge of a batch leads to the nodes that were found last.

Compressed rows are a stable counting sort; each chunk of the loop owns a range of rows.

`move_segments_gpu` puts segments of an array into another order: items begins[s], begins[s] + 1, ... of segment s move
by shifts[s]. On a CPU `copy_runs_cpu` copies the segments of any number of arrays.
"""

from __future__ import annotations

import numpy as np

from pyg_direct.compiler.jit import THREADS, body, cpu_kernel, cpu_sequence, cuda, gpu_kernel, prange, system_function
from pyg_direct.kernels.binary_search import first_not_below
from pyg_direct.kernels.sampling.uniform import find_row

# Odd, so that no two numbers share a product: the multipliers of splitmix64 and of xxHash64.
_OF_PLACE, _OF_SOURCE, _OF_TARGET = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xC2B2AE3D27D4EB4F))
_SHIFT = np.uint64(29)

# (destination address, source address, number of bytes) -> the destination.
memcpy = system_function("memcpy", "i8 i8 i8 i8")


@gpu_kernel("I[] I[]", I=("i4", "i8"))
def find_offsets_gpu(ordered, out):
    row = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while row < out.shape[0]:
        out[row] = first_not_below(ordered, 0, ordered.shape[0], row)
        row += np.int64(cuda.gridDim.x) * THREADS


@body
def mark_run(row, target, first, last):
    """Hash of these edges, at their positions."""
    mark, ids, ends = np.uint64(0), row[first:last], target[first:last]
    for e in range(ids.shape[0]):
        mixed = np.uint64(ids[e]) * _OF_SOURCE + np.uint64(ends[e]) * _OF_TARGET + np.uint64(first + e) * _OF_PLACE
        mark += mixed ^ (mixed >> _SHIFT)
    return mark


@cpu_sequence
def mark_edges_cpu(row, target, out):
    out[0] = mark_run(row, target, 0, row.shape[0])


@cpu_sequence
def read_hops_cpu(row, target, hops, marks):
    """`hops` [H, 3]: end of each hop, and bounds of its sources and targets. `marks` [H + 1]: hashes of the edges up to
    each end, and the number of edges that are out of order or bounds.
    """
    begin, mark, wrong = 0, np.uint64(0), np.uint64(0)
    for h in range(hops.shape[0]):
        end, sources, targets = hops[h, 0], np.uint64(hops[h, 1]), np.uint64(hops[h, 2])
        mark += mark_run(row, target, begin, end)
        marks[h] = mark
        ids, ends = row[begin:end], target[begin:end]
        for e in range(ids.shape[0]):
            # As unsigned numbers, negative ones are larger than all others.
            wrong += np.uint64(np.uint64(ids[e]) >= sources) + np.uint64(np.uint64(ends[e]) >= targets)
        begin = end
    for e in range(1, target.shape[0]):
        wrong += np.uint64(target[e] < target[e - 1])
    marks[hops.shape[0]] = wrong


@cpu_kernel
def count_rows_cpu(rows, chunks, counts):
    """counts[r] += number of edges of row r."""
    share = (counts.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        low, high = c * share, min((c + 1) * share, counts.shape[0])
        for e in range(rows.shape[0]):
            if rows[e] >= low and rows[e] < high:
                counts[rows[e]] += 1


@cpu_kernel
def place_edges_cpu(rows, columns, chunks, cursors, indices, edge_ids):
    """Put each edge at its row's cursor, in the order given; `cursors` starts as indptr[:-1] and is consumed."""
    share = (cursors.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        low, high = c * share, min((c + 1) * share, cursors.shape[0])
        for e in range(rows.shape[0]):
            row = rows[e]
            if row >= low and row < high:
                at = cursors[row]
                cursors[row] = at + 1
                indices[at] = columns[e]
                edge_ids[at] = e


@cpu_kernel
def order_edges_cpu(rows, chunks, cursors, edge_ids):
    """As `place_edges_cpu`, only for the ids of the edges."""
    share = (cursors.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        low, high = c * share, min((c + 1) * share, cursors.shape[0])
        for e in range(rows.shape[0]):
            row = rows[e]
            if row >= low and row < high:
                edge_ids[cursors[row]] = e
                cursors[row] += 1


@cpu_kernel
def copy_runs_cpu(runs):
    """Copy runs of bytes, int64 `[n, 3]`: destination address, source address, and number."""
    for i in prange(runs.shape[0]):
        memcpy(runs[i, 0], runs[i, 1], runs[i, 2])


@gpu_kernel("i8[] i8[] i8[] i8[]")
def move_segments_gpu(begins, shifts, items, out):
    i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
    while i < items.shape[0]:
        out[i + shifts[find_row(begins, shifts.shape[0], i)]] = items[i]
        i += np.int64(cuda.gridDim.x) * THREADS

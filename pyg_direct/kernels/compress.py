"""Compressed rows from an edge list: a stable counting sort, each chunk of the loop owning a range of rows."""

from __future__ import annotations

from pyg_direct.kernels.jit import cpu_kernel, prange


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
    """As `place_edges_cpu`, for the ids of the edges alone."""
    share = (cursors.shape[0] + chunks - 1) // chunks
    for c in prange(chunks):
        low, high = c * share, min((c + 1) * share, cursors.shape[0])
        for e in range(rows.shape[0]):
            row = rows[e]
            if row >= low and row < high:
                edge_ids[cursors[row]] = e
                cursors[row] += 1

"""Compressed rows of an edge list."""

from __future__ import annotations

from collections.abc import Sequence


def compress(rows: Sequence[int], columns: Sequence[int], num_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """(indptr, indices, edge ids): the edges of a row keep the order of the list, their ids are places in it."""
    indptr, indices, edge_ids = [0], [], []
    for node in range(num_nodes):
        for edge, (row, column) in enumerate(zip(rows, columns, strict=True)):
            if row == node:
                indices.append(column)
                edge_ids.append(edge)
        indptr.append(len(indices))
    return indptr, indices, edge_ids

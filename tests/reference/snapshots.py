"""Snapshots as dictionaries and dense matrices: their shared edges, and the meaning of their aggregation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Edge = tuple[int, int]


def merge(edge_index: np.ndarray, weight: np.ndarray | None) -> dict[Edge, float]:
    """Weight of each (target, source), parallel edges added up."""
    edges: dict[Edge, float] = {}
    for e, (source, target) in enumerate(edge_index.T.tolist()):
        edges[target, source] = edges.get((target, source), 0.0) + (1.0 if weight is None else float(weight[e]))
    return edges


def unite(snapshots: Sequence[set[Edge]]) -> dict[Edge, int]:
    """Each edge of any snapshot, ascending, with a bit for each snapshot that has it."""
    every = sorted(set().union(*snapshots))
    return {edge: sum(1 << t for t, edges in enumerate(snapshots) if edge in edges) for edge in every}


def slices(rows: Sequence[int], size: int = 32) -> list[tuple[int, int, int]]:
    """(row, first, last) of slices of at most `size` edges of ascending rows."""
    out, first = [], 0
    while first < len(rows):
        last = first
        while last < len(rows) and rows[last] == rows[first] and last - first < size:
            last += 1
        out.append((rows[first], first, last))
        first = last
    return out


def matrix(edge_index: np.ndarray, weight: np.ndarray | None, num_nodes: int) -> np.ndarray:
    """Dense [target, source]."""
    dense = np.zeros((num_nodes, num_nodes))
    for (target, source), value in merge(edge_index, weight).items():
        dense[target, source] = value
    return dense


def gcn(edge_index: np.ndarray, weight: np.ndarray | None, num_nodes: int, improved: bool = False,
        loops: bool = True) -> np.ndarray:  # fmt: skip
    """Dense matrix of GCNConv."""
    source, target = edge_index
    if loops:
        fill = 2.0 if improved and weight is not None else 1.0
        own = np.full(num_nodes, fill)
        for e in np.flatnonzero(source == target):
            own[source[e]] = 1.0 if weight is None else weight[e]
        kept = source != target
        dense = matrix(edge_index[:, kept], None if weight is None else weight[kept], num_nodes) + np.diag(own)
    else:
        dense = matrix(edge_index, weight, num_nodes)
    degree = dense.sum(1)
    with np.errstate(divide="ignore"):
        scale = np.where(degree == 0, 0, degree**-0.5)
    return scale[:, None] * dense * scale


def aggregate(matrices: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
    """x [N, S, F] multiplied, snapshot by snapshot."""
    return np.stack([m @ x[:, t] for t, m in enumerate(matrices)], axis=1)

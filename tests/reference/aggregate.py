"""Reduction of rows over the edges of each target, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def edges_of(indptr: Sequence[int], target: int, num_edges: int) -> range:
    """Edges of a target; offsets above the number of edges are cut."""
    return range(min(indptr[target], num_edges), min(indptr[target + 1], num_edges))


def aggregate(x: np.ndarray, indptr: Sequence[int], row: Sequence[int], reduce: str = "sum",
              weight: np.ndarray | None = None) -> np.ndarray:  # fmt: skip
    """Rows x[row[e]] times weight[e] reduced over the edges of each target; zeros for a target without edges."""
    out = np.zeros((len(indptr) - 1, x.shape[1]), x.dtype)
    for t in range(len(out)):
        messages = [x[row[e]] if weight is None else x[row[e]] * spread(weight[e], x.shape[1])
                    for e in edges_of(indptr, t, len(row))]  # fmt: skip
        if messages:
            out[t] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[reduce](messages, axis=0)
    return out


def spread(weight: np.ndarray, width: int) -> np.ndarray:
    """The weights of heads, one for each of their columns."""
    return np.repeat(np.atleast_1d(weight), width // np.size(weight))


def weight_gradient(grad: np.ndarray, x: np.ndarray, indptr: Sequence[int], row: Sequence[int], reduce: str,
                    weight: np.ndarray) -> np.ndarray:  # fmt: skip
    """Gradient in the weights: of each head, the product of a row and the target's gradient over its columns."""
    out = np.zeros_like(weight)
    for t in range(len(grad)):
        edges = edges_of(indptr, t, len(row))
        for e in edges:
            columns = (grad[t] * x[row[e]]).reshape(weight.shape[1], -1)
            out[e] = columns.sum(1) / (len(edges) if reduce == "mean" else 1)
    return out


def gradient(grad: np.ndarray, x: np.ndarray, indptr: Sequence[int], row: Sequence[int], reduce: str = "sum",
             weight: np.ndarray | None = None) -> np.ndarray:  # fmt: skip
    """Gradient in `x`; the gradient of a maximum or minimum is shared among equals, including torch's initial zero."""
    out = np.zeros_like(x)
    best = aggregate(x, indptr, row, reduce) if reduce in ("max", "min") else None
    for t in range(len(grad)):
        edges = edges_of(indptr, t, len(row))
        if best is not None:
            equals = np.sum([x[row[e]] == best[t] for e in edges], axis=0) + (best[t] == 0)
        for e in edges:
            share = np.ones(x.shape[1]) if weight is None else spread(weight[e], x.shape[1])
            if reduce == "mean":
                share = share / len(edges)
            if best is not None:
                share = (x[row[e]] == best[t]) / equals
            out[row[e]] += grad[t] * share
    return out

"""Softmax over the edges of each target, in plain NumPy."""

import numpy as np


def softmax(source, target, edge, indptr, row, slope=1.0, loops=False):
    """Weights `[E, H]` of edges in float64; scores that are None are zeros."""
    num_edges = len(row)
    heads = next(scores for scores in (source, target, edge) if scores is not None).shape[1]
    alpha = np.zeros((num_edges, heads))
    for t in range(len(indptr) - 1):
        first, last = min(indptr[t], num_edges), min(indptr[t + 1], num_edges)
        counted = [e for e in range(first, last) if not loops or e == last - 1 or row[e] != t]
        for h in range(heads):
            scores = []
            for e in counted:
                score = sum(part[at, h] for part, at in ((source, row[e]), (target, t), (edge, e)) if part is not None)
                scores.append(score if score > 0 else slope * score)
            shares = np.exp(np.array(scores) - max(scores, default=0))
            for e, share in zip(counted, shares, strict=True):
                alpha[e, h] = share / (shares.sum() + 1e-16)
    return alpha

"""Products of rows with small matrices, one number after the other."""

import numpy as np


def multiply_rows(x, weight, bias=None):
    """`x` [B, R, K], `weight` [B, K, N], `bias` [N]: [B, R, N]."""
    out = np.zeros((*x.shape[:2], weight.shape[2]))
    for b, r, n in np.ndindex(out.shape):
        out[b, r, n] = sum(float(x[b, r, k]) * float(weight[b, k, n]) for k in range(x.shape[2]))
        out[b, r, n] += 0.0 if bias is None else float(bias[n])
    return out


def multiply_columns(x, grad):
    """`x` [B, R, K], `grad` [B, R, N]: the gradient [B, K, N] of what rows were multiplied with."""
    out = np.zeros((x.shape[0], x.shape[2], grad.shape[2]))
    for b, k, n in np.ndindex(out.shape):
        out[b, k, n] = sum(float(x[b, r, k]) * float(grad[b, r, n]) for r in range(x.shape[1]))
    return out

"""Batch normalisation of what is rectified, in a loop over the snapshots' columns that a CPU does once (see
`kernels/norm.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyg_direct.kernels import norm as kernels
from pyg_direct.ops.launch import run_cpu, threads_for

# Numbers up to which the loop, in one thread, takes less time than torch, which shares rows out to several.
_FEW = 2**17
_NONE = np.empty(0, np.float32)
_NOWHERE = np.empty((0, 0, 0), np.float32)


def suits_loop(rows: Tensor) -> bool:
    """Whether `normalise` takes rows `[N, W, H]`, and less time for them than torch."""
    return rows.numel() <= _FEW and rows.dtype == torch.float32 and not rows.is_cuda


def normalise(rows: Tensor, scale: Tensor, shift: Tensor, eps: float, beside: Tensor, at: int,
              norm: nn.BatchNorm1d | None = None, out: Tensor | None = None) -> Tensor:  # fmt: skip
    """Normalise what checked contiguous fp32 rows `[N, W, H]` on a CPU are rectified, over the nodes of each snapshot;
    mean and 1 / standard deviation, `[2, W, H]`. Has no gradient.

    Args:
        rows: The snapshots of a node side by side; left as they are.
        scale, shift: Of what is normalised, `[H]`.
        eps: What is added to variances.
        beside: Where that goes to by time, to columns from `at` on: contiguous `[W, N, C]`.
        at: First of these columns.
        norm: Whose running statistics see the snapshot, the only one.
        out: Where it goes to as well, like `rows`.
    """
    _, window, size = rows.shape
    moments = rows.new_empty(2, window, size)
    running: tuple[Any, Any, Any] = _NONE, _NONE, 0.0
    if norm is not None:
        assert window == 1, "statistics see one snapshot after the other"
        running = norm.running_mean, norm.running_var, norm.momentum
    with threads_for(0):
        run_cpu(kernels.normalise_cpu, rows, scale.detach(), shift.detach(), eps, *running, moments,
                _NOWHERE if out is None else out, beside, at)  # fmt: skip
    return moments

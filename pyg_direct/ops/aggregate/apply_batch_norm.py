"""Batch normalization after a ReLU on a GPU, in one pass over the snapshots' columns.

See `kernels/aggregate/batch_norm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyg_direct.kernels.aggregate import batch_norm as kernels
from pyg_direct.ops.run_kernel import MAX_BLOCKS, is_heard, is_ordinary, run_gpu, runs_on_gpu

# Nodes up to which a GPU's blocks, each with all rows of its columns, take less time than torch's.
_FEW_NODES = 2**12


def suits_grid(like: Tensor, shape: Sequence[int]) -> bool:
    """Report whether `normalise_on_gpu` takes rows of this shape `[N, W, H]`, in less time than torch."""
    return (
        like.dtype == torch.float32
        and runs_on_gpu(like)
        and shape[0] <= _FEW_NODES
        and 0 < math.prod(shape) < 2**31
        and is_ordinary()
        and not is_heard(like)
    )


def normalise_on_gpu(rows: Tensor, scale: Tensor, shift: Tensor, eps: float,
                     norm: nn.BatchNorm1d | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normalize ReLU of checked contiguous fp32 rows `[N, W, H]` over the nodes of each snapshot. Return the results,
    like `rows`, and means and 1 / standard deviations, `[2, W, H]`. Has no gradient.

    Args:
        rows: The snapshots of a node side by side; left unchanged.
        scale, shift: Parameters of the normalization, `[H]`.
        norm: Module whose running statistics and count see the snapshot, the only one.
    """
    num_nodes, window, size = rows.shape
    out, moments = torch.empty_like(rows), rows.new_empty(2, window, size)
    running: tuple[Any, ...] = rows.new_empty(0), rows.new_empty(0), rows.new_empty(0, dtype=torch.int64), 0.0
    if norm is not None:
        assert window == 1, "statistics see one snapshot after the other"
        running = norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum
    run_gpu(kernels.normalise_gpu, _count_blocks(window, size), rows, scale.detach().contiguous(),
            shift.detach().contiguous(), eps, *running,
            num_nodes, window, size, moments, out)  # fmt: skip
    return out, moments


def pull_normalised(grad: Tensor, more: Tensor | None, rows: Tensor, moments: Tensor, scale: Tensor,
                    begin: int = 0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return gradients of `rows`, for snapshots from `begin` on, on a GPU, from the gradients of the normalized rows.

    Args:
        grad: Gradients of S snapshots, `[N, S, H]`.
        more: Gradients to add to it, if any.

    Returns:
        `[N, S, H]`; then the gradients of scale and shift, and the sums of the former over nodes, `[3, S, H]`.
    """
    num_nodes, seen, size = grad.shape
    out, parts = torch.empty_like(grad), grad.new_empty(3, seen, size)
    more = grad.new_empty(0) if more is None else more
    run_gpu(kernels.pull_normalise_gpu, _count_blocks(seen, size), grad, more, rows, moments,
            scale.detach().contiguous(), num_nodes, rows.shape[1], begin, seen, size, out, parts)  # fmt: skip
    return out, parts


def _count_blocks(window: int, size: int) -> int:
    return min(MAX_BLOCKS, window * -(-size // kernels.GPU_COLUMNS))

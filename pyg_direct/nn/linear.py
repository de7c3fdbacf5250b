"""Products of rows with matrices at the end of convolutions; their bias takes little of the backward pass.

On an H200 torch adds up the gradients of 107,000 rows of 256 in 117 us, and multiplies them by ones in 35.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.ops.run_kernel import is_heard, runs_on_gpu
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

_DTYPES = (torch.float32, torch.float64)
# Ones on a GPU, by device, stream and dtype: to make them again takes the host longer than the product with them.
_ONES: dict[tuple[int, int, torch.dtype], Tensor] = {}
_MOST_ONES = 1 << 20
# torch 2.8 and later.
_has_wide_products = hasattr(torch.ops.aten.mm, "dtype")


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor | None = None,
             own_weight: Tensor | None = None) -> Tensor:  # fmt: skip
    """Compute rows @ weight.T + bias + own @ own_weight.T, without a pass over memory for the second sum."""
    given = [part for part in (rows, weight, bias, own, own_weight) if part is not None]
    if (
        bias is not None
        and bias.requires_grad
        and torch.is_grad_enabled()
        and runs_on_gpu(rows)
        and rows.dtype in _DTYPES
        and all(part.dtype == rows.dtype for part in given)
        and not torch.is_autocast_enabled(rows.device.type)
    ):
        out: Tensor = _Products.apply(rows, weight, bias, own, own_weight)
        return out
    return multiply_plainly(rows, weight, bias, own, own_weight)


def multiply_plainly(rows: Tensor, weight: Tensor, bias: Tensor | None, own: Tensor | None,
                     own_weight: Tensor | None) -> Tensor:  # fmt: skip
    """Compute the same, with gradients by torch."""
    out = F.linear(rows, weight, bias)
    return out if own is None or own_weight is None else out.addmm_(own, own_weight.t())


def multiply_exactly(rows: Tensor, wide: Tensor) -> Tensor:
    """Multiply rows `[N, K]` by a matrix `[K, M]` of their dtype or fp32, which is not rounded; the result has the
    matrix's dtype.

    The matrix is the sum of two of bfloat16, whose products fp32 adds up: exact to 16 bits of its numbers.
    """
    with torch.autocast(rows.device.type, enabled=False):
        if rows.dtype == wide.dtype:
            return rows @ wide
        if not _has_wide_products or rows.dtype != torch.bfloat16 or not rows.is_cuda or torch.is_grad_enabled():
            return rows.to(wide.dtype) @ wide
        high = wide.to(rows.dtype)
        both = torch.mm(rows, torch.cat([high, (wide - high).to(rows.dtype)], dim=1), out_dtype=torch.float32)
    return both[:, : wide.shape[1]] + both[:, wide.shape[1] :]


def add_up(grad: Tensor) -> Tensor:
    """Sum the rows of a gradient, which gives the gradient of a bias."""
    return torch.mv(grad.t(), _find_ones(grad)) if runs_on_gpu(grad) else grad.sum(0)


def _find_ones(grad: Tensor) -> Tensor:
    """Return a one for each row. A captured graph has its own, because it may outlive these."""
    count = grad.shape[0]
    if count > _MOST_ONES or not grad.is_cuda or is_heard(grad) or torch.cuda.is_current_stream_capturing():
        return grad.new_ones(count)
    index = grad.get_device()
    key = index, torch._C._cuda_getCurrentRawStream(index), grad.dtype
    ones = _ONES.get(key)
    if ones is None or ones.shape[0] < count:
        with ordinary_tensors():
            _ONES[key] = ones = grad.new_ones(1 << max(0, count - 1).bit_length())
    return ones.narrow(0, 0, count)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, own: Tensor | None,
                own_weight: Tensor | None) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weight, own, own_weight)
        return multiply_plainly(rows, weight, bias, own, own_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, own, own_weight = ctx.saved_tensors
        wants = ctx.needs_input_grad
        turned = grad.t()
        return (
            grad @ weight if wants[0] else None,
            turned @ rows if wants[1] else None,
            add_up(grad) if wants[2] else None,
            grad @ own_weight if wants[3] else None,
            turned @ own if wants[4] else None,
        )

"""Products of many rows with small matrices, differentiable: `kernels/product.py` on a GPU, and torch for all others.

A product of cuBLAS of rows of 4 to 32 numbers runs at a third to two thirds of the rate at which a GPU copies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_direct.kernels import product as kernels
from pyg_direct.kernels.jit import SIMULATED, THREADS
from pyg_direct.ops.launch import full_grid, run_gpu, runs_on_gpu

# Rows, and numbers of a matrix, from which and up to which our kernel is taken; wide matrices are the tensor cores'.
_LEAST = 2**14
_MOST_NUMBERS, _MOST_WIDTH = 2**12, 128
# Rows that a block stages at once, at most.
_ROWS = 8 if SIMULATED else 256


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_turned: bool = False) -> Tensor:
    """Rows times a matrix, or batches of them times matrices of their own; gradients for all three arguments.

    Args:
        x: `[..., K]`, or `[B, R, K]` of batches.
        weight: `[K, N]`, or `[B, K, N]` of batches; with `is_turned` `[N, K]` or `[B, N, K]`, as of `nn.Linear`.
        bias: `[N]`, or None.
        is_turned: See there.

    Returns:
        `[..., N]`, or `[B, R, N]` of batches.
    """
    if is_small(x, *weight.shape[-2:]):
        batched = weight if weight.dim() == 3 else weight.unsqueeze(0)
        rows = x if weight.dim() == 3 else x.reshape(1, -1, x.shape[-1])
        out: Tensor = _Product.apply(rows, batched, bias, is_turned)
        return out if weight.dim() == 3 else out.view(*x.shape[:-1], out.shape[-1])
    turned = weight if is_turned else weight.transpose(-1, -2)
    if weight.dim() == 2:
        return torch.nn.functional.linear(x, turned, bias)
    out = torch.bmm(x, turned.transpose(1, 2))
    return out if bias is None else out + bias


def pull_matrix(x: Tensor, grad: Tensor, *, is_turned: bool = False,
                has_bias: bool = True) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the matrix, `[K, N]` or with `is_turned` `[N, K]`, and with `has_bias` `[N]` of the bias.

    Args:
        x: Rows `[R, K]`.
        grad: Gradients `[R, N]` of their products.
        is_turned, has_bias: See there.
    """
    if is_small(x, x.shape[1], grad.shape[1]):
        of_weight, of_bias = multiply_columns(x.unsqueeze(0), grad.unsqueeze(0), has_bias)
        return of_weight[0].t().contiguous() if is_turned else of_weight[0], of_bias
    return grad.t() @ x if is_turned else x.t() @ grad, grad.sum(0) if has_bias else None


def is_small(x: Tensor, depth: int, width: int) -> bool:
    """Whether our kernel takes rows `x` times a matrix of this size."""
    if not runs_on_gpu(x) or x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type):
        return False
    least, most = min(depth, width), max(depth, width)
    if least == 0 or x.numel() < _LEAST * x.shape[-1]:
        return False
    return most <= _MOST_WIDTH and kernels.padded_width(depth) * kernels.padded_width(width) <= _MOST_NUMBERS


class _Product(torch.autograd.Function):
    """`x` `[B, R, K]`, `weight` `[B, K, N]` or turned, `bias` `[N]` or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_turned: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.is_turned, ctx.has_bias = is_turned, bias is not None
        return _multiply(x, weight, bias, is_turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = None, None, None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(grad, weight, None, not ctx.is_turned)
        wants_bias = ctx.has_bias and ctx.needs_input_grad[2]
        if ctx.needs_input_grad[1] or wants_bias:
            of_weight, of_bias = multiply_columns(x, grad, wants_bias)
            of_weight = of_weight.transpose(1, 2) if ctx.is_turned else of_weight
        return of_x, of_weight, of_bias, None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, is_turned: bool) -> Tensor:
    x, weight = x.detach().contiguous(), weight.detach().contiguous()
    batches, num_rows, depth = x.shape
    width = weight.shape[1] if is_turned else weight.shape[2]
    out = x.new_empty(batches, num_rows, width)
    if out.numel() > 0:
        tile = _fit(kernels.padded_width(depth))
        each = _count_blocks(x, tile)
        bias = x.new_empty(0) if bias is None else bias.detach().contiguous()
        run_gpu(kernels.multiply_rows_gpu, batches * each, x.view(-1), weight.view(-1), bias, num_rows, depth, width,
                int(is_turned), tile, each, out.view(-1))  # fmt: skip
    return out


def multiply_columns(x: Tensor, grad: Tensor, has_ones: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients `[B, K, N]` of a matrix, of rows `x` `[B, R, K]` and `grad` `[B, R, N]`; with `has_ones` also the sum
    `[N]` of all rows of `grad`. Equal calls give equal results.
    """
    x, grad = x.detach().contiguous(), grad.contiguous()
    batches, num_rows, depth = x.shape
    width, deep = grad.shape[2], depth + int(has_ones)
    tile = _fit(max(kernels.padded_width(deep), kernels.padded_width(width)))
    each = _count_blocks(x, tile)
    teams = max(1, THREADS // (-(-deep // kernels.TILE) * -(-width // kernels.TILE)))
    parts = x.new_empty(batches, each, teams, deep, width)
    run_gpu(kernels.multiply_columns_gpu, batches * each, x.view(-1), grad.view(-1), x.new_empty(0), num_rows, depth,
            width, int(has_ones), tile, each, parts.view(-1))  # fmt: skip
    total = parts.sum((1, 2))
    return total[:, :depth], total[:, depth].sum(0) if has_ones else None


def _fit(stride: int) -> int:
    """Rows of so many numbers that a block stages at once: a multiple of four."""
    return min(_ROWS, kernels.STAGED // stride // 4 * 4)


def _count_blocks(x: Tensor, tile: int) -> int:
    """Blocks for each matrix."""
    return max(1, min(-(-x.shape[1] // tile), full_grid(x, 4) // x.shape[0]))

"""Scalar products of the rows at both ends of edges sorted by target, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.aggregate.operators import operators
from pyg_direct.ops.aggregate.sum import Transposed
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.run_kernel import runs_on_gpu

_kernels = operators()


def dot(x: Tensor, q: Tensor, indptr: Tensor, row: Tensor, target: Tensor, *, max_degree: int | None = None,
        deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Compute x[row[e], h] . q[target[e], h] for each edge and head, accumulated in fp32 or wider.

    Args:
        x: Rows of sources, floating `[N, H, C]`.
        q: Rows of targets, `[T, H, C]` of the same dtype.
        indptr: Offsets of the targets' edges, `[T + 1]` or longer; those above E count as E.
        row, target: Source and target of each edge, int32 or int64 `[E]`, sorted by target.
        max_degree, deterministic: See `aggregate`.

    Returns:
        `[E, H]` of the dtype of the rows.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    if x.dim() != 3 or q.dim() != 3 or x.shape[1:] != q.shape[1:]:
        raise ArgumentError(f"x and q must be [N, H, C] and [T, H, C], got {tuple(x.shape)} and {tuple(q.shape)}")
    if not x.is_floating_point() or x.dtype != q.dtype:
        raise ArgumentTypeError(f"x and q must be of one floating dtype, got {x.dtype} and {q.dtype}")
    if indptr.dtype not in INDEX_DTYPES or indptr.numel() <= q.shape[0]:
        raise ArgumentError(f"indptr must hold the {q.shape[0] + 1} offsets of the rows of q, got {indptr.numel()}")
    if row.shape != target.shape:
        raise ArgumentError(f"row and target must be of one shape, got {tuple(row.shape)} and {tuple(target.shape)}")
    check_same_device("q", q, "x", x)
    on_host = not (runs_on_gpu(x) or torch.compiler.is_compiling())
    row = check_ids("row", row, x.shape[0] if on_host else None)
    target = check_ids("target", target, q.shape[0] if on_host else None)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    degree = -1 if max_degree is None else max_degree
    made: Tensor = _Dot.apply(x.flatten(1), q.flatten(1), indptr, row, target, x.shape[1], degree, deterministic)
    return made


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, indptr: Tensor, row: Tensor, target: Tensor, heads: int,
                max_degree: int, deterministic: bool) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, q, indptr, row, target)
        ctx.options = max_degree, deterministic
        made: Tensor = _kernels.dot_rows(q, x, indptr, row, target, heads, False).to(x.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, q, indptr, row, target = ctx.saved_tensors
        max_degree, deterministic = ctx.options
        grad_x = grad_q = None
        if torch.is_grad_enabled():
            # By functions that torch can differentiate again.
            shape = *grad.shape, x.shape[1] // grad.shape[1]
            shares = grad.unsqueeze(-1)
            if ctx.needs_input_grad[0]:
                lifted = (q.index_select(0, target).view(shape) * shares).flatten(1)
                grad_x = x.new_zeros(x.shape).index_add(0, row, lifted)
            if ctx.needs_input_grad[1]:
                lifted = (x.index_select(0, row).view(shape) * shares).flatten(1)
                grad_q = q.new_zeros(q.shape).index_add(0, target, lifted)
            return grad_x, grad_q, *(None,) * 6
        if ctx.needs_input_grad[0] and (deterministic or not runs_on_gpu(grad)):
            by_source = Transposed.of(row, target, x.shape[0])
            grad_x = _kernels.sum_rows(q, by_source.indptr, by_source.target, grad.index_select(0, by_source.edge),
                                       x.shape[0], False, -1)  # fmt: skip
        elif ctx.needs_input_grad[0]:
            grad_x = _kernels.spread_rows(q.contiguous(), indptr, row, target, grad, x.shape[0], False, max_degree)
        if ctx.needs_input_grad[1]:
            grad_q = _kernels.sum_rows(x, indptr, row, grad, q.shape[0], False, max_degree)
        return grad_x, grad_q, *(None,) * 6

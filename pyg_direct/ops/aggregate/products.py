"""Products: of matrices by the faster of torch's libraries, and of the rows at both ends of edges, differentiable.

`torch.mm` calls MKL, which uses half the vector width on processors of other makers. oneDNN, with which torch runs its
own recurrent layers, does not, but its calls take longer to begin. On a GPU many rows of few columns are multiplied in
pieces.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.cache_folder import recall
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.ops.aggregate.operators import operators
from pyg_direct.ops.aggregate.sum_rows import Transposed
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_ids, check_same_device
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.profiling import time_call

# Products of numbers from which oneDNN may be faster.
_MANY = 2**21
# How many times as long `torch.mm` must take: the choice should not depend on other work of the machine at that moment.
_CLEARLY = 1.25
_ROUNDS = 20
# Pieces of rows whose products are added up in the end: a product of few columns uses few of a GPU's multiprocessors.
_PIECES = 512
_LEAST_ROWS = 64
# Sizes of the measurement.
_VERSION = 1


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.t() + bias` of `x` `[..., F]`, weight `[C, F]` and bias `[C]`, of one dtype: `[..., C]`.

    Has no gradient: for the passes of an `autograd.Function`.
    """
    if (
        x.dtype == torch.float32
        and x.numel() * weight.shape[0] >= _MANY
        and not x.is_cuda
        and torch._C._get_mkldnn_enabled()
        and _compare(torch.get_num_threads()) > _CLEARLY
    ):
        return _multiply_by_onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def multiply_columns(left: Tensor, right: Tensor) -> Tensor:
    """Return `left.t() @ right` of `[N, A]` and `[N, B]`: `[A, B]`. Has no gradient."""
    rows = left.shape[0] // _PIECES
    if rows < _LEAST_ROWS or not runs_on_gpu(left):
        return left.t() @ right
    whole = rows * _PIECES
    pieces = [side[:whole].unflatten(0, (_PIECES, rows)) for side in (left, right)]
    out = torch.bmm(pieces[0].mT, pieces[1]).sum(0)
    return torch.addmm(out, left[whole:].t(), right[whole:]) if whole < left.shape[0] else out


def _multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # For weights whose rows or columns are not contiguous it has only a loop that takes a thousand times as long.
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if x.stride(-1) != 1 and not x.mT.is_contiguous():
        x = x.contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@functools.cache
def _compare(num_threads: int) -> float:
    """Measure how many times as long as oneDNN `torch.mm` takes, at the first call on this machine; 0 without
    oneDNN.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return 0.0
    key = f"{torch.backends.cpu.get_cpu_capability()} x{num_threads}, torch {torch.__version__}, {_VERSION}"
    ratio: float = recall("products", key, _measure, lambda kept: isinstance(kept, float) and kept > 0)
    return ratio


def _measure() -> float:
    x, weight = torch.ones(4096, 64, device="cpu"), torch.ones(96, 64, device="cpu")
    least = [math.inf, math.inf]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            # In turns, because other work of the machine comes and goes.
            for place, work in enumerate((F.linear, _multiply_by_onednn)):
                least[place] = min(least[place], time_call(partial(work, x, weight)))
    return least[0] / least[1]


_kernels = operators()


def dot(x: Tensor, q: Tensor, indptr: Tensor, row: Tensor, target: Tensor, *, max_degree: int | None = None,
        transposed: Transposed | None = None, deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Compute x[row[e], h] . q[target[e], h] for each edge and head, accumulated in fp32 or wider.

    Args:
        x: Rows of sources, floating `[N, H, C]`.
        q: Rows of targets, `[T, H, C]` of the same dtype.
        indptr: Offsets of the targets' edges, `[T + 1]` or longer; those above E count as E.
        row, target: Source and target of each edge, int32 or int64 `[E]`, sorted by target.
        max_degree, transposed, deterministic: See `aggregate`.

    Returns:
        `[E, H]` of the dtype of the rows.
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
    made: Tensor = _Dot.apply(x.flatten(1), q.flatten(1), indptr, row, target, transposed, x.shape[1], degree,
                             deterministic)  # fmt: skip
    return made


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, indptr: Tensor, row: Tensor, target: Tensor,
                transposed: Transposed | None, heads: int, max_degree: int, deterministic: bool) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, q, indptr, row, target)
        ctx.by_source = transposed
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
            return grad_x, grad_q, *(None,) * 7
        by_source = ctx.by_source
        if ctx.needs_input_grad[0] and (by_source is not None or deterministic or not runs_on_gpu(grad)):
            by_source = Transposed.of(row, target, x.shape[0]) if by_source is None else by_source
            grad_x = _kernels.sum_rows(q, by_source.indptr, by_source.target, grad.index_select(0, by_source.edge),
                                       x.shape[0], False, -1)  # fmt: skip
        elif ctx.needs_input_grad[0]:
            grad_x = _kernels.spread_rows(q.contiguous(), indptr, row, target, grad, x.shape[0], False, max_degree)
        if ctx.needs_input_grad[1]:
            grad_q = _kernels.sum_rows(x, indptr, row, grad, q.shape[0], False, max_degree)
        return grad_x, grad_q, *(None,) * 7

"""Sums, means, maxima and minima of rows over edges sorted by target, differentiable (see `kernels/aggregate/sum.py`).

The kernels are `torch.library` operators, so that `torch.compile` sees them. None waits for the GPU, so that CUDA
graphs can hold them.

`sum_fused` makes and sums the messages of GINEConv at once on a GPU; `nn/conv/gine.py` has the same in torch functions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.kernels.aggregate import sum as kernels
from pyg_direct.kernels.aggregate.sum import LONG_ROW
from pyg_direct.kernels.local_ids import csr
from pyg_direct.ops.aggregate import operators
from pyg_direct.ops.aggregate.operators import PIECE, WIDE_KINDS, is_wide
from pyg_direct.ops.argument_checks import INDEX_DTYPES, check_choice, check_ids, check_same_device
from pyg_direct.ops.local_ids.build_csr import compress_ids, expand
from pyg_direct.ops.run_kernel import grid_of, is_heard, run_cpu, run_gpu, runs_on_gpu

REDUCES = ("sum", "mean", "max", "min")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_kernels = operators.operators()


class Transposed(NamedTuple):
    """Edges sorted by source, for gradients.

    Attributes:
        indptr: Offsets of the sources, `[N + 1]`.
        target: Target of each edge, `[E]`.
        edge: Position of each edge in the order by target, int64 `[E]`.
    """

    indptr: Tensor
    target: Tensor
    edge: Tensor

    @classmethod
    def of(cls, row: Tensor, target: Tensor, num_rows: int) -> Transposed:
        """Sort edges by source, keeping the order within each source; on a CPU by counting, in a third of the time."""
        if torch.compiler.is_compiling() or runs_on_gpu(row) or is_heard(row):
            ordered, edge = torch.sort(row, stable=True)
            return cls(compress_ids(ordered, num_rows), target.index_select(0, edge), edge)
        row, target = check_ids("row", row, num_rows).contiguous(), target.contiguous()
        indptr, edge = row.new_zeros(num_rows + 1), torch.empty(row.numel(), dtype=torch.int64, device="cpu")
        run_cpu(csr.count_rows_cpu, row, 1, indptr[1:])
        torch.cumsum(indptr[1:], 0, out=indptr[1:])
        made = cls(indptr, torch.empty_like(target), edge)
        run_cpu(csr.place_edges_cpu, row, target, 1, indptr[:-1].clone(), *made[1:])
        return made


def aggregate(x: Tensor, indptr: Tensor, row: Tensor | None = None, *, reduce: str = "sum",
              weight: Tensor | None = None, target: Tensor | None = None, num_targets: int | None = None,
              max_degree: int | None = None, transposed: Transposed | None = None,
              deterministic: bool | None = None) -> Tensor:  # fmt: skip
    """Reduce the rows `row[e]` of `x` over the edges e of each target; 0 for a target without edges.

    Args:
        x: Rows `[N, ...]` of fp32, fp16, bfloat16 (added up in fp32) or float64.
        indptr: Offsets of the targets' edges, int32 or int64 `[T + 1]` or longer. Offsets above E count as E, so that
            the offsets of a whole batch serve its first E edges.
        row: Source of each edge, int32 or int64 `[E]`; None if `x` has a row for each edge.
        reduce: `sum`, `mean`, `max` or `min`. As in torch, the gradient of a maximum is shared among equal rows, also
            if the maximum is zero.
        weight: Factor of each edge, `[E]`, or `[E, H]` for H heads of equal width; for `sum` and `mean`.
        target: Target of each edge, `[E]`, if it is there already; only gradients need it.
        num_targets: T, if `indptr` is longer.
        max_degree: Upper bound of the edges of a target, if known; it saves the search for long rows.
        transposed: The edges by source, if they are there already; only gradients need them.
        deterministic: Equal calls give equal gradients to the last bit, at the price of a sort; None asks torch.
            Results are always deterministic.

    Returns:
        `[T, ...]` of the dtype of `x`.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> indptr, row = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2])  # of targets 0, 1 and 2
        >>> aggregate(x, indptr, row, reduce="mean").tolist()
        [[1.5], [0.0], [4.0]]
    """
    num_targets = indptr.numel() - 1 if num_targets is None else num_targets
    num_edges = x.shape[0] if row is None else row.numel()
    row = check_rows(x, indptr, row, reduce, weight, num_targets, num_edges)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    # Widths are given, because torch cannot infer the width of zero rows.
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    if weight is not None:
        weight = weight.reshape(num_edges, math.prod(weight.shape[1:]))
        if weight.shape[1] == 0 or flat.shape[1] % weight.shape[1] != 0:
            raise ArgumentError(f"weight must have a divisor of {flat.shape[1]} columns, got {weight.shape[1]}")
    degree = -1 if max_degree is None else max_degree
    tracked = torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    if reduce in ("sum", "mean"):
        if tracked:
            out = _Sum.apply(flat, weight, indptr, row, target, transposed, num_targets, reduce == "mean", degree,
                             deterministic)  # fmt: skip
        else:
            out = _kernels.sum_rows(flat, indptr, row, weight, num_targets, reduce == "mean", degree)
    elif tracked:
        out = _Extreme.apply(flat, indptr, row, transposed, num_targets, reduce == "max", degree, deterministic)
    else:
        out = _kernels.extreme_rows(flat, indptr, row, num_targets, reduce == "max", degree)
    return out.reshape(num_targets, *x.shape[1:])


def check_rows(x: Tensor, indptr: Tensor, row: Tensor | None, reduce: str, weight: Tensor | None, num_targets: int,
               num_edges: int) -> Tensor | None:  # fmt: skip
    """Check that the arguments of `aggregate` fit, and return `row` on the device."""
    check_choice("reduce", reduce, REDUCES)
    if x.dtype not in DTYPES or x.dim() == 0:
        raise ArgumentTypeError(f"x must have rows of a floating dtype, got {x.dtype} with shape {tuple(x.shape)}")
    if indptr.dtype not in INDEX_DTYPES or indptr.dim() != 1:
        raise ArgumentTypeError(
            f"indptr must be int64 or int32 with shape [T + 1], got {indptr.dtype} with shape {tuple(indptr.shape)}"
        )
    if not 0 <= num_targets < indptr.numel():
        raise ArgumentError(f"num_targets must lie in [0, {indptr.numel() - 1}], got {num_targets}")
    check_same_device("indptr", indptr, "x", x)
    on_host = not (runs_on_gpu(x) or torch.compiler.is_compiling())
    if on_host and num_edges > int(indptr[num_targets]):
        raise ArgumentError(f"indptr must give every one of the {num_edges} edges a target below {num_targets=}")
    if row is not None:
        check_same_device("row", row, "x", x)
        row = check_ids("row", row, x.shape[0] if on_host else None)
    if weight is not None:
        check_same_device("weight", weight, "x", x)
        if reduce not in ("sum", "mean"):
            raise ArgumentError(f"weight must be None for reduce={reduce!r}, got a tensor")
        if weight.dim() not in (1, 2) or weight.shape[0] != num_edges:
            raise ArgumentError(f"weight must have shape [{num_edges}] or [{num_edges}, H], got {tuple(weight.shape)}")
    return row


def check_edges(indptr: Tensor, row: Tensor, num_sources: int, num_targets: int) -> None:
    """Check the edges of `aggregate` on a CPU."""
    if row.numel() > int(indptr[num_targets]):
        raise ArgumentError(f"indptr must give every one of the {row.numel()} edges a target below {num_targets=}")
    check_ids("row", row, num_sources)


def sum_known(x: Tensor, indptr: Tensor, row: Tensor | None, num_targets: int, mean: bool, max_degree: int | None
              ) -> Tensor:  # fmt: skip
    """Compute `aggregate` of rows `[N, F]` over edges that are known to fit; without a gradient."""
    work = _kernels if is_heard(x) else operators
    made: Tensor = work.sum_rows(x, indptr, row, None, num_targets, mean, -1 if max_degree is None else max_degree)
    return made


def spread_known(grad: Tensor, indptr: Tensor, row: Tensor, target: Tensor, num_rows: int, mean: bool,
                 max_degree: int | None, transposed: Transposed | None) -> Tensor:  # fmt: skip
    """Return the gradient of `sum_known` in its rows, `[N, F]`, in new memory.

    Args:
        grad: Gradients of the sums, `[T, F]`; overwritten.
        transposed: The edges by source; None for any order of additions, on a GPU.
    """
    if transposed is None:
        work = _kernels if is_heard(grad) else operators
        degree = -1 if max_degree is None else max_degree
        made: Tensor = work.spread_rows(grad, indptr, row, target, None, num_rows, mean, degree)
        return made
    if mean:
        # A target's share before its edges multiply it.
        grad = grad.div_(indptr[: grad.shape[0] + 1].clamp(max=row.numel()).diff().clamp_(min=1).unsqueeze(1))
    return sum_known(grad, transposed.indptr, transposed.target, num_rows, False, None)


class _Sum(torch.autograd.Function):
    """Sum or mean, linear in `x` and in `weight`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, indptr: Tensor, row: Tensor | None, target: Tensor | None,
                transposed: Transposed | None, num_targets: int, mean: bool, max_degree: int,
                deterministic: bool) -> Tensor:  # fmt: skip
        by_source = (None, None, None) if transposed is None else transposed
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, indptr, row, target, *by_source)
        ctx.shape, ctx.mean, ctx.deterministic = x.shape, mean, deterministic
        ctx.num_targets, ctx.max_degree = num_targets, max_degree
        return _kernels.sum_rows(x, indptr, row, weight, num_targets, mean, max_degree)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, indptr, row, target, *by_source = ctx.saved_tensors
        num_rows = ctx.shape[0]
        grad = grad.contiguous()
        num_edges = num_rows if row is None else row.numel()
        if target is None:
            target = expand(indptr[: ctx.num_targets + 1], num_edges)
        grad_x = grad_weight = None
        if torch.is_grad_enabled():
            return *_differentiate(grad, x, weight, indptr, row, target, ctx), *(None,) * 8
        if ctx.needs_input_grad[0] and row is None:
            grad_x = _weigh(
                grad.index_select(0, target), _shares(indptr, target, weight, ctx.mean, num_edges, grad.dtype)
            )
        elif ctx.needs_input_grad[0]:
            if by_source[0] is None and (ctx.deterministic or not runs_on_gpu(grad)):
                by_source = Transposed.of(row, target, num_rows)
            if by_source[0] is None:
                grad_x = _kernels.spread_rows(grad, indptr, row, target, weight, num_rows, ctx.mean, ctx.max_degree)
            else:
                sources, targets, edge = by_source
                share = _shares(indptr, target, weight, ctx.mean, num_edges, grad.dtype)
                share = None if share is None else share.index_select(0, edge)
                grad_x = _kernels.sum_rows(grad, sources, targets, share, num_rows, False, -1)
        if ctx.needs_input_grad[1]:
            grad_weight = _kernels.dot_rows(grad, x, indptr, row, target, weight.shape[1], ctx.mean).to(weight.dtype)
        return grad_x, grad_weight, None, None, None, None, None, None, None, None


def _weigh(rows: Tensor, share: Tensor | None) -> Tensor:
    """Multiply rows of edges `[E, F]` by their weights `[E, H]`, in the dtype of the rows."""
    if share is None:
        return rows
    heads = share.shape[1]
    parted = rows.view(rows.shape[0], heads, rows.shape[1] // heads)
    return (parted * share.unsqueeze(-1)).view_as(rows).to(rows.dtype)


def _differentiate(grad: Tensor, x: Tensor | None, weight: Tensor | None, indptr: Tensor, row: Tensor | None,
                   target: Tensor, ctx: Any) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return gradients of a sum by functions that torch can differentiate again."""
    num_edges, (num_rows, width) = target.numel(), ctx.shape
    lifted, grad_x, grad_weight = grad.index_select(0, target), None, None
    if ctx.needs_input_grad[0]:
        grad_x = _weigh(lifted, _shares(indptr, target, weight, ctx.mean, num_edges, grad.dtype))
        grad_x = grad_x if row is None else grad.new_zeros(num_rows, width).index_add(0, row, grad_x)
    if x is not None and weight is not None:
        lifted = _weigh(lifted, _shares(indptr, target, None, ctx.mean, num_edges, grad.dtype))
        rows = x if row is None else x.index_select(0, row)
        grad_weight = (lifted * rows).view(*weight.shape, width // weight.shape[1]).sum(-1).to(weight.dtype)
    return grad_x, grad_weight


def _shares(indptr: Tensor, target: Tensor, weight: Tensor | None, mean: bool, num_edges: int,
            dtype: torch.dtype) -> Tensor | None:  # fmt: skip
    """Return the factor of each edge's row, `[E, H]`; None for ones."""
    if not mean:
        return weight
    dtype = torch.promote_types(dtype, torch.float32)
    degree = indptr.clamp(max=num_edges).diff().clamp(min=1)
    scale = degree.to(dtype).reciprocal().index_select(0, target).unsqueeze(1)
    return scale if weight is None else weight * scale


class _Extreme(torch.autograd.Function):
    """Maximum or minimum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, indptr: Tensor, row: Tensor | None, transposed: Transposed | None,
                num_targets: int, largest: bool, max_degree: int, deterministic: bool) -> Tensor:  # fmt: skip
        out = _kernels.extreme_rows(x, indptr, row, num_targets, largest, max_degree)
        by_source = (None, None, None) if transposed is None else transposed
        ctx.save_for_backward(x, out, indptr, row, *by_source)
        ctx.deterministic, ctx.max_degree = deterministic, max_degree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, indptr, row, *by_source = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiate_extreme(grad, x, out, indptr, row), *(None,) * 7
        if ctx.deterministic and row is not None and runs_on_gpu(grad):
            # A row for each edge first, so that no two targets write to one row, then sums by source.
            if by_source[0] is None:
                by_source = Transposed.of(row, row, x.shape[0])
            to_edges = _kernels.spread_extremes(grad, x, out, indptr, row, True, ctx.max_degree)
            grad_x = _kernels.sum_rows(to_edges, by_source[0], by_source[2], None, x.shape[0], False, -1)
        else:
            grad_x = _kernels.spread_extremes(grad, x, out, indptr, row, False, ctx.max_degree)
        return grad_x, None, None, None, None, None, None, None


def _differentiate_extreme(grad: Tensor, x: Tensor, out: Tensor, indptr: Tensor, row: Tensor | None) -> Tensor:
    """Return the gradient of a maximum by functions that torch can differentiate again."""
    num_edges = x.shape[0] if row is None else row.numel()
    target = expand(indptr[: out.shape[0] + 1], num_edges)
    rows, best = (x if row is None else x.index_select(0, row)).detach(), out.detach()
    brings = (rows == best.index_select(0, target)).to(x.dtype)
    equals = (best == 0).to(x.dtype).index_add(0, target, brings)
    # A NaN equals no row, so that its gradient is 0 / 0, a NaN too, as in torch.
    shares = grad.index_select(0, target) * (brings / equals.index_select(0, target))
    return shares if row is None else x.new_zeros(x.shape).index_add(0, row, shares)


def is_fused(x: Tensor, edge_rows: Tensor, num_targets: int, max_degree: int | None) -> bool:
    """Report whether rows of sources `[N, C]` and of edges `[E, C]` are read in pieces of 16 bytes on a GPU. No target
    may have many edges, because one thread adds up all edges of a target.
    """
    most, num_edges = max(len(x), len(edge_rows)), len(edge_rows)
    return (
        runs_on_gpu(x)
        and x.dtype == edge_rows.dtype
        and x.is_contiguous()
        and edge_rows.is_contiguous()
        and min(num_edges, num_targets, x.shape[1]) > 0
        and (num_edges <= LONG_ROW or (max_degree is not None and max_degree <= LONG_ROW))
        and all(is_wide(rows, rows.shape[1], most) for rows in (x, edge_rows))
        and not is_heard(x)
    )


def sum_fused(x: Tensor, edge_rows: Tensor, indptr: Tensor, row: Tensor, num_targets: int, *, mean: bool, keeps: bool
              ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return relu(x[row] + edge_rows) reduced over the edges of each target, `[T, C]`, if `is_fused`. If `keeps`, also
    return the bits of the messages that `pull_fused` needs, uint8 `[E, P]` for rows of P pieces of 16 bytes.
    """
    out, pieces = x.new_empty(num_targets, x.shape[1]), x.shape[1] * x.element_size() // PIECE
    kept = torch.empty(len(edge_rows), pieces, dtype=torch.uint8, device=x.device) if keeps else None
    indptr, row = indptr.contiguous(), row.contiguous()
    run_gpu(kernels.sum_messages_gpu, grid_of(num_targets * pieces, 0), x.data_ptr(), edge_rows.data_ptr(),
            row.data_ptr(), row.element_size(), indptr, row.numel(), num_targets, pieces, int(mean),
            WIDE_KINDS[x.dtype], 0 if kept is None else kept.data_ptr(), out.data_ptr())  # fmt: skip
    return out, kept


def pull_fused(grad: Tensor, kept: Tensor, row: Tensor, target: Tensor, num_rows: int, *, to_edges: bool, to_x: bool
               ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the requested gradients of the rows of edges, `[E, C]`, and of sources, `[N, C]`, added up in any order.

    Args:
        grad: Gradients of the sums, `[T, C]`, times the scale of means.
        kept: See `sum_fused`.
        row, target: Source and target of each edge, `[E]`.
    """
    grad, (num_edges, pieces) = grad.contiguous(), kept.shape
    if grad.data_ptr() % PIECE:
        grad = grad.clone()
    of_edges = grad.new_empty(num_edges, grad.shape[1]) if to_edges else None
    of_x = grad.new_zeros(num_rows, grad.shape[1], dtype=torch.float32) if to_x else None
    run_gpu(kernels.pull_messages_gpu, grid_of(num_edges * pieces, 0), grad.data_ptr(), kept.data_ptr(),
            row.contiguous(), target.to(row.dtype).contiguous(), num_edges, pieces, grad.element_size(),
            WIDE_KINDS[grad.dtype], 0 if of_edges is None else of_edges.data_ptr(),
            0 if of_x is None else of_x.data_ptr())  # fmt: skip
    return of_edges, None if of_x is None else of_x.to(grad.dtype)


def unpack_kept(kept: Tensor, width: int) -> Tensor:
    """Unpack the bits that `sum_fused` keeps, as bool `[E, C]`."""
    bits = torch.arange(width // kept.shape[1], dtype=torch.uint8, device=kept.device)
    return (kept.unsqueeze(2) >> bits & 1).bool().view(len(kept), width)

"""Products of rows with matrices at the end of convolutions; their bias takes little of the backward pass.

On an H200 torch adds up the gradients of 107,000 rows of 256 in 117 us, and multiplies them by ones in 35.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.ops.run_kernel import is_asked_again, is_heard, runs_on_gpu
from pyg_direct.runtime.host.tensor_views import ordinary_tensors

_DTYPES = (torch.float32, torch.float64)
# Ones on a GPU, by device, stream and dtype: to make them again takes the host longer than the product with them.
_ONES: dict[tuple[int, int, torch.dtype], Tensor] = {}
_MOST_ONES = 1 << 20
# Rows and columns of a tile of a product, tiles that keep a GPU busy, and the fewest rows of a piece.
_TILE, _ENOUGH_TILES, _LEAST_PIECE = 128, 256, 2048
# Widths from which on torch adds up pieces of fp32 rows itself; 47, 64 and more were tried on an H200.
_SPLIT_BY_TORCH = 47
# torch 2.8 and later.
_has_wide_products = hasattr(torch.ops.aten.mm, "dtype")
_has_wide_sums = hasattr(torch.ops.aten.mm, "dtype_out") and hasattr(torch.ops.aten.addmm, "dtype_out")


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


class Product(NamedTuple):
    """Product of the first rows of a tensor with a matrix.

    Attributes:
        weight: `[M, F]`.
        bias: `[M]`, or None.
        num_rows: Number of the rows; None for all.
    """

    weight: Tensor
    bias: Tensor | None = None
    num_rows: int | None = None


def multiply_ends(rows: Tensor, targets: Tensor, of_rows: Sequence[Product], of_targets: Sequence[Product]
                  ) -> list[Tensor]:  # fmt: skip
    """Return the products of the rows of sources, then those of targets; both may be one tensor."""
    if rows is targets:
        return multiply_each(rows, [*of_rows, *of_targets])
    return [*multiply_each(rows, of_rows), *multiply_each(targets, of_targets)]


def multiply_each(rows: Tensor, products: Sequence[Product]) -> list[Tensor]:
    """Compute several products of rows `[N, F]`, whose gradients are added up in the memory of one.

    Results are in memory of their own, and no step of autograd reads them again.
    """
    counts = [len(rows) if part.num_rows is None else part.num_rows for part in products]
    given = [part for product in products for part in product[:2] if part is not None]
    if not (
        torch.is_grad_enabled()
        and any(part.requires_grad for part in (rows, *given))
        and all(part.dtype == rows.dtype for part in given)
        and not torch.is_autocast_enabled(rows.device.type)
    ):
        return [F.linear(rows[:count], *part[:2]) for count, part in zip(counts, products, strict=True)]
    weights, biases = zip(*[part[:2] for part in products], strict=True)
    # Views, because autograd does not tell whether someone waits for the gradient of a leaf.
    parts = [None if part is None else part.view_as(part) for part in (*weights, *biases)]
    return list(_Each.apply(counts, rows, *parts))


def add_to_first(rows: Tensor, first: Tensor) -> Tensor:
    """Add rows `[T, F]` to the first rows of others `[N, F]`, in their memory if autograd does not need it."""
    if rows.dtype != first.dtype:
        return rows + F.pad(first, (0, 0, 0, len(rows) - len(first)))
    made: Tensor = _AddToFirst.apply(rows, first)
    return made


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context without autocast. To enter torch's own takes the host as long as a launch, so it is entered only
    if autocast is on.
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def multiply_exactly(rows: Tensor, wide: Tensor) -> Tensor:
    """Multiply rows `[N, K]` by a matrix `[K, M]` of their dtype or fp32, which is not rounded; the result has the
    matrix's dtype.

    The matrix is the sum of two of bfloat16, whose products fp32 adds up: exact to 16 bits of its numbers.
    """
    with without_autocast(rows.device.type):
        if rows.dtype == wide.dtype:
            return rows @ wide
        if not splits(rows, wide.dtype):
            return rows.to(wide.dtype) @ wide
        both = multiply_widely(rows, torch.cat(split_in_two(wide, rows.dtype), dim=1))
    return _add_halves(both)


def splits(rows: Tensor, dtype: torch.dtype) -> bool:
    """Report whether rows are multiplied by matrices of fp32 in two parts of their own dtype."""
    is_wider = rows.dtype == torch.bfloat16 and dtype == torch.float32
    return is_wider and _has_wide_products and rows.is_cuda and not torch.is_grad_enabled()


def split_in_two(wide: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors of a dtype whose sum is near one of fp32."""
    high = wide.to(dtype)
    return high, (wide - high).to(dtype)


def multiply_widely(rows: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix of their 16 bits, with fp32 results; for the rows of `splits`.

    Args:
        out: Memory for the results.
    """
    with without_autocast(rows.device.type):
        if out is not None and _has_wide_sums:
            return torch.mm(rows, matrix, out_dtype=torch.float32, out=out)
        made = torch.mm(rows, matrix, out_dtype=torch.float32)
    return made if out is None else out.copy_(made)


def multiply_into(total: Tensor, rows: Tensor, matrix: Tensor, *, adds: bool) -> None:
    """Write rows `[N, K]` times a matrix `[K, M]` of their dtype to `total` `[N, M]`, of this dtype or fp32, or add
    them to it. On a GPU the products reach fp32 without a rounding in between.
    """
    with without_autocast(total.device.type):
        if rows.dtype == total.dtype:
            torch.addmm(total, rows, matrix, beta=int(adds), out=total)
        elif _has_wide_sums and rows.is_cuda and total.dtype == torch.float32:
            if not adds:
                torch.mm(rows, matrix, out_dtype=total.dtype, out=total)
            elif _adds_widely(rows.device, rows.dtype):
                torch.addmm(total, rows, matrix, out_dtype=total.dtype, out=total)
            else:
                total.add_(torch.mm(rows, matrix, out_dtype=total.dtype))
        elif adds:
            total.add_(rows @ matrix)
        else:
            total.copy_(rows @ matrix)


@functools.cache
def _adds_widely(device: torch.device, dtype: torch.dtype) -> bool:
    """Report whether torch adds products of 16 bits to fp32 in place: earlier versions refuse such sums."""
    rows, total = torch.zeros(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        # Refused by the host, so that a captured graph does not end.
        torch.addmm(total, rows, rows, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def multiply_tall(rows: Tensor, wide: Tensor) -> Tensor:
    """Multiply the transpose of rows `[K, M]` by rows `[K, N]` of their dtype or fp32, as in the gradient of a matrix;
    `[M, N]` in fp32 or wider.

    The result has few tiles, and K is large. So a GPU adds up pieces of K in as many tiles as it has multiprocessors.
    Each piece is rounded to the dtype of the rows, which an error of the sum hardly shows. In fp32 torch's own product
    takes as long, unless one of the widths is small.
    """
    work = torch.promote_types(wide.dtype, torch.float32)
    if rows.dtype == wide.dtype in _DTYPES and min(rows.shape[1], wide.shape[1]) >= _SPLIT_BY_TORCH:
        return multiply_exactly(rows.t(), wide)
    pieces = _count_pieces(rows, wide.shape[1])
    is_split = rows.dtype != wide.dtype
    # Numbers below the range of fp16 would be lost.
    if pieces < 2 or (is_split and rows.dtype == torch.float16):
        return multiply_exactly(rows.t(), wide).to(work)
    if is_split:
        return _add_halves(_add_pieces(rows, torch.cat(split_in_two(wide, rows.dtype), dim=1), pieces, work))
    return _add_pieces(rows, wide, pieces, work)


def multiply_tall_halves(rows: Tensor, both: Tensor) -> Tensor:
    """Compute `multiply_tall` for rows of fp32 whose two parts are side by side, `[K, 2 * N]`; see `splits`."""
    pieces = _count_pieces(rows, both.shape[1] // 2)
    if pieces < 2:
        return _add_halves(multiply_widely(rows.t(), both))
    return _add_halves(_add_pieces(rows, both, pieces, torch.float32))


def _count_pieces(rows: Tensor, width: int) -> int:
    """Return in how many pieces the product of the transpose of rows with others of a width is added up."""
    if not runs_on_gpu(rows) or torch.is_grad_enabled():
        return 1
    tiles = -(-rows.shape[1] // _TILE) * -(-width // _TILE)
    most = min(len(rows) // _LEAST_PIECE, -(-_ENOUGH_TILES // tiles))
    # Powers of two divide numbers of rows that recordings round up, so that no rows are left over.
    return 1 << most.bit_length() - 1 if most > 0 else 1


def _add_pieces(rows: Tensor, others: Tensor, pieces: int, dtype: torch.dtype) -> Tensor:
    count, length = len(rows), len(rows) // pieces
    whole = length * pieces
    with without_autocast(rows.device.type):
        total = torch.bmm(rows[:whole].reshape(pieces, length, -1).transpose(1, 2),
                          others[:whole].reshape(pieces, length, -1)).sum(0, dtype=dtype)  # fmt: skip
        if whole < count:
            multiply_into(total, rows[whole:].t(), others[whole:], adds=True)
    return total


def _add_halves(both: Tensor) -> Tensor:
    """Add the products with the two parts of a matrix, side by side."""
    width = both.shape[1] // 2
    return both[:, :width] + both[:, width:]


def multiply_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows of several heads `[N, H, I]` by the matrix of each, `[H, I, O]`; returns `[H, N, O]`.

    The gradient of each matrix is small, and a sum over all rows. By torch a GPU computes it in as many tiles as there
    are heads: on an H200 in 1.9 ms for 8 heads of 32 numbers and 100,000 rows. Here it adds up pieces of the rows.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if runs_on_gpu(rows) and rows.dtype == weight.dtype and weight.requires_grad and torch.is_grad_enabled():
        made: Tensor = _Heads.apply(rows, weight)
        return made
    return torch.bmm(rows.transpose(0, 1), weight)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.are_tensors = [True, True]
        return torch.bmm(rows.transpose(0, 1), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), (of_rows, of_weight) = ctx.saved_tensors, _list_wanted(ctx)
        to_rows = torch.bmm(grad, weight.transpose(1, 2)).transpose(0, 1) if of_rows else None
        return to_rows, _pull_heads(rows, grad) if of_weight else None


def _pull_heads(rows: Tensor, grad: Tensor) -> Tensor:
    """Multiply the transpose of each head's rows `[N, H, I]` by gradients `[H, N, O]`: `[H, I, O]`."""
    (count, heads, width), length = rows.shape, grad.shape[2]
    tiles = heads * -(-width // _TILE) * -(-length // _TILE)
    pieces = min(count // _LEAST_PIECE, -(-_ENOUGH_TILES // tiles))
    # What torch differentiates again goes by its own functions.
    if pieces < 2 or torch.is_grad_enabled():
        return torch.bmm(rows.permute(1, 2, 0), grad)
    whole = count // pieces * pieces
    parts = rows[:whole].transpose(0, 1).reshape(heads * pieces, -1, width)
    pulled = torch.bmm(parts.transpose(1, 2), grad[:, :whole].reshape(heads * pieces, -1, length))
    total = pulled.view(heads, pieces, width, length).sum(1, dtype=torch.promote_types(grad.dtype, torch.float32))
    total = total.to(grad.dtype)
    return total if whole == count else torch.baddbmm(total, rows[whole:].permute(1, 2, 0), grad[:, whole:])


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


def _list_wanted(ctx: Any) -> list[bool]:
    """Report for each input of a step of autograd whether someone waits for its gradient in this backward pass.

    `needs_input_grad` is also true for matrices if only the gradient of rows is asked for.
    """
    asks, nodes = torch._C._will_engine_execute_node, iter(ctx.next_functions)
    wanted = []
    for is_tensor, needed in zip(ctx.are_tensors, ctx.needs_input_grad, strict=True):
        node = next(nodes)[0] if is_tensor else None
        wanted.append(needed and node is not None and (node.name() == _LEAF or asks(node)))
    return wanted


_LEAF = "torch::autograd::AccumulateGrad"


class _Each(torch.autograd.Function):
    """Products of the first `counts` rows with as many matrices, then biases."""

    @staticmethod
    def forward(ctx: Any, counts: list[int], rows: Tensor, *parts: Any) -> tuple[Tensor, ...]:
        weights, biases = parts[: len(counts)], parts[len(counts) :]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, *weights)
        ctx.counts, ctx.are_tensors = counts, [False, True, *(part is not None for part in parts)]
        return tuple([F.linear(rows.narrow(0, 0, count), weight, bias)
                      for count, weight, bias in zip(counts, weights, biases, strict=True)])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        _, of_rows, *wants = _list_wanted(ctx)
        given = list(zip(ctx.counts, weights, grads, strict=True))
        to_rows, again = None, is_asked_again(grads)
        # All rows first.
        for count, weight, grad in sorted(given, key=lambda part: -part[0]) if of_rows else []:
            if grad is None:
                continue
            if to_rows is not None and not again:
                to_rows.narrow(0, 0, count).addmm_(grad, weight)
                continue
            made = grad @ weight
            made = F.pad(made, (0, 0, 0, len(rows) - count)) if count < len(rows) else made
            to_rows = made if to_rows is None else to_rows + made
        of_weights, of_biases = wants[: len(weights)], wants[len(weights) :]
        return (
            None,
            to_rows,
            *[grad.t() @ rows.narrow(0, 0, count) if wanted and grad is not None else None
              for wanted, (count, _, grad) in zip(of_weights, given, strict=True)],
            *[add_up(grad) if wanted and grad is not None else None
              for wanted, grad in zip(of_biases, grads, strict=True)],
        )  # fmt: skip


class _AddToFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, first: Tensor) -> Tensor:
        ctx.mark_dirty(rows)
        ctx.count = len(first)
        rows.narrow(0, 0, len(first)).add_(first)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, grad.narrow(0, 0, ctx.count)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, own: Tensor | None,
                own_weight: Tensor | None) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, weight, own, own_weight)
        ctx.are_tensors = [True, True, True, own is not None, own_weight is not None]
        return multiply_plainly(rows, weight, bias, own, own_weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, own, own_weight = ctx.saved_tensors
        wants = _list_wanted(ctx)
        turned = grad.t()
        return (
            grad @ weight if wants[0] else None,
            turned @ rows if wants[1] else None,
            add_up(grad) if wants[2] else None,
            grad @ own_weight if wants[3] else None,
            turned @ own if wants[4] else None,
        )

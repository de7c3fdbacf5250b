"""Products and results of several relations, one behind the other in one memory, and whose results a loss uses.

What belongs to a relation whose result nobody uses gets no gradient, which optimizers tell from zeros; the step in
between, which is one for all relations, cannot tell. So the last step leaves a note for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Of each relation, whether a gradient came back to its result in the last backward pass.
Used = list[bool]


def split_apart(out: Tensor, sizes: Sequence[int], used: Used) -> list[Tensor]:
    """The results of relations, `[T, ...]` each, of `[sum of T, ...]` that nothing else sees; they may be written to.

    Args:
        out: Results, one relation behind the other.
        sizes: Rows of each.
        used: Is set in a backward pass.
    """
    if out.requires_grad and torch.is_grad_enabled():
        return list(_Split.apply(out, sizes, used))
    return list(torch.unsafe_split_with_sizes(out, list(sizes)))


def join_apart(parts: Sequence[Tensor], serves: Sequence[Sequence[int]], used: Used) -> Tensor:
    """Rows of several tables, one behind the other, `[sum of N, C]`; a table that serves no result used gets none.

    Args:
        parts: `[N, C]` each.
        serves: The relations that each of them serves.
        used: Is read in a backward pass.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        joined: Tensor = _Join.apply(used, serves, *parts)
        return joined
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def multiply_apart(tables: Sequence[Tensor], weights: Sequence[Tensor], used: Used,
                   biases: Sequence[Tensor | None] | None = None) -> Tensor:  # fmt: skip
    """table @ weight.T + bias of each relation, written one behind the other, `[sum of N, O]`.

    Args:
        tables: Rows, `[N, C]` of any width each.
        weights: A matrix for each, `[O, C]`, of the same dtype.
        used: Is read in a backward pass.
        biases: `[O]` for each that has one; None for none at all.
    """
    out: Tensor = _Products.apply(used, *tables, *weights, *(biases or [None] * len(tables)))
    return out


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, sizes: Sequence[int], used: Used) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.sizes, ctx.used = out.shape[1:], sizes, used
        return tuple(torch.unsafe_split_with_sizes(out, list(sizes)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.used[:] = [grad is not None for grad in grads]
        first = next((grad for grad in grads if grad is not None), None)
        if first is None:
            return None, None, None
        parts = [first.new_zeros(size, *ctx.shape) if grad is None else grad
                 for grad, size in zip(grads, ctx.sizes, strict=True)]  # fmt: skip
        return torch.cat(parts), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, serves: Sequence[Sequence[int]], *parts: Tensor) -> Tensor:
        ctx.used, ctx.serves, ctx.sizes = used, serves, [len(part) for part in parts]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(grad.split(ctx.sizes), ctx.needs_input_grad[2:], ctx.serves, strict=True)
        return None, None, *(part if wants and any(ctx.used[i] for i in its) else None for part, wants, its in parts)


class _Products(Function):
    @staticmethod
    def forward(ctx: Any, used: Used, *given: Any) -> Tensor:
        count = len(given) // 3
        tables, weights, biases = given[:count], given[count : 2 * count], given[2 * count :]
        ctx.save_for_backward(*tables, *weights)
        ctx.used = used
        sizes = [len(table) for table in tables]
        out: Tensor = tables[0].new_empty(sum(sizes), len(weights[0]))
        for part, table, weight, bias in zip(out.split(sizes), tables, weights, biases, strict=True):
            if bias is None:
                torch.mm(table, weight.t(), out=part)
            else:
                torch.addmm(bias, table, weight.t(), out=part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In what torch can differentiate once more.
        given, wants = ctx.saved_tensors, ctx.needs_input_grad[1:]
        count = len(given) // 2
        tables, weights = given[:count], given[count:]
        found: list[Tensor | None] = [None] * (3 * count)
        for i, part in enumerate(grad.split([len(table) for table in tables])):
            if ctx.used[i]:
                found[i] = part @ weights[i] if wants[i] else None
                found[count + i] = part.t() @ tables[i] if wants[count + i] else None
                found[2 * count + i] = part.sum(0) if wants[2 * count + i] else None
        return None, *found

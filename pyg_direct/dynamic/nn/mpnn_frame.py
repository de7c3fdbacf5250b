"""All snapshots of a frame through MPNN-LSTM at once, and gradients of those of them that a loss sees.

Snapshots depend on each other through running statistics only. Losses often see the last one alone, which autograd
learns too late to leave out the others: here their gradients are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_direct.dynamic.nn.apart import set_apart
from pyg_direct.dynamic.nn.recurrence import open_lstm, open_lstm_backward
from pyg_direct.dynamic.operator import GCN
from pyg_direct.dynamic.plan import SnapshotPlan

_BACK = torch.ops.aten
_OPERATOR = GCN()
# Numbers of a recurrent layer that each thread of a CPU works on at once, so that what lies between products stays in
# its cache, and threads seldom wait for each other.
_CACHED = 2**17


class Frame(NamedTuple):
    """What goes through the layers.

    Attributes:
        plan: That of the frame.
        weighted: Whether edges have weights.
        aggregated: First aggregation of the features, `[W, N, F]`.
        x: The features, `[W, N, F]`.
        dropout: Rate, 0 outside of training.
        eps: What is added to the variances of both layers.
    """

    plan: SnapshotPlan
    weighted: bool
    aggregated: Tensor
    x: Tensor
    dropout: float
    eps: tuple[float, float]


class Normalised(NamedTuple):
    """A convolution's rows, rectified, normalised over the nodes of each snapshot, some dropped.

    Attributes:
        given: Rows aggregated by edges, `[N, W, C]`.
        rectified: `[N, W, H]`.
        mean, inverse: Mean and 1 / standard deviation of each number of `rectified`, `[W, H]`.
        kept: Which numbers of the result were kept; None without dropout.
        out: `[N, W, H]`.
    """

    given: Tensor
    rectified: Tensor
    mean: Tensor
    inverse: Tensor
    kept: Tensor | None
    out: Tensor


def _convolve(given: Tensor, parameters: Sequence[Tensor], eps: float, dropout: float) -> Normalised:
    weight, bias, scale, shift = parameters
    rectified = F.linear(given, weight, bias).relu_()
    num_nodes, window, size = rectified.shape
    flat, mean, inverse = torch.native_batch_norm(
        rectified.view(num_nodes, -1), scale.repeat(window), shift.repeat(window), None, None, True, 0.0, eps
    )
    out, kept = flat.view(rectified.shape), None
    if dropout > 0:
        out, kept = torch.native_dropout(out, dropout, True)
    return Normalised(given, rectified, mean.view(window, size), inverse.view(window, size), kept, out)


def _convolve_backward(layer: Normalised, grad: Tensor, seen: slice, scale: Tensor, eps: float,
                       dropout: float) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of what the layer's weight is multiplied with, and of its parameters; `grad` `[N, S, H]`."""
    if layer.kept is not None:
        grad = _BACK.native_dropout_backward(grad, layer.kept[:, seen], 1 / (1 - dropout))
    rectified = layer.rectified[:, seen].contiguous()
    num_nodes, count, size = rectified.shape
    of_rows, of_scale, of_shift = _BACK.native_batch_norm_backward(
        grad.contiguous().view(num_nodes, -1), rectified.view(num_nodes, -1), scale.repeat(count), None, None,
        layer.mean[seen].flatten(), layer.inverse[seen].flatten(), True, eps, [True, True, True],
    )  # fmt: skip
    rows = _BACK.threshold_backward(of_rows.view(-1, size), rectified.view(-1, size), 0)
    given = layer.given[:, seen].reshape(-1, layer.given.shape[2])
    return rows, [rows.t() @ given, rows.sum(0), of_scale.view(count, size).sum(0), of_shift.view(count, size).sum(0)]


class RunTogether(torch.autograd.Function):
    """`(Frame, parameters)` to rows `[N, 2 * H + F]` of each snapshot, then mean and variance `[W, H]` of both layers.

    Parameters are weight, bias, scale and shift of both convolutions, then weights of inputs and of states, and biases
    of inputs and of states, of both recurrent layers.
    """

    @staticmethod
    def forward(ctx: Any, frame: Frame, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        # The snapshots of a node side by side.
        given = frame.aggregated.transpose(0, 1).contiguous()
        num_nodes, window, _ = given.shape
        first = _convolve(given, parameters[:4], frame.eps[0], frame.dropout)
        given = frame.plan.multiply_window(_OPERATOR, first.out, frame.weighted)
        second = _convolve(given, parameters[4:8], frame.eps[1], frame.dropout)
        out = torch.empty(window, num_nodes, 2 * first.out.shape[2] + frame.x.shape[2], dtype=given.dtype,
                          device=given.device)  # fmt: skip
        step = num_nodes if given.is_cuda else _count_nodes(window * first.out.shape[2])
        for begin in range(0, num_nodes, step):
            part = slice(begin, begin + step)
            rows = torch.cat([first.out[part], second.out[part]], 2).flatten(0, 1)
            states, _ = open_lstm(rows, *parameters[8:12])
            states_2, _ = open_lstm(states, *parameters[12:16])
            apart = (s.view(-1, window, s.shape[1]).transpose(0, 1) for s in (states, states_2))
            torch.cat([*apart, frame.x[:, part]], 2, out=out[:, part])
        ctx.save_for_backward(*parameters)
        ctx.frame, ctx.first, ctx.second = frame, first, second
        statistics = [s for layer, eps in zip((first, second), frame.eps, strict=True)
                      for s in (layer.mean, _to_variance(layer.inverse, eps, num_nodes))]  # fmt: skip
        ctx.mark_non_differentiable(*statistics)
        return *set_apart(out), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        parameters, frame, first, second = ctx.saved_tensors, ctx.frame, ctx.first, ctx.second
        places = [place for place, grad in enumerate(grads[:-4]) if grad is not None]
        if not places:
            return None, *[None] * len(parameters)
        seen = slice(places[0], places[-1] + 1)
        num_nodes, _, size = first.out.shape
        like = next(grad for grad in grads if grad is not None)
        given = [torch.zeros_like(like) if grad is None else grad for grad in grads[seen]]
        grad = given[0].unsqueeze(1) if len(given) == 1 else torch.stack(given, 1)

        rows = torch.cat([first.out[:, seen], second.out[:, seen]], 2).flatten(0, 1)
        states, opened_1 = open_lstm(rows, *parameters[8:12])
        _, opened_2 = open_lstm(states, *parameters[12:16])
        of_state_1, of_state_2 = (part.reshape(-1, size) for part in grad[..., : 2 * size].split(size, 2))
        of_state, of_second = open_lstm_backward(of_state_2, states, opened_2, *parameters[12:16])
        of_rows, of_first = open_lstm_backward(of_state_1 + of_state, rows, opened_1, *parameters[8:12])
        left, right = of_rows.view(num_nodes, -1, 2 * size).split(size, 2)
        eps, dropout = frame.eps, frame.dropout
        rows, of_conv_2 = _convolve_backward(second, right, seen, parameters[6], eps[1], dropout)
        back = (rows @ parameters[4]).view(num_nodes, -1, size)
        left = left + frame.plan.multiply_window(_OPERATOR, back, frame.weighted, seen.start, transposed=True)
        _, of_conv_1 = _convolve_backward(first, left, seen, parameters[2], eps[0], dropout)
        return None, *of_conv_1, *of_conv_2, *of_first, *of_second


def _count_nodes(width: int) -> int:
    """Nodes of `width` numbers that a CPU works on at once."""
    return max(1, torch.get_num_threads() * _CACHED // width)


def _to_variance(inverse: Tensor, eps: float, count: int) -> Tensor:
    """Unbiased variances, as running statistics have them."""
    return (inverse**-2 - eps) * (count / max(1, count - 1))

"""All snapshots of a frame through MPNN-LSTM at once, and gradients of those of them that a loss sees.

Snapshots depend on each other through running statistics only. Losses often see the last one alone, which autograd
learns too late to leave out the others: here their gradients are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pyg_direct.dynamic.nn.apart import set_apart
from pyg_direct.dynamic.nn.convolve import Located
from pyg_direct.dynamic.nn.recurrence import open_lstm, open_lstm_backward
from pyg_direct.dynamic.operator import GCN, Operator
from pyg_direct.ops.lstm import open_gates
from pyg_direct.ops.product import multiply
from pyg_direct.ops.snapshots import multiply_snapshots

_BACK = torch.ops.aten
_OPERATOR = GCN()
# Numbers of a recurrent layer that each thread of a CPU works on at once, so that what lies between products stays in
# its cache, and threads seldom wait for each other.
_CACHED = 2**17


class Multiplier(Protocol):
    """What aggregates rows of the snapshots of a frame, as plans do."""

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """Rows `[N, W, F]` of snapshots from `first` on, aggregated, or with `transposed` their gradient."""
        ...


class OneSnapshot(NamedTuple):
    """A snapshot outside of frames as a frame of its own."""

    found: Located

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """As of a `Multiplier`."""
        plan, num_nodes = self.found.plan, x.shape[0]
        matrices = plan.get_matrices(operator, self.found.time, self.found.time + 1, weighted)
        if num_nodes < plan.num_nodes:
            x = F.pad(x, (0, 0, 0, 0, 0, plan.num_nodes - num_nodes))
        return multiply_snapshots(x.contiguous(), matrices, 0, transposed)[:num_nodes]


class Frame(NamedTuple):
    """What goes through the layers.

    Attributes:
        plan: That of the frame, or what else aggregates its rows.
        weighted: Whether edges have weights.
        aggregated: First aggregation of the features, `[W, N, F]`.
        x: The features, `[W, N, F]`.
        dropout: Rate, 0 outside of training.
        eps: What is added to the variances of both layers.
        norms: Layers whose running statistics are to see the snapshot, in a frame of one; none where they are told
            later.
    """

    plan: Multiplier
    weighted: bool
    aggregated: Tensor
    x: Tensor
    dropout: float
    eps: tuple[float, float]
    norms: tuple[nn.BatchNorm1d, ...] = ()


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


def _convolve(given: Tensor, parameters: Sequence[Tensor], frame: Frame, layer: int) -> Normalised:
    weight, bias, scale, shift = parameters
    rectified = multiply(given, weight, bias).relu_()
    num_nodes, window, size = rectified.shape
    if window > 1:
        scale, shift = scale.repeat(window), shift.repeat(window)
    running: tuple[Any, Any, float] = None, None, 0.0
    if frame.norms:
        norm = frame.norms[layer]
        assert norm.momentum is not None and norm.num_batches_tracked is not None, "asked before"
        running = norm.running_mean, norm.running_var, norm.momentum
        norm.num_batches_tracked.add_(1)
    flat, mean, inverse = torch.native_batch_norm(
        rectified.view(num_nodes, -1), scale, shift, running[0], running[1], True, running[2], frame.eps[layer]
    )
    out, kept = flat.view(rectified.shape), None
    if frame.dropout > 0:
        out, kept = torch.native_dropout(out, frame.dropout, True)
    return Normalised(given, rectified, mean.view(window, size), inverse.view(window, size), kept, out)


def _convolve_backward(layer: Normalised, grad: Tensor, seen: slice, scale: Tensor, eps: float,
                       dropout: float) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of what the layer's weight is multiplied with, and of its parameters; `grad` `[N, S, H]`."""
    if layer.kept is not None:
        grad = _BACK.native_dropout_backward(grad, layer.kept[:, seen], 1 / (1 - dropout))
    rectified = layer.rectified[:, seen].contiguous()
    num_nodes, count, size = rectified.shape
    scale = scale.repeat(count) if count > 1 else scale
    of_rows, of_scale, of_shift = _BACK.native_batch_norm_backward(
        grad.contiguous().view(num_nodes, -1), rectified.view(num_nodes, -1), scale, None, None,
        layer.mean[seen].flatten(), layer.inverse[seen].flatten(), True, eps, [True, True, True],
    )  # fmt: skip
    rows = _BACK.threshold_backward(of_rows.view(-1, size), rectified.view(-1, size), 0)
    given = layer.given[:, seen].reshape(-1, layer.given.shape[2])
    of_norm = (part.view(count, size).sum(0) for part in (of_scale, of_shift))
    return rows, [rows.t() @ given, rows.sum(0), *of_norm]


class RunTogether(torch.autograd.Function):
    """`(Frame, parameters)` to rows `[N, 2 * H + F]` of each snapshot, then mean and variance `[W, H]` of both layers
    where running statistics are told later.

    Parameters are weight, bias, scale and shift of both convolutions, then weights of inputs and of states, and biases
    of inputs and of states, of both recurrent layers.
    """

    @staticmethod
    def forward(ctx: Any, frame: Frame, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        # The snapshots of a node side by side.
        given = frame.aggregated.transpose(0, 1).contiguous()
        num_nodes, window, _ = given.shape
        first = _convolve(given, parameters[:4], frame, 0)
        given = frame.plan.multiply_window(_OPERATOR, first.out, frame.weighted)
        second = _convolve(given, parameters[4:8], frame, 1)
        out = torch.empty(window, num_nodes, 2 * first.out.shape[2] + frame.x.shape[2], dtype=given.dtype,
                          device=given.device)  # fmt: skip
        # Of the last snapshot, most often the one that a loss sees; those of others are computed again.
        ctx.opened = None
        if given.is_cuda or given.dtype != torch.float32:
            _recur(first.out, second.out, frame.x, parameters[8:], out)
        else:
            ctx.opened = _recur_in_place(first.out, second.out, frame.x, parameters[8:], out)
        ctx.save_for_backward(*parameters)
        ctx.frame, ctx.first, ctx.second = frame, first, second
        if frame.norms:
            return tuple(set_apart(out))
        statistics = [s for layer, eps in zip((first, second), frame.eps, strict=True)
                      for s in (layer.mean, _to_variance(layer.inverse, eps, num_nodes))]  # fmt: skip
        ctx.mark_non_differentiable(*statistics)
        return *set_apart(out), *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        parameters, frame, first, second = ctx.saved_tensors, ctx.frame, ctx.first, ctx.second
        places = [place for place, grad in enumerate(grads[: first.out.shape[1]]) if grad is not None]
        if not places:
            return None, *[None] * len(parameters)
        seen = slice(places[0], places[-1] + 1)
        num_nodes, _, size = first.out.shape
        like = next(grad for grad in grads if grad is not None)
        given = [torch.zeros_like(like) if grad is None else grad for grad in grads[seen]]
        grad = given[0].unsqueeze(1) if len(given) == 1 else torch.stack(given, 1)

        if ctx.opened is None or seen.start != first.out.shape[1] - 1:
            rows = torch.cat([first.out[:, seen], second.out[:, seen]], 2).flatten(0, 1)
            states, opened_1 = open_lstm(rows, *parameters[8:12])
            _, opened_2 = open_lstm(states, *parameters[12:16])
        else:
            rows, gates, gates_2 = ctx.opened
            # Those that were returned may have been written to.
            states, opened_1, opened_2 = open_gates(gates, parameters[10], parameters[11]), (gates,), (gates_2,)
        of_state_1, of_state_2 = (part.reshape(-1, size) for part in grad[..., : 2 * size].split(size, 2))
        of_state, of_second = open_lstm_backward(of_state_2, states, opened_2, *parameters[12:16])
        of_rows, of_first = open_lstm_backward(of_state_1 + of_state, rows, opened_1, *parameters[8:12])
        left, right = of_rows.view(num_nodes, -1, 2 * size).split(size, 2)
        eps, dropout = frame.eps, frame.dropout
        rows, of_conv_2 = _convolve_backward(second, right, seen, parameters[6], eps[1], dropout)
        back = multiply(rows, parameters[4].t()).view(num_nodes, -1, size)
        left = left + frame.plan.multiply_window(_OPERATOR, back, frame.weighted, seen.start, transposed=True)
        _, of_conv_1 = _convolve_backward(first, left, seen, parameters[2], eps[0], dropout)
        return None, *of_conv_1, *of_conv_2, *of_first, *of_second


def _recur(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """Both recurrent layers of rows `[N, W, H]` of both convolutions, and the features `[W, N, F]`, to `out`."""
    num_nodes, window, size = first.shape
    step = num_nodes if first.is_cuda else _count_rows(window * size)
    for begin in range(0, num_nodes, step):
        part = slice(begin, begin + step)
        rows = torch.cat([first[part], second[part]], 2).flatten(0, 1)
        states, _ = open_lstm(rows, *parameters[:4])
        states_2, _ = open_lstm(states, *parameters[4:])
        apart = (s.view(-1, window, s.shape[1]).transpose(0, 1) for s in (states, states_2))
        torch.cat([*apart, x[:, part]], 2, out=out[:, part])


def _recur_in_place(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor],
                    out: Tensor) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The same of fp32 on a CPU, snapshot by snapshot, which leaves no results to copy; rows of the last snapshot and
    gates of both layers, unless its nodes are too many to be worked on at once.
    """
    num_nodes, window, size = first.shape
    out[:, :, 2 * size :] = x
    limit, opened = _count_rows(size), None
    if num_nodes > limit:
        steps = [(slice(t, t + 1), slice(n, n + limit)) for t in range(window) for n in range(0, num_nodes, limit)]
    else:
        count = limit // num_nodes
        steps = [(slice(t, t + count), slice(None)) for t in range(0, window, count)]
    by_time = first.transpose(0, 1), second.transpose(0, 1)
    for step in steps:
        place = out[step].view(-1, out.shape[2])
        rows = torch.cat([part[step] for part in by_time], 2).view(-1, 2 * size)
        states, (gates,) = open_lstm(rows, *parameters[:4], out=place)
        _, (gates_2,) = open_lstm(states, *parameters[4:], out=place, at=size)
        opened = rows[-num_nodes:], gates[-num_nodes:], gates_2[-num_nodes:]
    return opened if num_nodes <= limit else None


def _count_rows(width: int) -> int:
    """Rows of `width` numbers that a CPU works on at once."""
    return max(1, torch.get_num_threads() * _CACHED // width)


def _to_variance(inverse: Tensor, eps: float, count: int) -> Tensor:
    """Unbiased variances, as running statistics have them."""
    return (inverse**-2 - eps) * (count / max(1, count - 1))

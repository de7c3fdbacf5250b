"""All snapshots of a frame through MPNN-LSTM at once, and gradients of those of them that a loss sees.

Snapshots depend on each other through running statistics only. Losses often see the last one alone, which autograd
learns too late to leave out the others: here their gradients are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_direct.dynamic.nn.apart import set_apart
from pyg_direct.dynamic.nn.mpnn_again import run_by_torch
from pyg_direct.dynamic.nn.recurrence import open_lstm, open_lstm_backward
from pyg_direct.dynamic.operator import GCN, Operator
from pyg_direct.dynamic.plan import SnapshotPlan
from pyg_direct.ops.again import is_asked_again, pull_by_torch
from pyg_direct.ops.launch import runs_on_gpu
from pyg_direct.ops.lstm import open_gates, open_two, pull_two, suits_two
from pyg_direct.ops.norm import normalise, normalise_on_gpu, pull_normalised, suits_grid, suits_loop
from pyg_direct.ops.product import multiply, multiply_columns
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
    """A snapshot outside of frames, or a large one in a frame, as a frame of its own."""

    plan: SnapshotPlan
    time: int

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """As of a `Multiplier`."""
        plan, num_nodes = self.plan, x.shape[0]
        matrices = plan.get_matrices(operator, self.time, self.time + 1, weighted)
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


def suits_alone(x: Tensor, size: int) -> bool:
    """Whether a snapshot by itself takes fewer calls as a frame of one: always on a CPU, and on a GPU where one
    kernel does all of its recurrent layers.
    """
    return not runs_on_gpu(x) or suits_two(x, (x.shape[0], 1, size))


class Normalised(NamedTuple):
    """What the gradient of a convolution needs, whose rows are rectified, normalised over the nodes of each snapshot,
    some dropped.

    Attributes:
        given: Rows aggregated by edges, `[N, W, C]`.
        products: What is rectified, or was, `[N, W, H]`.
        moments: Mean and 1 / standard deviation of each number that is rectified, `[W, H]` each.
        kept: Which numbers of the result were kept; None without dropout.
    """

    given: Tensor
    products: Tensor
    moments: Tensor | tuple[Tensor, Tensor]
    kept: Tensor | None


def _convolve(given: Tensor, parameters: Sequence[Tensor], frame: Frame, layer: int,
              rows: Tensor | None) -> tuple[Normalised, Tensor]:  # fmt: skip
    """What the layer of this place gives is `[N, W, H]`. With `rows` `[W, N, 2 * H]` it goes to the layer's half of
    them, and of the second layer it may go nowhere else: then these are returned.
    """
    weight, bias, scale, shift = parameters
    products, eps = multiply(given, weight, bias), frame.eps[layer]
    size = products.shape[2]
    norm = frame.norms[layer] if frame.norms else None
    if suits_grid(products, products.shape):
        out, moments = normalise_on_gpu(products, scale, shift, eps, norm)
        out, kept = _drop(out, frame)
        return Normalised(given, products, moments, kept), out
    if norm is not None:
        visited = norm.num_batches_tracked
        assert visited is not None, "asked before"
        visited.add_(1)
    if rows is not None and frame.dropout == 0 and suits_loop(products):
        beside = torch.empty_like(products) if layer == 0 else None
        moments = normalise(products, scale, shift, eps, rows, layer * size, norm, beside)
        return Normalised(given, products, moments, None), rows if beside is None else beside
    out, both = _normalise_by_torch(products.relu_(), scale, shift, eps, norm)
    out, kept = _drop(out, frame)
    if rows is not None:
        rows[:, :, layer * size : layer * size + size] = out.transpose(0, 1)
    return Normalised(given, products, both, kept), out


def _normalise_by_torch(rows: Tensor, scale: Tensor, shift: Tensor, eps: float,
                        norm: nn.BatchNorm1d | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    num_nodes, window, size = rows.shape
    if window > 1:
        scale, shift = scale.repeat(window), shift.repeat(window)
    running: tuple[Any, Any, float] = None, None, 0.0
    if norm is not None:
        assert norm.momentum is not None, "asked before"
        running = norm.running_mean, norm.running_var, norm.momentum
    flat, mean, inverse = torch.native_batch_norm(
        rows.view(num_nodes, -1), scale, shift, running[0], running[1], True, running[2], eps
    )
    return flat.view(rows.shape), (mean.view(window, size), inverse.view(window, size))


def _drop(rows: Tensor, frame: Frame) -> tuple[Tensor, Tensor | None]:
    """Rows of which some are dropped, and which were kept; None without dropout."""
    if frame.dropout == 0:
        return rows, None
    rows, kept = torch.native_dropout(rows, frame.dropout, True)
    return rows, kept


def _convolve_backward(layer: Normalised, grad: Tensor, more: Tensor | None, seen: slice, scale: Tensor, eps: float,
                       dropout: float) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Gradients of what the layer's weight is multiplied with, and of its parameters; `grad` `[N, S, H]`, and what is
    to be added to it.
    """
    count, size = grad.shape[1:]
    given = layer.given[:, seen].reshape(-1, layer.given.shape[2])
    if layer.kept is not None:
        grad, more = grad if more is None else grad + more, None
        grad = _BACK.native_dropout_backward(grad, layer.kept[:, seen], 1 / (1 - dropout))
    if isinstance(layer.moments, Tensor) and suits_grid(layer.products, layer.products.shape):
        of_rows, parts = pull_normalised(grad.contiguous(), more, layer.products, layer.moments, scale, seen.start)
        # Tensors of their own, which may be written to.
        of_scale, of_shift, of_bias = (part.sum(0) for part in parts)
        rows = of_rows.view(-1, size)
        return rows, [multiply_columns(rows, given), of_bias, of_scale, of_shift]
    grad = grad if more is None else grad + more
    products = layer.products[:, seen]
    rectified = products.relu() if isinstance(layer.moments, Tensor) else products.contiguous()
    scale = scale.repeat(count) if count > 1 else scale
    of_rows, of_scale, of_shift = _BACK.native_batch_norm_backward(
        grad.contiguous().view(grad.shape[0], -1), rectified.view(grad.shape[0], -1), scale, None, None,
        *(part[seen].flatten() for part in layer.moments), True, eps, [True, True, True],
    )  # fmt: skip
    rows = _BACK.threshold_backward(of_rows.view(-1, size), rectified.view(-1, size), 0)
    of_norm = (part.view(count, size).sum(0) for part in (of_scale, of_shift))
    return rows, [multiply_columns(rows, given), rows.sum(0), *of_norm]


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
        size = parameters[1].shape[0]
        # By time, as recurrent layers read them.
        is_elsewhere = runs_on_gpu(given) or given.dtype != torch.float32
        rows = None if is_elsewhere else given.new_empty(window, num_nodes, 2 * size)
        first, of_first = _convolve(given, parameters[:4], frame, 0, rows)
        given = frame.plan.multiply_window(_OPERATOR, of_first, frame.weighted)
        second, of_second = _convolve(given, parameters[4:8], frame, 1, rows)
        out = given.new_empty(window * num_nodes, 2 * size + frame.x.shape[2])
        by_time = out.view(window, num_nodes, -1)
        # Of the last snapshot, most often the one that a loss sees; those of others are computed again.
        ctx.opened = None
        if rows is None:
            ctx.results = of_first, of_second
            _recur(of_first, of_second, frame.x, parameters[8:], by_time)
        else:
            ctx.results = (rows.transpose(0, 1),)
            ctx.opened = _recur_in_place(rows, frame.x, parameters[8:], by_time)
        ctx.save_for_backward(*parameters)
        ctx.frame, ctx.first, ctx.second = frame, first, second
        apart = (out,) if window == 1 else tuple(set_apart(by_time))
        if frame.norms:
            return apart
        statistics = [s for layer, eps in zip((first, second), frame.eps, strict=True)
                      for s in (layer.moments[0], _to_variance(layer.moments[1], eps, num_nodes))]  # fmt: skip
        ctx.mark_non_differentiable(*statistics)
        return *apart, *statistics

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        parameters, frame, first, second = ctx.saved_tensors, ctx.frame, ctx.first, ctx.second
        grads = grads[: first.products.shape[1]]
        places = [place for place, grad in enumerate(grads) if grad is not None]
        if not places:
            return None, *[None] * len(parameters)
        if is_asked_again(grads):
            run = partial(run_by_torch, frame, (first.kept, second.kept))
            return None, *pull_by_torch(run, parameters, ctx.needs_input_grad[1:], grads)
        seen = slice(places[0], places[-1] + 1)
        num_nodes, _, size = first.products.shape
        like = next(grad for grad in grads if grad is not None)
        given = [torch.zeros_like(like) if grad is None else grad for grad in grads[seen]]
        grad = given[0].unsqueeze(1) if len(given) == 1 else torch.stack(given, 1)

        left, right, of_layers = _recur_backward(ctx, grad, seen)
        eps, dropout = frame.eps, frame.dropout
        rows, of_conv_2 = _convolve_backward(second, right, None, seen, parameters[6], eps[1], dropout)
        back = multiply(rows, parameters[4].t()).view(num_nodes, -1, size)
        more = frame.plan.multiply_window(_OPERATOR, back, frame.weighted, seen.start, transposed=True)
        _, of_conv_1 = _convolve_backward(first, left, more, seen, parameters[2], eps[0], dropout)
        return None, *of_conv_1, *of_conv_2, *of_layers


def _recur_backward(ctx: Any, grad: Tensor, seen: slice) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of both convolutions' rows `[N, S, H]`, and of the parameters of both recurrent layers, of those of the
    snapshots that were seen, `[N, S, 2 * H + F]`.
    """
    parameters = ctx.saved_tensors[8:]
    num_nodes, window, size = ctx.first.products.shape
    if suits_two(grad, ctx.first.products.shape):
        first, second = ctx.results
        pulled = pull_two(grad, first, second, parameters, seen.start)
        return pulled.first, pulled.second, pulled.layers
    if ctx.opened is None or seen.start != window - 1:
        rows = torch.cat([part[:, seen] for part in ctx.results], 2).flatten(0, 1)
        states, opened_1 = open_lstm(rows, *parameters[:4])
        _, opened_2 = open_lstm(states, *parameters[4:])
    else:
        rows, gates, gates_2 = ctx.opened
        # Those that were returned may have been written to.
        states, opened_1, opened_2 = open_gates(gates, parameters[2], parameters[3]), (gates,), (gates_2,)
    of_state_1, of_state_2 = (part.reshape(-1, size) for part in grad[..., : 2 * size].split(size, 2))
    of_state, of_second = open_lstm_backward(of_state_2, states, opened_2, *parameters[4:])
    of_rows, of_first = open_lstm_backward(of_state_1 + of_state, rows, opened_1, *parameters[:4])
    left, right = of_rows.view(num_nodes, -1, 2 * size).split(size, 2)
    return left, right, [*of_first, *of_second]


def _recur(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """Both recurrent layers of rows `[N, W, H]` of both convolutions, and the features `[W, N, F]`, to `out`."""
    num_nodes, window, size = first.shape
    if suits_two(first, first.shape):
        open_two(first, second, x, parameters, out)
        return
    step = num_nodes if first.is_cuda else _count_rows(window * size)
    for begin in range(0, num_nodes, step):
        part = slice(begin, begin + step)
        rows = torch.cat([first[part], second[part]], 2).flatten(0, 1)
        states, _ = open_lstm(rows, *parameters[:4])
        states_2, _ = open_lstm(states, *parameters[4:])
        apart = (s.view(-1, window, s.shape[1]).transpose(0, 1) for s in (states, states_2))
        torch.cat([*apart, x[:, part]], 2, out=out[:, part])


def _recur_in_place(rows: Tensor, x: Tensor, parameters: Sequence[Tensor],
                    out: Tensor) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The same of fp32 rows `[W, N, 2 * H]` on a CPU, which leaves no results to copy; rows of the last snapshot and
    gates of both layers, unless its nodes are too many to be worked on at once.
    """
    window, num_nodes, width = rows.shape
    out[:, :, width:] = x
    size, limit = width // 2, _count_rows(width // 2)
    at_once = limit - limit % num_nodes if num_nodes <= limit else limit
    pieces, places = (rows.view(-1, width),), (out.view(-1, out.shape[2]),)
    if at_once < window * num_nodes:
        pieces, places = pieces[0].split(at_once), places[0].split(at_once)
    for piece, place in zip(pieces, places, strict=True):
        states, (gates,) = open_lstm(piece, *parameters[:4], out=place)
        _, (gates_2,) = open_lstm(states, *parameters[4:], out=place, at=size)
    if num_nodes > limit:
        return None
    opened = piece, gates, gates_2
    return opened if len(piece) == num_nodes else tuple(part[-num_nodes:] for part in opened)


def _count_rows(width: int) -> int:
    """Rows of `width` numbers that a CPU works on at once."""
    return max(1, torch.get_num_threads() * _CACHED // width)


def _to_variance(inverse: Tensor, eps: float, count: int) -> Tensor:
    """Unbiased variances, as running statistics have them."""
    return (inverse**-2 - eps) * (count / max(1, count - 1))

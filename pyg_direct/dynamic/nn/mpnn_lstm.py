"""MPNN-LSTM (Panagopoulos et al., 2021): two graph convolutions, then two recurrent layers over a window.

All snapshots of a frame run at once (`RunTogether`). Snapshots depend on each other only through running statistics.
Losses often read the last snapshot alone, but autograd finds this out too late to skip the others. Here only the
gradients of the snapshots that a loss reads are computed. `run_by_torch` computes with torch's functions instead; its
gradients have gradients in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from pyg_direct.dynamic.nn.recurrent_step import (
    get_parameters,
    is_single,
    open_by_torch,
    open_lstm,
    open_lstm_backward,
    run_lstm,
    set_apart,
)
from pyg_direct.dynamic.nn.sparse_conv import Located, convolve, locate
from pyg_direct.dynamic.sequence_edges import GCN, Operator
from pyg_direct.dynamic.snapshot_plan import SnapshotPlan
from pyg_direct.ops.aggregate.apply_batch_norm import normalise_on_gpu, pull_normalised, suits_grid
from pyg_direct.ops.aggregate.products import multiply, multiply_columns
from pyg_direct.ops.run_kernel import is_asked_again, is_transformed, pull_by_torch, runs_on_gpu
from pyg_direct.ops.snapshots.aggregate import multiply_snapshots
from pyg_direct.ops.snapshots.run_recurrent_cells import open_gates, open_two, pull_two, suits_two


class _Multiply(torch.autograd.Function):
    """Aggregation of rows `[N, W, F]` of the snapshots of a frame, or with `transposed` its adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, frame: Frame, transposed: bool) -> Tensor:
        ctx.given = frame, not transposed
        return frame.plan.multiply_window(GCN(), rows.contiguous(), frame.weighted, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Multiply.apply(grad, *ctx.given), None, None


def _aggregate(rows: Tensor, frame: Frame) -> Tensor:
    if is_transformed():
        # There torch differentiates it, which takes no custom functions.
        return frame.plan.multiply_window(GCN(), rows.contiguous(), frame.weighted)
    out: Tensor = _Multiply.apply(rows, frame, False)
    return out


def run_by_torch(frame: Frame, kept: tuple[Tensor | None, Tensor | None], *parameters: Tensor) -> list[Tensor]:
    """Return rows `[N, 2 * H + F]` of each snapshot.

    Args:
        kept: Numbers `[N, W, H]` of each convolution that dropout has kept; None without dropout.
    """
    rows, halves = frame.aggregated.transpose(0, 1), []
    for layer, chosen in enumerate(kept):
        weight, bias, scale, shift = parameters[4 * layer : 4 * layer + 4]
        rows = F.linear(_aggregate(rows, frame) if layer else rows, weight, bias).relu()
        shape = rows.shape
        flat = F.batch_norm(rows.reshape(shape[0], -1), None, None, scale.repeat(shape[1]), shift.repeat(shape[1]),
                            True, 0.0, frame.eps[layer])  # fmt: skip
        rows = flat.view(shape)
        rows = rows if chosen is None else rows * chosen / (1 - frame.dropout)
        halves.append(rows)
    num_nodes, window, _ = rows.shape
    states = open_by_torch(torch.cat(halves, 2).flatten(0, 1), *parameters[8:12])
    states_2 = open_by_torch(states, *parameters[12:16])
    given = [states.view(num_nodes, window, -1), states_2.view(num_nodes, window, -1), frame.x.transpose(0, 1)]
    return list(torch.cat(given, 2).unbind(1))


_BACK = torch.ops.aten
_OPERATOR = GCN()
# Numbers of a recurrent layer that each CPU thread processes at once. Intermediate results then stay in its cache, and
# threads seldom wait for each other.
_CACHED = 2**17


class Multiplier(Protocol):
    """Aggregator of rows of a frame's snapshots, as plans are."""

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """Aggregate rows `[N, W, F]` of snapshots from `first` on, or with `transposed` return their gradient."""
        ...


class OneSnapshot(NamedTuple):
    """Snapshot outside of frames, or a large one in a frame, as a frame of its own."""

    plan: SnapshotPlan
    time: int

    def multiply_window(self, operator: Operator, x: Tensor, weighted: bool = True, first: int = 0,
                        transposed: bool = False) -> Tensor:  # fmt: skip
        """Aggregate as a `Multiplier`."""
        plan, num_nodes = self.plan, x.shape[0]
        matrices = plan.get_matrices(operator, self.time, self.time + 1, weighted)
        if num_nodes < plan.num_nodes:
            x = F.pad(x, (0, 0, 0, 0, 0, plan.num_nodes - num_nodes))
        return multiply_snapshots(x.contiguous(), matrices, 0, transposed)[:num_nodes]


class Frame(NamedTuple):
    """Inputs of the layers.

    Attributes:
        plan: Plan of the frame, or another aggregator of its rows.
        weighted: True if edges have weights.
        aggregated: First aggregation of the features, `[W, N, F]`.
        x: The features, `[W, N, F]`.
        dropout: Rate, 0 outside of training.
        norms: Layers whose running statistics see the snapshot, in a frame of one; empty if they are updated later.
    """

    plan: Multiplier
    weighted: bool
    aggregated: Tensor
    x: Tensor
    dropout: float
    eps: tuple[float, float]
    norms: tuple[nn.BatchNorm1d, ...] = ()


def suits_alone(x: Tensor, size: int) -> bool:
    """Report whether a frame of one takes fewer calls: on a CPU, or if one kernel runs all recurrent layers."""
    return not runs_on_gpu(x) or suits_two(x, (x.shape[0], 1, size))


class Normalised(NamedTuple):
    """Tensors for the gradient of a convolution whose rows pass ReLU, normalization over the nodes of each snapshot,
    and dropout.

    Attributes:
        given: Rows aggregated by edges, `[N, W, C]`.
        products: Rows before ReLU, or after it, `[N, W, H]`.
        moments: Mean and 1 / standard deviation of each number after ReLU, `[W, H]` each.
        kept: Numbers of the result that were kept; None without dropout.
    """

    given: Tensor
    products: Tensor
    moments: Tensor | tuple[Tensor, Tensor]
    kept: Tensor | None


def _convolve(given: Tensor, parameters: Sequence[Tensor], frame: Frame, layer: int,
              rows: Tensor | None) -> tuple[Normalised, Tensor]:  # fmt: skip
    """Compute the layer at this place, `[N, W, H]`, and write it to its half of `rows` `[W, N, 2 * H]`, if given."""
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
    """Return rows with dropout, and the mask of kept numbers; None without dropout."""
    if frame.dropout == 0:
        return rows, None
    rows, kept = torch.native_dropout(rows, frame.dropout, True)
    return rows, kept


def _convolve_backward(layer: Normalised, grad: Tensor, more: Tensor | None, seen: slice, scale: Tensor, eps: float,
                       dropout: float) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return gradients of the input of the layer's weight and of its parameters; `more` is added to `grad`."""
    count, size = grad.shape[1:]
    given = layer.given[:, seen].reshape(-1, layer.given.shape[2])
    if layer.kept is not None:
        grad, more = grad if more is None else grad + more, None
        grad = _BACK.native_dropout_backward(grad, layer.kept[:, seen], 1 / (1 - dropout))
    if isinstance(layer.moments, Tensor) and suits_grid(layer.products, layer.products.shape):
        of_rows, parts = pull_normalised(grad.contiguous(), more, layer.products, layer.moments, scale, seen.start)
        # Separate tensors, which may be written to.
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
    if running statistics are updated later.

    Parameters are weight, bias, scale and shift of both convolutions. Then come weights of inputs and of states, and
    biases of inputs and of states, of both recurrent layers.
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
        # From the last snapshot, which a loss reads most often; for others they are computed again.
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
    """Return gradients of both convolutions' rows `[N, S, H]`, and of the parameters of both recurrent layers. They
    come from the gradients of the snapshots that were seen, `[N, S, 2 * H + F]`.
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
        # Returned tensors may have been written to.
        states, opened_1, opened_2 = open_gates(gates, parameters[2], parameters[3]), (gates,), (gates_2,)
    of_state_1, of_state_2 = (part.reshape(-1, size) for part in grad[..., : 2 * size].split(size, 2))
    of_state, of_second = open_lstm_backward(of_state_2, states, opened_2, *parameters[4:])
    of_rows, of_first = open_lstm_backward(of_state_1 + of_state, rows, opened_1, *parameters[:4])
    left, right = of_rows.view(num_nodes, -1, 2 * size).split(size, 2)
    return left, right, [*of_first, *of_second]


def _recur(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """Run both recurrent layers over rows `[N, W, H]` of both convolutions and features `[W, N, F]`, into `out`."""
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
    """Run them over fp32 rows `[W, N, 2 * H]` on a CPU, without results to copy. Return rows of the last snapshot and
    gates of both layers; None if it has too many nodes to be processed at once.
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
    """Return the rows of `width` numbers that a CPU processes at once."""
    return max(1, torch.get_num_threads() * _CACHED // width)


def _to_variance(inverse: Tensor, eps: float, count: int) -> Tensor:
    """Return unbiased variances, as running statistics have them."""
    return (inverse**-2 - eps) * (count / max(1, count - 1))


# Numbers of a layer in a snapshot, above which a frame would take much memory while single snapshots fill any device.
_LARGE = 2**23


def _is_ordinary(norm: nn.BatchNorm1d, x: Tensor) -> bool:
    """Report whether a layer is torch's own, in training, with statistics that kernels may write to."""
    running, visited = (norm.running_mean, norm.running_var), norm.num_batches_tracked
    return (
        type(norm) is nn.BatchNorm1d
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and norm.training
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and all(value is not None and value.is_contiguous() for value in running)
        and visited is not None
        and (visited.dtype, visited.device, visited.numel()) == (torch.int64, x.device, 1)
    )


class MPNNLSTM(nn.Module):
    """The layer of this name of PyTorch Geometric Temporal: equal arguments, parameters and results.

    Two graph convolutions, then two recurrent layers over a window (Panagopoulos et al., AAAI 2021). The features of
    the snapshots of `pyg_direct.dynamic.stream` are aggregated once for all epochs; the snapshots of a frame go through
    all layers together.

    Args:
        in_channels, hidden_size: Features of a node, and of its representations.
        num_nodes, window: Nodes of a graph, and graphs that lie one after the other in the rows.
        dropout: Rate of dropout.

    Example:
        >>> x, ring = torch.eye(3), torch.tensor([[0, 1, 2], [1, 2, 0]])
        >>> MPNNLSTM(3, 4, num_nodes=3, window=1, dropout=0.5)(x, ring, torch.ones(3)).shape
        torch.Size([3, 11])
    """

    def __init__(self, in_channels: int, hidden_size: int, num_nodes: int, window: int, dropout: float) -> None:
        super().__init__()
        self.in_channels, self.hidden_size, self.num_nodes = in_channels, hidden_size, num_nodes
        self.window, self.dropout = window, dropout
        self._convolution_1 = GCNConv(in_channels, hidden_size)
        self._convolution_2 = GCNConv(hidden_size, hidden_size)
        self._batch_norm_1 = nn.BatchNorm1d(hidden_size)
        self._batch_norm_2 = nn.BatchNorm1d(hidden_size)
        self._recurrent_1 = nn.LSTM(2 * hidden_size, hidden_size, 1)
        self._recurrent_2 = nn.LSTM(hidden_size, hidden_size, 1)

    def _convolve(self, conv: Any, norm: nn.BatchNorm1d, x: Tensor, edge_index: Any,
                  edge_weight: Tensor | None) -> Tensor:  # fmt: skip
        rows = F.linear(convolve(x, edge_index, edge_weight, GCN()), conv.lin.weight, conv.bias)
        rows = norm(rows.relu())
        return F.dropout(rows, self.dropout) if self.training and self.dropout else rows

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:  # noqa: N803
        """Return the states of both recurrent layers after a window, beside features of its graphs.

        Args:
            X: Features of the graphs, one after the other, floats `[window * N, in_channels]`.
            edge_index: Edges, int64 `[2, E]`, sources first, or a transposed `SparseTensor`.
            edge_weight: A weight for each edge, floats `[E]`; None for 1.

        Returns:
            Floats `[N, 2 * hidden_size + in_channels + window - 1]`: both states, all features of the first graph, and
            the last feature of each that follows.

        Raises:
            ArgumentError: the edges belong to a snapshot of a stream, and `X` has one dimension.
        """
        found = locate(X, edge_index, edge_weight)
        if found is not None and found.holds(X) and self._goes_together(X):
            window = found.plan.get_window(GCN(), found.weighted)
            is_large = self.num_nodes * self.hidden_size > _LARGE
            if window is not None and not is_large:
                return self._take(window, found)
            # Draws of dropout equal the draws of single calls.
            if self._rate() == 0 and suits_alone(X, self.hidden_size) and (X.is_cuda or not is_large):
                found.plan.finish(id(self))
                return self._run_alone(found, X)
        if found is not None:
            # The next step may read running statistics, and adds to them: snapshots before it come first.
            found.plan.finish(id(self))
        first = self._convolve(self._convolution_1, self._batch_norm_1, X, edge_index, edge_weight)
        second = self._convolve(self._convolution_2, self._batch_norm_2, first, edge_index, edge_weight)
        rows = self._by_graph(torch.cat([first, second], dim=1))
        rows, state_1 = run_lstm(self._recurrent_1, rows)
        _, state_2 = run_lstm(self._recurrent_2, rows)
        # All of the first graph, and the last feature of each that follows.
        given = self._by_graph(X)
        return torch.cat([state_1, state_2, given[0], *given[1:, :, -1:]], dim=1)

    def _by_graph(self, rows: Tensor) -> Tensor:
        """Return rows `[B * window * N, C]` of one or more windows by graph, `[window, B * N, C]`."""
        if self.window == 1:
            return rows.unsqueeze(0)
        apart = rows.view(-1, self.window, self.num_nodes, rows.shape[1]).transpose(0, 1)
        return apart.reshape(self.window, -1, rows.shape[1])

    def _norms(self) -> tuple[nn.BatchNorm1d, nn.BatchNorm1d]:
        return self._batch_norm_1, self._batch_norm_2

    def _goes_together(self, x: Tensor) -> bool:
        """Report whether only running statistics join snapshots, and no parameter was replaced."""
        return (
            self.window == 1
            and x.numel() // self.in_channels == self.num_nodes > 1
            and self.dropout < 1
            and not torch.is_autocast_enabled(x.device.type)
            and all(_is_ordinary(norm, x) for norm in self._norms())
            and all(is_single(layer) for layer in (self._recurrent_1, self._recurrent_2))
            and all(
                isinstance(value, Tensor) and (value.dtype, value.device, value.shape) == (x.dtype, x.device, shape)
                for value, shape in self._list_shapes()
            )
        )

    def _list_shapes(self) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """List parameters and running statistics, and the shapes that they were made with."""
        size = self.hidden_size
        for conv, norm, width in (
            (self._convolution_1, self._batch_norm_1, self.in_channels),
            (self._convolution_2, self._batch_norm_2, size),
        ):
            yield conv.lin.weight, (size, width)
            for value in (conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var):
                yield value, (size,)
        for layer, width in ((self._recurrent_1, 2 * size), (self._recurrent_2, size)):
            shapes = (4 * size, width), (4 * size, size), (4 * size,), (4 * size,)
            yield from zip(get_parameters(layer), shapes, strict=True)

    def _take(self, window: Tensor, found: Located) -> Tensor:
        """Return the snapshot's part of the result of its frame, which the first request computes."""
        plan = found.plan
        key = id(self), torch.is_grad_enabled(), self.training, found.weighted
        rows, statistics, visited = plan.once(key, lambda: self._run_together(window, found))
        if not visited:
            plan.finish(id(self))
            plan.defer(lambda: self._update_statistics(statistics, visited), id(self))
        visited.append(found.time)
        out: Tensor = rows[found.time]
        return out

    def _run_alone(self, found: Located, x: Tensor) -> Tensor:
        """Compute a snapshot outside of frames as a frame of one, which takes fewer calls than its layers."""
        aggregated = found.plan.aggregate_features(GCN(), found.time, found.weighted)
        x = x.unsqueeze(0)
        return self._run(
            OneSnapshot(*found.plan.at(found.time)), found.weighted, aggregated.view(x.shape), x, self._norms()
        )[0]

    def _run_together(self, window: Tensor, found: Located) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[int]]:
        """Return rows of each snapshot of a frame, means and variances of all, and a list for the requested ones."""
        out = self._run(found.plan, found.weighted, window, found.plan.get_features())
        return out[:-4], out[-4:], []

    def _run(self, multiplier: Multiplier, weighted: bool, window: Tensor, x: Tensor,
             norms: tuple[nn.BatchNorm1d, ...] = ()) -> tuple[Tensor, ...]:  # fmt: skip
        """Return rows of each snapshot, then means and variances of both layers unless `norms` are given."""
        first, second = self._norms()
        frame = Frame(multiplier, weighted, window, x, self._rate(), (first.eps, second.eps), norms)
        parameters: list[Tensor] = []
        pairs: Any = ((self._convolution_1, first), (self._convolution_2, second))
        for conv, norm in pairs:
            parameters += [conv.lin.weight, conv.bias, norm.weight, norm.bias]
        for layer in (self._recurrent_1, self._recurrent_2):
            parameters += get_parameters(layer)
        out: tuple[Tensor, ...] = RunTogether.apply(frame, *parameters)
        return out

    def _rate(self) -> float:
        return self.dropout if self.training else 0.0

    def _update_statistics(self, statistics: tuple[Tensor, ...], visited: list[int]) -> None:
        """Update running statistics with the requested snapshots, in order, all in one step."""
        count, together = len(visited), visited == list(range(statistics[0].shape[0]))
        for norm, *seen in zip(self._norms(), statistics[::2], statistics[1::2], strict=True):
            assert norm.momentum is not None, "asked before"
            assert norm.num_batches_tracked is not None, "asked before"
            norm.num_batches_tracked.add_(count)
            ages = torch.arange(count - 1, -1, -1, dtype=seen[0].dtype, device=seen[0].device)
            shares = norm.momentum * (1 - norm.momentum) ** ages
            for running, rows in zip((norm.running_mean, norm.running_var), seen, strict=True):
                assert running is not None, "asked before"
                chosen = rows if together else torch.stack([rows[place] for place in visited])
                running.addmv_(chosen.t(), shares, beta=(1 - norm.momentum) ** count)
        visited.clear()

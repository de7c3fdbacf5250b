"""Recurrent cells: gated steps of T-GCN, LSTM steps and small GRU steps; differentiable.

The gated step has its reset before the product with the state, as T-GCN has it. On a GPU a narrow step of fp32 takes
one kernel. One more kernel runs backward and computes the step again, so that only its inputs are kept. For other
steps, the work between the products takes one kernel each way and product. Torch's own functions would read and write
the numbers of a node several times as often (`kernels/snapshots/recurrent_cells.py`). The order of additions never
changes.

`fold_gates` combines the parameters of T-GCN's layers into one matrix from states and aggregated features to the gates.
A convolution's weight is multiplied by the half of the linear layer behind it, so that features go to each gate in one
product. One kernel does so for all gates, and one more takes gradients back to the parameters.

`open_gates` is the step of an LSTM from a state of zeros, on a CPU in one pass over its gates. `open_two` is two such
steps on a GPU, in one kernel each way. `step_gru` is the step of a small GRU on a GPU in one call. `mix` is a gated
unit's last gate: it mixes a state and its proposed replacement, also of several dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.kernels.snapshots import recurrent_cells as kernels
from pyg_direct.ops.aggregate.products import multiply_columns
from pyg_direct.ops.run_kernel import (
    grid_for,
    grid_of,
    is_asked_again,
    is_heard,
    is_ordinary,
    pull_by_torch,
    run_cpu,
    run_gpu,
    runs_on_gpu,
    shared_grid,
    threads_for,
)

# The update, the reset and the proposal.
GATES = 3


def fits(parameters: Sequence[Tensor], channels: int, features: int, like: Tensor) -> bool:
    """Report whether these parameters have so many channels and features, and the dtype and the device of `like`."""
    kinds = {(p.dtype, p.device) for p in parameters}
    shapes = [(channels, features), (channels,), (channels, 2 * channels), (channels,)]
    return kinds == {(like.dtype, like.device)} and [p.shape for p in parameters] == [s for s in shapes for _ in "zrh"]


def fold_gates(parameters: Sequence[Tensor], is_spent: list[bool] | None = None) -> Tensor:
    """Return weights of a step, `[C + F + 1, 3 * C]`: rows of states, of features, and the bias; columns of each gate.

    Args:
        parameters: For each of the three gates the weights of convolutions `[C, F]`, then their biases `[C]`; the
            weights of linear layers `[C, 2 * C]`, whose right half sees the state, and their biases `[C]`. They are
            fp32, on a GPU, and accepted by `fits`.
        is_spent: One item, set to true after gradients have returned to the parameters; torch then keeps no tensors for
            further gradients.
    """
    # Here, so that torch sees it; see `step_folded`.
    made: Tensor = _Fold.apply(is_spent, *[p.contiguous() for p in parameters])
    return made


def fold_features(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return weight `[3 * C, F]` and bias from aggregated features to gates, by torch, on any device."""
    convs, conv_biases, linears, linear_biases = (parameters[i : i + GATES] for i in range(0, 4 * GATES, GATES))
    left = torch.stack([linear[:, : linear.shape[0]] for linear in linears])
    weight = torch.bmm(left, torch.stack(list(convs))).flatten(0, 1)
    bias = torch.stack(list(conv_biases)).unsqueeze(2)
    return weight, torch.baddbmm(torch.stack(list(linear_biases)).unsqueeze(2), left, bias).flatten()


def fold_states(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the halves of linear layers that see the state: of gates, `[C, 2 * C]`, and proposal, `[C, C]`."""
    update, reset, proposed = (linear[:, linear.shape[0] :] for linear in parameters[2 * GATES : 3 * GATES])
    return torch.cat([update, reset]).t(), proposed.t()


def fold_by_torch(parameters: Sequence[Tensor]) -> Tensor:
    """Fold as `fold_gates` does, by torch's functions."""
    weight, bias = fold_features(parameters)
    return torch.cat([torch.cat(fold_states(parameters), 1), weight.t(), bias.unsqueeze(0)])


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, is_spent: list[bool] | None, *parameters: Tensor) -> Tensor:
        channels, features = parameters[0].shape
        weights = parameters[0].new_empty(channels + features + 1, GATES * channels)
        grid = grid_for(weights.numel(), weights)
        run_gpu(kernels.fold_gates_gpu, grid, *parameters, channels, features, weights)
        # Not as torch keeps tensors: a checkpoint counts the tensors of a step, which folds again when it runs again.
        if not any(parameter.is_inference() for parameter in parameters):
            ctx.kept = [(parameter, parameter._version) for parameter in parameters]
        ctx.is_spent = is_spent
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_spent is not None:
            ctx.is_spent[0] = True
        if any(parameter._version != version for parameter, version in ctx.kept):
            raise RuntimeError("parameters must stay as they are until gradients come back to them, got one that was "
                               "modified in place since the step that it was used in")  # fmt: skip
        parameters, needed = [parameter for parameter, _ in ctx.kept], ctx.needs_input_grad[1:]
        if is_asked_again([grad]):
            return None, *pull_by_torch(lambda *given: [fold_by_torch(given)], parameters, needed, [grad])
        channels, features = parameters[0].shape
        out = grad.new_empty(sum(p.numel() for p in parameters))
        grid = grid_for(out.numel(), out)
        run_gpu(kernels.unfold_gates_gpu, grid, grad.contiguous(), *parameters, channels, features, out)
        parts = out.split([p.numel() for p in parameters])
        return None, *(part.view(p.shape) if is_needed else None
                       for part, p, is_needed in zip(parts, parameters, needed, strict=True))  # fmt: skip


# Numbers of a state in the time of one item of `threads_for`: several are computed at once. Spinning torch threads
# would occupy the cores of others.
_LIGHT = 64


def open_gates(gates: Tensor, bias: Tensor, state_bias: Tensor, out: Tensor | None = None, at: int = 0) -> Tensor:
    """Return the state of checked fp32 `gates` `[N, 3 * H]` or `[N, 4 * H]`, `[N, H]`; biases `[4 * H]`. Has no
    gradient.

    With contiguous `out` `[N, C]` the state is its columns from `at` on.
    """
    size = bias.numel() // 4
    out = gates.new_empty(gates.shape[0], size) if out is None else out
    with threads_for(gates.shape[0] * size // _LIGHT):
        run_cpu(kernels.open_lstm_cpu, gates, bias.detach(), state_bias.detach(), at, out)
    return out[:, at : at + size]


def pull_gates(grad: Tensor, gates: Tensor, bias: Tensor, state_bias: Tensor) -> Tensor:
    """Return gradients of the gates from the gradient of the state, `[N, H]` contiguous: like `gates`."""
    out, size = torch.empty_like(gates), grad.shape[1]
    if gates.shape[1] == 4 * size:
        out[:, size : 2 * size] = 0
    with threads_for(grad.numel() // _LIGHT):
        run_cpu(kernels.pull_lstm_cpu, grad, gates, bias.detach(), state_bias.detach(), out)
    return out


class Pulled(NamedTuple):
    """Gradients of two layers over rows, one behind the other.

    Attributes:
        first, second: Of both parts of the rows, `[N, S, H]`.
        layers: Of weights of inputs and of states, and of both biases, of each layer.
    """

    first: Tensor
    second: Tensor
    layers: list[Tensor]


def suits_two(like: Tensor, shape: Sequence[int]) -> bool:
    """Report whether `open_two` takes parts of shape `[N, W, H]` on a GPU; the simulator runs no C++."""
    return (
        like.is_cuda
        and like.dtype == torch.float32
        and 0 < shape[2] <= kernels.MOST_NUMBERS
        and 0 < shape[0] * shape[1] < 2**31
        and is_ordinary()
        and not is_heard(like)
    )


def open_two(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """Write states of two layers, one after the other, from checked fp32 rows on a GPU. Has no gradient.

    Args:
        first, second: Left and right half of the rows, contiguous `[N, W, H]`.
        x: Features `[W, N, F]`.
        parameters: Weights of inputs and of states, and biases of both, of each layer.
        out: Contiguous `[W, N, 2 * H + F]`, for both states, beside the features.
    """
    num_nodes, window, size = first.shape
    at_once = kernels.OPEN_ROWS[size > kernels.FEW_NUMBERS]
    blocks = shared_grid(first, num_nodes * window, at_once, kernels.OPEN_RESIDENT)
    given = [first, second, x.contiguous(), *_pick(parameters)]
    run_gpu(kernels.open_two_gpu, blocks, *[value.data_ptr() for value in given], num_nodes, window, size, x.shape[2],
            out, out.data_ptr())  # fmt: skip


def pull_two(grad: Tensor, first: Tensor, second: Tensor, parameters: Sequence[Tensor], begin: int = 0) -> Pulled:
    """Return gradients of `open_two` from `grad` `[N, S, 2 * H + F]` of snapshots from `begin` on."""
    num_nodes, window, size = first.shape
    seen, width = grad.shape[1:]
    count = num_nodes * seen
    gates, gates_2, rows, states = (first.new_empty(count, n * size) for n in (4, 4, 2, 1))
    of_first, of_second = (first.new_empty(num_nodes, seen, size) for _ in range(2))
    given = [grad.contiguous(), first, second, *_pick(parameters)]
    places = [value.data_ptr() for value in (gates, gates_2, rows, states, of_first)]
    at_once = kernels.PULL_ROWS[size > kernels.FEW_NUMBERS]
    blocks = shared_grid(first, count, at_once, kernels.PULL_RESIDENT)
    run_gpu(kernels.pull_two_gpu, blocks, *[value.data_ptr() for value in given], num_nodes, window, begin, seen, size,
            width - 2 * size, *places, of_second, of_second.data_ptr())  # fmt: skip
    layers = []
    for of_gates, given_rows in ((gates, rows), (gates_2, states)):
        bias = of_gates.sum(0)
        # A state of zeros takes no gradient back to its weights.
        layers += [multiply_columns(of_gates, given_rows), first.new_zeros(4 * size, size), bias, bias]
    return Pulled(of_first, of_second, layers)


def _pick(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return all parameters but the weights of states, of each layer."""
    return [parameters[i].detach().contiguous() for i in (0, 2, 3, 4, 6, 7)]


def step_gru(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the next state of checked fp32 `x` `[N, F]` and `state` `[N, C]` on a GPU, `[N, C]`, and the tensors that
    its gradient needs.

    Parameters are weights of inputs and of states, and biases of both. Has no gradient.
    """
    out = torch.empty_like(state, memory_format=torch.contiguous_format)
    kept = state.new_empty(state.shape[0], 4 * state.shape[1])
    given = [value.detach().contiguous() for value in (x, state, *parameters)]
    run_gpu(kernels.step_gru_gpu, grid_of(out.numel(), 0), *given, *x.shape, state.shape[1], kept, out)
    return out, kept


def pull_gru(grad: Tensor, x: Tensor, state: Tensor, parameters: Sequence[Tensor], kept: Tensor) -> list[Tensor]:
    """Return gradients of `x`, `state` and the four parameters from the gradient of the next state, `[N, C]`."""
    weights = parameters[:2]
    given = [value.detach().contiguous() for value in (grad, x, state, *weights, kept)]
    sizes = [value.numel() for value in (x, state, *parameters)]
    whole = x.new_empty(sum(sizes))
    run_gpu(kernels.pull_gru_gpu, grid_of(whole.numel(), 0), *given, *x.shape, state.shape[1], whole)
    parts = zip(whole.split(sizes), (x, state, *parameters), strict=True)
    return [part.view(value.shape) for part, value in parts]


def mix(proposed: Tensor, state: Tensor, share: Tensor) -> Tensor:
    """Return `proposed + share * (state - proposed)`, in one step if all three have one dtype.

    Under autocast dtypes differ: torch's `lerp` refuses them, and products and sums take the widest dtype.

    Args:
        proposed, state: Floats `[N, C]`.
        share: Share of the state that stays, floats `[N, C]`.

    Returns:
        Floats `[N, C]`.
    """
    if proposed.dtype == state.dtype == share.dtype:
        return torch.lerp(proposed, state, share)
    return share * state + (1 - share) * proposed


_DTYPES = (torch.float32, torch.float64)
# Features up to which a kernel computes their part of the gates again each time it needs it.
_NARROW = 16


def suits_gpu(x: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Report whether `step_gated` takes these: on one GPU, of one floating type, of shapes that fit, and without a mode
    that watches torch's calls. Torch itself refuses shapes that do not fit.
    """
    return (
        x.dtype == weight.dtype
        and x.device == weight.device
        and x.dtype in _DTYPES
        and _may_step(x, state)
        and weight.shape == (GATES * state.shape[1], x.shape[1])
    )


def suits_folded(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Report whether `step_folded` takes these, with parameters as in `fold_gates`: narrow rows of fp32, and the
    conditions of `suits_gpu`. The kernels are C++, which the simulator cannot run.
    """
    return is_narrow(x, state) and _may_step(x, state) and fits(parameters, state.shape[1], x.shape[1], x)


def is_narrow(x: Tensor, state: Tensor) -> bool:
    """Report whether a step of these is one kernel, if they fit."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.dim() == state.dim() == 2
        and x.shape[1] <= kernels.MOST_FEATURES
        and state.shape[1] <= kernels.MOST_CHANNELS
    )


def _may_step(x: Tensor, state: Tensor) -> bool:
    return (
        runs_on_gpu(x)
        and x.dtype == state.dtype
        and x.device == state.device
        and x.dim() == state.dim() == 2
        and x.shape[0] == state.shape[0]
        and 0 < GATES * state.numel() < 2**31
        and not torch.is_autocast_enabled(x.device.type)
        and is_ordinary()
        and not is_heard(x)
    )


def step_folded(x: Tensor, state: Tensor, weights: Tensor) -> Tensor:
    """Return the next state of nodes whose rows `suits_folded` accepts, in one kernel.

    Args:
        x: Features, fp32 `[N, F]`.
        state: The state before, `[N, C]`.
        weights: The result of `fold_gates`, `[C + F + 1, 3 * C]`.

    Returns:
        proposed + update * (state - proposed), `[N, C]`.
    """
    # Here, so that torch sees it: second gradients differentiate through the tensors that a step keeps.
    made: Tensor = _FoldedStep.apply(x.contiguous(), state.contiguous(), weights.contiguous())
    return made


def step_folded_by_torch(x: Tensor, state: Tensor, weights: Tensor) -> Tensor:
    """Compute the step by torch's functions, in any precision and on any device."""
    channels = state.shape[1]
    of_state, of_x, bias = weights.split([channels, x.shape[1], 1])
    return step_by_torch(torch.addmm(bias, x, of_x), state, *of_state.split([2 * channels, channels], 1))


def step_gated(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, of_gates: Tensor, of_proposal: Tensor) -> Tensor:
    """Return the next state of nodes whose rows `suits_gpu` accepts.

    Args:
        x: Features, floats `[N, F]`.
        state: The state before, `[N, C]`.
        weight, bias: Map from features to update, reset and proposal, `[3 * C, F]` and `[3 * C]`.
        of_gates: Map from the state to update and reset, `[C, 2 * C]`.
        of_proposal: Map from the reset state to the proposal, `[C, C]`.

    Returns:
        proposed + update * (state - proposed), `[N, C]`.
    """
    rows = [value.contiguous() for value in (x, state, weight, bias)]
    made: Tensor = _Step.apply(*rows, of_gates, of_proposal)
    return made


def step_by_torch(inputs: Tensor, state: Tensor, of_gates: Tensor, of_proposal: Tensor) -> Tensor:
    """Compute the step by torch's functions from the features' part of the gates, `inputs` `[N, 3 * C]`."""
    width = state.shape[1]
    gates = torch.addmm(inputs[:, : 2 * width], state, of_gates).sigmoid()
    update, reset = gates.split(width, 1)
    proposed = torch.addmm(inputs[:, 2 * width :], state * reset, of_proposal).tanh()
    return mix(proposed, state, update)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, of_gates: Tensor,
                of_proposal: Tensor) -> Tensor:  # fmt: skip
        channels, features = state.shape[1], x.shape[1]
        inputs = x.new_empty(0) if features <= _NARROW else F.linear(x, weight, bias)
        gates, shown, out = state @ of_gates, torch.empty_like(state), torch.empty_like(state)
        given = inputs, x, weight, bias, state
        count, grid = state.numel(), grid_of(state.numel(), 0)
        run_gpu(kernels.open_gates_gpu, grid, *given, count, channels, features, gates, shown)
        proposed = shown @ of_proposal
        run_gpu(kernels.close_gates_gpu, grid, *given, gates, count, channels, features, proposed, out)
        ctx.save_for_backward(x, state, weight, bias, of_gates, of_proposal, gates, shown, proposed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, gates, shown, proposed = ctx.saved_tensors
        if is_asked_again([grad]):
            return pull_by_torch(_step_by_torch, given, ctx.needs_input_grad, [grad])
        x, state, weight, _, of_gates, of_proposal = given
        grad, channels = grad.contiguous(), state.shape[1]
        to_inputs, to_state = state.new_empty(state.shape[0], 3 * channels), torch.empty_like(state)
        to_gates, to_proposal = to_inputs[:, : 2 * channels], to_inputs[:, 2 * channels :]
        count, grid = state.numel(), grid_of(state.numel(), 0)
        run_gpu(kernels.pull_close_gpu, grid, grad, state, gates, proposed, count, channels, to_inputs)
        to_shown = to_proposal @ of_proposal.t()
        run_gpu(kernels.pull_open_gpu, grid, grad, state, gates, to_shown, count, channels, to_inputs, to_state)
        needs_x, needs_state, needs_weight, needs_bias, needs_gates, needs_proposal = ctx.needs_input_grad
        return (
            to_inputs @ weight if needs_x else None,
            to_state.addmm_(to_gates, of_gates.t()) if needs_state else None,
            multiply_columns(to_inputs, x) if needs_weight else None,
            to_inputs.sum(0) if needs_bias else None,
            multiply_columns(state, to_gates) if needs_gates else None,
            multiply_columns(shown, to_proposal) if needs_proposal else None,
        )


def _step_by_torch(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, *right: Tensor) -> list[Tensor]:
    return [step_by_torch(F.linear(x, weight, bias), state, *right)]


def _step_folded_by_torch(*given: Tensor) -> list[Tensor]:
    return [step_folded_by_torch(*given)]


class _FoldedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, state, weights)
        at_once = kernels.STEP_NODES[state.shape[1] > kernels.FEW_CHANNELS]
        out, blocks = torch.empty_like(state), shared_grid(state, len(state), at_once, kernels.STEP_RESIDENT)
        run_gpu(kernels.step_gated_gpu, blocks, x.data_ptr(), state.data_ptr(), weights.data_ptr(), *state.shape,
                x.shape[1], out, out.data_ptr())  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, state, weights = ctx.saved_tensors
        if is_asked_again([grad]):
            return pull_by_torch(_step_folded_by_torch, (x, state, weights), ctx.needs_input_grad, [grad])
        needs_x, needs_state, needs_weights = ctx.needs_input_grad
        (nodes, channels), features = state.shape, x.shape[1]
        at_once = kernels.PULL_NODES[state.shape[1] > kernels.FEW_CHANNELS]
        blocks, grad = shared_grid(state, len(state), at_once, kernels.PULL_RESIDENT), grad.contiguous()
        to_inputs = state.new_empty(nodes, GATES * channels) if needs_x else None
        to_state = torch.empty_like(state) if needs_state else None
        sums = state.new_empty(blocks, *weights.shape)
        places = [0 if made is None else made.data_ptr() for made in (to_state, to_inputs)]
        run_gpu(kernels.pull_gated_gpu, blocks, grad.data_ptr(), x.data_ptr(), state.data_ptr(), weights.data_ptr(),
                nodes, channels, features, *places, sums, sums.data_ptr())  # fmt: skip
        of_x = weights[channels : channels + features]
        to_x = None if to_inputs is None else to_inputs @ of_x.t()
        return to_x, to_state, sums.sum(0) if needs_weights else None

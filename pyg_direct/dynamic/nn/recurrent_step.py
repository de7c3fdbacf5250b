"""Single steps of recurrent layers; torch's own steps spend most of their time before they compute.

`set_apart` returns the parts of results of one function, which lie side by side in one memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyg_direct.ops.aggregate.products import multiply
from pyg_direct.ops.run_kernel import is_asked_again, is_ordinary, pull_by_torch, runs_on_gpu
from pyg_direct.ops.snapshots.run_recurrent_cells import open_gates, pull_gates, pull_gru, step_gru as step_small_gru

_BACK = torch.ops.aten
# Numbers of a state up to which products in a loop take no longer than calls that would compute them.
_SMALL = 64
# Rows up to which computing the forget gate takes no longer than leaving it out.
_FEW = 256


def open_lstm(x: Tensor, weight: Tensor, of_state: Tensor, bias: Tensor, state_bias: Tensor, *,
              out: Tensor | None = None, at: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Compute an LSTM's step `[N, F]` to `[N, C]` from a state of zeros, and the tensors that its gradient needs.

    Such a step does not use the forget gate nor the weights of the state. Autograd does not see it. fp32 rows on a CPU
    may go to columns of `out` from `at` on.
    """
    size = weight.shape[0] // 4
    if x.is_cuda:
        gates = x @ weight.t()
        zeros = gates.new_zeros(1, 1)
        out, cell, opened = _BACK._thnn_fused_lstm_cell(gates, zeros.expand_as(gates), zeros.expand(len(x), size), bias,
                                                        state_bias)  # fmt: skip
        return out, (cell, opened)
    is_whole = x.dtype == torch.float32 and len(x) <= _FEW
    gates = multiply(x, weight if is_whole else _without_forget(weight))
    if x.dtype == torch.float32:
        return open_gates(gates, bias, state_bias, out, at), (gates,)
    admit, content, expose = _bend(gates, bias + state_bias)
    return expose * (admit * content).tanh_(), (gates,)


def open_lstm_backward(grad: Tensor, x: Tensor, kept: tuple[Tensor, ...], weight: Tensor, of_state: Tensor,
                       bias: Tensor, state_bias: Tensor) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Return gradients of `x` and of the four parameters."""
    if x.is_cuda:
        cell, opened = kept
        before = cell.new_zeros(1, 1).expand_as(cell)
        back = _BACK._thnn_fused_lstm_cell_backward_impl
        gates, _, of_bias = back(grad.contiguous(), None, before, cell, opened, True)
        return gates @ weight, [gates.t() @ x, torch.zeros_like(of_state), of_bias, of_bias]
    if x.dtype == torch.float32:
        gates = pull_gates(grad.contiguous(), kept[0], bias, state_bias)
        if gates.shape[1] == bias.numel():
            of_bias = gates.sum(0)
            of_weight = multiply(gates.t(), x.t())
            return multiply(gates, weight.t()), [of_weight, torch.zeros_like(of_state), of_bias, of_bias]
    else:
        admit, content, expose = _bend(kept[0], bias + state_bias)
        cell = (admit * content).tanh_()
        of_cell = _BACK.tanh_backward(grad * expose, cell)
        gates = torch.cat([_BACK.sigmoid_backward(of_cell * content, admit),
                           _BACK.tanh_backward(of_cell * admit, content),
                           _BACK.sigmoid_backward(grad * cell, expose)], 1)  # fmt: skip
    size = bias.numel() // 4
    # The forget gate gets no gradient.
    of_weight, of_bias = (
        torch.cat([part[:size], torch.zeros_like(part[:size]), part[size:]])
        for part in (multiply(x.t(), gates.t()).t(), gates.sum(0))
    )
    return multiply(gates, _without_forget(weight).t()), [of_weight, torch.zeros_like(of_state), of_bias, of_bias]


def _without_forget(gates: Tensor) -> Tensor:
    size = gates.shape[0] // 4
    return torch.cat([gates[:size], gates[2 * size :]])


def _bend(gates: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Return the gate that admits, the content, and the gate that exposes it."""
    admit, content, expose = (gates + _without_forget(bias)).chunk(3, 1)
    return admit.sigmoid(), content.tanh(), expose.sigmoid()


def step_gates(from_input: Tensor, from_state: Tensor, state: Tensor, bias: Tensor,
               state_bias: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """Return the next state of a GRU from the input's and the state's parts of its gates, `[N, 3 * C]` each without
    biases. Also return the tensors that its gradient needs; has no gradient itself.
    """
    if state.is_cuda:
        new, opened = _BACK._thnn_fused_gru_cell(from_input, from_state, state, bias, state_bias)
        return new, (opened,)
    size = state.shape[1]
    from_input, from_state = from_input + bias, from_state + state_bias
    reset, update = (from_input + from_state)[:, : 2 * size].sigmoid_().split(size, 1)
    of_state = from_state[:, 2 * size :]
    content = torch.addcmul(from_input[:, 2 * size :], reset, of_state).tanh_()
    return torch.lerp(content, state, update), (reset, update, content, of_state, state)


def step_gates_backward(grad: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the input's and the state's parts of the gates, and of the state itself."""
    if len(kept) == 1:
        of_input, of_gates, of_state, _, _ = _BACK._thnn_fused_gru_cell_backward(grad.contiguous(), kept[0], False)
        return of_input, of_gates, of_state
    reset, update, content, from_state, state = kept
    of_content = _BACK.tanh_backward(grad * (1 - update), content)
    of_update = _BACK.sigmoid_backward(grad * (state - content), update)
    of_reset = _BACK.sigmoid_backward(of_content * from_state, reset)
    of_input = torch.cat([of_reset, of_update, of_content], 1)
    return of_input, torch.cat([of_reset, of_update, of_content * reset], 1), grad * update


def open_by_torch(x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute `open_lstm` by torch's functions."""
    zeros = x.new_zeros(len(x), parameters[1].shape[1])
    return torch.lstm_cell(x, [zeros, zeros], *parameters)[0]


class _FirstStep(torch.autograd.Function):
    """`open_lstm` with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        out, kept = open_lstm(x, *parameters)
        ctx.save_for_backward(x, *parameters, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        if is_asked_again([grad]):
            return pull_by_torch(lambda *given: [open_by_torch(*given)], [x, *rest[:4]], ctx.needs_input_grad, [grad])
        of_x, of_parameters = open_lstm_backward(grad, x, tuple(rest[4:]), *rest[:4])
        return of_x if ctx.needs_input_grad[0] else None, *of_parameters


def run_lstm(layer: nn.LSTM, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(states, last state of the first layer)` of an LSTM over `[T, N, F]` from a state of zeros."""
    if rows.shape[0] == 1 and is_single(layer) and not torch.is_autocast_enabled(rows.device.type):
        out = _FirstStep.apply(rows[0], *get_parameters(layer))
        return out.unsqueeze(0), out
    states, (last, _) = layer(rows)
    return states, last[0]


def _step_by_torch(x: Tensor, state: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    return (torch.gru_cell(x[0], state[0], *parameters).unsqueeze(0),)


class _SmallStep(torch.autograd.Function):
    """The next state, `[1, N, C]`, of a small GRU, from `(x, state, parameters)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, *parameters: Tensor) -> Tensor:
        out, kept = step_small_gru(x[0], state[0], parameters)
        ctx.save_for_backward(x, state, *parameters, kept)
        return out.unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, kept = ctx.saved_tensors
        if is_asked_again([grad]):
            return pull_by_torch(_step_by_torch, given, ctx.needs_input_grad, [grad])
        of_x, of_state, *of_parameters = pull_gru(grad[0], given[0][0], given[1][0], given[2:], kept)
        return of_x.unsqueeze(0), of_state.unsqueeze(0), *of_parameters


def _is_small(*given: Tensor) -> bool:
    """Report whether a step of these suits `_SmallStep`, on a GPU: torch refuses shapes that do not fit."""
    x, state, of_input, of_state = given[:4]
    return (
        runs_on_gpu(x)
        and all(value.dtype == torch.float32 and value.device == x.device for value in given)
        and x.dim() == state.dim() == 3
        and x.shape[:2] == state.shape[:2]
        and (x.shape[2], state.shape[2]) == (of_input.shape[1], of_state.shape[1])
        and max(given[0].shape[2], given[1].shape[2], given[1].shape[1]) <= _SMALL
        and not torch.is_autocast_enabled(x.device.type)
        and is_ordinary()
    )


def step_gru(layer: nn.GRU, x: Tensor, state: Tensor) -> Tensor:
    """Return the next state, `[1, N, C]`, of a GRU of one layer."""
    parameters = get_parameters(layer)
    if _is_small(x, state, *parameters):
        out: Tensor = _SmallStep.apply(x, state, *parameters)
        return out
    if x.is_cuda:
        new: Tensor = layer(x, state)[1]
        return new
    return torch.gru_cell(x[0], state[0], *parameters).unsqueeze(0)


def is_single(layer: Any) -> bool:
    """Report whether an LSTM is torch's own, of one layer and direction, all of it in `get_parameters`."""
    return (
        type(layer) is nn.LSTM
        and layer.num_layers == 1
        and layer.bias
        and not (layer.bidirectional or layer.proj_size or layer.batch_first)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def get_parameters(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights of inputs and of states, and biases of both, of a recurrent layer of one layer."""
    return layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0


def set_apart(rows: Tensor) -> list[Tensor]:
    """Return the parts of contiguous `[W, ...]`, in its memory, without views that autograd must guard."""
    like = rows[0]
    return [
        rows.new_empty(0).set_(rows.untyped_storage(), place * like.numel(), like.shape, like.stride())
        for place in range(rows.shape[0])
    ]

"""Single steps of recurrent layers on a CPU, where those of torch spend most of their time before they compute.

On a GPU they are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_BACK = torch.ops.aten
# Rows of which all are computed rather than looked at.
_FEW = 64


class _FirstStep(torch.autograd.Function):
    """An LSTM's step from a state of zeros: what it forgets and the weights of the state have no part in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of_state: Tensor, bias: Tensor) -> Tensor:
        size = weight.shape[0] // 4
        admit = torch.addmm(bias[:size], x, weight[:size].t()).sigmoid_()
        # The content, and the gate that exposes it.
        rest = torch.addmm(bias[2 * size :], x, weight[2 * size :].t())
        content, expose = rest.split(size, 1)
        content.tanh_()
        expose.sigmoid_()
        cell = (admit * content).tanh_()
        ctx.save_for_backward(x, weight, admit, content, expose, cell)
        ctx.of_state = of_state
        return expose * cell

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *kept = ctx.saved_tensors
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        # Of snapshots that went together, losses often see the last one only.
        seen = grad.any(1).nonzero() if grad.shape[0] > _FEW else None
        rows = slice(None) if seen is None else slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0)
        x, grad = x[rows], grad[rows]
        admit, content, expose, cell = (part[rows] for part in kept)
        # Nothing reaches the gate that forgets.
        gates = grad.new_zeros(grad.shape[0], weight.shape[0])
        of_admit, _, of_content, of_expose = gates.split(cell.shape[1], 1)
        of_cell = _BACK.tanh_backward(grad * expose, cell)
        _BACK.sigmoid_backward(of_cell * content, admit, grad_input=of_admit)
        _BACK.tanh_backward(of_cell * admit, content, grad_input=of_content)
        _BACK.sigmoid_backward(grad * cell, expose, grad_input=of_expose)
        if of_x is not None:
            torch.mm(gates, weight, out=of_x[rows])
        return of_x, gates.t() @ x, torch.zeros_like(ctx.of_state), gates.sum(0)


def run_lstm(layer: nn.LSTM, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`(states, last state)` of an LSTM of one layer over `[T, N, F]` from a state of zeros."""
    if rows.shape[0] == 1 and not rows.is_cuda:
        of_input, of_state, *biases = _parameters(layer)
        out = _FirstStep.apply(rows[0], of_input, of_state, biases[0] + biases[1])
        return out.unsqueeze(0), out
    states, (last, _) = layer(rows)
    return states, last[0]


def step_gru(layer: nn.GRU, x: Tensor, state: Tensor) -> Tensor:
    """The next state, `[1, N, C]`, of a GRU of one layer."""
    if x.is_cuda:
        new: Tensor = layer(x, state)[1]
        return new
    return torch.gru_cell(x[0], state[0], *_parameters(layer)).unsqueeze(0)


def _parameters(layer: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0

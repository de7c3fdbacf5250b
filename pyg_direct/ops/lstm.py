"""The step of an LSTM from a state of zeros, in loops over its gates that a CPU does once (see `kernels/lstm.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels import lstm as kernels
from pyg_direct.ops.launch import run_cpu, threads_for

# Numbers of a state in the time of an item that others are woken for: several are found at once, and threads of torch
# that wait awake are on the cores of others.
_LIGHT = 64


def open_gates(gates: Tensor, bias: Tensor, state_bias: Tensor, out: Tensor | None = None, at: int = 0) -> Tensor:
    """The state of checked fp32 `gates` `[N, 3 * H]` or `[N, 4 * H]`, `[N, H]`; biases `[4 * H]`. Has no gradient.

    With contiguous `out` `[N, C]` these are the columns of it from `at` on.
    """
    size = bias.numel() // 4
    out = gates.new_empty(gates.shape[0], size) if out is None else out
    with threads_for(gates.shape[0] * size // _LIGHT):
        run_cpu(kernels.open_lstm_cpu, gates, bias.detach(), state_bias.detach(), at, out)
    return out[:, at : at + size]


def pull_gates(grad: Tensor, gates: Tensor, bias: Tensor, state_bias: Tensor) -> Tensor:
    """Gradients of the gates of that of the state, `[N, H]` contiguous: like `gates`."""
    out, size = torch.empty_like(gates), grad.shape[1]
    if gates.shape[1] == 4 * size:
        out[:, size : 2 * size] = 0
    with threads_for(grad.numel() // _LIGHT):
        run_cpu(kernels.pull_lstm_cpu, grad, gates, bias.detach(), state_bias.detach(), out)
    return out

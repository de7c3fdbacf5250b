"""The step of an LSTM from a state of zeros, in loops over its gates that a CPU does once (see `kernels/lstm.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.kernels import lstm as kernels
from pyg_direct.ops.launch import run_cpu, threads_for

# Numbers of a state in the time of an item that others are woken for: several are found at once, and threads of torch
# that wait awake are on the cores of others.
_LIGHT = 64


def open_gates(gates: Tensor, bias: Tensor, state_bias: Tensor) -> Tensor:
    """The state of checked fp32 `gates` `[N, 3 * H]` or `[N, 4 * H]`, `[N, H]`; biases `[4 * H]`. Has no gradient."""
    out = gates.new_empty(gates.shape[0], bias.numel() // 4)
    with threads_for(out.numel() // _LIGHT):
        run_cpu(kernels.open_lstm_cpu, gates, bias.detach(), state_bias.detach(), out)
    return out


def pull_gates(grad: Tensor, gates: Tensor, bias: Tensor, state_bias: Tensor) -> Tensor:
    """Gradients of the gates of that of the state, `[N, H]` contiguous: like `gates`."""
    out, size = torch.empty_like(gates), grad.shape[1]
    if gates.shape[1] == 4 * size:
        out[:, size : 2 * size] = 0
    with threads_for(grad.numel() // _LIGHT):
        run_cpu(kernels.pull_lstm_cpu, grad, gates, bias.detach(), state_bias.detach(), out)
    return out

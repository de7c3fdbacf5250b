"""The step of a small GRU in one call (see `kernels/gru.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.kernels import gru as kernels
from pyg_direct.ops.launch import run_cpu, threads_for


def step_gru(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The next state of checked fp32 `x` `[N, F]` and `state` `[N, C]`, `[N, C]`, and what its gradient needs.

    Parameters are weights of inputs and of states, and biases of both. Has no gradient.
    """
    out = torch.empty_like(state, memory_format=torch.contiguous_format)
    kept = state.new_empty(state.shape[0], 4 * state.shape[1])
    with threads_for(0):
        run_cpu(kernels.step_gru_cpu, *(given.detach().contiguous() for given in (x, state, *parameters)), kept, out)
    return out, kept


def pull_gru(grad: Tensor, x: Tensor, state: Tensor, parameters: Sequence[Tensor], kept: Tensor) -> list[Tensor]:
    """Gradients of `x`, `state` and the four parameters of that of the next state, `[N, C]`."""
    weights = parameters[:2]
    given = [value.detach().contiguous() for value in (grad, x, state, *weights, kept)]
    out = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, state, *parameters)]
    with threads_for(0):
        run_cpu(kernels.pull_gru_cpu, *given, *out)
    return out

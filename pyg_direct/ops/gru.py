"""The step of a small GRU in one call, on CPU and GPU (see `kernels/gru.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.kernels import gru as kernels
from pyg_direct.ops.launch import grid_of, run_cpu, run_gpu, runs_on_gpu, threads_for


def step_gru(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The next state of checked fp32 `x` `[N, F]` and `state` `[N, C]`, `[N, C]`, and what its gradient needs.

    Parameters are weights of inputs and of states, and biases of both. Has no gradient.
    """
    out = torch.empty_like(state, memory_format=torch.contiguous_format)
    kept = state.new_empty(state.shape[0], 4 * state.shape[1])
    given = [value.detach().contiguous() for value in (x, state, *parameters)]
    if runs_on_gpu(x):
        run_gpu(kernels.step_gru_gpu, grid_of(out.numel(), 0), *given, *_sizes(x, state), kept, out)
        return out, kept
    with threads_for(0):
        run_cpu(kernels.step_gru_cpu, *given, kept, out)
    return out, kept


def pull_gru(grad: Tensor, x: Tensor, state: Tensor, parameters: Sequence[Tensor], kept: Tensor) -> list[Tensor]:
    """Gradients of `x`, `state` and the four parameters of that of the next state, `[N, C]`."""
    weights = parameters[:2]
    given = [value.detach().contiguous() for value in (grad, x, state, *weights, kept)]
    if runs_on_gpu(x):
        sizes = [value.numel() for value in (x, state, *parameters)]
        whole = x.new_empty(sum(sizes))
        run_gpu(kernels.pull_gru_gpu, grid_of(whole.numel(), 0), *given, *_sizes(x, state), whole)
        parts = zip(whole.split(sizes), (x, state, *parameters), strict=True)
        return [part.view(value.shape) for part, value in parts]
    out = [torch.empty_like(value, memory_format=torch.contiguous_format) for value in (x, state, *parameters)]
    with threads_for(0):
        run_cpu(kernels.pull_gru_cpu, *given, *out)
    return out


def _sizes(x: Tensor, state: Tensor) -> tuple[int, int, int]:
    return *x.shape, state.shape[1]

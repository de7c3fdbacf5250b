"""A gated step whose reset comes before the product with the state, as T-GCN has it; differentiable.

On a GPU a narrow step of fp32 takes one kernel, and one more on the way back, which computes it again, so that nothing
is kept for it but what went in. Of other steps what lies between the products takes a kernel each way and product;
torch's own functions would read and write the numbers of a node several times as often (`kernels/gated.py`). Nothing is
added up in an order that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.kernels import gated as kernels
from pyg_direct.ops.again import is_asked_again, pull_by_torch
from pyg_direct.ops.folded import GATES, fits
from pyg_direct.ops.launch import grid_of, is_heard, is_ordinary, run_gpu, runs_on_gpu, shared_grid
from pyg_direct.ops.mix import mix
from pyg_direct.ops.product import multiply_columns

_DTYPES = (torch.float32, torch.float64)
# Features up to which a kernel makes of them what they add to the gates, each time it needs it.
_NARROW = 16


def suits_gpu(x: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Whether `step_gated` takes these: on one GPU, of one floating type and of shapes that fit, and nothing watches
    torch's calls. What does not fit is torch's to refuse.
    """
    return (
        x.dtype == weight.dtype
        and x.device == weight.device
        and x.dtype in _DTYPES
        and _may_step(x, state)
        and weight.shape == (GATES * state.shape[1], x.shape[1])
    )


def suits_folded(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether `step_folded` takes these, of parameters as `fold_gates` has them: narrow rows of fp32, and all else as
    `suits_gpu` asks for. The kernels are of C++, which the simulator has not.
    """
    return is_narrow(x, state) and _may_step(x, state) and fits(parameters, state.shape[1], x.shape[1], x)


def is_narrow(x: Tensor, state: Tensor) -> bool:
    """Whether a step of these is one kernel, if they fit."""
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
    """The next state of nodes whose rows `suits_folded` has been asked for, in one kernel.

    Args:
        x: Features, fp32 `[N, F]`.
        state: The state before, `[N, C]`.
        weights: What `fold_gates` gives, `[C + F + 1, 3 * C]`.

    Returns:
        proposed + update * (state - proposed), `[N, C]`.
    """
    # Here, where torch sees it: what a gradient is differentiated again with are the tensors that a step keeps.
    made: Tensor = _FoldedStep.apply(x.contiguous(), state.contiguous(), weights.contiguous())
    return made


def step_folded_by_torch(x: Tensor, state: Tensor, weights: Tensor) -> Tensor:
    """The same by torch's functions, in any precision and on any device."""
    channels = state.shape[1]
    of_state, of_x, bias = weights.split([channels, x.shape[1], 1])
    return step_by_torch(torch.addmm(bias, x, of_x), state, *of_state.split([2 * channels, channels], 1))


def step_gated(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, of_gates: Tensor, of_proposal: Tensor) -> Tensor:
    """The next state of nodes whose rows `suits_gpu` has been asked for.

    Args:
        x: Features, floats `[N, F]`.
        state: The state before, `[N, C]`.
        weight, bias: What makes of features what they add to update, reset and proposal, `[3 * C, F]` and `[3 * C]`.
        of_gates: The same of the state for update and reset, `[C, 2 * C]`.
        of_proposal: And of the reset state for the proposal, `[C, C]`.

    Returns:
        proposed + update * (state - proposed), `[N, C]`.
    """
    rows = [value.contiguous() for value in (x, state, weight, bias)]
    made: Tensor = _Step.apply(*rows, of_gates, of_proposal)
    return made


def step_by_torch(inputs: Tensor, state: Tensor, of_gates: Tensor, of_proposal: Tensor) -> Tensor:
    """The same by torch's functions, from what the features add, `inputs` `[N, 3 * C]`, on any device."""
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

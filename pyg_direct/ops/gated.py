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
from pyg_direct.ops.launch import full_grid, grid_of, is_heard, is_ordinary, run_gpu, runs_on_gpu

_DTYPES = (torch.float32, torch.float64)
# Features up to which a kernel makes of them what they add to the gates, each time it needs it.
_NARROW = 16
# Pieces of rows whose products are added up in the end: a product of few columns uses few of a GPU's multiprocessors.
_PIECES = 512
_LEAST_ROWS = 64


def suits_gpu(x: Tensor, state: Tensor, weight: Tensor) -> bool:
    """Whether `step_gated` takes these: on one GPU, of one floating type and of shapes that fit, and nothing watches
    torch's calls. What does not fit is torch's to refuse.
    """
    return (
        runs_on_gpu(x)
        and x.dtype == state.dtype == weight.dtype
        and x.dtype in _DTYPES
        and x.device == state.device == weight.device
        and x.dim() == state.dim() == 2
        and x.shape[0] == state.shape[0]
        and weight.shape == (3 * state.shape[1], x.shape[1])
        and 0 < 3 * state.numel() < 2**31
        and not torch.is_autocast_enabled(x.device.type)
        and is_ordinary()
        and not is_heard(x)
    )


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
    # Here, where torch sees it: what a gradient is differentiated again with are the tensors that a step keeps.
    rows = [value.contiguous() for value in (x, state, weight, bias)]
    step = _WholeStep if is_whole(x, state) else _Step
    made: Tensor = step.apply(*rows, of_gates, of_proposal)
    return made


def is_whole(x: Tensor, state: Tensor) -> bool:
    """Whether a step that `suits_gpu` takes one kernel: of C++, which the simulator has not."""
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and x.shape[1] <= kernels.MOST_FEATURES
        and state.shape[1] <= kernels.MOST_CHANNELS
    )


def step_by_torch(inputs: Tensor, state: Tensor, of_gates: Tensor, of_proposal: Tensor) -> Tensor:
    """The same by torch's functions, from what the features add, `inputs` `[N, 3 * C]`, on any device."""
    width = state.shape[1]
    gates = torch.addmm(inputs[:, : 2 * width], state, of_gates).sigmoid()
    update, reset = gates.split(width, 1)
    proposed = torch.addmm(inputs[:, 2 * width :], state * reset, of_proposal).tanh()
    return torch.lerp(proposed, state, update)


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
        if torch.is_grad_enabled() or is_heard(grad):
            return _pull_by_torch(given, ctx.needs_input_grad, grad)
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
            _multiply_columns(to_inputs, x) if needs_weight else None,
            to_inputs.sum(0) if needs_bias else None,
            _multiply_columns(state, to_gates) if needs_gates else None,
            _multiply_columns(shown, to_proposal) if needs_proposal else None,
        )


class _WholeStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, of_gates: Tensor,
                of_proposal: Tensor) -> Tensor:  # fmt: skip
        given, out = (x, state, weight, bias, of_gates, of_proposal), torch.empty_like(state)
        ctx.save_for_backward(*given)
        blocks = _grid_over(state, kernels.STEP_NODES, kernels.STEP_RESIDENT)
        run_gpu(kernels.step_gated_gpu, blocks, *_describe(*given), out, out.data_ptr())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        if torch.is_grad_enabled() or is_heard(grad):
            return _pull_by_torch(given, ctx.needs_input_grad, grad)
        x, state, weight, *_ = given
        needs_x, needs_state, *needed = ctx.needs_input_grad
        (nodes, channels), features = state.shape, x.shape[1]
        blocks = _grid_over(state, kernels.PULL_NODES, kernels.PULL_RESIDENT)
        grad = grad.contiguous()
        to_inputs = state.new_empty(nodes, 3 * channels) if needs_x else None
        to_state = torch.empty_like(state) if needs_state else None
        sums = state.new_empty(blocks, channels + features + 1, 3 * channels)
        places = [0 if made is None else made.data_ptr() for made in (to_state, to_inputs)]
        run_gpu(kernels.pull_gated_gpu, blocks, grad.data_ptr(), *_describe(*given), *places, sums, sums.data_ptr())
        of_state, of_x, of_bias = sums.sum(0).split([channels, features, 1])
        to_gates, to_proposal = of_state.split([2 * channels, channels], 1)
        found = (of_x.t(), of_bias[0], to_gates, to_proposal)
        return (
            None if to_inputs is None else to_inputs @ weight,
            to_state,
            *(value if wanted else None for value, wanted in zip(found, needed, strict=True)),
        )


def _grid_over(state: Tensor, block_nodes: tuple[int, int], resident: int) -> int:
    """Blocks for all nodes of a whole step, which share them out."""
    nodes = block_nodes[state.shape[1] > kernels.FEW_CHANNELS]
    return min(full_grid(state, resident), -(-state.shape[0] // nodes))


def _describe(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, of_gates: Tensor,
              of_proposal: Tensor) -> tuple[int, ...]:  # fmt: skip
    """What the kernels of a whole step are told of what goes in."""
    addresses = [value.data_ptr() for value in (x, state, weight, bias, of_gates, of_proposal)]
    return *addresses, *of_gates.stride(), *of_proposal.stride(), *state.shape, x.shape[1]


def _pull_by_torch(given: Sequence[Tensor], needed: Sequence[bool], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of gradients, or many at once: of views, since some of what is given may be one tensor."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        views = [value.view_as(value) if again else value.detach().requires_grad_() for value in given]
        out = step_by_torch(F.linear(views[0], *views[2:4]), views[1], *views[4:])
    wanted = [view for view, is_needed in zip(views, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def _multiply_columns(left: Tensor, right: Tensor) -> Tensor:
    """`left.t() @ right` of `[N, A]` and `[N, B]`: `[A, B]`."""
    rows = left.shape[0] // _PIECES
    if rows < _LEAST_ROWS:
        return left.t() @ right
    whole = rows * _PIECES
    pieces = [side[:whole].unflatten(0, (_PIECES, rows)) for side in (left, right)]
    out = torch.bmm(pieces[0].mT, pieces[1]).sum(0)
    return torch.addmm(out, left[whole:].t(), right[whole:]) if whole < left.shape[0] else out

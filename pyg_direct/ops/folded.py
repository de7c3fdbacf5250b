"""What takes states and aggregated features to the gates of T-GCN, of the parameters of its layers; differentiable.

A convolution's weight and the half of the linear layer behind it are multiplied with each other, so that features go to
each gate in one product. One kernel does so for all gates, and one more takes gradients back to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.kernels import gated as kernels
from pyg_direct.ops.again import is_asked_again, pull_by_torch
from pyg_direct.ops.launch import grid_for, run_gpu

# The update, the reset and the proposal.
GATES = 3


def fits(parameters: Sequence[Tensor], channels: int, features: int, like: Tensor) -> bool:
    """Whether these are the parameters of so many channels and features, of the dtype and the device of `like`."""
    kinds = {(p.dtype, p.device) for p in parameters}
    shapes = [(channels, features), (channels,), (channels, 2 * channels), (channels,)]
    return kinds == {(like.dtype, like.device)} and [p.shape for p in parameters] == [s for s in shapes for _ in "zrh"]


def fold_gates(parameters: Sequence[Tensor], is_spent: list[bool] | None = None) -> Tensor:
    """Weights of a step, `[C + F + 1, 3 * C]`: rows of states, of features, and the bias; columns of each gate.

    Args:
        parameters: For each of the three gates the weights of convolutions `[C, F]`, then their biases `[C]`, the
            weights of linear layers `[C, 2 * C]`, whose right half sees the state, and their biases `[C]`; fp32, on a
            GPU, of those that `fits` has been asked for.
        is_spent: Of one item, which becomes true when gradients have come back to the parameters, after which torch
            keeps nothing for further ones.
    """
    # Here, where torch sees it; see `step_folded`.
    made: Tensor = _Fold.apply(is_spent, *[p.contiguous() for p in parameters])
    return made


def fold_features(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What makes of aggregated features what they add to the gates, by torch's functions: a weight, floats `[3 * C,
    F]`, and a bias; in any precision and on any device.
    """
    convs, conv_biases, linears, linear_biases = (parameters[i : i + GATES] for i in range(0, 4 * GATES, GATES))
    left = torch.stack([linear[:, : linear.shape[0]] for linear in linears])
    weight = torch.bmm(left, torch.stack(list(convs))).flatten(0, 1)
    bias = torch.stack(list(conv_biases)).unsqueeze(2)
    return weight, torch.baddbmm(torch.stack(list(linear_biases)).unsqueeze(2), left, bias).flatten()


def fold_states(parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The halves of linear layers that see the state: of both gates, `[C, 2 * C]`, and of the proposal, `[C, C]`."""
    update, reset, proposed = (linear[:, linear.shape[0] :] for linear in parameters[2 * GATES : 3 * GATES])
    return torch.cat([update, reset]).t(), proposed.t()


def fold_by_torch(parameters: Sequence[Tensor]) -> Tensor:
    """As `fold_gates`, by torch's functions."""
    weight, bias = fold_features(parameters)
    return torch.cat([torch.cat(fold_states(parameters), 1), weight.t(), bias.unsqueeze(0)])


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, is_spent: list[bool] | None, *parameters: Tensor) -> Tensor:
        channels, features = parameters[0].shape
        weights = parameters[0].new_empty(channels + features + 1, GATES * channels)
        grid = grid_for(weights.numel(), weights)
        run_gpu(kernels.fold_gates_gpu, grid, *parameters, channels, features, weights)
        # Not as torch keeps tensors: a checkpoint counts those of a step, which folds again when it is run again.
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

"""The step of an LSTM from a state of zeros, in loops over its gates that a CPU does once, and that of two of them on a
GPU, in one kernel each way (see `kernels/lstm.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.kernels import lstm as kernels
from pyg_direct.ops.launch import is_heard, is_ordinary, run_cpu, run_gpu, shared_grid, threads_for
from pyg_direct.ops.product import multiply_columns

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
    """Whether `open_two` takes parts of this shape `[N, W, H]`, which lie on a GPU. The kernels are of C++, which the
    simulator has not.
    """
    return (
        like.is_cuda
        and like.dtype == torch.float32
        and 0 < shape[2] <= kernels.MOST_NUMBERS
        and 0 < shape[0] * shape[1] < 2**31
        and is_ordinary()
        and not is_heard(like)
    )


def open_two(first: Tensor, second: Tensor, x: Tensor, parameters: Sequence[Tensor], out: Tensor) -> None:
    """States of two layers, one behind the other, of checked fp32 rows on a GPU. Has no gradient.

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
    """Gradients of what `open_two` was given, of that of what it gave of S snapshots from `begin` on, which are
    computed again: `grad` `[N, S, 2 * H + F]`.
    """
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
    """All but the weights of states, of each layer."""
    return [parameters[i].detach().contiguous() for i in (0, 2, 3, 4, 6, 7)]

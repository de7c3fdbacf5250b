"""All snapshots of a frame through MPNN-LSTM by torch's functions, for gradients that have gradients in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_direct.dynamic.nn.recurrence import open_by_torch
from pyg_direct.dynamic.operator import GCN
from pyg_direct.ops.launch import is_transformed

if TYPE_CHECKING:
    from pyg_direct.dynamic.nn.mpnn_frame import Frame


class _Multiply(torch.autograd.Function):
    """Rows `[N, W, F]` of the snapshots of a frame, aggregated, or with `transposed` the adjoint of that."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, frame: Frame, transposed: bool) -> Tensor:
        ctx.given = frame, not transposed
        return frame.plan.multiply_window(GCN(), rows.contiguous(), frame.weighted, transposed=transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Multiply.apply(grad, *ctx.given), None, None


def _aggregate(rows: Tensor, frame: Frame) -> Tensor:
    if is_transformed():
        # There it is differentiated by torch, which takes no functions of ours.
        return frame.plan.multiply_window(GCN(), rows.contiguous(), frame.weighted)
    out: Tensor = _Multiply.apply(rows, frame, False)
    return out


def run_by_torch(frame: Frame, kept: tuple[Tensor | None, Tensor | None], *parameters: Tensor) -> list[Tensor]:
    """Rows `[N, 2 * H + F]` of each snapshot.

    Args:
        frame: What goes through the layers.
        kept: Which numbers `[N, W, H]` of each convolution dropout has kept; None without dropout.
        parameters: As of `RunTogether`.
    """
    rows, halves = frame.aggregated.transpose(0, 1), []
    for layer, chosen in enumerate(kept):
        weight, bias, scale, shift = parameters[4 * layer : 4 * layer + 4]
        rows = F.linear(_aggregate(rows, frame) if layer else rows, weight, bias).relu()
        shape = rows.shape
        flat = F.batch_norm(rows.reshape(shape[0], -1), None, None, scale.repeat(shape[1]), shift.repeat(shape[1]),
                            True, 0.0, frame.eps[layer])  # fmt: skip
        rows = flat.view(shape)
        rows = rows if chosen is None else rows * chosen / (1 - frame.dropout)
        halves.append(rows)
    num_nodes, window, _ = rows.shape
    states = open_by_torch(torch.cat(halves, 2).flatten(0, 1), *parameters[8:12])
    states_2 = open_by_torch(states, *parameters[12:16])
    given = [states.view(num_nodes, window, -1), states_2.view(num_nodes, window, -1), frame.x.transpose(0, 1)]
    return list(torch.cat(given, 2).unbind(1))

"""The weights of EvolveGCN-O for all snapshots of a frame, and what they make of aggregated features.

These weights depend on each other but on no features, so that all their steps come first, and one product follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.nn.apart import set_apart
from pyg_direct.dynamic.nn.recurrence import step_gates, step_gates_backward
from pyg_direct.ops.again import is_asked_again, pull_by_torch


class EvolveTogether(torch.autograd.Function):
    """`(aggregated [W, N, F], weight [1, F, F], parameters of the GRU)` to rows `[N, F]` of each snapshot, then the
    weights `[1, F, F]` of each.
    """

    @staticmethod
    def forward(ctx: Any, aggregated: Tensor, weight: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        ctx.set_materialize_grads(False)
        of_input, of_state, bias, state_bias = parameters
        both = torch.cat([of_input, of_state]).t()
        states, kept = [weight[0]], []
        for _ in range(aggregated.shape[0]):
            from_input, from_state = (states[-1] @ both).chunk(2, 1)
            state, saved = step_gates(from_input, from_state, states[-1], bias, state_bias)
            states.append(state)
            kept.append(saved)
        ctx.save_for_backward(aggregated, weight, *parameters)
        ctx.states, ctx.kept = states, kept
        weights = torch.stack(states[1:])
        return *set_apart(torch.bmm(aggregated, weights)), *set_apart(weights.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: D102
        aggregated, _, of_input, of_state, *_ = ctx.saved_tensors
        if is_asked_again(grads):
            return pull_by_torch(_evolve_by_torch, ctx.saved_tensors, ctx.needs_input_grad, grads)
        window = aggregated.shape[0]
        back: Tensor | None = None
        gates: list[tuple[Tensor, Tensor]] = []
        last = 0
        for place in reversed(range(window)):
            of_rows, of_weight = grads[place], grads[window + place]
            if of_rows is not None:
                seen = aggregated[place].t()
                back = seen @ of_rows if back is None else torch.addmm(back, seen, of_rows)
            if of_weight is not None:
                back = of_weight[0] if back is None else back + of_weight[0]
            if back is None:
                continue
            last = last or place + 1
            of_gates, of_state_gates, back = step_gates_backward(back, ctx.kept[place])
            gates.append((of_gates, of_state_gates))
            back = torch.addmm(torch.addmm(back, of_gates, of_input), of_state_gates, of_state)
        if back is None:
            return None, *[None] * 5
        before = torch.cat(ctx.states[:last][::-1])
        whole = [torch.cat(parts) for parts in zip(*gates, strict=True)]
        return None, back.unsqueeze(0), *(part.t() @ before for part in whole), *(part.sum(0) for part in whole)


def _evolve_by_torch(aggregated: Tensor, weight: Tensor, *parameters: Tensor) -> list[Tensor]:
    """What `EvolveTogether` gives."""
    weights = [weight[0]]
    for _ in range(aggregated.shape[0]):
        weights.append(torch.gru_cell(weights[-1], weights[-1], *parameters))
    rows = [part @ weight for part, weight in zip(aggregated, weights[1:], strict=True)]
    return [*rows, *(weight.unsqueeze(0) for weight in weights[1:])]

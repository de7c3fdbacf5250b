"""Folded weights that the steps of a sequence share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.ops.folded import fold_gates


class _Folded(NamedTuple):
    weights: Tensor
    parameters: list[Tensor]
    # What they were: the version of each, and whether it asked for a gradient.
    states: list[tuple[int, bool]]
    # Whether gradients have come back through them, or none will.
    is_spent: list[bool]


class SharedGates:
    """What `fold_gates` makes of the parameters of a layer, once for steps of which each begins with the state that the
    one before gave, so that gradients of all of them come back to the parameters together.

    They are made anew for other states, and where parameters have changed, gradients have come back, none are taken, or
    a CUDA graph is captured, which will be replayed with other parameters. A copy of a layer shares nothing.
    """

    def __init__(self) -> None:
        # The state that the last step gave, and what it was made with: one tuple, for threads.
        self._last: tuple[weakref.ref[Tensor], _Folded] | None = None

    def __deepcopy__(self, memo: Any) -> SharedGates:
        return SharedGates()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedGates, ()

    def fold(self, state: Tensor, parameters: list[Tensor]) -> _Folded:
        """What a step that begins with `state` takes."""
        last = self._last
        if (
            last is not None
            and last[0]() is state
            and torch.is_grad_enabled()
            and _are(last[1], parameters)
            and not (state.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return last[1]
        is_spent = [False]
        weights = fold_gates(parameters, is_spent)
        if not weights.requires_grad:
            return _Folded(weights, parameters, [], [True])
        return _Folded(weights, parameters, [(p._version, p.requires_grad) for p in parameters], is_spent)

    def keep(self, state: Tensor, folded: _Folded) -> None:
        """For a step that begins with the state that this one gave."""
        self._last = None if folded.is_spent[0] else (weakref.ref(state), folded)


def _are(folded: _Folded, parameters: Sequence[Tensor]) -> bool:
    """Whether these parameters would give the same now, with gradients of their own."""
    return not folded.is_spent[0] and all(
        mine is own and (own._version, own.requires_grad) == state
        for mine, own, state in zip(folded.parameters, parameters, folded.states, strict=True)
    )

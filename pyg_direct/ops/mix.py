"""What a gated unit's last gate mixes: a state and what is proposed in its place, also of several dtypes."""

from __future__ import annotations

import torch
from torch import Tensor


def mix(proposed: Tensor, state: Tensor, share: Tensor) -> Tensor:
    """`proposed + share * (state - proposed)`, in one step where all three have one dtype.

    Under autocast they have not: torch's `lerp` refuses them, and products and sums take the widest dtype.

    Args:
        proposed, state: Floats `[N, C]`.
        share: How much of the state stays, floats `[N, C]`.

    Returns:
        Floats `[N, C]`.
    """
    if proposed.dtype == state.dtype == share.dtype:
        return torch.lerp(proposed, state, share)
    return share * state + (1 - share) * proposed

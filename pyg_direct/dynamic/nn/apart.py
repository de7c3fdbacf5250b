"""Results of one function that lie side by side in one memory."""

from __future__ import annotations

from torch import Tensor


def set_apart(rows: Tensor) -> list[Tensor]:
    """The parts of contiguous `[W, ...]`, in its memory, but none a view that autograd must guard against writing."""
    like = rows[0]
    return [
        rows.new_empty(0).set_(rows.untyped_storage(), place * like.numel(), like.shape, like.stride())
        for place in range(rows.shape[0])
    ]

"""Gradients of custom steps by torch's functions, for gradients of gradients and for batched gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_direct.ops.run_kernel import is_heard, is_transformed


def is_asked_again(grads: Sequence[Tensor | None]) -> bool:
    """Report whether gradients need gradients, or come as a batch, which the package's loops cannot compute."""
    return torch.is_grad_enabled() or any(is_heard(grad) for grad in grads if grad is not None)


def pull_by_torch(run: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], needed: Sequence[bool],
                  grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the needed gradients of `given` through the result of `run(*given)`.

    Args:
        run: The step by functions that torch differentiates.
        given: Inputs of the step.
        needed: Inputs that want a gradient.
        grads: Gradient of each result, None if nothing depends on it.
    """
    again = torch.is_grad_enabled()
    # Within a transform a new tensor cannot require gradients.
    is_known = again or is_transformed()
    with torch.enable_grad():
        # Views, because some inputs may be one tensor.
        views = [value.view_as(value) if is_known else value.detach().requires_grad_() for value in given]
        pairs: Any = [pair for pair in zip(run(*views), grads, strict=True) if pair[1] is not None]
    wanted = [view for view, is_needed in zip(views, needed, strict=True) if is_needed]
    if not pairs or not wanted:
        return (None,) * len(given)
    results, of_results = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(results, wanted, of_results, create_graph=again, allow_unused=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)

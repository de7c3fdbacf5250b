"""Tensors that outlive a user's `torch.inference_mode`."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch


class ordinary_tensors(ContextDecorator):  # noqa: N801
    """`with ordinary_tensors():` what is made inside can be written, and kept for a backward, anywhere.

    Buffers, plans and placed rows are often first needed by an evaluation in `torch.inference_mode`, whose tensors
    training could not use.
    """

    def __enter__(self) -> None:
        self._modes: list[Any] = []
        if torch.is_inference_mode_enabled():
            self._modes = [torch.inference_mode(False), torch.no_grad()]
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _recreate_cm(self) -> ordinary_tensors:
        # One for each call: calls nest.
        return ordinary_tensors()


def version_of(tensor: Any) -> int:
    """Changes with every write to a tensor; 0 for those of `torch.inference_mode`, which do not count them."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
        return 0
    return tensor._version

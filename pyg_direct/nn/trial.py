"""What a model's pass may do besides giving its result, and a recorded one would not do again: found before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


@contextmanager
def left_as_it_was(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers of a model, what its modules train or evaluate, and random numbers are as before in the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(part, part.training) for part in model.modules()]
    drawn = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            for part, is_training in modes:
                part.training = is_training
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class Traces:
    """What a pass over `given` may leave behind, as it is before."""

    def __init__(self, model: torch.nn.Module, given: Sequence[Tensor]) -> None:
        self._model, self._given = model, given
        self._attributes, self._versions, self._draws = self._read()

    def find(self) -> str | None:
        """What a pass since then has left; None where it has not."""
        attributes, versions, draws = self._read()
        for (name, part), before, after in zip(self._model.named_modules(), self._attributes, attributes, strict=False):
            for key in {**before, **after}:
                if before.get(key) != after.get(key):
                    return f"forward sets {key!r} of {type(part).__name__} {name!r}"
        if versions != self._versions:
            return "forward writes to its arguments"
        return None if draws == self._draws else "forward draws random numbers of the host"

    def _read(self) -> tuple[list[dict[str, Any]], list[int], list[Any]]:
        # Torch's own layers leave nothing that counts; LSTM looks where its parameters are.
        attributes = [
            {} if type(part).__module__.startswith("torch.nn.") else
            {key: (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
             for key, value in part.__dict__.items()}
            for part in self._model.modules()
        ]  # fmt: skip
        draws: list[Any] = [random.getstate(), str(np.random.get_state())]
        if any(tensor.is_cuda for tensor in self._given):
            draws.append(torch.get_rng_state().tolist())
        return attributes, [tensor._version for tensor in self._given], draws

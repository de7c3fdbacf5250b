"""Tensors as the bytes that they lie in."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

# Arrays in one run of bytes begin at multiples of it, which views of the widest dtype, complex128, need.
ALIGNMENT = 16
_Sizes = TypeVar("_Sizes", int, np.ndarray)


def align(num_bytes: _Sizes) -> _Sizes:
    """How far the next array begins behind one of so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype, uint8 `[n]`, over the same memory."""
    flat = tensor.detach().view(-1)
    if flat.numel() == 1:
        # torch calls one item contiguous whatever its stride.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)

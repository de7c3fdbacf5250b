"""Tensors as the bytes that they lie in."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype, uint8 `[n]`, over the same memory."""
    flat = tensor.detach().view(-1)
    if flat.numel() == 1:
        # torch calls one item contiguous whatever its stride.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)

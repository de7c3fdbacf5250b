"""Small arrays on their way to a GPU, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(words: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """An array of the host as a tensor of `device`; a tensor of a GPU that is wanted on the host is waited for.

    The driver copies ordinary memory aside before it returns, so the host neither waits for the GPU nor must it keep
    the array.
    """
    tensor = torch.from_numpy(words) if isinstance(words, np.ndarray) else words
    # On its way to the host, what is not waited for would be read before it is there.
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload_parts(parts: Sequence[Tensor | None], device: torch.device) -> Sequence[Tensor | None]:
    """1-D tensors of the host, or None, on `device`: those of one dtype travel together, and are written to apart."""
    own = [part for part in parts if part is not None]
    if len(own) < len(parts) or len({part.dtype for part in own}) != 1:
        return [None if part is None else part.to(device) for part in parts]
    return torch.unsafe_split_with_sizes(upload(torch.cat(own), device), [part.numel() for part in own])

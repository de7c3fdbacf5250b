"""Copies of arrays to a GPU: small ones without a wait, large ones through page-locked memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.runtime.host.threads import few_threads

# Bytes that torch's threads copy to the stage at once, and the number of page-locked pieces; in pieces of 1 MiB 34 MB
# take 2.7 ms instead of 1.6 on an H100's host.
_PIECE_BYTES, _NUM_PIECES = 2**22, 2
# Threads that copy. With six of 16 cores 34 MB take 2.3 ms instead of the driver's 4.8, and 5 MB 0.49 instead of 0.83.
# With 16 they take 1.8 and 0.44; but if a virtual machine loses one core, all wait for it, at times 50 to 100 ms.
_THREADS = 6


def upload(words: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return an array of the host as a tensor of `device`; if a GPU tensor goes to the host, wait for it.

    The driver copies ordinary memory to a stage before it returns. So the host neither waits for the GPU nor must it
    keep the array.
    """
    tensor = torch.from_numpy(words) if isinstance(words, np.ndarray) else words
    # A copy to the host without a wait would be read before it is complete.
    return tensor.to(device, non_blocking=device.type == "cuda")


def upload_parts(parts: Sequence[Tensor | None], device: torch.device) -> Sequence[Tensor | None]:
    """Return tensors of the host, or None, on `device`; tensors of one dtype travel together, in memory apart."""
    own = [part for part in parts if part is not None]
    if len(own) in (0, 1) or len(own) < len(parts) or len({part.dtype for part in own}) != 1:
        return [None if part is None else upload(part, device) for part in parts]
    return torch.unsafe_split_with_sizes(upload(torch.cat(own), device), [len(part) for part in own])


def upload_large(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on `device`; those that are there already stay as they are.

    The driver copies ordinary memory with one thread and sends it in turn, at 7 GB/s. For many bytes to a GPU, torch's
    threads copy a piece while the one before is being sent.
    """
    num_bytes = sum(part.numel() * part.element_size() for part in parts if not part.is_cuda)
    if device.type != "cuda" or num_bytes < _PIECE_BYTES:
        return [part.to(device) for part in parts]
    staged, out = _Staged(device), []
    for part in parts:
        if part.is_cuda or part.is_pinned():
            out.append(part.to(device, non_blocking=True))
            continue
        flat = part.contiguous().view(-1)
        made, step = torch.empty_like(flat, device=device), _PIECE_BYTES // flat.element_size()
        with few_threads(_THREADS):
            for source, target in zip(flat.split(step), made.split(step), strict=True):
                staged.copy(source, target)
        out.append(made.view(part.shape))
    return out


class _Staged:
    """Page-locked memory that pieces go through, one after the other; torch keeps it for the next time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._pieces = [
            torch.empty(_PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_NUM_PIECES)
        ]
        self._events: list[torch.cuda.Event | None] = [None] * _NUM_PIECES
        self._next = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy; the host may change the source afterwards."""
        event, piece = self._events[self._next], self._pieces[self._next]
        if event is not None:
            event.synchronize()
        aside = piece[: source.numel() * source.element_size()].view(source.dtype)
        target.copy_(aside.copy_(source), non_blocking=True)
        self._events[self._next] = self._stream.record_event()
        self._next = (self._next + 1) % _NUM_PIECES

"""Arrays of several dtypes in one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.runtime.raw import ALIGNMENT, align, as_bytes


def pack(arrays: Sequence[Tensor]) -> Tensor:
    """The bytes of contiguous arrays, one after the other, uint8."""
    pieces = []
    for array in arrays:
        if array.numel():
            pieces.append(as_bytes(array.contiguous()))
            if pad := -pieces[-1].numel() % ALIGNMENT:
                pieces.append(array.new_zeros(pad, dtype=torch.uint8))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=arrays[0].device)


class Unpacker:
    """Takes the arrays of a message out, one after the other."""

    def __init__(self, message: Tensor) -> None:
        # What came with other messages in one buffer need not begin where a word does.
        self._message = message if message.storage_offset() % ALIGNMENT == 0 else message.clone()
        self._at = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """The next array, of known dtype and shape."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        part = self._message[self._at : self._at + count]
        assert part.numel() == count, "a message is shorter than its sender and receiver agreed"
        self._at += align(count)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=part.device)
        return part.view(dtype).view(shape)

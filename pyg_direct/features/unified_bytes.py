"""The bytes behind unified tensors, and how the CPU and the streams of a GPU take turns on them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.runtime.memory import Block
from pyg_direct.runtime.stream import current_stream


class UnifiedBytes:
    """The bytes that a unified tensor and its views share."""

    def __init__(self, block: Block, device: torch.device | None) -> None:
        self.block = block
        # The GPU that reads them; None without one.
        self.device = device if block.placement in ("unified", "pinned") else None
        self.gpu = None if self.device is None else self.device.index
        self._flat: Tensor | None = None
        self._is_dirty = False

    def on_gpu(self) -> Tensor:
        """All bytes as the GPU sees them, to be used on its current stream."""
        if self._flat is None:
            self._flat = self.block.view_on_gpu(torch.uint8, (self.block.num_bytes,), self.device)
        self.join()
        return self._flat

    def join(self) -> None:
        """Let the GPU's current stream use the bytes, after what others write."""
        block = self.block
        block.check_process()
        number = torch._C._cuda_getCurrentRawStream(self.gpu)  # type: ignore[arg-type]
        if number in block.streams and not self._is_dirty:
            return
        stream, streams = current_stream(self.gpu), block.streams  # type: ignore[arg-type]
        if self._is_dirty and streams.keys() != {stream.cuda_stream} and not torch.cuda.is_current_stream_capturing():
            # Autograd takes them for the CPU's, and orders no streams for them.
            for other in streams.values():
                stream.wait_stream(other)
        streams[stream.cuda_stream] = stream

    def mark_written(self) -> None:
        """The GPU will have written here."""
        self._is_dirty = True

    def wait(self, for_write: bool) -> None:
        """Wait until the CPU may read, or write, what the GPU writes, or reads."""
        self.block.check_process()
        if self.device is not None and self.block.streams and (for_write or self._is_dirty):
            for stream in self.block.streams.values():
                stream.synchronize()
            self.block.streams.clear()
            self._is_dirty = False

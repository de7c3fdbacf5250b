"""Unified memory that is used again: temporary tensors then cost no call of the driver (PyTorch-Direct, section 4.4).

A block that nobody refers to any more goes to a list by its size, with events of the streams that may still read it;
it is given out again when they have passed. What lies in the lists is bounded.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from pyg_direct.errors import CudaError
from pyg_direct.runtime.memory import Block, allocate_or_fall_back

# Larger blocks are given back to the driver: they are tables, not temporary tensors.
_MOST_BYTES = 1 << 30
# All that lies unused, at most.
_MOST_KEPT = 2 << 30
_LEAST_BYTES = 4096
_STEP = 2 << 20


def round_size(num_bytes: int) -> int:
    """The size that a request is given: powers of two up to 2 MiB, the pages of a GPU, then whole ones of these."""
    if num_bytes <= _STEP:
        return max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
    return -(-num_bytes // _STEP) * _STEP


class _Freed:
    """Memory that waits for its next user."""

    def __init__(self, block: Block, events: list[torch.cuda.Event]) -> None:
        self.block, self.events = block, events


class UnifiedPool:
    """Unified memory of all GPUs of a process, recycled.

    Attributes:
        num_allocated, num_recycled: Requests that the driver served, and that a list served.
    """

    def __init__(self) -> None:
        self._lists: dict[tuple[torch.device, int], list[_Freed]] = defaultdict(list)
        self._lock = threading.RLock()
        self._kept = 0
        self.num_allocated = self.num_recycled = 0

    def take(self, num_bytes: int, device: torch.device | None) -> Block:
        """A block of at least so many bytes: unified, or what it falls back to.

        Raises:
            MemoryLimitError: host memory does not hold it.
        """
        if device is None or num_bytes == 0 or num_bytes > _MOST_BYTES:
            return allocate_or_fall_back(num_bytes, "cpu" if device is None else "unified", device)
        size = round_size(num_bytes)
        with self._lock:
            freed = self._lists[device, size]
            # The one that was given back first is most likely no longer read.
            found = freed.pop(0) if freed else None
            self._kept -= size if found else 0
        if found is None:
            try:
                block = allocate_or_fall_back(size, "unified", device)
            except CudaError:
                self.clear()
                block = allocate_or_fall_back(size, "unified", device)
            self.num_allocated += 1
        else:
            for event in found.events:
                event.synchronize()
            block = found.block
            self.num_recycled += 1
        if block.placement == "unified":
            block.recycle = self._put
        return block

    def _put(self, block: Block) -> None:
        """Keep the memory of a block that is about to go, in a block of its own."""
        assert block.device is not None
        with self._lock:
            if self._kept + block.num_bytes > _MOST_KEPT or torch.cuda.is_current_stream_capturing():
                return
            events = []
            for stream in block.streams.values():
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
            self._lists[block.device, block.num_bytes].append(_Freed(block.hand_over(), events))
            self._kept += block.num_bytes

    def clear(self) -> None:
        """Give all unused memory back to the driver."""
        with self._lock:
            self._lists.clear()
            self._kept = 0


POOL = UnifiedPool()

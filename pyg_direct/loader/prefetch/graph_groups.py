"""Batches of small graphs in groups: a GPU makes up to 16 batches by one launch, on the stream of the program.

Such a launch takes a few microseconds of a GPU, less than events between two streams take the host. So it is not worth
a side stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import PlacementWarning, warn
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.prefetch.gpu_streams import hold_for, is_out_of_memory
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.cuda.launch import current_stream

Work = tuple[int, Seeds]
# A batch and the tensors that own its memory.
Made = tuple[Any, list[Tensor]]
# Groups of 1, 4 and 16 batches, so that the first batch of an epoch has no extra latency.
MOST_BATCHES, _GROWTH = 16, 4
# Limits of a group: bytes on the GPU, where larger batches take longer than the host, and share of the free memory.
_ROOM, _SHARE = 32 << 20, 1 / 16


class GraphGroups:
    """Iterator over (number, seeds, batch) of an epoch, whose batches are made in groups.

    Batches have memory of their own, and are dropped one by one. An error ahead of time is raised at its batch's turn.

    Args:
        make: Makes the first batches of a group, as many as take so many bytes, and at least one: (work, bytes) ->
            batches.
        device: The GPU.
    """

    def __init__(self, work: Iterator[Work], make: Callable[[Sequence[Work], int], list[Made]], device: torch.device
                 ) -> None:  # fmt: skip
        self._work, self._make, self._device = work, make, device
        self._waiting: deque[Work] = deque()
        self._ready: deque[tuple[Work, Any, list[Tensor]]] = deque()
        self._made_on: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._size, self._most, self._room = 1, MOST_BATCHES, 0
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[int, Seeds, Any]]:
        return self

    def __next__(self) -> tuple[int, Seeds, Any]:
        """Return the next batch, which is ready on torch's current stream."""
        if not self._ready:
            self._fill()
        (number, seeds), batch, memory = self._ready.popleft()
        if self._device.type == "cuda":
            stream = current_stream(self._device.index)
            if stream is not self._made_on:
                assert self._event is not None
                self._event.wait(stream)
                hold_for(memory, stream)
        return number, seeds, batch

    def _fill(self) -> None:
        """Make the next group."""
        self._draw(min(self._size, self._most))
        if not self._waiting:
            error, self._error = self._error, None
            raise StopIteration if error is None else error
        while True:
            try:
                made = self._make(list(islice(self._waiting, self._most)), self._find_room())
                break
            except Exception as error:
                if min(len(self._waiting), self._most) == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the handler nothing refers to tensors of the failing call.
            self._shrink()
        if self._device.type == "cuda":
            self._made_on = current_stream(self._device.index)
            self._event = torch.cuda.Event()
            self._event.record(self._made_on)
        self._ready += [(self._waiting.popleft(), *own) for own in made]
        self._size = min(self._size * _GROWTH, MOST_BATCHES)

    def _draw(self, count: int) -> None:
        """Draw work until so many batches wait."""
        while self._error is None and len(self._waiting) < count:
            try:
                item = next(self._work, None)
            except Exception as error:
                self._error = error
                return
            if item is None:
                return
            self._waiting.append(item)

    def _find_room(self) -> int:
        """Find the bytes that a group may take."""
        if self._size > 1 and self._room == 0:
            share = int(_SHARE * free_bytes(self._device.index)) if self._device.type == "cuda" else _ROOM
            self._room = max(1, min(_ROOM, share))
        return self._room

    def _shrink(self) -> None:
        """Make smaller groups from now on, after memory has run out."""
        count = min(len(self._waiting), self._most)
        self._most = count // 2
        warn(f"GPU memory ran out for {count} batches of graphs together: at most {self._most} are made together from "
             "now on", PlacementWarning)  # fmt: skip
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

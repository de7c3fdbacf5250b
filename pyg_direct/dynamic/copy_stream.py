"""Copies from page-locked memory to the device, on a separate stream, in parallel with its computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.profiling import trace

T = TypeVar("T")


class Coming(Generic[T]):
    """A copy in flight.

    Its memory belongs to the copy stream. If it is dropped before it is taken, its memory is freed only for later
    copies on that stream.
    """

    def __init__(self, value: T, copied: Any, timeline: Timeline | None = None) -> None:
        self._value, self._copied, self._timeline = value, copied, timeline

    def take(self, device: torch.device) -> T:
        """Return the value for the current stream: work queued on it from now on waits for the copy, the host does not.

        The memory is not reused by other copies before that work is done, whenever it is dropped.
        """
        stream = torch.cuda.current_stream(device)
        with trace(self._timeline, "wait"):
            stream.wait_event(self._copied)
        value: Any = self._value
        value.record_stream(stream)
        return self._value


class CopyStream:
    """Stream that begins copies before they are needed; only on a GPU.

    A copy waits for nothing: it writes to memory that no other stream uses, and the host has finished writing its
    source.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> Any:
        # A stream belongs to its process.
        return CopyStream, (self._device,)

    @property
    def is_apart(self) -> bool:
        """Report whether there is a device to copy to in parallel."""
        return self._device.type == "cuda"

    def begin(self, copy: Callable[[], T], timeline: Timeline | None = None) -> Coming[T]:
        """Queue a copy.

        Args:
            copy: Makes it on the current stream without waiting; its result has `record_stream`.
            timeline: Timeline that records the copy.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream), trace(timeline, "copy"):
            value = copy()
            return Coming(value, self._stream.record_event(), timeline)

"""Copies from page-locked memory to the device, on a stream of their own, beside what it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.profiling import trace

T = TypeVar("T")


class Coming(Generic[T]):
    """What is on its way.

    Memory of it belongs to the stream that copies: one that lets go of it untaken frees it for later copies only, which
    are behind this one on that stream.
    """

    def __init__(self, value: T, copied: Any, timeline: Timeline | None = None) -> None:
        self._value, self._copied, self._timeline = value, copied, timeline

    def take(self, device: torch.device) -> T:
        """The value, for the current stream: work queued on it from now on waits for the copy, the host does not.

        The memory is not given to other copies before that work is done, whenever it is let go of.
        """
        stream = torch.cuda.current_stream(device)
        with trace(self._timeline, "wait"):
            stream.wait_event(self._copied)
        value: Any = self._value
        value.record_stream(stream)
        return self._value


class CopyStream:
    """Begins copies that are asked for later; only of a GPU.

    Nothing is awaited before a copy: it writes to memory that no other stream has, and what it reads was written by the
    host before it began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __reduce__(self) -> Any:
        # A stream is of its process.
        return CopyStream, (self._device,)

    @property
    def is_apart(self) -> bool:
        """Whether there is anything to be beside of."""
        return self._device.type == "cuda"

    def begin(self, copy: Callable[[], T], timeline: Timeline | None = None) -> Coming[T]:
        """Queue a copy.

        Args:
            copy: Makes it on the current stream without waiting; its result has `record_stream`.
            timeline: Where it is noted.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream), trace(timeline, "copy"):
            value = copy()
            return Coming(value, self._stream.record_event(), timeline)

"""Work in parallel with training: copies to the device on a separate stream, and host work on threads.

`Ahead` starts each result by key before it is requested (PiPAD, section 4.5). `take_turns` serializes an object's
methods, because threads read, change and keep the same state. `Timeline` has the spans of the stages of an epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import wraps
from typing import Any, Generic, TypeVar

import torch

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.loader.prefetch.drivers import FORK_GATE
from pyg_direct.profiling import LaneSpans, trace
from pyg_direct.runtime.host.host_memory import count_cores
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.runtime.host.threads import Pool

# From top to bottom: on a thread, on the copy stream, on the stream that computes.
LANES = {"slice": "#9aa5b1", "copy": "#ed8936", "wait": "#c53030", "aggregate": "#2b6cb0", "move": "#63b3ed",
         "passes": "#38a169", "step": "#805ad5"}  # fmt: skip


class Timeline(LaneSpans):
    """Spans of stages: "slice" (edges sorted and matrices built, on a thread), "copy" (ahead of use), and "wait" (for
    such copies, within the next ones). Then "aggregate" (first layers), "move" (a frame's snapshots to their places),
    "passes" (forward and backward) and "step".

    On a GPU they are spans of the GPU, except for "slice".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, LANES)


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
        """Queue a copy. `copy`: Makes it on the current stream without waiting; its result has `record_stream`."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream), trace(timeline, "copy"):
            value = copy()
            return Coming(value, self._stream.record_event(), timeline)


class Ahead:
    """Results by key, each begun on a thread before it is requested.

    An exception is raised when its result is requested. A process with a single core gets no thread.

    Attributes:
        turn: Guards state that only callers change, also while one waits for the thread, which never takes it.
    """

    def __init__(self) -> None:
        self.lock, self.turn = threading.RLock(), threading.RLock()
        self._coming: dict[Hashable, Future[Any]] = {}

    def __reduce__(self) -> Any:
        # Copies begin empty.
        return Ahead, ()

    def begin(self, key: Hashable, work: Callable[[], Any], timeline: Timeline | None = None) -> None:
        """Let the thread do work, unless it has done so or is about to."""
        if key in self._coming or count_cores() < 2:
            return
        # With loops of one thread, because the other cores train.
        pool = Pool(1, "pyg_direct-snapshots", lambda: set_cpu_threads(1))
        self._coming[key] = pool.submit(_run, work, timeline)
        # It ends with its work. While it has threads of torch's loops, all other such threads wait asleep, and a small
        # loop takes ten times as long.
        pool.finish()

    def finish(self, key: Hashable) -> Any:
        """Return the result of work that was begun, once; None if it was not begun."""
        future = self._coming.pop(key, None)
        return None if future is None else future.result()


def _run(work: Callable[[], Any], timeline: Timeline | None) -> Any:
    with FORK_GATE, trace(timeline, "slice", on_host=True):
        return work()


def take_turns(*names: str) -> Callable[[type[T]], type[T]]:
    """Make a class's methods of these names run in one thread at a time; its objects have the lock `_ahead.turn`.

    Results first requested by an evaluation in `torch.inference_mode` serve training too.
    """

    def change(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, _in_turn(getattr(cls, name)))
        return cls

    return change


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self._ahead.turn, ordinary_tensors():
            return method(self, *args, **options)

    return run

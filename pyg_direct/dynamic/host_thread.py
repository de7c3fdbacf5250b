"""Host work on snapshots that are needed soon, on threads in parallel with training (PiPAD, section 4.5).

`Ahead` starts each result by key before it is requested. `take_turns` serializes an object's methods, because threads
read, change and keep the same state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import wraps
from typing import Any, TypeVar

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.loader.prefetch.cpu_threads import FORK_GATE
from pyg_direct.profiling import trace
from pyg_direct.runtime.host.memory import count_cores
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.runtime.host.threads import Pool


class Ahead:
    """Results by key, each begun on a thread before it is requested.

    An exception is raised when its result is requested. A process with a single core gets no thread.

    Attributes:
        lock: Guards state that the thread and its callers both change.
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


T = TypeVar("T")


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

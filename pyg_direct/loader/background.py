"""Items made ahead by one thread, for training on the CPU: the loops that make a batch let Python run meanwhile."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any

from pyg_direct.errors import ForkedProcessError
from pyg_direct.kernels.jit import get_cpu_threads, set_cpu_threads

# Held while an item is made. A fork waits for it, so that no child inherits a lock of a thread it does not have, nor
# a Numba that stands in the middle of a loop.
_BUSY = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_BUSY.acquire, after_in_parent=_BUSY.release, after_in_child=_BUSY.release)
# A thread looks so often, in seconds, whether anybody still waits for what it made.
_PATIENCE = 0.1
_END = object()


class Background:
    """Iterates over `source`, made in a thread that stays at most `depth` items ahead.

    Items come in order; an exception of the source is raised at its turn. The thread starts with the first item and
    ends with the last one, at `close()`, when this object is dropped, or when the program ends.

    Args:
        source: Used by the thread alone from the first item on.
        depth: Items made ahead, at least 1.
    """

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self._source = source
        # One more is in the hands of the thread.
        self._items: Queue[tuple[Any, BaseException | None]] = Queue(maxsize=depth)
        self._stop = threading.Event()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, _end_thread, self._stop, self._items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._process != os.getpid():
            raise ForkedProcessError(
                f"an iterator of process {self._process} was used in its forked child {os.getpid()}, where its thread "
                "does not run; call iter() on the loader there"
            )
        if self._stop.is_set():
            raise StopIteration
        if self._thread is None:
            # Numba's number of threads belongs to the thread that set it.
            args = self._source, self._items, self._stop, get_cpu_threads()
            self._thread = threading.Thread(target=_make_ahead, args=args, name="pyg_direct", daemon=True)
            self._thread.start()
        item, error = self._items.get()
        if error is not None or item is _END:
            self.close()
            raise StopIteration if error is None else error
        return item

    def close(self) -> None:
        """End the thread and forget what was made ahead."""
        self._end()
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()
            # What the thread put last, while it was being told.
            _end_thread(self._stop, self._items)
        self._thread, self._source = None, iter(())


def _make_ahead(source: Iterator[Any], items: Queue[tuple[Any, BaseException | None]], stop: threading.Event,
                num_threads: int) -> None:  # fmt: skip
    set_cpu_threads(num_threads)
    while not stop.is_set():
        try:
            with _BUSY:
                made: tuple[Any, BaseException | None] = next(source, _END), None
        except BaseException as error:
            made = None, error
        while not stop.is_set():
            try:
                items.put(made, timeout=_PATIENCE)
                break
            except Full:
                continue
        if made[1] is not None or made[0] is _END:
            return
        del made


def _end_thread(stop: threading.Event, items: Queue[tuple[Any, BaseException | None]]) -> None:
    stop.set()
    while True:
        try:
            items.get_nowait()
        except Empty:
            return

"""Batches prepared by threads, for training on the CPU: the loops that make a batch release Python's GIL."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.errors import ForkedProcessError
from pyg_direct.runtime.host.memory_sizes import give_back_now_and_then
from pyg_direct.runtime.host.threads import Pool

Work = tuple[int, Any]


class _Gate:
    """Lock that lets a process fork only while no thread makes a batch.

    Otherwise a child could inherit a lock of a thread that it does not have, or a Numba loop in an undefined state.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()

    def __enter__(self) -> None:
        with self._changed:
            self._inside.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        while self._inside - {threading.get_ident()}:
            self._changed.wait()

    def after_fork(self) -> None:
        self._changed.release()


FORK_GATE = _Gate()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORK_GATE.before_fork, after_in_parent=FORK_GATE.after_fork, after_in_child=FORK_GATE.after_fork
    )


class Background:
    """Iterator over batches that threads prepare, `ahead` of the last one handed over.

    Batches come in order; an exception is raised at the turn of its batch. One thread makes a batch with all the cores
    of its user. Several threads make one batch each with a share of the cores, which uses more of them, as the loops of
    a batch are short. The threads end with the last batch, at `close()`, when this object is dropped, or when the
    program ends.

    Args:
        work: (number, work item) of the batches, in order; read in the thread that requests batches.
        make: Makes a batch: (number, work item) -> batch; called in the threads.
        ahead: Batches prepared ahead, at least 1.
        num_threads: Threads that make them; None for one per batch.
    """

    def __init__(self, work: Iterator[Work], make: Callable[[int, Any], Any], ahead: int,
                 num_threads: int | None = None) -> None:  # fmt: skip
        self._work, self._make, self._ahead = work, make, ahead
        self._num_threads = ahead if num_threads is None else num_threads
        self._batches: deque[Future[Any]] = deque()
        self._process = os.getpid()
        self._pool: Pool | None = None
        self._is_closed = False

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        if self._process != os.getpid():
            raise ForkedProcessError(
                f"an iterator of process {self._process} was used in its forked child {os.getpid()}, where its threads "
                "do not run; call iter() on the loader there"
            )
        if self._is_closed:
            raise StopIteration
        try:
            self._start(1)
            if not self._batches:
                raise StopIteration
            # One more during the wait: then `ahead` batches are in work when this one is complete.
            self._start(self._ahead + 1)
            made: tuple[int, Any] = self._batches.popleft().result()
            return made
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start to prepare batches before the first request."""
        self._start(self._ahead)

    def _start(self, count: int) -> None:
        """Start batches until `count` are in work."""
        while len(self._batches) < count:
            try:
                item = next(self._work, None)
            except Exception as error:
                # The batches before it are still handed over.
                self._work = iter(())
                failed: Future[Any] = Future()
                failed.set_exception(error)
                self._batches.append(failed)
                return
            if item is None:
                return
            if self._pool is None:
                self._pool = Pool(self._num_threads, "pyg_direct_batch")
                # Pending batches are dropped with their iterator; running ones end by themselves.
                weakref.finalize(self, self._pool.close, wait=False).atexit = False
                # Numba's number of threads is a setting of each thread.
                self._num_cores = max(1, get_cpu_threads() // self._num_threads)
            self._batches.append(self._pool.submit(_make, self._make, self._num_cores, *item))

    def close(self) -> None:
        """End the threads and drop prepared batches."""
        self._is_closed = True
        had_threads = self._pool is not None and self._process == os.getpid()
        if self._pool is not None and had_threads:
            self._pool.close()
        self._pool, self._work = None, iter(())
        self._batches.clear()
        if had_threads:
            # Arenas of threads keep freed memory for other threads, which may never use it.
            give_back_now_and_then()


def _make(make: Callable[[int, Any], Any], num_cores: int, number: int, item: Any) -> tuple[int, Any]:
    with FORK_GATE:
        before = set_cpu_threads(num_cores)
        try:
            return number, make(number, item)
        finally:
            # It is the caller's thread if no other thread can start.
            set_cpu_threads(before)

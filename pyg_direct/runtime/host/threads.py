"""Worker threads that work for their owner as long as any thread of the program runs, and torch's own CPU threads.

A torch loop on a CPU wakes all its threads, even if it has work for few. `few_threads` and `one_thread` limit them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

# Threads that live, and the queue of each.
_LIVE: dict[threading.Thread, queue.SimpleQueue[Any]] = {}
# Set by the end of the program, after which no thread is given work.
_ENDED = threading.Event()


class Pool:
    """Threads that run submitted work, in order; a new one starts if there is work and no thread is free.

    Python closes a `ThreadPoolExecutor` with the main thread. This pool works on, in other threads of the program and
    in `atexit` handlers. If no thread can start any more, the caller does the work as it is submitted. Submitted work
    is still done at the end of the program.

    Args:
        most: Threads at most.
        begin: Called in each thread before its work.
    """

    def __init__(self, most: int, name: str, begin: Callable[[], Any] | None = None) -> None:
        self._most, self._name, self._begin, self._process = most, name, begin, os.getpid()
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Work that was submitted and is not done: as many threads are busy.
        self._unfinished: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_threads, self._work, self._threads)
        self._end.atexit = False

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a function call to a thread."""
        done: Future[Any] = Future()
        # Threads of another process do not live in its fork.
        if _ENDED.is_set() or not self._end.alive or self._process != os.getpid():
            _do(set(), done, fn, args)
            return done
        with self._lock:
            is_free = len(self._unfinished) < len(self._threads)
            if is_free or self._start() or self._threads:
                self._unfinished.add(done)
                self._work.put((self._unfinished, done, fn, args))
                return done
        _do(set(), done, fn, args)
        return done

    def _start(self) -> bool:
        """Start one more thread, unless there are enough or the program ends."""
        number = len(self._threads)
        if number == self._most:
            return False
        thread = threading.Thread(target=_run, args=(self._work, self._begin), name=f"{self._name}_{number}",
                                  daemon=True)  # fmt: skip
        _LIVE[thread] = self._work
        try:
            thread.start()
        except RuntimeError as error:
            del _LIVE[thread]
            # Python 3.12 starts none while it ends.
            if "shutdown" in str(error):
                return False
            raise
        self._threads.append(thread)
        return True

    def finish(self) -> None:
        """Take no more work; the threads end after the work that they were given."""
        self._end()

    def close(self, *, wait: bool = True) -> None:
        """Forget work that no thread has begun, and wait for running work, unless `wait` is False.

        A thread of the pool waits only for the others. Python collects garbage in whichever thread allocates next, so
        an iterator may end in one of its own threads.
        """
        while True:
            try:
                work = self._work.get_nowait()
            except queue.Empty:
                break
            if work is not None:
                work[1].cancel()
        # Once more if the pool was closed before: the stop word of the threads may just have been taken out.
        self._end.detach()
        _end_threads(self._work, self._threads)
        for thread in list(self._threads) if wait else ():
            if thread is not threading.current_thread():
                thread.join()


def _run(work: queue.SimpleQueue[Any], begin: Callable[[], Any] | None) -> None:
    """Run work in a thread: it holds the queue, and not the pool, which may be dropped."""
    try:
        if begin is not None:
            begin()
        while True:
            item = work.get()
            if item is None:
                return
            _do(*item)
            # Results are not kept while the next work is waited for.
            del item
    finally:
        _LIVE.pop(threading.current_thread(), None)


def _do(unfinished: set[Future[Any]], done: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not done.set_running_or_notify_cancel():
        unfinished.discard(done)
        return
    try:
        result = fn(*args)
    except BaseException as error:
        unfinished.discard(done)
        done.set_exception(error)
        # The error refers to this frame.
        del done
    else:
        unfinished.discard(done)
        done.set_result(result)


def _end_threads(work: queue.SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    for _ in range(len(threads)):
        work.put(None)


def _end_all() -> None:
    """End all threads before the interpreter ends, which would cut them off inside loops in C++."""
    _ENDED.set()
    live = list(_LIVE.items())
    for _, work in live:
        work.put(None)
    for thread, _ in live:
        thread.join()


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LIVE.clear)


# More than any machine has.
_MANY = 2**30


class few_threads:  # noqa: N801
    """Limit of the threads for torch loops that the calling thread runs in this block, if it can be set.

    `torch.set_num_threads` would also affect other threads. With GNU OpenMP a loop of 1,000 searches wakes all 64
    threads of a large host, which takes milliseconds if they sleep. The loop then waits for all of them, even if a
    virtual machine does not run one's core.
    """

    __slots__ = "before", "most"

    def __init__(self, most: int) -> None:
        self.most, self.before = most, most

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        _set_threads(self.before, min(self.before, self.most))

    def __exit__(self, *error: object) -> None:
        _set_threads(min(self.before, self.most), self.before)


class one_thread(few_threads):  # noqa: N801
    """The same for one thread. `is_on`: False has no effect, so that a caller needs no branch."""

    __slots__ = ()

    def __init__(self, is_on: bool = True) -> None:
        super().__init__(1 if is_on else _MANY)

    @property
    def is_on(self) -> bool:
        """Report whether loops run on one thread."""
        return self.most == 1


def _set_threads(before: int, count: int) -> None:
    if before != count and (tell := _find_setter()) is not None:
        tell(count)


@functools.cache
def _find_setter() -> Callable[[int], None] | None:
    """Return a setter of the threads of the calling thread's loops; None if torch does not use OpenMP."""
    try:
        tell = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        # There is no such library, or it is not visible to others.
        return None
    tell.argtypes, tell.restype = [ctypes.c_int], None
    # There may be several copies of it, of which torch uses one.
    before = torch.get_num_threads()
    tell(before + 1)
    is_heard = torch.get_num_threads() == before + 1
    tell(before)
    return tell if is_heard else None

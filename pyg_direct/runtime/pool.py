"""Threads of a pool that end with what they work for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def end_pool(pool: ThreadPoolExecutor) -> None:
    """Forget what no thread has begun, and wait for what they do.

    A thread of the pool waits for the others alone: Python collects what nobody holds in whatever thread it is that
    makes something new, so that an iterator may end in a thread of its own.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    for thread in list(pool._threads):
        if thread is not threading.current_thread():
            thread.join()

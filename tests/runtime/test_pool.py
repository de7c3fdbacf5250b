"""Pools end from outside, and from one of their own threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from pyg_direct.runtime.pool import end_pool


def test_what_runs_is_waited_for():
    pool, done = ThreadPoolExecutor(1), threading.Event()
    future = pool.submit(done.wait, 60)
    threading.Timer(0.1, done.set).start()

    end_pool(pool)

    assert future.done()


def test_a_thread_does_not_wait_for_itself():
    pool = ThreadPoolExecutor(1)

    assert pool.submit(end_pool, pool).result(60) is None
    pool.shutdown(wait=True)

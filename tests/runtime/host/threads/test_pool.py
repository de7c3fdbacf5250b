"""Threads run submitted work, end on request, and leave work to the caller if none can start."""

import gc
import threading
import time
import weakref

import pytest

from pyg_direct.runtime.host.threads import Pool


def test_work_is_done_in_threads_in_its_order():
    pool, done = Pool(1, "test_pool", lambda: done.append("begin")), []

    waits = [pool.submit(done.append, number) for number in range(5)]
    [wait.result(60) for wait in waits]

    assert done == ["begin", 0, 1, 2, 3, 4]
    pool.close()


def test_as_many_threads_start_as_have_work():
    pool, met = Pool(3, "test_pool"), threading.Barrier(4)

    assert pool.submit(threading.current_thread).result(60) is pool.submit(threading.current_thread).result(60)
    waits = [pool.submit(met.wait, 60) for _ in range(3)]
    met.wait(60)

    assert sorted(wait.result(60) for wait in waits) != [3, 3, 3]
    assert not met.broken
    pool.close()


def test_an_error_is_for_who_waits():
    pool = Pool(1, "test_pool")

    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(60)

    assert pool.submit(len, "abc").result(60) == 3
    pool.close()


def test_what_runs_is_waited_for_and_the_rest_is_forgotten():
    pool, begun, done = Pool(1, "test_pool"), threading.Event(), threading.Event()
    running = pool.submit(lambda: begun.set() or done.wait(60))
    rest = pool.submit(len, "abc")
    assert begun.wait(60)
    threading.Timer(0.1, done.set).start()

    pool.close()

    assert running.done()
    assert rest.cancelled()


def test_a_thread_does_not_wait_for_itself():
    pool = Pool(1, "test_pool")

    thread = pool.submit(threading.current_thread).result(60)

    assert pool.submit(lambda: [pool.close(wait=False), pool.close()]).result(60) == [None, None]
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["finish", "drop"])
def test_threads_end_with_their_pool(end):
    pool = Pool(1, "test_pool")
    result, thread = pool.submit(len, "abc"), pool.submit(threading.current_thread)

    if end == "finish":
        pool.finish()
    else:
        del pool
        gc.collect()

    assert result.result(60) == 3
    thread.result(60).join(60)
    assert not thread.result().is_alive()


def test_a_result_is_not_kept():
    class Result:
        pass

    pool = Pool(1, "test_pool")
    known = weakref.ref(pool.submit(Result).result(60))
    deadline = time.monotonic() + 60

    while known() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    pool.close()


def test_the_caller_works_where_no_thread_starts_any_more(monkeypatch):
    def refuse(thread):
        # Python 3.12 and newer, in handlers of `atexit`.
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert Pool(2, "test_pool").submit(threading.get_ident).result(0) == threading.get_ident()


def test_a_pool_that_is_closed_leaves_work_to_the_caller():
    pool = Pool(1, "test_pool")
    pool.submit(len, "abc").result(60)
    pool.close()

    assert pool.submit(threading.get_ident).result(0) == threading.get_ident()

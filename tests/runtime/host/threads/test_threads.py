"""Limits of torch's loops apply to one thread for a while; other threads keep theirs, and no limit remains."""

import ctypes
import threading

import pytest
import torch

from pyg_direct.runtime.host import threads
from pyg_direct.runtime.host.threads import few_threads, one_thread


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def heard():
    if threads._find_setter() is None:
        pytest.skip("needs OpenMP under torch's loops")


def count_elsewhere():
    told = []
    thread = threading.Thread(target=lambda: told.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return told[0]


def test_loops_of_this_thread_alone_keep_to_it(three_threads, heard):
    with one_thread():
        assert torch.get_num_threads() == 1
        assert count_elsewhere() == 3
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1

    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("most", "expected"), [(2, 2), (3, 3), (4, 3)])
def test_loops_keep_to_few_threads_and_never_take_more(three_threads, heard, most, expected):
    with few_threads(most):
        assert torch.get_num_threads() == expected
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == expected

    assert torch.get_num_threads() == 3


def test_nothing_is_told_where_it_need_not_be(three_threads):
    with one_thread(False):
        assert torch.get_num_threads() == 3


def test_errors_give_threads_back(three_threads, heard):
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / 0  # noqa: B018

    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("library", [object(), type("Deaf", (), {"omp_set_num_threads": lambda count: None})])
def test_torch_without_that_library_goes_on_with_all(three_threads, monkeypatch, library):
    threads._find_setter.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    try:
        with one_thread():
            assert torch.get_num_threads() == 3
    finally:
        threads._find_setter.cache_clear()

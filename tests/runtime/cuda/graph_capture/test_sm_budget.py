"""Multiprocessors that products leave to reads over the link."""

import gc
from contextlib import nullcontext

import pytest
import torch

from pyg_direct import Feature
from pyg_direct.runtime.cuda import graph_capture
from pyg_direct.runtime.cuda.device import abilities
from tests.products import read_target


class Reader:
    """A reader of rows."""


@pytest.fixture
def multiprocessors(monkeypatch):
    """Fake a GPU of 132 multiprocessors, without a reader."""
    monkeypatch.setattr(graph_capture, "_READERS", type(graph_capture._READERS)())
    monkeypatch.setattr(graph_capture, "abilities", lambda index: type("Abilities", (), {"multiprocessors": 132}))


@pytest.mark.usefixtures("multiprocessors")
def test_products_leave_twice_what_the_largest_reader_of_a_gpu_takes():
    readers = [Reader() for _ in range(3)]
    for reader, index, count in zip(readers, (0, 0, 1), (3, 6, 7), strict=True):
        graph_capture.note_reader(reader, index, count)

    assert [graph_capture.count_spared(index) for index in (0, 1, 2, None)] == [12, 14, 0, 0]


@pytest.mark.usefixtures("multiprocessors")
def test_beside_few_readers_products_leave_ten():
    reader = Reader()
    graph_capture.note_reader(reader, 0, 4)

    assert graph_capture.count_spared(0) == 10


@pytest.mark.usefixtures("multiprocessors")
def test_products_leave_an_eighth_at_most():
    reader = Reader()
    graph_capture.note_reader(reader, 0, 64)

    assert graph_capture.count_spared(0) == 16


@pytest.mark.usefixtures("multiprocessors")
@pytest.mark.parametrize("end", ["forgotten", "gone"])
def test_nothing_is_left_to_a_reader_that_reads_no_more(end):
    reader = Reader()
    graph_capture.note_reader(reader, 0, 4)

    if end == "forgotten":
        graph_capture.forget_reader(reader)
    else:
        del reader
        gc.collect()

    assert graph_capture.count_spared(0) == 0


def test_where_there_is_no_cublas_products_are_made_as_ever(monkeypatch):
    monkeypatch.setattr(graph_capture, "_find_cublas", lambda: None)

    with graph_capture.products_leave(4, torch.device("cuda", 0)):
        assert torch.equal(torch.eye(3) @ torch.ones(3, 3), torch.ones(3, 3))


def read_targets():
    """Return the targets of this thread, and of the thread of backward passes."""
    return read_target(), graph_capture._run_in_backward(torch.device("cuda", 0), read_target)


@pytest.mark.usefixtures("multiprocessors")
def test_a_thread_that_runs_backward_itself_plans_for_all_afterwards(monkeypatch):
    targets = [0]

    def set_target(multiprocessors):
        targets.append(multiprocessors)
        return targets[-2]

    monkeypatch.setattr(graph_capture, "_find_cublas", object)
    monkeypatch.setattr(graph_capture, "_set_target", set_target)
    monkeypatch.setattr(graph_capture, "_run_in_backward", lambda device, function: function())
    monkeypatch.setattr(torch.cuda, "device", nullcontext)

    with graph_capture.products_leave(6, torch.device("cuda", 0)):
        inside = targets[-1]

    assert inside > 0
    assert targets[-1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("is_threaded", [True, False])
def test_products_of_both_threads_are_made_for_fewer_inside_and_for_all_afterwards(is_threaded):
    all_of_them, targets = abilities(0).multiprocessors, []

    def fail():
        with graph_capture.products_leave(6, torch.device("cuda", 0)):
            with graph_capture.products_leave(9, torch.device("cuda", 0)):
                targets.append(read_targets())
            targets.append(read_targets())
            raise KeyError

    with torch.autograd.set_multithreading_enabled(is_threaded):
        with pytest.raises(KeyError):
            fail()
        targets.append(read_targets())

    assert targets == [(all_of_them - 9,) * 2, (all_of_them - 6,) * 2, (0, 0)]


@pytest.mark.gpu
def test_products_are_right_whatever_they_leave():
    a, b = torch.rand(3000, 100, device="cuda"), torch.rand(3000, 64, device="cuda")
    for count in (1, 6, abilities(0).multiprocessors + 5):
        with graph_capture.products_leave(count, torch.device("cuda", 0)):
            torch.testing.assert_close((a.T @ b).double(), a.double().T @ b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_a_feature_on_the_host_is_known_to_read_until_its_rows_are_elsewhere(monkeypatch):
    monkeypatch.setattr(graph_capture, "_READERS", type(graph_capture._READERS)())
    feature = Feature(link_blocks=5).from_cpu_tensor(torch.ones(40, 4))
    reading = graph_capture.count_spared(0)

    feature.from_cpu_tensor(torch.ones(4, 4))
    del feature
    gc.collect()

    assert reading == 10
    assert graph_capture.count_spared(0) == 0

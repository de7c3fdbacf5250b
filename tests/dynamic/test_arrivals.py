"""Tensors that a thread copies to a GPU before they are asked for arrive as they were, each at its turn."""

import threading
import time

import pytest
import torch

from pyg_direct.dynamic import arrivals, edges
from pyg_direct.dynamic.arrivals import Arrivals
from tests.frames import make_signal, make_trainer


def test_tensors_stay_where_they_are_on_a_cpu():
    given, coming = torch.randn(2**21), Arrivals(torch.device("cpu"))

    coming.begin([given])

    assert coming.take(given) is given
    assert not any(thread.name.startswith("pyg_direct-copies") for thread in threading.enumerate())


@pytest.mark.gpu
@pytest.mark.parametrize("cores", [1, 2])
def test_copies_are_equal_whether_a_thread_made_them(monkeypatch, cores):
    monkeypatch.setattr(arrivals, "count_cores", lambda: cores)
    given, coming = [torch.randn(2**20) for _ in range(6)], Arrivals(torch.device("cuda", 0))

    # Twice, and one that nobody announced.
    for _ in range(2):
        coming.begin(given[:5])
    assert len(coming._coming) == (5 if cores == 2 else 0)

    for tensor in reversed(given):
        assert torch.equal(coming.take(tensor).cpu(), tensor)
    assert not coming._coming


@pytest.mark.gpu
def test_few_bytes_get_no_thread():
    coming = Arrivals(torch.device("cuda", 0))

    coming.begin([torch.randn(2**18 - 1)] * 4)

    assert not coming._coming


@pytest.mark.gpu
def test_no_thread_stays_when_all_are_copied():
    coming = Arrivals(torch.device("cuda", 0))

    coming.begin([torch.randn(2**21)])

    deadline = time.monotonic() + 60
    while any(thread.name.startswith("pyg_direct-copies") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.gpu
def test_an_error_is_raised_at_the_turn_of_its_tensor(monkeypatch):
    monkeypatch.setattr(arrivals, "_WORTH", 0)
    coming, good, bad = Arrivals(torch.device("cuda", 0)), torch.randn(5), torch.randn(6)

    def copy(make):
        raise torch.OutOfMemoryError("no room")

    coming.begin([good])
    assert torch.equal(coming.take(good).cpu(), good)
    monkeypatch.setattr(coming._copies, "begin", copy)
    coming.begin([bad])
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        coming.take(bad)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TGCN", "MPNNLSTM"])
def test_models_train_equally_on_what_a_thread_copied(monkeypatch, name):
    monkeypatch.setattr(edges, "FEW", 0)
    signal, losses = make_signal(), []

    for least in (0, 2**40):
        monkeypatch.setattr(arrivals, "_WORTH", least)
        trainer = make_trainer(name, signal, device="cuda")
        losses.append(trainer.fit(3))
        assert trainer.history[-1]["moved_bytes"] == 0

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)

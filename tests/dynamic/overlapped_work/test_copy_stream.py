"""Data of the next frame is copied in parallel with the passes of this one; bytes and results stay equal."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from pyg_direct.dynamic import overlapped_work, snapshot_plan, stream
from pyg_direct.dynamic.overlapped_work import Coming, CopyStream
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.frames import NODES, TIMES, WINDOW, make_signal, make_trainer


class Log(list):
    """Fake of GPU streams: records the work queued on each, and the order."""

    def __init__(self):
        self.now = "compute"
        compute = SimpleNamespace(wait_event=lambda event: self.append(f"compute waits for {event}"))
        names = {"Stream": self.make, "stream": self.enter, "current_stream": lambda device: compute}
        self.cuda = SimpleNamespace(**names)

    def make(self, device):
        return SimpleNamespace(record_event=lambda: self.append("recorded") or "the copy")

    @contextmanager
    def enter(self, stream):
        self.now = "copying"
        yield
        self.now = "compute"


def test_work_waits_for_the_copy_and_memory_for_the_work(monkeypatch):
    log = Log()
    monkeypatch.setattr(overlapped_work, "torch", SimpleNamespace(cuda=log.cuda, device=torch.device))
    value = SimpleNamespace(record_stream=lambda stream: log.append("kept for compute"))

    coming = CopyStream(torch.device("cuda")).begin(lambda: log.append(f"queued on {log.now}") or value)
    got = coming.take(torch.device("cuda"))

    assert got is value
    assert log == ["queued on copying", "recorded", "compute waits for the copy", "kept for compute"]


class Beside(CopyStream):
    """Fake that copies at once, and records what was begun and taken."""

    begun, taken = 0, 0
    is_apart = True

    def begin(self, copy, timeline=None):
        Beside.begun += 1
        value = copy()
        return SimpleNamespace(take=lambda device: self.take(value))

    def take(self, value):
        Beside.taken += 1
        return value


@pytest.fixture
def beside(monkeypatch):
    monkeypatch.setattr(snapshot_plan, "CopyStream", Beside)
    monkeypatch.setattr(Beside, "begun", 0)
    monkeypatch.setattr(Beside, "taken", 0)
    return Beside


def count_begun(trainer, beside):
    """Count the copies that an epoch begins, and how many of these it takes."""
    before = beside.begun, beside.taken
    trainer.train_epoch()
    return beside.begun - before[0], beside.taken - before[1]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_matrices_and_features_of_a_following_frame_are_begun_once(beside, group_size, weighted):
    signal = make_signal("MPNNLSTM", weighted)
    given = stream(signal, "cpu", memory=NODES * 16, keep="host", group_size=group_size)
    trainer = make_trainer("MPNNLSTM", given, device="cpu")
    trainer.fit(2)

    counts = [count_begun(trainer, beside) for _ in range(2)]

    # For all snapshots but the kept one, and but the last of the first frame. That frame has no snapshot of earlier
    # frames, so two of its snapshots are begun. Groups come with their first snapshots.
    groups = -(-TIMES // group_size) - (0 if group_size == 4 else 1)
    features = TIMES - 1 - (WINDOW - 2)
    assert counts == [(groups + features, groups + features)] * 2


def test_losses_and_bytes_are_those_of_copies_on_demand(beside, monkeypatch):
    signal, runs = make_signal("MPNNLSTM"), []
    for kind in (Beside, CopyStream):
        monkeypatch.setattr(snapshot_plan, "CopyStream", kind)
        trainer = make_trainer("MPNNLSTM", signal, device="cpu", memory=3 * NODES * 16)
        runs.append((trainer.fit(3), [epoch["moved_bytes"] for epoch in trainer.history]))

    assert beside.begun > 0
    assert runs[0] == runs[1]


def test_nothing_is_begun_where_all_stays(beside):
    make_trainer("MPNNLSTM", make_signal("MPNNLSTM"), device="cpu").fit(3)

    assert beside.begun == 0


def test_what_was_begun_for_a_frame_that_did_not_follow_is_let_go(beside):
    given = stream(make_signal("MPNNLSTM"), "cpu", memory=NODES * 16, keep="host", group_size=1)
    trainer = make_trainer("MPNNLSTM", given, device="cpu")
    trainer.fit(2)
    matrices = trainer.plan.matrices
    trainer._frame.move(0)
    trainer._frame.prefetch()
    assert len(matrices._coming) == 1

    trainer._frame.move(4)

    assert len(matrices._coming) == 0
    assert matrices._visiting.keys().isdisjoint(matrices._coming)


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [1, 4])
def test_nobody_waits_for_matrices_on_a_gpu(monkeypatch, group_size):
    signal = make_signal("MPNNLSTM")
    expected = make_trainer("MPNNLSTM", signal, device="cuda").fit(4)
    given = stream(signal, "cuda", memory=NODES * 16, keep="host", group_size=group_size)
    trainer = make_trainer("MPNNLSTM", given, device="cuda", replay=False)

    losses = trainer.fit(3)
    # Waits for the GPU raise here, in cases in which the host would wait for a copy too. Gradients wait: they reverse
    # edges.
    monkeypatch.setattr(trainer._frame, "move", without_waits(trainer._frame.move))
    monkeypatch.setattr(trainer._frame, "prefetch", without_waits(trainer._frame.prefetch))
    timeline = trainer.trace_epoch()

    assert losses == pytest.approx(expected[:3], rel=1e-3)
    assert trainer.history[-1]["loss"] == pytest.approx(expected[3], rel=1e-3)
    assert timeline.seconds()["copy"] > 0
    assert trainer.plan.matrices.is_pinned


def without_waits(work):
    def run(*args):
        with waits_refused():
            return work(*args)

    return run


@pytest.mark.gpu
def test_memory_that_is_let_go_is_not_written_before_work_on_it_is_done():
    where, size = torch.device("cuda", 0), 1 << 22
    beside = CopyStream(where)
    hosts = [torch.full((size,), float(n)).pin_memory() for n in range(8)]
    sums = []
    for host in hosts:
        coming: Coming[torch.Tensor] = beside.begin(lambda host=host: host.to(where, non_blocking=True))
        rows = coming.take(where)
        # The computing stream is far behind the copying one.
        torch.cuda._sleep(20_000_000)
        sums.append(rows.sum())
        del rows, coming

    assert [float(s) / size for s in sums] == [float(n) for n in range(8)]

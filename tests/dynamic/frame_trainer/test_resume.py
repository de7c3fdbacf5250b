"""Epochs that an exception interrupted continue there: each frame has one step, and the mean is of all."""

import pytest
import torch

from pyg_direct.dynamic import stream
from tests.dynamic.frame_trainer.test_replay import make_steps_capturable, pretend_to_record
from tests.frames import TIMES, WINDOW, make_signal, make_trainer

FRAMES = TIMES - WINDOW + 1
# In the simulator each epoch takes seconds, so one of them is enough.
SLOW = pytest.mark.slow
STAGES = ("step", *(pytest.param(stage, marks=SLOW) for stage in ("move", "model", "loss", "settle")))


def make(device, name="TGCN", **options):
    # Ones that leave must be called in every frame.
    replay = {"replay": False} if device.type == "cuda" else {}
    return make_trainer(name, make_signal(name), device=device, **replay, **options)


def raise_at(monkeypatch, owner, name, call):
    """Let a call of a method, counted from 0, be interrupted before it does anything."""
    real, calls = getattr(owner, name), iter(range(call + 1))

    def interrupted(*args, **options):
        if next(calls, None) == call:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)


def interrupt(monkeypatch, trainer, stage, frame):
    owner, name, calls = {
        "move": (trainer._frame, "move", 1), "model": (trainer, "step", WINDOW), "loss": (trainer, "loss", 1),
        "step": (trainer.optimizer, "step", 1), "settle": (trainer._frame, "settle_frames", 0),
    }[stage]  # fmt: skip
    raise_at(monkeypatch, owner, name, calls * frame)
    with pytest.raises(KeyboardInterrupt):
        trainer.train_epoch()


def assert_trained_alike(trainer, other):
    for mine, theirs in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("frame", [1, *(pytest.param(frame, marks=SLOW) for frame in (0, FRAMES - 1))])
@pytest.mark.parametrize("stage", STAGES)
def test_a_first_epoch_has_each_step_once(device, monkeypatch, stage, frame):
    trainer, whole = make(device), make(device)
    expected = whole.fit(2)

    interrupt(monkeypatch, trainer, stage, frame)
    assert trainer.history == []

    assert trainer.fit(2) == expected
    assert_trained_alike(trainer, whole)
    assert [cost.first for cost in trainer.costs] == list(range(FRAMES))


@pytest.mark.parametrize("stage", STAGES[:-1])
def test_a_later_epoch_has_each_step_once(device, monkeypatch, stage):
    trainer, whole = make(device), make(device)
    expected = whole.fit(3)
    trainer.fit(1)

    interrupt(monkeypatch, trainer, stage, 2)
    losses = trainer.fit(2)

    assert losses == expected[1:]
    assert len(trainer.history) == 3
    assert_trained_alike(trainer, whole)


@pytest.mark.parametrize("name", ["EvolveGCNO", pytest.param("GConvGRU", marks=SLOW)])
def test_an_epoch_may_be_left_often(device, monkeypatch, name):
    trainer, whole = make(device, name), make(device, name)
    expected = whole.fit(2)

    for frame in (0, 2, 1):
        # Counted from the continuation.
        interrupt(monkeypatch, trainer, "model", frame)

    assert trainer.fit(2) == expected
    assert_trained_alike(trainer, whole)
    assert sum(cost.moved_bytes for cost in trainer.costs) <= trainer.history[0]["moved_bytes"]


def test_time_and_bytes_are_those_of_all_frames(monkeypatch):
    given = stream(make_signal(), "cpu", keep="host", group_size=1)
    trainer, whole = make_trainer("TGCN", given), make_trainer("TGCN", stream(make_signal(), "cpu", group_size=1))
    whole.fit(1)

    interrupt(monkeypatch, trainer, "step", 2)
    trainer.fit(1)

    assert trainer.history[0]["moved_bytes"] == whole.history[0]["moved_bytes"] > 0
    assert trainer.history[0]["seconds"] >= sum(cost.seconds["passes"] for cost in trainer.costs)


def test_a_traced_epoch_shows_what_was_left(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    interrupt(monkeypatch, trainer, "loss", 3)

    lanes = [lane for lane, _, _ in trainer.trace_epoch().spans()]

    assert lanes.count("step") == FRAMES - 3
    assert len(trainer.costs) == FRAMES


def test_replayed_epochs_go_on_too(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    pretend_to_record(monkeypatch)
    trainer._may_replay = True
    trainer.fit(1)
    graph = trainer._recorded.graph

    interrupt(monkeypatch, trainer, "move", 3)
    moved, real = [], trainer._frame.move
    monkeypatch.setattr(trainer._frame, "move", lambda first: moved.append(first) or real(first))
    trainer.train_epoch()

    assert moved == [3, 4]
    assert trainer._recorded.graph is graph
    assert len(steps) == 2

"""Frames that are replayed as one CUDA graph train as others do, and those that cannot be are not."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from pyg_direct.dynamic import FrameTrainer
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.dynamic.nn import MPNNLSTM
from pyg_direct.runtime.cuda import graph_capture
from tests.frames import HIDDEN, NODES, WINDOW, Model, make_signal, make_trainer

pytestmark = pytest.mark.usefixtures("full_precision")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "replayed"), [("TGCN", True), ("MPNNLSTM", True), ("GConvGRU", False)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_frames_are_replayed_where_the_model_allows_it(name, replayed):
    trainer = make_trainer(name, make_signal(), device="cuda")
    plain = make_trainer(name, make_signal(), device="cuda", replay=False)

    assert trainer.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)

    assert [epoch["replayed"] for epoch in trainer.history] == [replayed] * 3
    assert "replayed" in trainer.summary()


@pytest.mark.gpu
@pytest.mark.gpus
def test_frames_are_replayed_on_a_gpu_that_is_not_the_current_one():
    trainer, plain = (make_trainer("TGCN", make_signal(), device="cuda:1", replay=replay) for replay in (True, False))

    assert trainer.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)

    assert trainer.history[-1]["replayed"]
    assert torch.cuda.current_device() == 0


def read_back(y_hat, y):
    cost = F.mse_loss(y_hat, y)
    assert float(cost.detach()) >= 0
    return cost


@pytest.mark.gpu
def test_frames_that_wait_for_the_gpu_are_not_replayed():
    trainer, plain = (
        make_trainer("TGCN", make_signal(), device="cuda", loss=read_back, replay=replay) for replay in (None, False)
    )

    assert trainer.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)

    assert [epoch["replayed"] for epoch in trainer.history] == [False] * 3
    assert trainer.decisions == ["frames are not replayed: called a synchronizing CUDA operation"]
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def pretend_to_record(monkeypatch):
    """Record frames on a CPU, where they run once; replays have no effect. List the devices of streams."""
    devices = []
    for name in (
        "CUDAGraph",
        "Stream",
        "stream",
        "synchronize",
        "get_sync_debug_mode",
        "set_sync_debug_mode",
        "graph_pool_handle",
        "empty_cache",
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *args: nullcontext(args))
    monkeypatch.setattr(torch.cuda, "current_stream", devices.append)
    monkeypatch.setattr(
        graph_capture, "record_graph", lambda graph, stream, pool: nullcontext(devices.append(stream.enter_result[0]))
    )
    monkeypatch.setattr(nullcontext, "replay", lambda self: None, raising=False)
    return devices


def test_replays_find_their_gradients_again(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    spare = trainer.model.spare = torch.nn.Parameter(torch.ones(2))
    mine = spare.grad = torch.ones(2)
    trainer.fit(1)
    pretend_to_record(monkeypatch)
    trainer._record()
    trainer.optimizer.zero_grad()
    before = [parameter.clone() for parameter in trainer.optimizer.param_groups[0]["params"]]

    trainer.train_epoch()

    for parameter, old in zip(trainer.optimizer.param_groups[0]["params"], before, strict=True):
        assert not torch.equal(parameter, old)
    # A graph must not add to gradients that it does not own.
    assert spare.grad is None
    assert torch.equal(mine, torch.ones(2))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: a stream depends")])
@pytest.mark.parametrize("failures", [0, 1, 2])
@pytest.mark.full
def test_what_earlier_passes_left_is_given_back_where_a_capture_fails(monkeypatch, failures, error):
    trainer, emptied = make_trainer("TGCN", make_signal()), []
    trainer.fit(1)
    trainer._may_replay = True
    pretend_to_record(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    compute, left = trainer._compute, [failures]

    def run_out():
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return compute()

    monkeypatch.setattr(trainer, "_compute", run_out)

    trainer._record()

    assert len(emptied) == min(failures, 1)
    assert trainer._may_replay == (trainer._recorded.graph is not None) == (failures < 2)
    told = f"frames are not replayed: {error}" if failures == 2 else "frames are replayed as one CUDA graph"
    assert trainer.decisions == [told]
    assert not trainer._frame.is_recording


def test_what_a_failed_capture_made_is_given_back_too(monkeypatch):
    trainer, made, left = make_trainer("TGCN", make_signal()), [], []
    trainer.fit(1)
    trainer._may_replay = True
    pretend_to_record(monkeypatch)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.extend(one() for one in made))
    compute = trainer._compute

    def run_out():
        cost = compute()
        if not made:
            made.append(weakref.ref(cost))
            raise torch.OutOfMemoryError("no room")
        return cost

    monkeypatch.setattr(trainer, "_compute", run_out)

    trainer._record()

    assert left == [None]
    assert trainer._recorded.graph is not None


@pytest.mark.gpu
def test_memory_of_a_failed_capture_is_there_for_the_next(monkeypatch):
    trainer, failed, held = make_trainer("TGCN", make_signal(), device="cuda"), [], []
    compute, empty_cache = trainer._compute, torch.cuda.empty_cache
    empty_cache()
    before, num_bytes = torch.cuda.memory_reserved(), 256 << 20

    def run_out():
        if failed or not trainer._frame.is_recording:
            return compute()
        failed.append(torch.ones(num_bytes, dtype=torch.uint8, device="cuda").numel())
        raise torch.OutOfMemoryError("no room")

    def give_back():
        empty_cache()
        held.append(torch.cuda.memory_reserved())

    monkeypatch.setattr(trainer, "_compute", run_out)
    monkeypatch.setattr(torch.cuda, "empty_cache", give_back)

    trainer.fit(2)

    assert trainer.history[-1]["replayed"]
    assert len(held) == 1
    assert held[0] < before + num_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TGCN", "MPNNLSTM"])
def test_recording_leaves_cached_memory_alone(monkeypatch, name):
    trainer = make_trainer(name, make_signal(), device="cuda")
    cached = torch.empty(64 << 20, device="cuda")
    del cached
    before = torch.cuda.memory_reserved()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("memory was given back"))

    losses = trainer.fit(3)

    assert trainer.history[-1]["replayed"]
    assert torch.cuda.memory_reserved() >= before
    assert losses == pytest.approx(make_trainer(name, make_signal(), device="cuda", replay=False).fit(3), rel=1e-3)


def make_steps_capturable(monkeypatch, trainer):
    """Steps of momentum that count as ones of the GPU; how many there were."""
    steps = []
    trainer.optimizer = optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01, momentum=0.9)
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: steps.append(step()))
    monkeypatch.setattr("pyg_direct.dynamic.frame_trainer.steps_on_gpu", lambda given: given is optimizer)
    return steps


def test_steps_are_captured_with_their_frames(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    trainer.fit(1)
    assert len(steps) == trainer.num_frames
    pretend_to_record(monkeypatch)
    trainer._may_replay = True

    trainer.fit(2)

    assert len(steps) == trainer.num_frames + 1
    assert trainer.decisions == ["frames and steps are replayed as one CUDA graph"]


def test_frames_are_replayed_from_the_second_on(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    pretend_to_record(monkeypatch)
    trainer._may_replay = True

    trainer.fit(2)

    # One that is a step, and one that is captured.
    assert len(steps) == 2
    assert [epoch["replayed"] for epoch in trainer.history] == [True, True]
    assert [cost.first for cost in trainer.costs] == list(range(trainer.num_frames))


def test_preparing_goes_on_without_a_graph(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    pretend_to_record(monkeypatch)
    trainer._may_replay = True
    real, left = trainer._frame.move, iter([0, 0, 0, None])
    monkeypatch.setattr(trainer._frame, "move", lambda first: real(first) if next(left, 0) == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(1)

    trainer.fit(1)

    assert len(steps) == 4
    assert len(trainer.costs) == trainer.num_frames


@pytest.mark.parametrize("change", ["option", "rate", "state"])
def test_steps_are_captured_again_when_the_optimizer_changes(monkeypatch, change):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    trainer.fit(1)
    pretend_to_record(monkeypatch)
    trainer._may_replay = True
    trainer.fit(2)
    del steps[:]

    if change == "state":
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    else:
        trainer.optimizer.param_groups[0]["lr" if change == "rate" else "momentum"] = 0.5
    trainer.fit(2)

    assert len(steps) == 1


def test_steps_without_a_state_are_not_captured(monkeypatch):
    trainer = make_trainer("TGCN", make_signal())
    steps = make_steps_capturable(monkeypatch, trainer)
    trainer.fit(1)
    del steps[:]
    trainer.optimizer.state.popitem()
    pretend_to_record(monkeypatch)
    trainer._may_replay = True

    trainer.fit(1)

    assert len(steps) == trainer.num_frames
    assert trainer.decisions == ["frames are replayed as one CUDA graph"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["TGCN", "EvolveGCNO", "MPNNLSTM"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_captured_steps_train_as_others_do(name):
    trainers = [make_trainer(name, make_signal(), device="cuda", replay=replay) for replay in (True, False)]
    for trainer in trainers:
        rate = torch.tensor(0.02, device="cuda")
        parameters = trainer.model.parameters()
        trainer.optimizer = torch.optim.Adam(parameters, lr=rate, fused=True, capturable=True)
    captured, plain = trainers

    assert captured.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)
    assert captured.decisions == ["frames and steps are replayed as one CUDA graph"]
    for trainer in trainers:
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
        trainer.optimizer.param_groups[0]["lr"].fill_(0.004)
    assert captured.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)
    before = [parameter.detach().clone() for parameter in captured.model.parameters()]
    captured.optimizer.param_groups[0]["lr"] = 0.0
    captured.fit(2)
    for parameter, old in zip(captured.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


@pytest.mark.parametrize("waits", [False, True])
def test_waits_are_refused_while_a_frame_is_recorded(monkeypatch, waits):
    modes, mode_of_loss = [1], []

    def loss(y_hat, y):
        mode_of_loss.append(modes[-1])
        if waits and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        return F.mse_loss(y_hat, y)

    trainer = make_trainer("TGCN", make_signal(), loss=loss)
    trainer.fit(1)
    devices = pretend_to_record(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    trainer._record()

    assert (modes, mode_of_loss[-1]) == ([1, "error", 1], "error")
    assert devices == [trainer.plan.device] * 2
    reason = "not replayed: called a synchronizing CUDA operation" if waits else "replayed as one CUDA graph"
    assert trainer.decisions == [f"frames are {reason}"]
    assert not trainer._frame.is_recording


@pytest.mark.gpu
def test_each_replay_drops_numbers_anew():
    model = Model(MPNNLSTM(4, HIDDEN, NODES, 1, 0.5), 2 * HIDDEN + 4, False).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device="cuda", step=run_stateless)

    losses = trainer.fit(4)

    assert [epoch["replayed"] for epoch in trainer.history] == [True] * 4
    assert len(set(losses)) == 4

"""Frames that are replayed as one CUDA graph train as others do, and those that cannot be are not."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from pyg_direct.dynamic import FrameTrainer
from pyg_direct.dynamic.nn import MPNNLSTM
from pyg_direct.dynamic.trainer import run_stateless
from tests.frames import HIDDEN, NODES, WINDOW, Model, make_signal, make_trainer


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    # Recurrent layers of cuDNN would round their inputs.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "replayed"), [("TGCN", True), ("MPNNLSTM", True), ("GConvGRU", False)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_frames_are_replayed_where_the_model_allows_it(name, replayed):
    trainer = make_trainer(name, make_signal(), device="cuda")
    plain = make_trainer(name, make_signal(), device="cuda", replay=False)

    assert trainer.fit(3) == pytest.approx(plain.fit(3), rel=1e-3)

    assert [epoch["replayed"] for epoch in trainer.history] == [False, replayed, replayed]
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
    """Frames are recorded on a CPU, where they run once; replays do nothing. The devices of streams are listed."""
    devices = []
    for name in ("CUDAGraph", "Stream", "stream", "synchronize", "get_sync_debug_mode", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: nullcontext(args))
    monkeypatch.setattr(torch.cuda, "current_stream", devices.append)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext(devices.append(stream.enter_result[0])))
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
    # A graph must not add to what it does not own.
    assert spare.grad is None
    assert torch.equal(mine, torch.ones(2))


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

    assert [epoch["replayed"] for epoch in trainer.history] == [False, True, True, True]
    assert len(set(losses)) == 4

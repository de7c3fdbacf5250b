"""Training over frames equals the plain loop over frames, whatever memory there is."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from pyg_direct.datasets.dynamic import synthetic_dtdg
from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.nn import DCRNN, MPNNLSTM, TGCN, EvolveGCNH, EvolveGCNO, GConvGRU, evolve, mpnn
from pyg_direct.dynamic.trainer import run_stateless
from pyg_direct.errors import ArgumentError, MemoryLimitError

NODES, WINDOW, TIMES, HIDDEN = 30, 3, 7, 6


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    # Recurrent layers of cuDNN would round their inputs.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Model(torch.nn.Module):
    """A cell and a linear layer; `channels` is what the cell gives."""

    def __init__(self, cell, channels, keeps_state):
        super().__init__()
        self.cell, self.keeps_state = cell, keeps_state
        self.linear = torch.nn.Linear(channels, 1)

    def forward(self, x, edge_index, edge_weight, state=None):
        if not self.keeps_state:
            return self.linear(self.cell(x, edge_index, edge_weight).relu()).view(-1)
        state = self.cell(x, edge_index, edge_weight, state)
        return self.linear(state.relu()).view(-1), state


MODELS = {
    "TGCN": lambda: Model(TGCN(4, HIDDEN), HIDDEN, True),
    "EvolveGCNO": lambda: Model(EvolveGCNO(4), 4, False),
    "EvolveGCNH": lambda: Model(EvolveGCNH(NODES, 4), 4, False),
    "MPNNLSTM": lambda: Model(MPNNLSTM(4, HIDDEN, NODES, 1, 0.0), 2 * HIDDEN + 4, False),
    "GConvGRU": lambda: Model(GConvGRU(4, HIDDEN, 2), HIDDEN, True),
    "DCRNN": lambda: Model(DCRNN(4, HIDDEN, 2), HIDDEN, True),
}


def make_signal(name="", weighted=True):
    signal = synthetic_dtdg(NODES, 120, TIMES, 0.2, 4, weighted=weighted)
    for snapshot in signal if name == "DCRNN" else ():
        # Each edge once, and some from and to every node, which its degrees need.
        ring = torch.arange(NODES)
        ends = torch.unique(torch.cat([snapshot.edge_index, torch.stack([ring, (ring + 1) % NODES])], 1), dim=1)
        snapshot.edge_index, snapshot.edge_attr = ends, torch.ones(ends.shape[1])
    return signal


def make_trainer(name, signal, **options):
    torch.manual_seed(0)
    device = options.get("device", "cpu")
    model = MODELS[name]().to(device)
    step = {} if model.keeps_state else {"step": run_stateless}
    optimizer = torch.optim.Adam(model.parameters(), lr=options.pop("rate", 0.02))
    return FrameTrainer(model, signal, optimizer, window=WINDOW, **step, **options)


def train_plainly(name, signal, epochs, target):
    """The loop that the trainer stands for, over plain snapshots."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for first in range(len(signal) - WINDOW + 1):
            if hasattr(model.cell, "reinitialize_weight"):
                model.cell.reinitialize_weight()
            state, costs = None, []
            for snapshot in signal[first : first + WINDOW]:
                inputs = snapshot.x, snapshot.edge_index, snapshot.edge_attr
                if model.keeps_state:
                    y_hat, state = model(*inputs, state)
                else:
                    y_hat = model(*inputs)
                costs.append(F.mse_loss(y_hat, snapshot.y))
            cost = costs[-1] if target == "last" else sum(costs) / WINDOW
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
            total += cost.item()
        losses.append(total / (len(signal) - WINDOW + 1))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [*((name, "last") for name in MODELS), ("TGCN", "all")])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_losses_are_those_of_the_plain_loop(device, name, target):
    signal = make_signal(name)
    expected = train_plainly(name, copy.deepcopy(signal), 3, target)

    trainer = make_trainer(name, signal, device=device, target=target)

    assert trainer.fit(3) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("target", ["last", "all"])
@pytest.mark.parametrize("has_slots", [False, True], ids=["", "at fixed places"])
def test_snapshots_of_a_frame_go_through_a_model_together(device, monkeypatch, step, target, has_slots):
    signal = make_signal("MPNNLSTM")
    # One more than a window has, with more nodes than those trained on.
    signal.append(Data(x=torch.randn(NODES + 3, 4), edge_index=torch.tensor([[0], [1]])))
    times = slice(0, 7, step)
    together, apart = (
        make_trainer("MPNNLSTM", stream(signal, device)[times], device=device, target=target) for _ in range(2)
    )
    together._frame.has_slots |= has_slots
    losses = together.fit(2)

    monkeypatch.setattr(mpnn, "_LARGE", 0)

    assert losses == pytest.approx(apart.fit(2), rel=1e-3)
    for (name, mine), (_, other) in zip(together.model.named_buffers(), apart.model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=name)
    assert int(together.model.cell._batch_norm_1.num_batches_tracked) == 2 * together.num_frames * WINDOW


class Echo(torch.nn.Module):
    """Shows a cell the first snapshots of a frame only, and lets what it gave of one of them reach the loss."""

    def __init__(self, seen, reached):
        super().__init__()
        self.cell, self.seen, self.reached = MPNNLSTM(4, HIDDEN, NODES, 1, 0.0), seen, reached
        self.linear = torch.nn.Linear(2 * HIDDEN + 4, 1)

    def forward(self, x, edge_index, edge_weight, state=None):
        place, kept = (0, None) if state is None else state
        if place < self.seen:
            out = self.linear(self.cell(x, edge_index, edge_weight)).view(-1)
            kept = out if place == self.reached else kept
        return kept, (place + 1, kept)


@pytest.mark.parametrize(("seen", "reached"), [(3, 0), (3, 1), (2, 1), (1, 0)])
def test_any_snapshot_of_a_frame_may_reach_the_loss(device, monkeypatch, seen, reached):
    def train():
        torch.manual_seed(0)
        model = Echo(seen, reached).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device=device)
        return trainer.fit(2), model.state_dict()

    losses, mine = train()
    monkeypatch.setattr(mpnn, "_LARGE", 0)
    expected, other = train()

    assert losses == pytest.approx(expected, rel=1e-3)
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=name)
    assert int(mine["cell._batch_norm_1.num_batches_tracked"]) == 2 * (TIMES - WINDOW + 1) * seen


class Wayward(torch.nn.Module):
    """Evolves twice at a place of a frame, or anew, or not at all; every output reaches the loss."""

    def __init__(self, way):
        super().__init__()
        self.cell, self.way = EvolveGCNO(4), way
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, edge_index, edge_weight, state=None):
        place, total = (0, 0.0) if state is None else state
        if place == 1 and self.way == "twice":
            total = total + self.cell(x, edge_index, edge_weight)
        elif place == 1 and self.way == "anew":
            self.cell.reinitialize_weight()
        if place != 1 or self.way != "not at all":
            total = total + self.cell(x, edge_index, edge_weight)
        return self.linear(total).view(-1) + self.cell.weight.sum(), (place + 1, total)


@pytest.mark.parametrize("way", ["once", "twice", "anew", "not at all"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_weights_evolve_as_often_as_they_are_asked_to(device, monkeypatch, way):
    def train():
        torch.manual_seed(0)
        model = Wayward(way).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device=device)
        return trainer.fit(2), model.state_dict()

    losses, mine = train()
    monkeypatch.setattr(evolve._Steps, "follow", lambda self, weight: False)
    expected, other = train()

    assert losses == pytest.approx(expected, rel=1e-3)
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=name)


def test_dropped_numbers_are_those_of_the_gradient():
    signal = make_signal()
    torch.manual_seed(0)
    model = Model(MPNNLSTM(4, HIDDEN, NODES, 1, 0.5), 2 * HIDDEN + 4, False)
    trainer = FrameTrainer(model, signal, torch.optim.SGD(model.parameters(), lr=0.0), window=WINDOW, device="cpu",
                           step=run_stateless)  # fmt: skip
    weight = model.cell._convolution_2.lin.weight
    step, values = 1e-2, []
    trainer.train_epoch()
    for shift in (0.0, step, -2 * step):
        with torch.no_grad():
            weight[1, 2] += shift
        trainer._frame.move(trainer.num_frames - 1)
        torch.manual_seed(3)
        values.append(float(trainer._run_frame()))
        if shift == 0:
            expected = float(weight.grad[1, 2])

    assert (values[1] - values[2]) / (2 * step) == pytest.approx(expected, rel=0.05, abs=1e-4)


@pytest.mark.parametrize("memory", [None, "10%", "50%"])
def test_memory_changes_nothing_but_what_is_moved(device, memory):
    signal = make_signal()
    free = make_trainer("TGCN", signal, device=device)

    capped = make_trainer("TGCN", signal, device=device, memory=memory)

    assert capped.fit(3) == pytest.approx(free.fit(3), rel=1e-5)
    row_bytes = NODES * 4 * 4
    described = capped.plan.describe()
    assert described["aggregated_bytes"] + described["aggregated_host_bytes"] == TIMES * row_bytes
    # At most each snapshot once an epoch: what a frame shares with the one before stays.
    assert capped.history[-1]["moved_bytes"] <= (0 if memory is None else TIMES * row_bytes)


def test_frames_of_part_of_a_stream_are_its_own(device):
    signal = make_signal()
    whole = stream(signal, device, keep="host")

    part = make_trainer("TGCN", whole[1:6], device=device)

    alone = make_trainer("TGCN", signal[1:6], device=device)
    assert part.fit(2) == pytest.approx(alone.fit(2), rel=1e-4)
    assert part.num_frames == 3


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


def test_casts_of_parameters_are_those_after_the_last_step():
    def train(is_kept):
        trainer = make_trainer("MPNNLSTM", make_signal())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_kept):
            return trainer.fit(2)

    assert train(True) == pytest.approx(train(False), rel=1e-3)


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


def test_all_numbers_may_be_dropped(device):
    model = Model(MPNNLSTM(4, HIDDEN, NODES, 1, 1.0), 2 * HIDDEN + 4, False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device=device, step=run_stateless)

    assert torch.tensor(trainer.fit(2)).isfinite().all()


@pytest.mark.parametrize("calls", [1, 4, 6])
def test_an_epoch_that_was_interrupted_is_resumed(device, monkeypatch, calls):
    # Each snapshot is aggregated by itself, so that there is something to interrupt.
    signals = [stream(make_signal(), device, keep="host", group_size=1) for _ in range(2)]
    # Without steps that count, so that losses tell whether frames hold what they should.
    expected = make_trainer("TGCN", signals[0], device=device, rate=0.0).fit(1)
    trainer = make_trainer("TGCN", signals[1], device=device, rate=0.0)
    real, left = trainer.plan.aggregate_features, iter([*range(calls), None])

    def interrupted(*args):
        if next(left, 0) is None:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(trainer.plan, "aggregate_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(3)

    # What was aggregated before is kept.
    kept = trainer.plan.describe()["aggregated_bytes"]
    assert kept > 0
    assert trainer.fit(2)[-1] == pytest.approx(expected[0], rel=1e-5)
    assert trainer.plan.describe()["aggregated_bytes"] >= kept


def test_stages_of_an_epoch_are_traced(device):
    trainer = make_trainer("TGCN", make_signal(), device=device)

    lanes = [lane for lane, _, _ in trainer.trace_epoch().spans()]

    assert [lanes.count(lane) for lane in ("passes", "step", "move")] == [trainer.num_frames] * 3
    assert lanes.count("aggregate") >= 1
    assert "aggregate" not in [lane for lane, _, _ in trainer.trace_epoch().spans()]
    assert trainer.plan.timeline is None


def test_summary_tells_sizes_and_epochs():
    trainer = make_trainer("TGCN", make_signal())
    trainer.fit(2)

    lines = trainer.summary().splitlines()

    assert "snapshots: 7" in lines
    assert "frames: 5 of 3 snapshots" in lines
    assert [line.split(":")[0] for line in lines[-2:]] == ["epoch 1", "epoch 2"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 8}, ArgumentError, r"\[1, 7\], the number of snapshots, got 8"),
        ({"window": 0}, ArgumentError, "got 0"),
        ({"target": "first"}, ArgumentError, "last, all"),
        ({"replay": True}, ArgumentError, "on cpu"),
        ({"memory": 100}, MemoryLimitError, "480 bytes, got 100"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    model = MODELS["TGCN"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(error, match=message):
        FrameTrainer(model, make_signal(), optimizer, device="cpu", **{"window": 3, **options})


def test_snapshots_of_different_sizes_are_refused():
    signal = make_signal()
    signal[2].x = signal[2].x[:-1]
    model = MODELS["TGCN"]()

    with pytest.raises(ArgumentError, match="x must have one shape"):
        FrameTrainer(model, signal, torch.optim.SGD(model.parameters(), lr=0.1), window=WINDOW, device="cpu")

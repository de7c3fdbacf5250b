"""Training over frames equals the plain loop over frames, whatever memory there is."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.frame_trainer import run_recurrent, run_stateless
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices
from tests.frames import MODELS, NODES, TIMES, WINDOW, make_signal, make_trainer

NO_REPLAY = {"cuda": {"replay": False}, "cpu": {}}
pytestmark = pytest.mark.usefixtures("full_precision")


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


@pytest.mark.parametrize("memory", ["10%", *(pytest.param(memory, marks=pytest.mark.slow) for memory in (None, "50%"))])
def test_memory_changes_nothing_but_what_is_moved(device, memory):
    signal = make_signal()
    free = make_trainer("TGCN", signal, device=device)

    capped = make_trainer("TGCN", signal, device=device, memory=memory)

    assert capped.fit(3) == pytest.approx(free.fit(3), rel=1e-5)
    row_bytes = NODES * 4 * 4
    described = capped.plan.describe()
    assert described["aggregated_bytes"] + described["aggregated_host_bytes"] == TIMES * row_bytes
    # At most each snapshot once an epoch: snapshots shared with the frame before stay.
    assert capped.history[-1]["moved_bytes"] <= (0 if memory is None else TIMES * row_bytes)


@pytest.mark.parametrize(("name", "kept", "made"), [("TGCN", "aggregated_bytes", 0), ("MPNNLSTM", "feature_bytes", 1)])
def test_features_come_before_structures_in_memory(device, name, kept, made):
    # Room for the model's reads of all snapshots; aggregated rows are computed from features if these are read too.
    rows = TIMES * NODES * 4 * 4
    given = stream(make_signal(), device, memory=rows, keep="host", group_size=2)
    trainer = make_trainer(name, given, device=device, **NO_REPLAY[device.type])

    trainer.fit(3)

    held = trainer.plan.describe()
    assert trainer.history[-1]["moved_bytes"] == made * sum(trainer.plan.matrices.sent_bytes.values())
    assert held[kept] == rows
    assert held["aggregated_host_bytes"] == made * rows


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_matrices_that_do_not_fit_are_sent_once_an_epoch(device, groups):
    signal = make_signal("MPNNLSTM")
    sequence = stream(signal, device, memory=NODES * 4 * 4, keep="host", group_size=groups)
    trainer = make_trainer("MPNNLSTM", sequence, device=device, **NO_REPLAY[device.type])

    losses = trainer.fit(3)

    assert losses == pytest.approx(make_trainer("MPNNLSTM", signal, device=device).fit(3), rel=1e-3)
    # Not again for each frame, although every snapshot is part of up to three. And x of all but the kept one, but not
    # the rows computed from it.
    matrices = sum(trainer.plan.matrices.sent_bytes.values())
    assert trainer.history[-1]["moved_bytes"] == matrices + (TIMES - 1) * NODES * 4 * 4
    assert device.type != "cuda" or trainer.plan.matrices.is_pinned


def test_matrices_that_all_snapshots_share_are_sent_once(device):
    signal = make_signal()
    for snapshot in signal:
        snapshot.edge_index, snapshot.edge_attr = signal[0].edge_index, signal[0].edge_attr
    sequence = stream(signal, device, memory=NODES * 4 * 4, keep="host")
    trainer = make_trainer("GCLSTM", sequence, device=device, **NO_REPLAY[device.type])
    trainer.fit(2)
    matrices = trainer.plan.matrices
    before = matrices.moved_bytes

    trainer.fit(1)

    # Whichever snapshot asked for them, they stay while a frame has any that did, and every frame has.
    assert matrices.moved_bytes == before == sum(matrices.sent_bytes.values()) > 0


def test_what_fits_is_sent_once(device):
    trainer = make_trainer("TGCN", make_signal(), device=device)

    trainer.fit(2)

    plan = trainer.plan.describe()
    # The first epoch brings the features, of which aggregated rows are made, and the matrices.
    assert trainer.history[0]["moved_bytes"] == plan["matrix_bytes"] + TIMES * NODES * 4 * 4
    assert trainer.history[1]["moved_bytes"] == 0


def test_frames_of_part_of_a_stream_are_its_own(device):
    signal = make_signal()
    whole = stream(signal, device, keep="host")

    part = make_trainer("TGCN", whole[1:6], device=device)

    alone = make_trainer("TGCN", signal[1:6], device=device)
    assert part.fit(2) == pytest.approx(alone.fit(2), rel=1e-4)
    assert part.num_frames == 3


@pytest.mark.parametrize("calls", [1, 4, 6])
def test_an_epoch_that_was_interrupted_is_resumed(device, monkeypatch, calls):
    # Each snapshot is aggregated by itself, so that there is something to interrupt.
    signals = [stream(make_signal(), device, keep="host", group_size=1) for _ in range(2)]
    # Without effective steps, so that losses show whether frames hold the right snapshots.
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

    # Rows aggregated before are kept.
    kept = trainer.plan.describe()["aggregated_bytes"]
    assert kept > 0
    assert trainer.fit(2)[-1] == pytest.approx(expected[0], rel=1e-5)
    assert trainer.plan.describe()["aggregated_bytes"] >= kept


class Both(torch.nn.Module):
    """Reads the features of a frame as two operators give them."""

    def __init__(self):
        super().__init__()
        self.cells = torch.nn.ModuleList([TGCN(4, 3), TGCN(4, 3, improved=True)])

    def forward(self, x, edge_index, edge_weight):
        return sum(cell(x, edge_index, edge_weight).sum(1) for cell in self.cells)


def test_frames_that_were_half_moved_are_filled_anew(device, monkeypatch):
    signal, calls = make_signal(), iter([*range(2 * WINDOW), None])
    model = Both().to(device)
    # Steps of size zero, so that losses show whether frames hold the right snapshots.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainers = [FrameTrainer(model, stream(signal, device, keep="host", group_size=1), optimizer, window=WINDOW,
                             step=run_stateless, **NO_REPLAY[device.type]) for _ in range(2)]  # fmt: skip
    expected = trainers[0].fit(1)
    real = trainers[1].plan.aggregate_features

    def interrupted(*args):
        # The first of the two rows of the second frame.
        if next(calls, 0) is None:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(trainers[1].plan, "aggregate_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainers[1].fit(1)

    assert trainers[1].fit(1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.full
def test_a_trainer_leaves_no_memory_behind(name, is_left):
    trainer = make_trainer(name, make_signal(name))
    trainer.fit(2)
    if is_left:
        trainer.loss = None
        with pytest.raises(TypeError, match="not callable"):
            trainer.train_epoch()
    frame = weakref.ref(trainer._frame)

    del trainer
    gc.collect()

    assert frame() is None


def test_stages_of_an_epoch_are_traced(device):
    trainer = make_trainer("TGCN", make_signal(), device=device)

    lanes = [lane for lane, _, _ in trainer.trace_epoch().spans()]

    assert [lanes.count(lane) for lane in ("passes", "step", "move")] == [trainer.num_frames] * 3
    assert lanes.count("aggregate") >= 1
    assert "aggregate" not in [lane for lane, _, _ in trainer.trace_epoch().spans()]
    assert trainer.plan.timeline is None


def test_frames_of_the_first_epoch_are_measured(device):
    trainer = make_trainer("TGCN", make_signal(), device=device)
    assert trainer.costs == []

    trainer.fit(2)

    assert [cost.first for cost in trainer.costs] == list(range(trainer.num_frames))
    assert sum(cost.moved_bytes for cost in trainer.costs) == trainer.history[0]["moved_bytes"]
    assert all(cost.seconds["passes"] > 0 and cost.seconds["step"] > 0 for cost in trainer.costs)
    assert trainer.costs[0].seconds["aggregate"] > 0
    on_gpu = device.type == "cuda"
    assert all((cost.peak_bytes >= cost.held_bytes > 0) == on_gpu for cost in trainer.costs)
    assert trainer.plan.budget.need == max(cost.peak_bytes - cost.held_bytes for cost in trainer.costs)


def test_summary_tells_sizes_and_epochs():
    trainer = make_trainer("TGCN", make_signal())
    trainer.fit(2)

    lines = trainer.summary().splitlines()

    assert "snapshots: 7" in lines
    assert "frames: 5 of 3 snapshots" in lines
    assert any(line.startswith("most that a frame of the first epoch took: ") and "passes" in line for line in lines)
    assert [line.split(":")[0] for line in lines[-2:]] == ["epoch 1", "epoch 2"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 8}, ArgumentError, r"\[1, 7\], the number of snapshots, got 8"),
        ({"window": 0}, ArgumentError, "got 0"),
        ({"window": True}, ArgumentTypeError, "window must be an integer, got True"),
        ({"window": "3"}, ArgumentTypeError, "window must be an integer, got '3'"),
        ({"window": 3.0}, ArgumentTypeError, r"window must be an integer, got 3\.0"),
        ({"target": "first"}, ArgumentError, "last, all"),
        ({"replay": True}, ArgumentError, "on cpu"),
        ({"memory": 100}, MemoryLimitError, "480 bytes .*, got 100: give at least 480 bytes$"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    model = MODELS["TGCN"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(error, match=message):
        FrameTrainer(model, make_signal(), optimizer, device="cpu", **{"window": 3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"memory": "50%"}, "given to `stream`.*got '50%'"), ({"device": "meta"}, "that of the stream, cpu, got meta")],
)
def test_what_a_stream_has_is_not_asked_for_again(monkeypatch, options, message):
    # There is no second device on most machines.
    monkeypatch.setattr("pyg_direct.dynamic.frame_trainer.resolve_device", torch.device)
    given, model = stream(make_signal(), "cpu"), MODELS["TGCN"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ArgumentError, match=message):
        FrameTrainer(model, given, optimizer, window=WINDOW, **options)

    assert FrameTrainer(model, given, optimizer, window=WINDOW, device="cpu").plan is given.plan


@pytest.mark.parametrize(
    ("time", "name", "shape", "message"),
    [(2, "x", (12, 3), r"x must have one shape.*at 0 and \(12, 3\) at 2; a loop over `stream`"),
     (1, "y", (12,), r"y must have one shape.*at 0 and \(12,\) at 1; a loop"),
     (4, "y", None, "at 0 and None at 4; give y to every"),
     (0, "x", None, "x must have one shape.*got None at 0; give x to every snapshot, or loop over `stream`, which")],
)  # fmt: skip
def test_snapshots_of_different_sizes_are_refused(time, name, shape, message):
    signal, model = make_signal(), MODELS["TGCN"]()
    signal[time][name] = None if shape is None else torch.zeros(shape)
    signal[time].num_nodes = NODES

    with pytest.raises(ArgumentError, match=message):
        FrameTrainer(model, signal, torch.optim.SGD(model.parameters(), lr=0.1), window=WINDOW, device="cpu")


def test_a_target_that_is_missing_is_told_before_shapes():
    signal, model = make_signal(), MODELS["TGCN"]()
    signal[1].y, signal[5].y = torch.zeros(12), None

    with pytest.raises(ArgumentError, match=r"y must .* got \(30,\) at 0 and None at 5; give y .*, which needs none$"):
        FrameTrainer(model, signal, torch.optim.SGD(model.parameters(), lr=0.1), window=WINDOW, device="cpu")


@pytest.mark.parametrize("memory", [None, 200_000])
def test_what_a_frame_takes_the_host_is_the_same_in_longer_signals(monkeypatch, memory):
    counts, real = [], SnapshotMatrices.num_bytes
    monkeypatch.setattr(SnapshotMatrices, "num_bytes", property(lambda self: counts.append(1) or real.fget(self)))
    found = []
    for times in (1, 4):
        signal = [snapshot for _ in range(times) for snapshot in make_signal("MPNNLSTM")]
        trainer = make_trainer("MPNNLSTM", stream(signal, "cpu", memory=memory, keep="host", group_size=1))
        trainer.fit(1)
        counts.clear()
        trainer.fit(1)
        found.append(len(counts) / trainer.num_frames)

    # Snapshots are weighed if a frame has them, and not all of them in each.
    assert 0 < found[1] <= 1.5 * found[0]


class OneOutput(torch.nn.Module):
    """A model of snapshots, without a state or with the one that it is given."""

    def __init__(self, width: int, takes_state: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
        self.takes_state = takes_state

    def forward(self, x, edge_index, edge_weight, *state):
        y_hat = self.layer(x).view(-1)
        return y_hat if self.takes_state else (y_hat, None)


@pytest.mark.parametrize(
    ("step", "takes_state", "words"),
    [(run_recurrent, True, r"step must return \(y_hat, state\), got a Tensor: .* give step=run_stateless"),
     (run_stateless, False, "model must return y_hat alone .*, got a tuple of 2: .* give step=run_recurrent")],
)  # fmt: skip
@pytest.mark.parametrize("num_nodes", [2, NODES])
def test_a_model_with_other_outputs_is_told_which_step_to_take(step, takes_state, words, num_nodes):
    # A tensor of two rows would be taken apart into the two outputs.
    signal = [Data(x=torch.rand(num_nodes, 3), y=torch.rand(num_nodes), edge_index=torch.tensor([[0, 1], [1, 0]]),
                   edge_attr=torch.ones(2)) for _ in range(4)]  # fmt: skip
    model = OneOutput(3, takes_state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = run_stateless if step is run_recurrent else run_recurrent

    with pytest.raises(ArgumentTypeError, match=words):
        FrameTrainer(model, signal, optimizer, window=2, step=step, device="cpu").train_epoch()

    assert FrameTrainer(model, signal, optimizer, window=2, step=right, device="cpu").train_epoch() > 0


def test_an_optimizer_of_another_model_is_refused():
    model, other = MODELS["TGCN"](), MODELS["TGCN"]()

    with pytest.raises(ArgumentError, match=r"optimizer must hold parameters of model, got SGD of .* others"):
        FrameTrainer(model, make_signal(), torch.optim.SGD(other.parameters(), lr=0.1), window=3, device="cpu")

    some = [next(model.parameters()), *other.parameters()]
    FrameTrainer(model, make_signal(), torch.optim.SGD(some, lr=0.1), window=3, device="cpu")

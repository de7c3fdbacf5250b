"""Frames pass on attributes of snapshots beside features, edges, weights and targets, recorded ones at fixed places."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Batch
from torch_geometric.nn import GATConv

from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.frame_plan import NotReplayableError
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.errors import ArgumentError
from tests.dynamic.frame_trainer.test_replay import pretend_to_record
from tests.frames import NODES, TIMES, WINDOW, make_signal


class Attention(torch.nn.Module):
    """Scores edges by messages of two numbers."""

    def __init__(self):
        super().__init__()
        self.conv = GATConv(4, 1, edge_dim=2)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, edge_attr).view(-1)


class Row(torch.nn.Module):
    """A linear layer of features, and whatever `read` makes of its result and the snapshot."""

    def __init__(self, read):
        super().__init__()
        self.linear, self.read = torch.nn.Linear(4, 1), read

    def forward(self, snapshot):
        return self.read(self.linear(snapshot.x).view(-1), snapshot)


def run_row(model, snapshot, state):
    return model(snapshot), None


def make_messages():
    signal = make_signal()
    for snapshot in signal:
        snapshot.edge_attr = torch.rand(snapshot.num_edges, 2)
    return signal


def make_others():
    signal, static = make_signal(), torch.rand(NODES, 2)
    for number, snapshot in enumerate(signal):
        snapshot.mask, snapshot.pos, snapshot.level = torch.rand(NODES) < 0.5, static.clone(), torch.tensor(number / 2)
        snapshot.edge_time, snapshot.day, snapshot.unit = torch.rand(snapshot.num_edges + number), number, "mm"
    return signal


def make(model, signal, step, device="cpu", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return FrameTrainer(model.to(device), signal, optimizer, window=WINDOW, step=step, device=device, **options)


def train_plainly(model, signal, step, epochs):
    """The loop that the trainer stands for."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(epochs):
        total = 0.0
        for first in range(TIMES - WINDOW + 1):
            for snapshot in signal[first : first + WINDOW]:
                y_hat, _ = step(model, snapshot, None)
            cost = F.mse_loss(y_hat, snapshot.y)
            optimizer.zero_grad()
            cost.backward()
            optimizer.step()
            total += cost.item()
        losses.append(total / (TIMES - WINDOW + 1))
    return losses


@pytest.mark.parametrize("keep", ["device", "host"])
def test_messages_reach_the_model(device, keep):
    signal, model = make_messages(), Attention()
    given = stream(copy.deepcopy(signal), device, keep=keep)
    trainer = make(copy.deepcopy(model), given, run_stateless, device)

    losses = trainer.fit(3)

    assert losses == pytest.approx(train_plainly(model, signal, run_stateless, 3), rel=1e-4)
    assert not any(epoch["replayed"] for epoch in trainer.history)


def test_messages_are_fetched_for_a_frame_only():
    trainer = make(Attention(), make_messages(), run_stateless)

    trainer.fit(1)

    assert all(snapshot.edge_attr._loaded is None for snapshot in trainer._frame.others._snapshots)


def test_messages_that_ask_for_gradients_are_refused():
    signal = make_messages()
    signal[3].edge_attr.requires_grad_()

    with pytest.raises(ArgumentError, match="edge_attr must not ask for gradients"):
        make(Attention(), signal, run_stateless)


@pytest.mark.parametrize("as_stream", [False, True])
def test_attributes_are_those_of_each_snapshot_of_each_frame(device, as_stream):
    signal, seen = make_others(), []

    def read(y_hat, snapshot):
        seen.append({key: snapshot[key] for key in snapshot.keys()})  # noqa: SIM118
        return y_hat

    given = stream(copy.deepcopy(signal), device) if as_stream else copy.deepcopy(signal)
    trainer = make(Row(read), given, run_row, device)

    trainer.fit(1)

    times = [first + place for first in range(trainer.num_frames) for place in range(WINDOW)]
    for got, expected in zip(seen, (signal[time] for time in times), strict=True):
        assert got.keys() == set(expected.keys())
        for key in ("mask", "pos", "level", "edge_time"):
            assert got[key].device.type == device.type
            assert torch.equal(got[key].cpu(), expected[key])
        assert (got["day"], got["unit"]) == (expected.day, expected.unit)


def test_attributes_train_as_in_the_plain_loop(device):
    signal = make_others()
    model = Row(lambda y_hat, snapshot: (y_hat + snapshot.pos[:, 0]) * snapshot.mask * 0.9**snapshot.level)
    trainer = make(copy.deepcopy(model), copy.deepcopy(signal), run_row, device)

    losses = trainer.fit(3)

    assert losses == pytest.approx(train_plainly(model, signal, run_row, 3), rel=1e-4)
    assert device.type == "cpu" or trainer.history[-1]["replayed"]


def test_batches_stay_batches():
    signal, kinds = [Batch.from_data_list([snapshot]) for snapshot in make_signal()], []
    model = Row(lambda y_hat, snapshot: kinds.append((type(snapshot), snapshot.batch.tolist())) or y_hat)

    make(model, signal, run_row).fit(1)

    assert kinds[0] == (type(signal[0]), [0] * NODES)


def test_a_snapshot_that_is_written_to_leaves_others_alone():
    signal = make_others()

    def read(y_hat, snapshot):
        assert "note" not in snapshot
        snapshot.note, snapshot.day = 1, 100
        return y_hat

    trainer = make(Row(read), signal, run_row)

    trainer.fit(2)

    assert [snapshot.day for snapshot in trainer._frame.get_snapshots()] == [4, 5, 6]


def record(monkeypatch, read, signal=None):
    """Return a trainer of two epochs, whose second begins with a recorded frame, and the results of `read` for it."""
    seen, trainer = [], None

    def note(y_hat, snapshot):
        value = read(snapshot)
        if trainer is not None and trainer._frame.is_recording:
            seen.append(value)
        return y_hat

    trainer = make(Row(note), signal or make_others(), run_row)
    trainer.fit(1)
    pretend_to_record(monkeypatch)
    trainer._may_replay = True
    trainer.fit(1)
    return trainer, seen


@pytest.mark.parametrize("key", ["mask", "level"])
def test_recorded_frames_find_attributes_at_fixed_places(monkeypatch, key):
    signal = make_others()
    trainer, seen = record(monkeypatch, lambda snapshot: snapshot[key], signal)

    for first in (0, 3, 1, 4):
        trainer._frame.move(first)

        assert all(torch.equal(value, s[key]) for value, s in zip(seen, signal[first : first + WINDOW], strict=True))


@pytest.mark.parametrize("read", [
    lambda snapshot: (snapshot.pos, snapshot.unit), lambda snapshot: copy.copy(snapshot).unit,
    lambda snapshot: snapshot.num_nodes, lambda snapshot: snapshot.edge_attr.shape, lambda snapshot: "pos" in snapshot,
])  # fmt: skip
def test_what_all_snapshots_share_may_be_read_by_recorded_frames(monkeypatch, read):
    trainer, seen = record(monkeypatch, read, make_others())

    assert len(seen) == WINDOW
    assert trainer.decisions == ["frames are replayed as one CUDA graph"]


@pytest.mark.parametrize(("key", "read"), [
    ("day", lambda snapshot: snapshot.day), ("day", lambda snapshot: snapshot["day"]),
    ("day", lambda snapshot: snapshot.to_dict()["day"]), ("day", lambda snapshot: copy.copy(snapshot).day),
    ("edge_time", lambda snapshot: snapshot.edge_time), ("edge_time", lambda snapshot: snapshot.get("edge_time")),
    ("edge_time", lambda snapshot: list(snapshot)), ("edge_time", lambda snapshot: snapshot.clone()),
])  # fmt: skip
def test_frames_that_read_what_cannot_be_replayed_are_not(monkeypatch, key, read):
    trainer, seen = record(monkeypatch, read)

    assert seen == []
    assert trainer.decisions == [
        f"frames are not replayed: the model reads {key}, which differs between snapshots and is no tensor of one shape"
    ]
    assert not trainer.history[-1]["replayed"]


def test_attributes_that_some_snapshots_miss_are_not_replayed(monkeypatch):
    signal = make_signal()
    signal[1].rare = torch.ones(2)

    trainer, _ = record(monkeypatch, lambda snapshot: snapshot.get("rare"), signal)

    assert trainer.decisions[0].startswith("frames are not replayed: the model reads rare, which")


def test_frames_that_read_messages_are_not_replayed(monkeypatch):
    trainer, seen = record(monkeypatch, lambda snapshot: snapshot.edge_attr.sum(), make_messages())

    assert seen == []
    assert trainer.decisions == [
        "frames are not replayed: the model reads edge_attr, messages of several numbers an edge"
    ]


def test_an_error_of_reading_is_raised_where_replays_must_be(monkeypatch):
    trainer = make(Row(lambda y_hat, snapshot: y_hat * snapshot.day), make_others(), run_row)
    trainer.fit(1)
    pretend_to_record(monkeypatch)
    trainer._may_replay = trainer._must_replay = True

    with pytest.raises(NotReplayableError, match="the model reads day"):
        trainer.fit(1)

"""Layers that see the snapshots of a frame together give the same results as one by one."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import FrameTrainer, stream
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.dynamic.nn import MPNNLSTM, EvolveGCNO, evolve_gcn, mpnn_lstm
from tests.frames import HIDDEN, NODES, TIMES, WINDOW, Model, make_signal, make_trainer

pytestmark = pytest.mark.usefixtures("full_precision")


def train(make, *args, device):
    """Return (losses, learned parameters) of two epochs of a model."""
    torch.manual_seed(0)
    model = make(*args).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device=device)
    return trainer.fit(2), model.state_dict()


def assert_trained_alike(got, expected):
    (losses, mine), (other_losses, other) = got, expected
    assert losses == pytest.approx(other_losses, rel=1e-3)
    for name, value in mine.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4, msg=name)


def one_simulated(*cases):
    """All of them, but in the simulator the first one alone."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in cases[1:])]


def take_layers_apart(monkeypatch):
    """Let each snapshot go through one layer after the other from now on."""
    monkeypatch.setattr(mpnn_lstm, "_LARGE", 0)
    monkeypatch.setattr(mpnn_lstm, "suits_alone", lambda x, size: False)


@pytest.mark.parametrize(("target", "step"), one_simulated(("all", 2), ("all", 1), ("last", 2), ("last", 1)))
@pytest.mark.parametrize("has_slots", [False, True], ids=["", "at fixed places"])
@pytest.mark.full
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

    take_layers_apart(monkeypatch)

    assert losses == pytest.approx(apart.fit(2), rel=1e-3)
    for (name, mine), (_, other) in zip(together.model.named_buffers(), apart.model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=name)
    assert int(together.model.cell._batch_norm_1.num_batches_tracked) == 2 * together.num_frames * WINDOW


class Echo(torch.nn.Module):
    """Model that shows a cell only the first snapshots of a frame, and lets its result for one of them reach the
    loss.
    """

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


@pytest.mark.parametrize(("seen", "reached"), one_simulated((3, 1), (3, 0), (2, 1), (1, 0)))
def test_any_snapshot_of_a_frame_may_reach_the_loss(device, monkeypatch, seen, reached):
    got = train(Echo, seen, reached, device=device)
    take_layers_apart(monkeypatch)
    expected = train(Echo, seen, reached, device=device)

    assert_trained_alike(got, expected)
    assert int(got[1]["cell._batch_norm_1.num_batches_tracked"]) == 2 * (TIMES - WINDOW + 1) * seen


class Switching(torch.nn.Module):
    """Lets a cell take the snapshots of a frame in several ways, one after the other."""

    def __init__(self, ways):
        super().__init__()
        self.cell, self.ways = MPNNLSTM(4, HIDDEN, NODES, 1, 0.0), ways
        self.linear = torch.nn.Linear(2 * HIDDEN + 4, 1)

    def forward(self, x, edge_index, edge_weight, state=None):
        place = 0 if state is None else state[0]
        way = self.ways[place]
        self.cell.train(way != "eval")
        # Gradients of a layer that reads running statistics would miss their old values.
        with torch.set_grad_enabled(way == "train"):
            rows = self.cell(x, edge_index, edge_weight)
        self.cell.train()
        out = self.linear(rows).view(-1)
        return out if state is None else out + state[1], (place + 1, out)


@pytest.mark.parametrize("ways", [("train", "eval", "train"),
                                  pytest.param(("train", "look", "train"), marks=pytest.mark.slow),
                                  pytest.param(("eval", "train", "eval"), marks=pytest.mark.slow)])  # fmt: skip
def test_ways_may_change_within_a_frame(device, monkeypatch, ways):
    got = train(Switching, ways, device=device)
    take_layers_apart(monkeypatch)
    expected = train(Switching, ways, device=device)

    assert_trained_alike(got, expected)


class Wayward(torch.nn.Module):
    """Model that evolves twice at a place of a frame, or again, or not at all; every output reaches the loss."""

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
    got = train(Wayward, way, device=device)
    monkeypatch.setattr(evolve_gcn._Steps, "follow", lambda self, weight: False)
    expected = train(Wayward, way, device=device)

    assert_trained_alike(got, expected)


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


def test_all_numbers_may_be_dropped(device):
    model = Model(MPNNLSTM(4, HIDDEN, NODES, 1, 1.0), 2 * HIDDEN + 4, False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = FrameTrainer(model, make_signal(), optimizer, window=WINDOW, device=device, step=run_stateless)

    assert torch.tensor(trainer.fit(2)).isfinite().all()


def test_casts_of_parameters_are_those_after_the_last_step():
    def train(is_kept):
        trainer = make_trainer("MPNNLSTM", make_signal())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_kept):
            return trainer.fit(2)

    assert train(True) == pytest.approx(train(False), rel=1e-3)


@pytest.mark.parametrize("name", ["TGCN", "EvolveGCNO", "MPNNLSTM"])
def test_edges_without_weights_go_with_those_that_have_some(device, name):
    ones, bare = make_signal(), make_signal()
    for time in (0, 2, 3):
        ones[time].edge_attr, bare[time].edge_attr = torch.ones(ones[time].num_edges), None
    expected, mixed = (make_trainer(name, signal, device=device) for signal in (ones, bare))

    losses = mixed.fit(2)

    assert losses == pytest.approx(expected.fit(2), rel=1e-3)
    for (key, mine), (_, other) in zip(mixed.model.named_buffers(), expected.model.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=key)


def test_weights_of_edges_may_be_left_out_of_a_frame(device):
    def look(model, snapshot, state):
        bare, _ = model(snapshot.x, snapshot.edge_index, None, None)
        out, state = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
        return out + bare, state

    together = make_trainer("TGCN", make_signal(), device=device)
    # Rows that are no features of a snapshot go through the layer alone.
    apart = make_trainer("TGCN", make_signal(), device=device)
    apart.model.cell.register_forward_pre_hook(lambda _, given: (given[0] + 0, *given[1:]))
    for trainer in (together, apart):
        trainer.step = look

    assert together.fit(2) == pytest.approx(apart.fit(2), rel=1e-3)


def test_a_look_without_gradients_takes_none_away(device):
    def look(model, snapshot, state):
        given = snapshot.x, snapshot.edge_index, snapshot.edge_attr, state
        with torch.no_grad():
            model(*given)
        return model(*given)

    looking, plain = (make_trainer("TGCN", make_signal(), device=device) for _ in range(2))
    looking.step = look

    assert looking.fit(2) == pytest.approx(plain.fit(2), rel=1e-3)


def test_what_a_layer_gave_may_be_written_to_before_its_gradient(device):
    def find_gradients(writes):
        torch.manual_seed(0)
        layer = MPNNLSTM(4, HIDDEN, NODES, 1, 0.0).to(device)
        snapshot = stream(make_signal(), device)[0]
        rows = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
        cost = rows[:, : 2 * HIDDEN].sum()
        with torch.no_grad():
            rows.mul_(0 if writes else 1)
        return torch.autograd.grad(cost, list(layer.parameters()))

    written, kept = find_gradients(True), find_gradients(False)

    assert all(torch.equal(mine, other) for mine, other in zip(written, kept, strict=True))
    assert any(gradient.any() for gradient in kept)

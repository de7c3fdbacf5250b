"""Programs may write to snapshots of a stream, as to a signal's; a step of a frame must not."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.dynamic.snapshot import find_tag
from pyg_direct.errors import ArgumentError
from tests.frames import NODES, make_signal, make_trainer

KEPT = pytest.mark.parametrize("keep", ["device", "host"])


class Signal:
    """Signal that makes its snapshots again each time, as in PyTorch Geometric Temporal."""

    snapshot_count = 3
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])

    def __getitem__(self, time):
        return Data(x=torch.full((3, 2), float(time)), edge_index=self.edges.clone(), edge_attr=torch.ones(3),
                    y=torch.full((3,), 10.0 + time))  # fmt: skip


@KEPT
def test_what_was_written_is_not_there_the_next_time(real_device, keep):
    given, plain = stream(Signal(), real_device, keep=keep), Signal()

    for _ in range(2):
        for time, snapshot in enumerate(given):
            for key in ("x", "y", "edge_attr"):
                snapshot[key] -= 1
                assert torch.equal(snapshot[key].cpu() + 0, plain[time][key] - 1), key


@KEPT
def test_a_snapshot_is_known_again_behind_a_write(keep):
    given = stream(Signal(), "cpu", keep=keep)

    given[1].x.add_(1)
    given[1].edge_attr.add_(1)

    assert find_tag(given[1].x, "x").time == 1
    assert find_tag(given[:2][1].edge_attr, "edge_weight").time == 1


@KEPT
def test_gradients_are_those_of_one_access(keep):
    given = stream(Signal(), "cpu", keep=keep)

    for _ in range(2):
        x = given[1].x.requires_grad_()
        x.sum().backward()
        assert torch.equal(x.grad, torch.ones(3, 2))


@pytest.mark.filterwarnings("ignore:edge_weight asks for gradients")
@KEPT
def test_features_and_weights_that_are_learned_are_those_of_the_last_step(keep):
    losses = []
    for wrap in (lambda signal: stream(signal, "cpu", keep=keep), list):
        torch.manual_seed(0)
        signal, layer = make_signal()[:3], TGCN(4, 3)
        learned = [torch.nn.Parameter(torch.randn(NODES, 4)), torch.nn.Parameter(signal[1].edge_attr + 1)]
        signal[0].x = signal[2].x = learned[0]
        signal[1].edge_attr = learned[1]
        optimizer, given = torch.optim.SGD(learned, lr=5.0), wrap(signal)
        losses.append([])
        for _ in range(3):
            for snapshot in given:
                loss = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    seen = [layer(s.x, s.edge_index, s.edge_attr).sum() for s in (given[0], given[1])]
                losses[-1].append(loss.item() + float(sum(seen)))

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@KEPT
def test_what_is_learned_from_equal_beginnings_stays_apart(keep):
    signal, learned = make_signal()[:2], [torch.nn.Parameter(torch.zeros(NODES, 4)) for _ in range(2)]
    for snapshot, rows in zip(signal, learned, strict=True):
        snapshot.x = rows

    for factor, snapshot in enumerate(stream(signal, "cpu", keep=keep), 1):
        (factor * snapshot.x).sum().backward()

    assert [rows.grad.unique().tolist() for rows in learned] == [[1.0], [2.0]]


def test_snapshots_with_types_are_given_anew(real_device):
    snapshot = HeteroData()
    snapshot["user"].x = torch.zeros(2, 1)
    given = stream([snapshot], real_device)

    given[0]["user"].x.add_(1)

    assert not given[0]["user"].x.any()
    assert not snapshot["user"].x.any()


@pytest.mark.parametrize("key", ["x", "edge_attr"])
def test_a_step_must_not_write_to_what_frames_share(device, key):
    trainer = make_trainer("GCNConv", make_signal(), device=device)

    def step(model, snapshot, state):
        snapshot[key].mul_(2)
        return model(snapshot.x, snapshot.edge_index, snapshot.edge_attr), None

    trainer.step = step

    with pytest.raises(ArgumentError, match=f"step must not write to {key} of a snapshot, .* to that of 0"):
        trainer.train_epoch()


def test_a_step_may_write_to_targets(real_device):
    losses = []
    for changes in (False, True):
        trainer = make_trainer("TGCN", make_signal()[:3], device=real_device, replay=False)

        def loss(y_hat, y, changes=changes):
            return torch.nn.functional.mse_loss(y_hat, y.sub_(1) if changes else y - 1)

        trainer.loss = loss
        losses.append(trainer.fit(2))

    assert losses[0] == pytest.approx(losses[1], rel=1e-3)

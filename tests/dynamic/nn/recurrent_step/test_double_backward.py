"""Gradients of layers' own steps have gradients in turn, and come in batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.utils import remove_self_loops

from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import MPNNLSTM, EvolveGCNO
from tests.frames import HIDDEN, MODELS, NODES, WINDOW, make_signal, make_trainer

pytestmark = pytest.mark.usefixtures("full_precision")


class Penalised:
    """A loss, and the squares of its gradients."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def __call__(self, y_hat, y):
        cost = F.mse_loss(y_hat, y)
        grads = torch.autograd.grad(cost, self.parameters, create_graph=True, allow_unused=True)
        return cost + sum(grad.square().sum() for grad in grads if grad is not None)


def train_plainly(model, signal):
    """Losses of an epoch over the frames of snapshots that no stream has."""
    loss, optimizer, costs = Penalised(model), torch.optim.Adam(model.parameters(), lr=0.02), []
    for first in range(len(signal) - WINDOW + 1):
        if hasattr(model.cell, "reinitialize_weight"):
            model.cell.reinitialize_weight()
        state = None
        for snapshot in signal[first : first + WINDOW]:
            out = model(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
            y_hat, state = out if model.keeps_state else (out, None)
        cost = loss(y_hat, snapshot.y)
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    return costs


@pytest.mark.parametrize("name", MODELS)
def test_losses_may_hold_gradients(real_device, name):
    signal = make_signal(name)
    for snapshot in signal:
        # Of two loops of a node PyG takes any on a GPU.
        snapshot.edge_index, snapshot.edge_attr = remove_self_loops(snapshot.edge_index, snapshot.edge_attr)
    trainer = make_trainer(name, signal, device=real_device, replay=False)
    plain = copy.deepcopy(trainer.model)
    trainer.loss = Penalised(trainer.model)
    expected = train_plainly(plain, [snapshot.clone().to(real_device) for snapshot in signal])

    got = trainer.train_epoch()

    assert got == pytest.approx(sum(expected) / len(expected), rel=1e-3)
    for mine, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("frames", [False, True], ids=["alone", "in a frame"])
@pytest.mark.parametrize("layer", [MPNNLSTM(4, HIDDEN, NODES, 1, 0.0), MPNNLSTM(4, HIDDEN, NODES, 1, 0.5),
                                   EvolveGCNO(4)], ids=["", "dropout", "evolving"])  # fmt: skip
def test_gradients_that_have_gradients_are_the_same(layer, frames):
    outs, parameters = run_two(layer, frames), list(layer.parameters())
    grads = [torch.randn_like(out) for out in outs]
    expected = torch.autograd.grad(outs, parameters, grads, retain_graph=True, allow_unused=True)

    got = torch.autograd.grad(outs, parameters, grads, create_graph=True, allow_unused=True)

    for mine, other in zip(got, expected, strict=True):
        assert_near(mine, other)


def test_gradients_of_weights_that_evolve_come_in_batches():
    layer = EvolveGCNO(4)
    outs, parameters = run_two(layer, True), list(layer.parameters())
    grads = [torch.randn(3, *out.shape) for out in outs]
    apart = [torch.autograd.grad(outs, parameters, one, retain_graph=True) for one in zip(*grads, strict=True)]

    got = torch.autograd.grad(outs, parameters, grads, is_grads_batched=True)

    for mine, others in zip(got, zip(*apart, strict=True), strict=True):
        assert_near(mine, torch.stack(others))


def run_two(layer, frames):
    """Return a layer's results for two snapshots, of a stream or of a frame."""
    given = stream(make_signal(), "cpu")
    snapshots = make_trainer("EvolveGCNO", given)._frame.get_snapshots() if frames else given
    return [layer(s.x, s.edge_index, s.edge_attr) for s in snapshots][:2]


def assert_near(got, expected):
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got / scale, expected / scale, rtol=1e-4, atol=1e-5)

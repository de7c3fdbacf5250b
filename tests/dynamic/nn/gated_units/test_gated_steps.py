"""T-GCN takes its gated steps by kernels if there is a GPU, with the values of torch's functions."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import remove_self_loops

from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.dynamic import nn, stream
from pyg_direct.dynamic.nn import gated_units
from pyg_direct.ops.run_kernel import runs_on_gpu

PERIODS = 4


@pytest.mark.parametrize("way", ["plain", "streamed", "periods"])
def test_steps_are_those_of_torch(device, monkeypatch, way):
    torch.manual_seed(2)
    signal = [snapshot.to(device) for snapshot in synthetic_dtdg(12, 40, 3, 0.2, 3, weighted=True)]
    for snapshot in signal if way == "periods" else ():
        snapshot.x = torch.stack([snapshot.x * (period + 1) for period in range(PERIODS)], 2)
    layer = (nn.A3TGCN(3, 5, PERIODS) if way == "periods" else nn.TGCN(3, 5)).to(device)
    steps = []
    monkeypatch.setattr(gated_units, "_FEW", {})
    for name in ("step_gated", "step_folded"):
        real = getattr(gated_units, name)
        monkeypatch.setattr(gated_units, name, lambda *given, real=real, name=name: steps.append(name) or real(*given))

    got = run(layer, stream(signal, device) if way == "streamed" else signal)

    # The simulator has no kernels of C++.
    name = "step_folded" if signal[0].x.is_cuda else "step_gated"
    assert steps == [name] * len(signal) * runs_on_gpu(signal[0].x)
    use_torch(monkeypatch)
    for mine, expected in zip(got, run(layer, signal), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


class Reader(torch.nn.Module):
    """A cell and a linear layer behind it."""

    def __init__(self):
        super().__init__()
        self.cell, self.linear = nn.TGCN(3, 5), torch.nn.Linear(5, 1)

    def forward(self, snapshot, state=None):
        state = self.cell(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
        return self.linear(state.relu()), state


def train_at_once(model, optimizer, signal):
    state, loss = None, 0
    for snapshot in signal:
        out, state = model(snapshot, state)
        loss = loss + out.square().mean()
    loss.backward()
    optimizer.step()
    return [loss]


def train_one_by_one(model, optimizer, signal):
    state, losses = None, []
    for snapshot in signal:
        optimizer.zero_grad()
        out, state = model(snapshot, state)
        losses.append(out.square().mean())
        losses[-1].backward()
        optimizer.step()
        state = state.detach()
    return losses


def train_with_a_graph_kept(model, optimizer, signal):
    state, losses = None, []
    for snapshot in signal:
        out, state = model(snapshot, state)
        losses.append(out.square().mean())
        losses[-1].backward(retain_graph=True)
    optimizer.step()
    return losses


def train_after_a_look(model, optimizer, signal):
    """Parts of a sequence without gradients, of which the state goes on."""
    state, losses = None, []
    for place, snapshot in enumerate(signal):
        with torch.set_grad_enabled(place % 3 != 0):
            out, state = model(snapshot, state)
        losses.append(out.square().mean())
    sum(losses[1:]).backward()
    optimizer.step()
    return losses


def train_by_hand(model, optimizer, signal):
    losses = train_at_once(model, torch.optim.SGD(model.parameters(), lr=0), signal)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
    return losses


@pytest.mark.parametrize("train", [train_at_once, train_one_by_one, train_with_a_graph_kept, train_after_a_look,
                                   train_by_hand])  # fmt: skip
@pytest.mark.parametrize("is_streamed", [False, True], ids=["plain", "streamed"])
def test_losses_of_a_script_are_those_of_torch(real_device, monkeypatch, train, is_streamed):
    signal = [snapshot.to(real_device) for snapshot in synthetic_dtdg(12, 40, 6, 0.2, 3, weighted=True)]
    for snapshot in signal:
        # Of two loops of a node PyG takes any on a GPU.
        snapshot.edge_index, snapshot.edge_attr = remove_self_loops(snapshot.edge_index, snapshot.edge_attr)
    given = stream(signal, real_device) if is_streamed else signal

    got = train_for(given, train, real_device)

    use_torch(monkeypatch)
    torch.testing.assert_close(got, train_for(signal, train, real_device), rtol=1e-4, atol=1e-6)


def train_for(signal, train, device, epochs=4):
    torch.manual_seed(3)
    model = Reader().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        losses += [loss.detach() for loss in train(model, optimizer, signal)]
    return torch.stack(losses)


def test_steps_may_be_checkpoints(real_device, monkeypatch):
    signal = [snapshot.to(real_device) for snapshot in synthetic_dtdg(12, 40, 3, 0.2, 3)]
    layer = nn.TGCN(3, 5).to(real_device)
    expected = run(layer, signal)
    apart = [partial(checkpoint, layer, use_reentrant=kind) for kind in (False, True)]

    for way in apart:
        got = run(way, signal, layer)

        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_graph_reads_parameters_as_they_are_when_it_is_replayed():
    # Their aggregated rows are kept, so that no other work is captured.
    (snapshot,) = stream(synthetic_dtdg(12, 40, 1, 0.2, 3, weighted=True), "cuda")
    layer = nn.TGCN(3, 5).cuda()
    parameters = list(layer.parameters())

    def step(state):
        return layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # The weights that it would share.
        before = step(torch.ones(12, 5, device="cuda"))
        # No gradient goes back to its inputs, which are not in the graph.
        before.register_hook(torch.zeros_like)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = step(step(before))
            grads = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.5)

        graph.replay()

        again = step(step(before.detach()))
        expected = torch.autograd.grad(again.square().sum(), parameters)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, again)
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def use_torch(monkeypatch):
    for name in ("suits_gpu", "suits_folded"):
        monkeypatch.setattr(gated_units, name, lambda *given: False)


def run(step, signal, layer=None):
    """The last state, and the gradients of all parameters of the layer that makes the steps."""
    layer = step if layer is None else layer
    layer.zero_grad()
    state = torch.zeros(signal[0].num_nodes, 5, device=signal[0].x.device, requires_grad=True)
    for snapshot in signal:
        state = step(snapshot.x, snapshot.edge_index, snapshot.edge_attr, state)
    state.square().sum().backward()
    return [state.detach(), *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]

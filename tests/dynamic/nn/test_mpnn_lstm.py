"""A snapshot that goes through MPNN-LSTM alone gives the results of its layers one by one."""

import copy

import pytest
import torch

from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.dynamic import stream
from pyg_direct.dynamic.nn import MPNNLSTM, mpnn_lstm

pytestmark = pytest.mark.usefixtures("full_precision")

NODES, CHANNELS = 70, 3


def visit(layer, signal, is_alone):
    """(rows of each snapshot, gradients of all of them together, running statistics) of one pass over a sequence."""
    # For features other than the snapshot's, layers are computed one by one.
    given = [snapshot.x if is_alone else snapshot.x.clone() for snapshot in signal]
    rows = [layer(x, snapshot.edge_index, snapshot.edge_attr) for x, snapshot in zip(given, signal, strict=True)]
    loss = sum((place + 1) * out.square().mean() for place, out in enumerate(rows))
    return [*rows, *torch.autograd.grad(loss, list(layer.parameters())), *layer.buffers()]


@pytest.mark.parametrize("hidden", [1, 5, 16, 32, 40])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "unweighted"])
@pytest.mark.parametrize(
    ("num_nodes", "is_large"), [(NODES, False), (NODES, True), (5000, False)], ids=["", "large", "many nodes"]
)
def test_rows_gradients_and_statistics_are_those_of_layers(real_device, monkeypatch, hidden, weighted, num_nodes,
                                                           is_large):  # fmt: skip
    signal = synthetic_dtdg(num_nodes, 6 * num_nodes, 3, 0.2, CHANNELS, weighted=weighted)
    if is_large:
        monkeypatch.setattr(mpnn_lstm, "_LARGE", 0)
    torch.manual_seed(0)
    layer = MPNNLSTM(CHANNELS, hidden, num_nodes, 1, 0.0).to(real_device)
    twin, called = copy.deepcopy(layer), []
    run_alone = MPNNLSTM._run_alone
    monkeypatch.setattr(MPNNLSTM, "_run_alone", lambda *given: called.append(1) or run_alone(*given))

    got = visit(layer, stream(signal, real_device), True)

    fits = hidden <= 32 if real_device.type == "cuda" else not is_large
    assert len(called) == (3 if fits else 0)
    expected = visit(twin, stream(signal, real_device), False)
    assert len(called) == (3 if fits else 0)
    # Sums over more nodes round more.
    most = 1e-5 if num_nodes == NODES else 1e-4
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=most)


class Doubled(torch.nn.BatchNorm1d):
    """Normalized rows, twice."""

    def forward(self, rows):
        return 2 * super().forward(rows)


@pytest.mark.parametrize("change", [
    lambda layer: setattr(layer, "_batch_norm_1", Doubled(5)),
    lambda layer: layer._batch_norm_2.register_forward_hook(lambda norm, given, out: 3 * out),
    lambda layer: setattr(layer._batch_norm_1, "num_batches_tracked", None),
], ids=["derived", "hook", "not counted"])  # fmt: skip
def test_changed_layers_are_called(real_device, change):
    signal = stream(synthetic_dtdg(NODES, 400, 2, 0.2, CHANNELS), real_device)
    torch.manual_seed(0)
    layer = MPNNLSTM(CHANNELS, 5, NODES, 1, 0.0)
    change(layer)
    layer = layer.to(real_device)
    twin = copy.deepcopy(layer)

    for mine, theirs in zip(visit(layer, signal, True), visit(twin, signal, False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def step_by_torch(layer, snapshot):
    """Compute the layer of PyTorch Geometric Temporal for a single snapshot, from its unchanged parts."""
    first = layer._batch_norm_1(layer._convolution_1(snapshot.x, snapshot.edge_index).relu())
    second = layer._batch_norm_2(layer._convolution_2(first, snapshot.edge_index).relu())
    rows, (state_1, _) = layer._recurrent_1(torch.cat([first, second], 1).unsqueeze(0))
    _, (state_2, _) = layer._recurrent_2(rows)
    return torch.cat([state_1[0], state_2[0], snapshot.x], 1)


@pytest.mark.parametrize("change", [
    lambda layer: setattr(layer, "_recurrent_1", torch.nn.LSTM(10, 5, num_layers=2)),
    lambda layer: setattr(layer, "_recurrent_2", torch.nn.LSTM(5, 5, bidirectional=True)),
    lambda layer: setattr(layer, "_recurrent_2", torch.nn.LSTM(5, 5, bias=False)),
    lambda layer: layer._recurrent_1.register_forward_hook(lambda lstm, given, out: (2 * out[0], out[1])),
], ids=["two layers", "two directions", "no biases", "hook"])  # fmt: skip
def test_recurrent_layers_of_another_kind_are_called(real_device, change):
    signal = synthetic_dtdg(NODES, 400, 2, 0.2, CHANNELS)
    torch.manual_seed(0)
    layer = MPNNLSTM(CHANNELS, 5, NODES, 1, 0.0)
    change(layer)
    layer = layer.to(real_device)
    # Moved too, so that its weights are contiguous; otherwise torch warns.
    twin = copy.deepcopy(layer).to(real_device)

    got = [layer(snapshot.x, snapshot.edge_index) for snapshot in stream(signal, real_device)]

    for mine, snapshot in zip(got, signal, strict=True):
        torch.testing.assert_close(mine, step_by_torch(twin, snapshot.to(real_device)), rtol=1e-4, atol=1e-5)


PARTS = {
    "half": lambda layer: layer._recurrent_2.half(), "double": lambda layer: layer._batch_norm_1.double(),
    "narrow": lambda layer: setattr(layer, "_recurrent_1", torch.nn.LSTM(10, 4)),
    "elsewhere": lambda layer: layer._recurrent_1.to("meta"),
}  # fmt: skip


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
def test_parts_of_another_kind_are_for_torch_to_refuse(real_device, change):
    (snapshot,) = stream(synthetic_dtdg(NODES, 400, 1, 0.2, CHANNELS), real_device)
    layer = MPNNLSTM(CHANNELS, 5, NODES, 1, 0.0).to(real_device)
    change(layer.requires_grad_(False))

    with pytest.raises((RuntimeError, ValueError, TypeError)):
        layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

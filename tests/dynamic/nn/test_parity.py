"""Layers equal PyTorch Geometric Temporal's: values, gradients, names of parameters, in any loop."""

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import nn as ours, stream
from pyg_direct.dynamic.nn import gated_units, sparse_conv
from pyg_direct.dynamic.snapshot import find_tag
from pyg_direct.errors import ArgumentError
from tests.snapshots import make_snapshots

pytestmark = [
    pytest.mark.temporal,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
NODES, CHANNELS, HIDDEN, TIMES = 12, 3, 5, 6
# Arguments of the constructor, and inputs and outputs of a step.
LAYERS = {
    "TGCN": ((CHANNELS, HIDDEN), "state"),
    "TGCN improved": ((CHANNELS, HIDDEN, True), "state"),
    "TGCN without loops": ((CHANNELS, HIDDEN, False, False, False), "state"),
    "TGCN cached": ((CHANNELS, HIDDEN, False, True), "state"),
    "A3TGCN": ((CHANNELS, HIDDEN, 4), "periods"),
    "EvolveGCNO": ((CHANNELS,), "none"),
    "EvolveGCNO without norm": ((CHANNELS, False, False, False), "none"),
    "EvolveGCNH": ((NODES, CHANNELS), "none"),
    "MPNNLSTM": ((CHANNELS, HIDDEN, NODES, 1, 0.0), "none"),
    "GCLSTM": ((CHANNELS, HIDDEN, 3), "two states"),
    "GCLSTM rw": ((CHANNELS, HIDDEN, 2, "rw", False), "two states"),
    "GConvGRU": ((CHANNELS, HIDDEN, 3), "state"),
    "GConvGRU without norm": ((CHANNELS, HIDDEN, 2, None), "state"),
    "DCRNN": ((CHANNELS, HIDDEN, 3), "state"),
    "DCRNN one step": ((CHANNELS, HIDDEN, 1), "state"),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make_signal(weighted, periods=None, simple=False):
    signal = []
    for edges, weight in make_snapshots(NODES, 40, TIMES, weighted=weighted):
        edges, weight = torch.from_numpy(edges), None if weight is None else torch.from_numpy(weight)
        if simple:
            # Without loops and parallel edges, and from and to every node: others are no numbers there.
            ring = torch.arange(NODES)
            keys = torch.unique(torch.cat([edges[0] * NODES + edges[1], ring * NODES + (ring + 1) % NODES]))
            keys = keys[keys // NODES != keys % NODES]
            edges = torch.stack([keys // NODES, keys % NODES])
            weight = None if weight is None else torch.rand(keys.numel()) + 0.5
        shape = (NODES, CHANNELS) if periods is None else (NODES, CHANNELS, periods)
        signal.append(Data(x=torch.randn(shape), edge_index=edges, edge_attr=weight, y=torch.randn(NODES)))
    return signal


def make_pair(name):
    from torch_geometric_temporal.nn import recurrent as theirs

    arguments, kind = LAYERS[name]
    cls = name.split()[0]
    torch.manual_seed(1)
    reference = getattr(theirs, cls)(*arguments)
    layer = getattr(ours, cls)(*arguments)
    layer.load_state_dict(reference.state_dict())
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in reference.named_parameters()]
    # So that biases that begin at zero count.
    with torch.no_grad():
        for mine, theirs_ in zip(layer.parameters(), reference.parameters(), strict=True):
            theirs_.add_(0.1 * torch.randn_like(theirs_))
            mine.copy_(theirs_)
    return layer, reference, kind


def run_layer(layer, kind, signal, name, state=()):
    """Outputs of all snapshots; the state is carried on."""
    options = {"lambda_max": 2.5} if name in ("GCLSTM rw", "GConvGRU without norm") else {}
    outputs = []
    for snapshot in signal:
        out = layer(snapshot.x, snapshot.edge_index, snapshot.edge_attr, *state, **options)
        if kind == "state":
            state = (out,)
        elif kind == "two states":
            state, out = out, out[0]
        outputs.append(out)
    return outputs


def make_signal_for(name, weighted):
    return make_signal(weighted, 4 if LAYERS[name][1] == "periods" else None, simple=name.startswith("DCRNN"))


@layers
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_values_and_gradients_are_equal(name, weighted, streamed):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, weighted)
    given = stream(signal, "cpu", group_size=4) if streamed else signal

    got = run_layer(layer, kind, given, name)
    expected = run_layer(reference, kind, signal, name)
    for outputs in (got, expected):
        sum((out * out).sum() * (t + 1) for t, out in enumerate(outputs)).backward()

    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for (key, mine), theirs in zip(layer.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), key
        if mine.grad is not None:
            scale = max(1.0, float(theirs.grad.abs().max()))
            torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, rtol=1e-4, atol=1e-5)


# PyGT's DCRNN knows fp32 only.
@pytest.mark.parametrize("name", [name for name in LAYERS if "DCRNN" not in name])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_values_are_equal_in_double_precision(name, streamed):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, True)
    signal = [s.apply(lambda value: value.double() if value.is_floating_point() else value) for s in signal]
    given = stream(signal, "cpu", group_size=4) if streamed else signal

    got = run_layer(layer.double(), kind, given, name)
    # PyGT's layers begin with zeros of fp32, which not all of them can go on with.
    state = [torch.zeros(NODES, HIDDEN, dtype=torch.float64)] * {"state": 1, "two states": 2}.get(kind, 0)
    expected = run_layer(reference.double(), kind, signal, name, state)

    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@layers
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_weights_may_be_a_column(name, streamed):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, True)
    for snapshot in signal:
        snapshot.edge_attr = snapshot.edge_attr.unsqueeze(1)
    given = stream(signal, "cpu") if streamed else signal

    got = run_layer(layer, kind, given, name)

    for mine, theirs in zip(got, run_layer(reference, kind, signal, name), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(39,), (40, 2)])
def test_diffusion_refuses_another_number_of_weights(shape):
    edges, weight = torch.randint(NODES, (2, 40)), torch.ones(shape)

    with pytest.raises(ArgumentError, match=r"^edge_weight must have shape \[40\], got"):
        ours.DCRNN(CHANNELS, HIDDEN, 2)(torch.randn(NODES, CHANNELS), edges, weight)


@layers
def test_a_default_device_is_none_of_a_step(name):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, True)

    with torch.device("meta"):
        got = run_layer(layer, kind, stream(signal, "cpu"), name)

    for mine, theirs in zip(got, run_layer(reference, kind, signal, name), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_many_nodes_are_projected_with_folded_weights(monkeypatch):
    layer, reference, kind = make_pair("TGCN")
    signal = make_signal(True)
    monkeypatch.setattr(gated_units, "_FEW", {})

    got = run_layer(layer, kind, signal, "TGCN")

    for mine, theirs in zip(got, run_layer(reference, kind, signal, "TGCN"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@layers
def test_training_step_by_step_is_equal(name):
    layer, reference, kind = make_pair(name)
    signal = make_signal_for(name, True)
    losses = []
    for module, given in ((layer, stream(signal, "cpu")), (reference, signal)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        losses.append([])
        for snapshot in given:
            if hasattr(module, "reinitialize_weight"):
                module.reinitialize_weight()
            out = run_layer(module, kind, [snapshot], name)[0]
            loss = (out * out).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_windows_of_several_graphs_are_one():
    from torch_geometric_temporal.nn.recurrent import MPNNLSTM

    layer, reference = ours.MPNNLSTM(CHANNELS, HIDDEN, 4, 3, 0.0), MPNNLSTM(CHANNELS, HIDDEN, 4, 3, 0.0)
    layer.load_state_dict(reference.state_dict())
    x, edges, weight = torch.randn(12, CHANNELS), torch.randint(12, (2, 30)), torch.rand(30)

    torch.testing.assert_close(layer(x, edges, weight), reference(x, edges, weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_diffusion_that_stays_takes_any_edges(streamed):
    # Steps of a diffusion do not: each edge must be there once.
    layer, reference, kind = make_pair("DCRNN one step")
    signal = make_signal(True)
    longer = ours.DCRNN(CHANNELS, HIDDEN, 2)
    given = stream(signal, "cpu") if streamed else signal

    got = run_layer(layer, kind, given, "DCRNN")

    for mine, theirs in zip(got, run_layer(reference, kind, signal, "DCRNN"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="each edge once"):
        run_layer(longer, kind, given, "DCRNN")


@pytest.mark.parametrize("memory", [None, 500])
def test_diffusion_is_the_same_in_every_form(memory):
    layer, reference, kind = make_pair("DCRNN")
    signal = make_signal(True, simple=True)

    for given in stream(signal, "cpu", memory=memory, keep="host"), stream(signal, "cpu", group_size=2, form="split"):
        got = run_layer(layer, kind, given, "DCRNN")

        for mine, theirs in zip(got, run_layer(reference, kind, signal, "DCRNN"), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_changed_features_are_aggregated_anew():
    layer, reference, _ = make_pair("TGCN")
    signal = make_signal(True)
    given = stream(signal, "cpu")

    for mine, theirs in zip(given, signal, strict=True):
        assert find_tag(mine.x, "x") is not None
        got = layer(mine.x * 2, mine.edge_index, mine.edge_attr)
        mine.x.add_(1)
        changed = layer(mine.x, mine.edge_index, mine.edge_attr)

        expected = (reference(x, theirs.edge_index, theirs.edge_attr) for x in (theirs.x * 2, theirs.x + 1))
        torch.testing.assert_close((got, changed), tuple(expected), rtol=1e-4, atol=1e-5)


def test_changed_edges_and_missing_weights_are_seen():
    layer, reference, _ = make_pair("TGCN")
    signal = make_signal(True)
    mine, theirs = stream(signal, "cpu")[0], signal[0]

    torch.testing.assert_close(layer(mine.x, mine.edge_index), reference(theirs.x, theirs.edge_index), rtol=1e-4,
                               atol=1e-5)  # fmt: skip
    mine.edge_index[0, 0] = (mine.edge_index[0, 0] + 1) % NODES
    changed = theirs.edge_index.clone()
    changed[0, 0] = (changed[0, 0] + 1) % NODES
    torch.testing.assert_close(
        layer(mine.x, mine.edge_index, mine.edge_attr), reference(theirs.x, changed, theirs.edge_attr), rtol=1e-4,
        atol=1e-5)  # fmt: skip


def test_gradients_through_weights_of_edges_are_pygs(monkeypatch):
    monkeypatch.setattr(sparse_conv, "_told", set())
    layer, reference, _ = make_pair("TGCN")
    signal = make_signal(True)
    mine, theirs = stream(signal, "cpu")[0], signal[0]
    weights = [snapshot.edge_attr.clone().requires_grad_() for snapshot in (mine, theirs)]
    mine.edge_attr.requires_grad_()

    with pytest.warns(UserWarning, match="asks for gradients"):
        layer(mine.x, mine.edge_index, mine.edge_attr).sum().backward()
    # Warned once; warnings are errors in these tests.
    layer(mine.x, mine.edge_index, mine.edge_attr)
    layer(mine.x, mine.edge_index, weights[0]).sum().backward()
    reference(theirs.x, theirs.edge_index, weights[1]).sum().backward()

    torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.edge_attr.grad, weights[1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("keep", ["device", "host"])
def test_running_statistics_are_equal_snapshot_by_snapshot(keep, momentum):
    layer, reference, kind = make_pair("MPNNLSTM")
    signal = make_signal(True)
    for module in (layer, reference):
        for name, norm in module.named_modules():
            if "norm" in name:
                norm.momentum = momentum

    for mine, theirs in zip(stream(signal, "cpu", keep=keep), signal, strict=True):
        run_layer(layer, kind, [mine], "MPNNLSTM")
        run_layer(reference, kind, [theirs], "MPNNLSTM")

        for (key, one), other in zip(layer.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    for module in (layer, reference):
        module.eval()
    got, expected = (run_layer(one, kind, given, "MPNNLSTM") for one, given in
                     ((layer, stream(signal, "cpu")), (reference, signal)))  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nodes", [NODES, 300])
def test_gradients_of_single_snapshots_reach_all_parameters(nodes):
    from torch_geometric_temporal.nn.recurrent import MPNNLSTM

    layer, reference = ours.MPNNLSTM(CHANNELS, HIDDEN, nodes, 1, 0.0), MPNNLSTM(CHANNELS, HIDDEN, nodes, 1, 0.0)
    layer.load_state_dict(reference.state_dict())
    edges = torch.randint(nodes, (2, 4 * nodes))
    signal = [Data(x=torch.randn(nodes, CHANNELS), edge_index=edges) for _ in range(3)]
    larger = Data(x=torch.randn(nodes + 5, CHANNELS), edge_index=edges)

    for module, given in ((layer, stream([*signal, larger], "cpu")[:3]), (reference, signal)):
        for snapshot in given:
            out = module(snapshot.x, snapshot.edge_index, snapshot.edge_attr)
        # The last one alone, as in a frame; those before it leave nothing.
        (out * out).sum().backward()

    for (key, mine), theirs in zip(layer.named_parameters(), reference.parameters(), strict=True):
        scale = max(1.0, float(theirs.grad.abs().max()))
        torch.testing.assert_close(mine.grad / scale, theirs.grad / scale, rtol=1e-4, atol=1e-5,
                                   msg=lambda text, key=key: f"{key}: {text}")  # fmt: skip

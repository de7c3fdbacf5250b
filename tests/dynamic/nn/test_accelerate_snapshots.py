"""PyG's own convolutions give equal results without acceleration, over streams and in frames, and aggregate features
once.
"""

import copy
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from pyg_direct.dynamic import FrameTrainer, accelerate, snapshot_plan, stream
from pyg_direct.dynamic.frame_trainer import run_stateless
from pyg_direct.errors import ArgumentTypeError
from tests.snapshots import make_snapshots

NODES, CHANNELS, TIMES = 12, 6, 5
# True if it takes weights of edges, and its other arguments.
CONVS = {
    "GCN": (lambda i, o: pyg.GCNConv(i, o), True, {}),
    "GCN improved, without bias": (lambda i, o: pyg.GCNConv(i, o, improved=True, bias=False), True, {}),
    "GCN without loops": (lambda i, o: pyg.GCNConv(i, o, add_self_loops=False), True, {}),
    "GCN without norm": (lambda i, o: pyg.GCNConv(i, o, normalize=False, add_self_loops=False), True, {}),
    "SAGE": (lambda i, o: pyg.SAGEConv(i, o), False, {}),
    "SAGE sum": (lambda i, o: pyg.SAGEConv(i, o, aggr="sum", normalize=True, root_weight=False), False, {}),
    "Graph": (lambda i, o: pyg.GraphConv(i, o), True, {}),
    "Graph mean": (lambda i, o: pyg.GraphConv(i, o, aggr="mean"), True, {}),
    "GIN": (lambda i, o: pyg.GINConv(torch.nn.Linear(i, o), train_eps=True), False, {}),
    "Cheb": (lambda i, o: pyg.ChebConv(i, o, 3), True, {}),
    "Cheb rw": (lambda i, o: pyg.ChebConv(i, o, 2, normalization="rw", bias=False), True, {"lambda_max": 2.5}),
}


class Model(torch.nn.Module):
    def __init__(self, name, hidden):
        super().__init__()
        make, self.is_weighted, self.options = CONVS[name]
        self.convs = torch.nn.ModuleList([make(CHANNELS, hidden), make(hidden, 3)])

    def forward(self, x, edge_index, edge_weight):
        given = (edge_weight,) if self.is_weighted else ()
        for conv in self.convs:
            x = conv(x, edge_index, *given, **self.options).tanh()
        return x


def make_signal(weighted=True):
    return [
        Data(x=torch.randn(NODES, CHANNELS), edge_index=torch.from_numpy(edges), y=torch.randn(NODES, 3),
             edge_attr=None if weight is None else torch.from_numpy(weight))
        for edges, weight in make_snapshots(NODES, 40, TIMES, weighted=weighted)
    ]  # fmt: skip


def make_pair(name, hidden=8):
    torch.manual_seed(0)
    model = Model(name, hidden)
    return model, copy.deepcopy(model)


def count_aggregations(monkeypatch):
    calls = []
    real = snapshot_plan.aggregate_snapshots
    monkeypatch.setattr(snapshot_plan, "aggregate_snapshots", lambda x, *args: calls.append(x.shape) or real(x, *args))
    return calls


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("hidden", [2, 8], ids=["narrow", "wide"])
def test_values_and_gradients_are_those_of_pyg(monkeypatch, name, weighted, hidden):
    signal, (mine, theirs) = make_signal(weighted), make_pair(name, hidden)
    calls = count_aggregations(monkeypatch)

    assert accelerate(mine) == ["convs.0", "convs.1"]

    for epoch in range(2):
        for given, plain in zip(stream(signal, "cpu", group_size=4), signal, strict=True):
            got = mine(given.x, given.edge_index, given.edge_attr)
            expected = theirs(plain.x, plain.edge_index, plain.edge_attr)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            got.square().sum().backward()
            expected.square().sum().backward()
        assert calls, epoch
    for (key, parameter), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-4, msg=key)


def test_features_are_aggregated_once(monkeypatch):
    signal, (mine, _) = make_signal(), make_pair("GCN")
    accelerate(mine)
    given, calls = stream(signal, "cpu", group_size=4), count_aggregations(monkeypatch)

    for _ in range(3):
        for snapshot in given:
            mine(snapshot.x, snapshot.edge_index, snapshot.edge_attr)

    # Features of four snapshots and of one; of the second layer each snapshot's in each epoch.
    assert [shape for shape in calls if shape[1] > 1 or shape[2] == CHANNELS] == [(NODES, 4, 6), (NODES, 1, 6)]
    assert len(calls) == 2 + 3 * TIMES


def test_frames_train_as_with_pyg(monkeypatch):
    signal = make_signal()
    losses = []
    for model in make_pair("GCN"):
        if not losses:
            accelerate(model)
            calls = count_aggregations(monkeypatch)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses.append(FrameTrainer(model, signal, optimizer, window=3, step=run_stateless, device="cpu").fit(2))

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert calls


def make_hooked():
    conv = pyg.GCNConv(CHANNELS, 3)
    conv.register_message_forward_hook(lambda *args: args[-1] * 2)
    return conv


def make_of_other_messages():
    conv = pyg.GraphConv(CHANNELS, 3)
    conv.message = lambda x_j, **_: x_j.square()
    return conv


@pytest.mark.parametrize(
    "make",
    [
        lambda: pyg.SAGEConv(CHANNELS, 3, aggr="max"),
        lambda: pyg.GCNConv(CHANNELS, 3, flow="target_to_source"),
        lambda: pyg.GCNConv(CHANNELS, 3, cached=True),
        lambda: pyg.SAGEConv(CHANNELS, 3, project=True, aggr="median"),
        lambda: pyg.GCNConv(CHANNELS, 3, aggr="mean"),
        lambda: pyg.ChebConv(CHANNELS, 3, 2, aggr="max"),
        lambda: pyg.GATConv(CHANNELS, 3),
        make_hooked,
        make_of_other_messages,
    ],
    ids=["max", "turned", "cached", "median", "normalised mean", "Chebyshev's max", "attention", "hook", "messages"],
)
def test_anything_else_is_left_to_pyg(monkeypatch, make):
    monkeypatch.setattr(snapshot_plan, "aggregate_snapshots", lambda *args: pytest.fail("must be PyG's"))
    signal, theirs = make_signal(), make()
    mine = copy.deepcopy(theirs)
    accelerate(mine)

    for given, plain in zip(stream(signal, "cpu"), signal, strict=True):
        torch.testing.assert_close(mine(given.x, given.edge_index), theirs(plain.x, plain.edge_index))


def test_other_edges_numbers_and_casts_are_left_to_pyg():
    mine, theirs = make_pair("GCN")
    accelerate(mine)
    signal = make_signal()
    (given, *_), plain = stream(signal, "cpu"), signal[0]

    torch.testing.assert_close(mine(given.x, plain.edge_index, None), theirs(plain.x, plain.edge_index, None))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(mine(given.x, given.edge_index, None), theirs(plain.x, plain.edge_index, None))
    wide = plain.x.double()
    torch.testing.assert_close(
        mine.double()(wide, given.edge_index, None), theirs.double()(wide, plain.edge_index, None)
    )


def derive_forwards(model, x, *edges):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)), *edges)).tangent


def derive_by_transform(model, x, *edges):
    return torch.func.grad(lambda rows: model(rows, *edges).square().sum())(x)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GIN", "Cheb"])
@pytest.mark.parametrize("derive", [derive_forwards, derive_by_transform])
def test_other_derivatives_take_the_code_of_pyg(name, derive):
    mine, theirs = make_pair(name)
    accelerate(mine)
    signal = make_signal()
    (given, *_), plain = stream(signal, "cpu"), signal[0]

    got = derive(mine, given.x, given.edge_index, given.edge_attr)

    torch.testing.assert_close(got, derive(theirs, plain.x, plain.edge_index, plain.edge_attr))


def test_what_is_no_module_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"model must be a torch.nn.Module, got list"):
        accelerate([pyg.GCNConv(CHANNELS, 3)])


def test_copies_stay_accelerated():
    mine, _ = make_pair("SAGE")
    accelerate(mine)

    twin = copy.deepcopy(mine)

    assert accelerate(mine) == accelerate(twin) == []
    assert twin.convs[0].propagate.__self__ is twin.convs[0]


def test_models_that_were_saved_are_accelerated_again():
    mine, _ = make_pair("GCN")

    names = accelerate(mine)

    assert accelerate(pickle.loads(pickle.dumps(mine))) == names

"""Calls of replayed models that come back: arguments in new containers, and `train()` and `eval()` between them."""

import pytest
import torch
from torch_geometric.nn import BatchNorm, GCNConv, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn.replay import model_call
from tests.nn.convolutions import assert_near
from tests.nn.replays import pair_with_ordinary

NODES, EDGES, CLASSES = 60, 300, 5


class Typed(torch.nn.Module):
    """Two layers, and arguments of several kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv((16, 16), 8), SAGEConv((8, 16), CLASSES)

    def forward(self, x_dict, edge_index_dict, scale=1.0):
        a = self.first((x_dict["b"], x_dict["a"]), edge_index_dict["b", "to", "a"]).relu()
        return self.second((a, x_dict["b"]), edge_index_dict["a", "to", "b"]) * scale


@pytest.fixture
def given(device):
    torch.manual_seed(0)
    x_dict = {kind: torch.randn(NODES, 16, device=device).double() for kind in "ab"}
    edges = {pair: torch.randint(NODES, (2, EDGES), device=device) for pair in (("a", "to", "b"), ("b", "to", "a"))}
    return x_dict, edges


def train_one(model, *args, **kwargs):
    model.zero_grad()
    loss = model(*args, **kwargs).square().sum()
    loss.backward()
    return [loss.detach(), *(part.grad for part in model.parameters())]


@pytest.mark.parametrize("named", [False, True])
def test_arguments_are_read_once_while_their_tensors_come_back(device, given, monkeypatch, named):
    reads, read = [], model_call._read_anew
    monkeypatch.setattr(model_call, "_read_anew", lambda *args: reads.append(1) or read(*args))
    ordinary, model, replay = pair_with_ordinary(Typed(), device)
    x_dict, edges = given
    for _ in range(14):
        own = {"x_dict": dict(x_dict), "edge_index_dict": dict(edges)}
        call = ((), own) if named else (tuple(own.values()), {})
        assert_near(*[train_one(trained, *call[0], **call[1]) for trained in (ordinary, model)])

    assert replay.replayed >= 4
    assert len(reads) == 1


@pytest.mark.parametrize("change", ["rows", "edges", "written", "order", "scale", "nest"])
def test_changed_arguments_are_seen(device, given, change):
    ordinary, model, replay = pair_with_ordinary(Typed(), device)
    x_dict, edges = given
    for _ in range(12):
        assert_near(*[train_one(trained, dict(x_dict), dict(edges)) for trained in (ordinary, model)])
    replayed, scale = replay.replayed, 1.0
    if change == "rows":
        x_dict = {**x_dict, "a": x_dict["a"] + 1}
    elif change == "edges":
        edges = {**edges, ("a", "to", "b"): edges["a", "to", "b"].flip(1).clone()}
    elif change == "written":
        edges["a", "to", "b"].copy_(torch.randint_like(edges["a", "to", "b"], NODES))
    elif change == "order":
        x_dict = {"b": x_dict["b"], "a": x_dict["a"]}
    elif change == "scale":
        scale = 2.0
    else:
        x_dict = {**x_dict, "more": [x_dict["a"]]}

    for _ in range(2):
        assert_near(*[train_one(trained, dict(x_dict), dict(edges), scale) for trained in (ordinary, model)])

    assert replayed > 0


def test_items_of_nested_containers_are_told_apart():
    x, y = torch.zeros(1), torch.zeros(1)
    nests = [((x, y), {}), ((x, (y,)), {}), (((x, y),), {}), ((x,), {"y": y}), ((x, {"y": y}), {}), ((x, ["y", y]), {}),
             (((x,), (y,)), {}), (([x], (y,)), {}), (((), x, y), {}), ((x, y, ()), {})]  # fmt: skip

    flat = [tuple(map(id, model_call._flatten(nest))) for nest in nests]

    assert len(set(flat)) == len(nests)
    assert flat[4] == tuple(map(id, model_call._flatten(((x, {"y": y}), {}))))


class Frozen(BatchNorm):
    """Norm that stays in evaluation."""

    def train(self, mode=True):
        return super().train(False)


class Deep(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv, self.parts = GCNConv(16, 8), torch.nn.ModuleList([torch.nn.Sequential(norm, torch.nn.Dropout())])
        self.none, self.again = None, self.parts[0]
        self.register_module("missing", None)

    def forward(self, x, edge_index):
        return self.parts[0](self.conv(x, edge_index))


def list_modes(model):
    return [part.training for part in model.modules()]


@pytest.mark.parametrize("case", ["plain", "class", "instance", "compiled"])
def test_modes_are_set_as_by_torch(device, case):
    expected, model = (Deep(Frozen(8) if case == "class" else BatchNorm(8)) for _ in range(2))
    accelerate(model, replay=True)
    for part in (expected, model):
        if case == "instance":
            norm = part.parts[0][0]
            norm.train = lambda mode=True, norm=norm: norm
            norm.training = False
        elif case == "compiled":
            part.conv = torch.compile(part.conv)
    for mode in (False, True, True):
        expected.train(mode)
        assert model.train(mode) is model
        assert list_modes(model) == list_modes(expected)
    expected.eval()
    assert model.eval() is model
    assert list_modes(model) == list_modes(expected)
    with pytest.raises(ValueError, match="boolean"):
        model.train("no")


class Own(Deep):
    def train(self, mode=True):
        super().train(mode)
        self.conv.eval()
        return self


def test_a_models_own_train_is_called(device):
    model = Own(BatchNorm(8))
    handle = accelerate(model, replay=True)

    model.train()

    assert not model.conv.training
    assert model.parts[0][1].training
    assert handle.replay.reason is None


def test_a_train_of_the_program_outlives_replay(device):
    model = Deep(BatchNorm(8))
    accelerate(model, replay=True)
    assert "train" in model.__dict__
    accelerate(model, replay=False)
    assert "train" not in model.__dict__

    accelerate(model, replay=True)
    model.train = lambda mode=True: model
    accelerate(model, replay=False)

    assert model.train(False).training

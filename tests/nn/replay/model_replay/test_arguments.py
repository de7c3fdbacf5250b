"""Calls of replayed models that come back: arguments in new containers, and `train()` and `eval()` between them."""

from types import MappingProxyType

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


class Plain(torch.nn.Module):
    """A layer, whose rows and edges are the model's own if none are given."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(16, CLASSES)
        self.register_buffer("x", torch.randn(NODES, 16))
        self.register_buffer("edges", torch.randint(NODES, (2, EDGES)))

    def forward(self, x=None, edge_index=None, parts=(), scale=None):
        x, edge_index = self.x if x is None else x, self.edges if edge_index is None else edge_index
        if parts:
            x, edge_index = parts[0], parts[1]
        return self.conv(x, edge_index) * (1 if scale is None else scale)


def make_resized(x, edge_index, models):
    # At the same address.
    x.resize_(NODES // 2, 16)


def make_strided(x, edge_index, models):
    x.as_strided_((NODES, 16), (1, NODES))


def assign_rows(x, edge_index, models):
    x.data = x.data * 2


def assign_edges(x, edge_index, models):
    edge_index.data = edge_index.data.flip(0).contiguous()


def write_rows(x, edge_index, models):
    x.mul_(2)


def write_edges(x, edge_index, models):
    edge_index.copy_(edge_index.flip(1).roll(1, 0))


def learn_rows(x, edge_index, models):
    x.requires_grad_()


def round_all(x, edge_index, models):
    x.data = x.data.float()
    for model in models:
        model.float()


def freeze_weight(x, edge_index, models):
    for model in models:
        model.conv.lin_l.weight.requires_grad_(False)


def replace_weight(x, edge_index, models):
    for model in models:
        model.conv.lin_l.weight = torch.nn.Parameter(model.conv.lin_l.weight.detach() * 2)


def assign_weight(x, edge_index, models):
    for model in models:
        model.conv.lin_l.weight.data = model.conv.lin_l.weight.data * 2


# How arguments are given.
STYLES = {
    "plain": lambda x, edge_index: ((x, edge_index), {}),
    "named": lambda x, edge_index: ((), {"x": x, "edge_index": edge_index}),
    "listed": lambda x, edge_index: ((None, None, [x, edge_index]), {}),
}


def assert_passes_alike(models, x, args=(), kwargs=MappingProxyType({})):
    """Compare results and gradients of a pass of each model, also of the rows."""
    found = []
    for model in models:
        model.zero_grad()
        x.grad = None
        out = model(*args, **kwargs)
        out.square().sum().backward()
        found.append([out.detach(), x.grad, *[part.grad for part in model.parameters()]])
    assert [part is None for part in found[0]] == [part is None for part in found[1]]
    assert_near(*[[part for part in parts if part is not None] for parts in found])


@pytest.fixture
def plain(device):
    """(an ordinary model and a replayed one, its replay, rows, edges)."""
    torch.manual_seed(0)
    ordinary, model, replay = pair_with_ordinary(Plain(), device)
    x = torch.randn(NODES, 16, device=device).double()
    return (ordinary, model), replay, x, torch.randint(NODES // 2, (2, EDGES), device=device)


@pytest.mark.parametrize("style", STYLES)
def test_a_call_without_arguments_is_another_one(plain, style):
    models, replay, x, edge_index = plain
    for _ in range(12):
        assert_passes_alike(models, x, *STYLES[style](x, edge_index))
    assert replay.replayed > 0

    for _ in range(2):
        assert_passes_alike(models, x)
        assert_passes_alike(models, x, *STYLES[style](x, edge_index))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("change", [
    make_resized, make_strided, assign_rows, assign_edges, write_rows, write_edges, learn_rows, round_all,
    freeze_weight, replace_weight, assign_weight,
])  # fmt: skip
def test_arguments_that_change_in_place_are_seen(plain, style, change):
    models, replay, x, edge_index = plain
    for _ in range(12):
        assert_passes_alike(models, x, *STYLES[style](x, edge_index))
    assert replay.replayed > 0

    change(x, edge_index, models)

    for _ in range(12):
        assert_passes_alike(models, x, *STYLES[style](x, edge_index))


def test_a_list_that_is_given_again_with_other_items_is_seen(plain):
    models, replay, x, edge_index = plain
    parts = [x, edge_index]
    for _ in range(12):
        assert_passes_alike(models, x, (None, None, parts))
    assert replay.replayed > 0

    for rows, edges in ((x * 2, edge_index), (x, edge_index.flip(0).contiguous()), (x, edge_index)):
        parts[:] = rows, edges
        assert_passes_alike(models, x, (None, None, parts))
    parts[:] = []
    assert_passes_alike(models, x, (None, None, parts))


def test_names_of_arguments_are_told_apart(plain):
    models, replay, x, edge_index = plain
    one, other = torch.full((2, CLASSES), 2.0, device=x.device).double()
    given = {"x": x, "edge_index": edge_index}
    calls = [{**given, "scale": one}, {"scale": one, **given}, {**given, "scale": other.mul_(2)}, given]
    for _ in range(12):
        assert_passes_alike(models, x, (), calls[0])
    assert replay.replayed > 0

    for call in [*calls, *calls[::-1]]:
        assert_passes_alike(models, x, (), call)


def test_autocast_between_calls_is_seen(plain):
    models, replay, x, edge_index = plain
    # Not double, which autocast leaves alone.
    round_all(x, edge_index, models)
    found = []
    for number in range(30):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=number % 15 > 11):
            outs = [model(x, edge_index).detach() for model in models]
            found.append(outs[0].dtype)
        assert outs[0].dtype == outs[1].dtype
        assert_near(outs[1:], outs[:1])

    assert replay.replayed > 0
    assert set(found) == {torch.float32, torch.bfloat16}


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

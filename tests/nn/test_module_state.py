"""A saved accelerated model is PyG's alone, and copies compute with their own parameters."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch.nn.utils import parametrizations
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    GATv2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    HeteroConv,
    HGTConv,
    RGCNConv,
    SAGEConv,
    to_hetero,
)

import pyg_direct
from pyg_direct.dynamic import accelerate as accelerate_snapshots
from pyg_direct.nn.replay import model_replay
from pyg_direct.nn.trimming import is_accelerated
from tests.nn.convolutions import OUT, WIDTH, Batch, assert_near

KINDS = [("a", "to", "b"), ("b", "back", "a")]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv((-1, -1), 4)

    def forward(self, x, edge_index):
        return self.conv(x, edge_index)


class Slotted(SAGEConv):
    __slots__ = ("note",)

    def __getstate__(self):
        return self.__dict__, {"note": 3}

    def __setstate__(self, state):
        super().__setstate__(state[0])
        self.note = state[1]["note"]


MODELS = {
    "sage": lambda: GraphSAGE(WIDTH, 8, 2, 3),
    "gat": lambda: GAT(WIDTH, 8, 2, 3),
    "gatv2": lambda: GATv2Conv(WIDTH, 4),
    "gcn": lambda: GCN(WIDTH, 8, 2, 3),
    "gin": lambda: GIN(WIDTH, 8, 2, 3),
    "gine": lambda: GINEConv(torch.nn.Linear(4, 4)),
    "graph": lambda: GraphConv(4, 4),
    "hetero": lambda: HeteroConv({kind: SAGEConv(4, 4) for kind in KINDS}),
    "relational": lambda: RGCNConv(4, 4, 2),
    "transformer": lambda: HGTConv(4, 4, (["a", "b"], KINDS)),
    "transformed": lambda: to_hetero(Layer(), (["a", "b"], KINDS)),
    "slotted": lambda: Slotted(4, 4),
}
WAYS = {
    "accelerated": pyg_direct.accelerate,
    "replayed": lambda model: [pyg_direct.accelerate(model), model_replay.watch_passes(model, is_strict=False)],
    "snapshots": accelerate_snapshots,
}


def save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def list_globals(model):
    """Classes and functions that a file of a model names."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(save(model)))


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "accelerated") for name in MODELS), ("sage", "replayed"), ("transformed", "replayed"),
     ("gcn", "snapshots")],
)  # fmt: skip
def test_a_file_of_a_model_names_what_it_did_before(name, way):
    model = MODELS[name]()
    keys, expected = list(model.state_dict()), list_globals(model)

    WAYS[way](model)
    sent = pickle.dumps({"hyper_parameters": {"model": copy.deepcopy(model)}, "model": model})

    assert list_globals(model) == expected
    assert b"pyg_direct" not in sent
    loaded = pickle.loads(sent)["model"]
    assert list(loaded.state_dict()) == list(model.state_dict()) == keys
    assert [vars(part).keys() for part in loaded.modules()] == [vars(part).keys() for part in MODELS[name]().modules()]
    assert getattr(loaded, "note", 3) == 3


@pytest.mark.full
def test_a_model_loads_where_the_package_is_not(tmp_path):
    model, (x, edge_index) = GraphSAGE(WIDTH, 8, 2, 3), (torch.randn(9, WIDTH), torch.randint(9, (2, 30)))
    pyg_direct.accelerate(model)
    torch.save({"model": model, "given": (x, edge_index), "expected": model(x, edge_index)}, tmp_path / "saved.pt")
    program = (
        "import sys; sys.modules['pyg_direct'] = None; import torch; saved = torch.load('saved.pt', "
        "weights_only=False); torch.testing.assert_close(saved['model'](*saved['given']), saved['expected'])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr


def double(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def replicate(model):
    """As `DataParallel` does, for one device."""
    made = model._replicate_for_data_parallel()
    for name, parameter in model._parameters.items():
        made._parameters[name] = None if parameter is None else parameter.detach().clone()
    for name, part in model._modules.items():
        made._modules[name] = None if part is None else replicate(part)
    return made


def copy_shallowly(model):
    made = copy.copy(model)
    made._parameters, made._modules = dict(made._parameters), copy.deepcopy(made._modules)
    for name, parameter in model._parameters.items():
        made._parameters[name] = None if parameter is None else torch.nn.Parameter(parameter.detach().clone())
    return made


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy_shallowly, replicate])
@pytest.mark.parametrize("name", ["sage", "gcn", "transformer"])
def test_a_copy_computes_with_its_own_parameters(duplicate, name):
    make = {"sage": lambda: SAGEConv(WIDTH, OUT), "gcn": lambda: GCNConv(WIDTH, OUT),
            "transformer": lambda: HGTConv(WIDTH, OUT - OUT % 2, (["a"], [("a", "to", "a")]))}[name]  # fmt: skip
    batch = Batch(loops=False)
    x = torch.randn(batch.num_nodes, WIDTH)
    given = ({"a": x}, {("a", "to", "a"): batch.edge_index}) if name == "transformer" else (x, batch.edge_index)
    plain = make()
    model = copy.deepcopy(plain)
    pyg_direct.accelerate(model)

    copied = duplicate(model)
    got, kept = double(copied)(*given), model(*given)

    as_list = (lambda out: [out["a"]]) if name == "transformer" else lambda out: [out]
    assert_near(as_list(kept), as_list(plain(*given)))
    assert_near(as_list(got), as_list(double(plain)(*given)))


def test_a_parametrized_layer_is_copied_as_before():
    layer = SAGEConv(4, 4)
    pyg_direct.accelerate(layer)
    layer.scale = torch.nn.Parameter(torch.ones(3, 2))
    parametrizations.orthogonal(layer, "scale")

    copied = copy.deepcopy(layer)

    assert type(copied) is type(layer)
    with pytest.raises(RuntimeError, match="parametrized modules"):
        pickle.dumps(layer)


def test_models_that_are_loaded_while_installed_are_accelerated():
    sent = pickle.dumps([GraphSAGE(4, 4, 2), MODELS["hetero"]()])
    pyg_direct.install(device="cpu")
    try:
        model, relations = pickle.loads(sent)
    finally:
        pyg_direct.uninstall()
    later, _ = pickle.loads(sent)

    assert all(is_accelerated(conv) for conv in model.convs)
    assert "forward" in vars(model._trim)
    assert "forward" in vars(relations)
    assert not any(is_accelerated(conv) for conv in later.convs)

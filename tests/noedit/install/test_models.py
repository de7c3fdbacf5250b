"""Models that an unedited program makes are accelerated, unless it is told otherwise."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch_geometric
from torch_geometric.nn import GCN, EdgeConv, GCNConv, GraphSAGE, HeteroConv, MessagePassing, SAGEConv, to_hetero

import pyg_direct
from pyg_direct.nn import any_convolution
from pyg_direct.nn.trimming import is_accelerated
from tests.batches import make_data

PROGRAM = """
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE

data = Data(x=torch.randn(30, 16), edge_index=torch.randint(30, (2, 200)))
model = GraphSAGE(16, 16, 2, 4)
with torch.profiler.profile() as profile:
    for batch in NeighborLoader(data, [4, 3], batch_size=10):
        model(batch.x, batch.edge_index)
print(sum(event.count for event in profile.key_averages() if event.key in ("pyg_direct::sum_rows", "_Layer")))
"""


@pytest.mark.usefixtures("_installed")
def test_convolutions_and_models_are_accelerated_as_they_are_made():
    class Named(SAGEConv):
        def __init__(self, *args):
            super().__init__(*args)
            self.last = torch.nn.Linear(2, 2)

    models = [SAGEConv(8, 4), Named(8, 4), *GraphSAGE(8, 8, 2).convs, *GCN(8, 8, 2).convs]

    assert all(is_accelerated(model) for model in models)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_installed")
def test_models_are_scripted_as_before():
    model, batch = GCN(8, 8, 2).eval(), make_data()
    x = torch.randn(batch.num_nodes, 8)

    scripted = torch.jit.script(model)

    assert torch.allclose(scripted(x, batch.edge_index), model(x, batch.edge_index), atol=1e-5)


@pytest.mark.usefixtures("_installed")
def test_layers_without_one_of_ours_aggregate_through_offsets_as_they_are_made(monkeypatch):
    class Own(MessagePassing):
        def __init__(self):
            super().__init__(aggr="max")
            self.lin = torch.nn.Linear(8, 4)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return self.lin(x_j)

    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)
    batch = next(iter(torch_geometric.loader.NeighborLoader(make_data(), [3, 2], batch_size=9)))
    x, layers = torch.rand(batch.num_nodes, 8), [Own(), EdgeConv(torch.nn.Linear(16, 4))]

    for layer in layers:
        got = layer(x, batch.edge_index)

        torch.testing.assert_close(got, layer(x, batch.edge_index.clone()))
        assert (layer._paths.accelerated, sum(layer._paths.left.values())) == (1, 1)
    pyg_direct.uninstall()
    assert "_paths" not in Own().__dict__


@pytest.mark.parametrize("replay", [False, True])
def test_the_model_that_a_program_calls_is_replayed_if_requested(replay):
    pyg_direct.install(device="cpu", replay=replay)
    try:
        model, data = GraphSAGE(8, 8, 2), make_data()
        model(torch.rand(data.num_nodes, 8), data.edge_index)
    finally:
        pyg_direct.uninstall()

    assert [name for name, part in model.named_modules() if "_replay" in part.__dict__] == ([""] if replay else [])


@pytest.mark.usefixtures("_installed")
def test_messages_of_a_subclass_that_sets_them_at_last_are_sent():
    class Squared(GCNConv):
        def __init__(self, *args):
            super().__init__(*args)
            self.message = lambda x_j, **_: x_j.square()

    batch = next(iter(torch_geometric.loader.NeighborLoader(make_data(), [3, 2], batch_size=9)))
    x, conv = torch.rand(batch.num_nodes, 8), Squared(8, 8)

    got = conv(x, batch.edge_index)

    torch.testing.assert_close(got, conv(x, batch.edge_index.clone()), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_installed")
def test_results_are_those_of_pyg():
    data = make_data()
    data.x = torch.rand(data.num_nodes, 16)
    model = GraphSAGE(16, 16, 2, 4)
    batch = next(iter(torch_geometric.loader.NeighborLoader(data, [3, 2], batch_size=9)))
    trims = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}

    with torch.profiler.profile(acc_events=True) as profile:
        got = model(batch.x, batch.edge_index, **trims)

    pyg_direct.uninstall()
    plain = GraphSAGE(16, 16, 2, 4)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(got, plain(batch.x, batch.edge_index, **trims), rtol=1e-4, atol=1e-5)
    # Sums on a GPU, whole layers on a CPU.
    assert any(event.key in ("pyg_direct::sum_rows", "_Layer") for event in profile.key_averages())
    assert not any(is_accelerated(conv) for conv in plain.convs)


@pytest.mark.usefixtures("_installed")
def test_classes_look_as_before():
    expected = inspect.signature(SAGEConv), SAGEConv.__init__.__doc__, repr(SAGEConv(2, 3))

    pyg_direct.uninstall()

    assert (inspect.signature(SAGEConv), SAGEConv.__init__.__doc__, repr(SAGEConv(2, 3))) == expected


@pytest.mark.usefixtures("_installed")
def test_models_of_types_keep_accelerated_convolutions():
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = SAGEConv((-1, -1), 4)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    model = to_hetero(Layers(), (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]))

    assert all(is_accelerated(conv) for conv in model.modules() if isinstance(conv, SAGEConv))


def test_relations_are_summed_together_while_installed():
    kinds = [("a", "to", "b"), ("b", "to", "a")]
    pyg_direct.install(device="cpu")
    inside = HeteroConv({kind: SAGEConv(8, 8) for kind in kinds})
    pyg_direct.uninstall()
    outside = HeteroConv({kind: SAGEConv(8, 8) for kind in kinds})

    assert ("forward" in inside.__dict__, "forward" in outside.__dict__) == (True, False)


# `tests/cli/test_run.py` has a program with `--no-accelerate`.
@pytest.mark.full
def test_models_of_a_program_are_accelerated(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "pyg_direct", "run", "--device", "cpu", str(path)]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.stdout == "6\n", done.stderr

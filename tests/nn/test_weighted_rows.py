"""Layers that sum rows of sources, times a weight or not: PyG's results and gradients, without messages."""

import pytest
import torch
from torch_geometric import nn

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution, weighted_rows
from pyg_direct.nn.weighted_rows import Weighted, read_message
from tests.nn.convolutions import OUT, WIDTH, Batch, assert_near

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")


class Own(nn.MessagePassing):
    """A layer of a program."""

    def __init__(self, aggr="sum"):
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(WIDTH, OUT)

    def forward(self, x, edge_index, norm):
        return self.propagate(edge_index, h=self.lin(x), norm=norm)

    def message(self, h_j, norm):
        """Weigh the rows."""
        return norm.view(-1, 1) * h_j


class WeightFirst(Own):
    def message(self, norm, h_j):
        return h_j * norm.view(-1, 1)


class Maximum(Own):
    def __init__(self):
        super().__init__("max")

    def message(self, h_j):
        return h_j


class Twice(Own):
    def message(self, h_j, norm):
        return norm.view(-1, 2) * h_j


class OfIndex(Own):
    def message(self, h_j, index):
        return index.view(-1, 1) * h_j


class OwnSelect(Own):
    def _index_select(self, src, index):
        return 2 * super()._index_select(src, index)


class OfTargets(Own):
    def message(self, h_j, norm_i):
        return norm_i.view(-1, 1) * h_j


class OwnUpdate(Own):
    def update(self, inputs):
        return inputs * 2


SERVED = {
    "own": Own,
    "mean": lambda: Own("mean"),
    "weight first": WeightFirst,
    "maximum": Maximum,
    "TAGConv": lambda: nn.TAGConv(WIDTH, OUT),
    "LGConv": nn.LGConv,
    "APPNP": lambda: nn.APPNP(3, 0.1, add_self_loops=False),
    "GatedGraphConv": lambda: nn.GatedGraphConv(OUT, 2),
    "SimpleConv": nn.SimpleConv,
    "ARMAConv": lambda: nn.ARMAConv(WIDTH, OUT, num_stacks=2, num_layers=2),
    "PDNConv": lambda: nn.PDNConv(WIDTH, OUT, 1, 4, add_self_loops=False, normalize=False),
}


@pytest.fixture(autouse=True)
def sums(monkeypatch):
    """The rows of each sum; a CPU takes part."""
    made, plain = [], weighted_rows.aggregate
    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)
    monkeypatch.setattr(any_convolution, "gains_on_cpu", lambda self: True)
    monkeypatch.setattr(weighted_rows, "aggregate", lambda *args, **more: (made.append(1), plain(*args, **more))[1])
    return made


def give(name, device, make=None):
    """(layer, rows, edges, their weights)."""
    torch.manual_seed(0)
    layer, batch = (make or SERVED[name])().double().to(device), Batch(device, loops=False)
    x = torch.randn(batch.num_nodes, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = batch.edge_weight.double()
    weight = weight.view(-1, 1) if name == "PDNConv" else weight
    return layer, (x, batch.edge_index, weight.requires_grad_())


def run(layer, args):
    out = layer(*args)
    leaves = [args[0], args[2], *layer.parameters()]
    first = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, create_graph=True)
    first = [part for part in first if part is not None]
    again = torch.autograd.grad(sum(part.square().sum() for part in first), leaves, allow_unused=True)
    return [out, *first, *[part for part in again if part is not None]]


@pytest.mark.parametrize("name", SERVED)
def test_equals_pyg_and_its_gradients_twice(real_device, name, sums):
    layer, args = give(name, real_device)
    expected = run(layer, args)
    assert not sums

    accelerate(layer)

    assert_near(run(layer, args), expected, rtol=1e-8, atol=1e-9)
    assert sums


@pytest.mark.parametrize("make", [Twice, OfTargets, OwnUpdate, OfIndex, OwnSelect])
def test_other_messages_are_made(real_device, make, sums):
    layer, (x, edge_index, weight) = give("", real_device, make)
    if make is OfTargets:
        weight = torch.rand(len(x), 1, dtype=torch.float64, device=real_device)
    expected = None
    if make is not Twice:
        expected = layer(x, edge_index, weight)
    accelerate(layer)

    if make is Twice:
        with pytest.raises(RuntimeError):
            layer(x, edge_index, weight)
    else:
        assert_near([layer(x, edge_index, weight)], [expected], rtol=1e-9, atol=1e-11)
    assert not sums


@pytest.mark.parametrize("step", ["message", "aggregate", "propagate"])
def test_hooks_read_messages(real_device, step, sums):
    layer, args = give("own", real_device)
    expected = layer(*args)
    accelerate(layer)
    seen = []
    getattr(layer, f"register_{step}_forward_hook")(lambda *given: seen.append(1))

    assert_near([layer(*args)], [expected], rtol=1e-9, atol=1e-11)
    assert seen
    assert not sums


def test_a_message_with_values_from_outside_is_not_recognized():
    weight = torch.ones(3)

    def closed(self, x_j):
        return weight.view(-1, 1) * x_j

    assert read_message(closed) is None
    assert read_message(Twice.message) is None
    assert read_message(Own.message) == Weighted("h", "norm", False)
    assert read_message(nn.MessagePassing.message) == Weighted("x", None, True)
    assert read_message(nn.EdgeConv.message) is None
    assert read_message(print) is None


@pytest.mark.parametrize("kind", [nn.ChebConv, nn.SGConv, nn.SSGConv, nn.ClusterGCNConv, nn.GCN2Conv, nn.MixHopConv])
def test_messages_of_pyg_are_recognized(kind):
    found = read_message(kind.message)

    assert found is not None
    assert found.rows == "x"
    assert found.weight in ("edge_weight", "norm")

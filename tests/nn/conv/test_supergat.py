"""SuperGATConv over sorted edges: PyG's results, its loss of attention and gradients."""

import copy

import pytest
import torch
from torch_geometric.nn import SuperGATConv

from pyg_direct import accelerate
from pyg_direct.nn import whole_graphs
from pyg_direct.nn.conv import supergat
from tests.nn.convolutions import WIDTH, Batch, assert_near, run

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
MAKES = {
    "mixed": {"heads": 2},
    "products": {"heads": 2, "attention_type": "SD"},
    "without loops": {"heads": 3, "add_self_loops": False},
    "products without loops": {"attention_type": "SD", "add_self_loops": False, "bias": False},
    "means of heads": {"heads": 2, "concat": False},
}


@pytest.fixture(autouse=True)
def attended(monkeypatch):
    """Let a CPU do as a GPU does, and count the layers that attend."""
    made, plain = [], supergat._attend
    monkeypatch.setattr(supergat, "find_slow", lambda module: None)
    monkeypatch.setattr(supergat, "_attend", lambda *args: (made.append(1), plain(*args))[1])
    return made


def make(device, dtype=torch.float64, kind=SuperGATConv, **options):
    """(PyG's layer, an accelerated copy, rows, edges)."""
    torch.manual_seed(0)
    batch = Batch(device)
    layer = kind(WIDTH, 5, is_undirected=True, **options).to(device, dtype)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    return layer, fast, torch.randn(batch.num_nodes, WIDTH, device=device, dtype=dtype), batch.edge_index


@pytest.mark.parametrize("name", MAKES)
def test_equals_pyg_and_its_gradients(real_device, attended, name):
    layer, fast, x, edge_index = make(real_device, **MAKES[name])
    grad = torch.randn_like(layer.eval()(x, edge_index))

    got = run(fast.eval(), x, edge_index, grad=grad)

    assert_near(got, run(layer, x, edge_index, grad=grad), rtol=1e-9, atol=1e-10)
    assert attended == [1]


@pytest.mark.parametrize("name", MAKES)
def test_the_loss_of_attention_is_that_of_pyg(real_device, attended, name):
    found = []
    layer, fast, x, edge_index = make(real_device, **MAKES[name])
    for one in (layer, fast):
        torch.manual_seed(3)
        rows = x.clone().requires_grad_()
        out = one(rows, edge_index, torch.randint(0, len(x), (2, 20), device=real_device))
        loss = one.get_attention_loss()
        found.append([loss, *torch.autograd.grad(out.square().sum() + loss, [rows, *one.parameters()])])

    assert_near(found[1], found[0], rtol=1e-9, atol=1e-10)
    assert attended == [1]


def test_second_gradients_are_those_of_pyg(real_device):
    layer, fast, x, edge_index = make(real_device, heads=2)
    found = []
    for one in (layer.eval(), fast.eval()):
        given = [x.clone().requires_grad_(), *one.parameters()]
        first = torch.autograd.grad(one(given[0], edge_index).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), given))

    assert_near(found[1], found[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_narrower_numbers_are_near(real_device, dtype, near):
    layer, fast, x, edge_index = make(real_device, heads=2)
    expected = layer.eval()(x, edge_index)

    got = fast.eval().to(dtype)(x.to(dtype), edge_index)

    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= near * expected.norm()


@pytest.mark.parametrize("name", ["mixed", "products without loops"])
def test_a_whole_graph_that_comes_back_is_served(real_device, attended, monkeypatch, name):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})
    layer, fast, x, edge_index = make(real_device, **MAKES[name])
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1])].contiguous()
    expected = run(layer.eval(), x, edge_index)

    for _ in range(12):
        got = run(fast.eval(), x, edge_index)

    assert attended
    assert_near(got, expected, rtol=1e-9, atol=1e-10)


class Own(SuperGATConv):
    def message(self, edge_index_i, x_i, x_j, size_i):
        return x_i + x_j


@pytest.mark.parametrize("case", ["hook", "maxima", "own message", "explained"])
def test_other_calls_are_those_of_pyg(real_device, attended, case):
    options = {"aggr": "max"} if case == "maxima" else {"kind": Own} if case == "own message" else {}
    layer, fast, x, edge_index = make(real_device, heads=2, **options)
    if case == "hook":
        fast.register_message_forward_hook(lambda module, given, out: 2 * out)
        layer.register_message_forward_hook(lambda module, given, out: 2 * out)
    elif case == "explained":
        for one in (layer, fast):
            one.explain, one._edge_mask, one._loop_mask = True, torch.ones(200).to(x), torch.ones(200).bool()
            one._apply_sigmoid = False
    if case != "explained":
        assert_near([fast.eval()(x, edge_index)], [layer.eval()(x, edge_index)], rtol=1e-9, atol=1e-10)
    else:
        assert supergat.find_left(fast) is not None
    assert not attended

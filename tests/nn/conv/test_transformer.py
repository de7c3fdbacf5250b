"""TransformerConv over sorted edges: PyG's results and gradients, without a row for each edge."""

import copy

import pytest
import torch
from torch_geometric.nn import TransformerConv

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution, whole_graphs
from pyg_direct.nn.conv import transformer
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import EDGES, NODES, WIDTH, Batch, assert_near, run

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
MAKES = {
    "one head": {},
    "heads": {"heads": 3, "out_channels": 4},
    "mean of heads": {"heads": 2, "concat": False},
    "gate": {"heads": 2, "beta": True},
    "gate of means": {"heads": 2, "beta": True, "concat": False},
    "no bias": {"bias": False},
    "edges": {"heads": 2, "edge_dim": 3},
    "edges, gate": {"heads": 2, "edge_dim": 3, "beta": True, "out_channels": 8},
}


@pytest.fixture(autouse=True)
def _served(monkeypatch):
    """Serve layers as a GPU does, on any device."""
    monkeypatch.setattr(transformer, "_gains", lambda tensor: True)


@pytest.fixture
def sums(monkeypatch):
    """Count weighted sums."""
    made, plain = [], transformer._sum
    monkeypatch.setattr(transformer, "_sum", lambda *args: (made.append(1), plain(*args))[1])
    return made


def make(device, dtype=torch.float64, **options):
    """(PyG's layer, an accelerated copy, rows, other arguments)."""
    torch.manual_seed(0)
    batch = Batch(device)
    layer = TransformerConv(WIDTH, **{"out_channels": 5, **options}).to(device, dtype)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    x = torch.randn(batch.num_nodes, WIDTH, device=device, dtype=dtype)
    return layer, fast, x, (batch.edge_index, *([batch.edge_attr.to(dtype)] if "edge_dim" in options else []))


@pytest.mark.parametrize("name", MAKES)
def test_equals_pyg_and_its_gradients(real_device, sums, name):
    layer, fast, x, args = make(real_device, **MAKES[name])
    grad = torch.randn_like(layer(x, *args))
    expected = run(layer, x, *args, grad=grad)

    got = run(fast, x, *args, grad=grad)

    assert_near(got, expected, rtol=1e-9, atol=1e-11)
    assert sums == [1]


def test_the_own_row_may_be_left_out(real_device, sums):
    layer, fast, x, args = make(real_device, heads=2, root_weight=False)

    assert_near([fast(x, *args)], [layer(x, *args)], rtol=1e-9, atol=1e-11)
    assert sums == [1]


@pytest.mark.parametrize("name", ["heads", "edges"])
def test_second_gradients_are_those_of_pyg(real_device, name):
    layer, fast, x, args = make(real_device, **MAKES[name])
    found = []
    for one in (layer, fast):
        given = [x.clone().requires_grad_(), *one.parameters()]
        first = torch.autograd.grad(one(given[0], *args).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), given))

    assert_near(found[1], found[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("channels", [4, 5, 8])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_narrower_numbers_are_near(real_device, dtype, near, channels):
    layer, fast, x, args = make(real_device, heads=2, out_channels=channels)
    expected = run(layer, x, *args)

    got = run(fast.to(dtype), x.to(dtype), *args)

    # Biases of keys have no part in a softmax, so that their gradients are nothing but rounding.
    least = min(part.norm() for part in expected if part.norm() > 1e-9)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= near * other.norm().clamp(min=least)


def test_autocast_gives_the_dtype_of_pyg(real_device):
    layer, fast, x, args = make(real_device, torch.float32, heads=2, out_channels=8, edge_dim=3)
    with torch.autocast(real_device.type, torch.bfloat16):
        expected, got = layer(x, *args), fast(x, *args)

    assert got.dtype == expected.dtype
    assert (got - expected).norm() <= 3e-2 * expected.norm()


def test_a_pair_of_rows_and_targets_that_no_edge_leads_to(real_device, sums):
    layer, fast, x, (edge_index,) = make(real_device, heads=2)
    pair = x, x[: sum(NODES[:2])]

    assert_near([fast(pair, edge_index)], [layer(pair, edge_index)], rtol=1e-9, atol=1e-11)
    assert sums == [1]


def test_no_edges_leave_the_own_rows(real_device):
    layer, fast, x, _ = make(real_device, heads=2)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=real_device)
    register_sorted(edge_index, [*NODES], [0] * len(EDGES))

    assert_near(run(fast, x, edge_index), run(layer, x, edge_index), rtol=1e-9, atol=1e-11)


def test_a_whole_graph_that_comes_back_is_served_in_its_own_order_of_edges(real_device, sums, monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})
    layer, fast, x, (edge_index, edge_attr) = make(real_device, heads=2, edge_dim=3)
    order = torch.randperm(edge_index.shape[1], generator=torch.Generator().manual_seed(2)).to(real_device)
    edge_index, edge_attr = edge_index[:, order].contiguous(), edge_attr[order]
    expected = run(layer, x, edge_index, edge_attr)

    for _ in range(12):
        got = run(fast, x, edge_index, edge_attr)

    assert sums
    assert_near(got, expected, rtol=1e-9, atol=1e-11)


def test_dropout_of_attention_is_that_of_pyg_over_a_batch(real_device):
    layer, fast, x, args = make(real_device, heads=2, dropout=0.5)
    found = []
    for one in (layer, fast):
        torch.manual_seed(3)
        found.append(one.train()(x, *args))

    assert_near(found[1:], found[:1], rtol=1e-9, atol=1e-11)
    assert_near([fast.eval()(x, *args)], [layer.eval()(x, *args)], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", ["weights returned", "hook", "maxima", "own message", "explained", "hook of a matrix"])
def test_other_calls_are_those_of_pyg(real_device, sums, monkeypatch, case):
    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)
    options = {"aggr": "max"} if case == "maxima" else {}
    layer, fast, x, args = make(real_device, heads=2, **options)
    more, seen = {}, []
    if case == "weights returned":
        more = {"return_attention_weights": True}
    elif case == "hook":
        fast.register_message_forward_hook(lambda module, given, out: seen.append(1))
    elif case == "own message":

        class Own(TransformerConv):
            def message(self, query_i, key_j, value_j):
                return query_i + key_j + value_j

        layer = Own(WIDTH, 5, heads=2).to(x)
        fast = copy.deepcopy(layer)
        accelerate(fast)
    elif case == "explained":
        fast.explain = True
        fast._edge_mask, fast._loop_mask, fast._apply_sigmoid = torch.ones(args[0].shape[1]).to(x), None, False
    elif case == "hook of a matrix":
        fast.lin_key.register_forward_hook(lambda module, given, out: seen.append(1))

    expected, got = layer(x, *args, **more), fast(x, *args, **more)

    if case == "weights returned":
        assert_near([got[1][1]], [expected[1][1]], rtol=1e-9, atol=1e-11)
        got, expected = got[0], expected[0]
    assert case == "explained" or torch.allclose(got, expected)
    assert bool(seen) is ("hook" in case)
    assert sums == ([1] if case == "hook of a matrix" else [])

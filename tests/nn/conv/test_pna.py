"""PNAConv over sorted edges: PyG's results and gradients, without messages."""

import copy

import pytest
import torch
from torch_geometric.nn import PNAConv

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution, linear, whole_graphs
from pyg_direct.nn.conv import pna
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import EDGES, NODES, OUT, WIDTH, Batch, assert_near, note_forward, run

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
ALL = ["mean", "min", "max", "std", "var", "sum"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
DEGREES = torch.tensor([2, 5, 3, 1, 1])
MAKES = {
    "all": {},
    "means": {"aggregators": ["mean"]},
    "sums and extremes": {"aggregators": ["sum", "max", "min"]},
    "deviations": {"aggregators": ["std"], "scalers": ["identity"]},
    "towers": {"towers": 2},
    "own part of each tower": {"towers": 2, "divide_input": True},
    "edges": {"edge_dim": 3},
    "edges and towers": {"edge_dim": 3, "towers": 2, "divide_input": True},
    "trained norm": {"train_norm": True, "post_layers": 2},
}
LEFT = {
    "two matrices": {"pre_layers": 2},
    "another aggregation": {"aggregators": ["mean", "median"]},
}


@pytest.fixture(autouse=True)
def _few_edges(monkeypatch):
    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)


@pytest.fixture
def reductions(monkeypatch):
    """Record the reductions of messages."""
    made, plain = [], pna.aggregate
    monkeypatch.setattr(pna, "aggregate", lambda *args, reduce, **more: (
        made.append(reduce), plain(*args, reduce=reduce, **more))[1])  # fmt: skip
    return made


def make(device, dtype=torch.float64, **options):
    """(PyG's layer, an accelerated copy, rows, other arguments)."""
    torch.manual_seed(0)
    batch = Batch(device)
    given = {"aggregators": ALL, "scalers": SCALERS, "deg": DEGREES, **options}
    layer = PNAConv(WIDTH, OUT, **given).to(device, dtype)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    x = torch.randn(batch.num_nodes, WIDTH, device=device, dtype=dtype)
    return layer, fast, x, (batch.edge_index, *([batch.edge_attr.to(dtype)] if "edge_dim" in options else []))


@pytest.mark.parametrize("name", MAKES)
def test_equals_pyg_and_its_gradients(real_device, reductions, name):
    layer, fast, x, args = make(real_device, **MAKES[name])
    grad = torch.randn_like(layer(x, *args))
    expected = run(layer, x, *args, grad=grad)

    got = run(fast, x, *args, grad=grad)

    assert reductions
    assert len(reductions) == len(set(reductions))
    assert_near(got, expected, rtol=1e-8, atol=1e-9)


def test_only_rows_that_edges_lead_to_have_aggregations(real_device, monkeypatch):
    _, fast, x, args = make(real_device)
    products, shapes, plain = [], [], pna.multiply_heads
    note_forward(monkeypatch, linear._Each, lambda given, *_: products.append(given))
    monkeypatch.setattr(pna, "multiply_heads", lambda rows, weight: (shapes.append(rows.shape), plain(rows, weight))[1])

    run(fast, x, *args)

    # Edges lead to the first 13 of 25 nodes; scales are no part of what is multiplied.
    assert products == [[13, 25, 25]]
    assert shapes == [(13, 1, len(ALL) * WIDTH)]


def test_a_network_without_a_first_matrix_takes_scaled_aggregations(real_device, reductions):
    layer, fast, x, args = make(real_device)
    for one in (layer, fast):
        one.post_nns[0] = torch.nn.Sequential(torch.nn.Identity(), *one.post_nns[0])

    assert_near(run(fast, x, *args), run(layer, x, *args), rtol=1e-8, atol=1e-9)
    assert reductions


@pytest.mark.parametrize("name", LEFT)
def test_other_networks_are_served_as_any_layer(real_device, reductions, name):
    layer, fast, x, args = make(real_device, **LEFT[name])

    assert_near(run(fast, x, *args), run(layer, x, *args), rtol=1e-8, atol=1e-9)
    assert not reductions


def test_second_gradients_are_those_of_pyg(real_device):
    layer, fast, x, args = make(real_device, aggregators=["mean", "var", "sum"], edge_dim=3)
    found = []
    for one in (layer, fast):
        given = [x.clone().requires_grad_(), *one.parameters()]
        first = torch.autograd.grad(one(given[0], *args).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(part.square().sum() for part in first), given, allow_unused=True))

    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
def test_narrower_numbers_are_near(real_device, dtype, near):
    layer, fast, x, args = make(real_device, aggregators=["mean", "min", "max"])

    expected, got = layer(x, *args), fast.to(dtype)(x.to(dtype), *args)

    assert got.dtype == dtype
    assert (got.double() - expected).norm() <= near * expected.norm()


def test_semi_gradients_are_those_of_pyg(real_device, reductions):
    layer, fast, x, args = make(real_device, aggregators=["var", "mean"])
    for one in (layer, fast):
        one.aggr_module.aggr.aggrs[0].semi_grad = True

    assert_near(run(fast, x, *args), run(layer, x, *args), rtol=1e-8, atol=1e-9)
    assert not reductions


def test_no_edges_leave_the_own_rows(real_device):
    layer, fast, x, _ = make(real_device)
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=real_device)
    register_sorted(edge_index, [*NODES], [0] * len(EDGES))

    assert_near([fast(x, edge_index)], [layer(x, edge_index)], rtol=1e-9, atol=1e-11)


def test_a_whole_graph_that_comes_back_is_served_in_its_own_order_of_edges(real_device, reductions, monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})
    layer, fast, x, (edge_index, edge_attr) = make(real_device, edge_dim=3)
    order = torch.randperm(edge_index.shape[1], generator=torch.Generator().manual_seed(2)).to(real_device)
    edge_index, edge_attr = edge_index[:, order].contiguous(), edge_attr[order]
    grad = torch.randn_like(layer(x, edge_index, edge_attr))
    expected = run(layer, x, edge_index, edge_attr, grad=grad)

    for _ in range(12):
        got = run(fast, x, edge_index, edge_attr, grad=grad)

    assert reductions
    assert_near(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("case", ["hook", "hook of an aggregation", "hook of a matrix", "own forward", "own message"])
def test_steps_of_a_program_are_called(real_device, reductions, case):
    layer, fast, x, args = make(real_device)
    seen = []
    note = lambda *given: seen.append(1)  # noqa: E731
    if case == "hook":
        fast.register_message_forward_hook(note)
    elif case == "hook of an aggregation":
        fast.aggr_module.aggr.aggrs[0].register_forward_hook(note)
    elif case == "hook of a matrix":
        fast.pre_nns[0][0].register_forward_hook(note)
    elif case == "own forward":
        part = fast.aggr_module.aggr.aggrs[1]
        plain = part.forward
        part.forward = lambda *given, **more: (note(), plain(*given, **more))[1]
    else:
        plain = fast.message
        fast.message = lambda x_i, x_j, edge_attr: (note(), plain(x_i, x_j, edge_attr))[1]

    assert_near([fast(x, *args)], [layer(x, *args)], rtol=1e-9, atol=1e-11)
    assert seen
    assert not reductions


def test_gradients_of_extremes_of_zero_are_those_of_pyg(real_device, reductions):
    layer, fast, x, args = make(real_device, aggregators=["max", "min"], scalers=["identity"])
    for model in (layer, fast):
        with torch.no_grad():
            # The part of the matrix for rows of sources: all their messages are zero.
            model.pre_nns[0][0].weight[:, WIDTH:] = 0

    assert_near(run(fast, x, *args), run(layer, x, *args), rtol=1e-9, atol=1e-9)
    assert reductions


class Shifted(PNAConv):
    """A program's layer, which gives each tower rows of its own."""

    def forward(self, x, edge_index):
        rows = torch.stack([x, 2 * x], dim=1)
        return self.propagate(edge_index, x=rows, edge_attr=None, size=None).flatten(1)


def test_rows_of_each_tower_are_read(real_device):
    torch.manual_seed(0)
    batch = Batch(real_device)
    layer = Shifted(WIDTH, OUT, ["mean", "max"], ["identity"], DEGREES, towers=2).to(real_device)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    x = torch.randn(batch.num_nodes, WIDTH, device=real_device)

    torch.testing.assert_close(fast(x, batch.edge_index), layer(x, batch.edge_index), rtol=1e-5, atol=1e-5)


class Doubled(torch.nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_network_of_a_program_is_called(real_device, reductions):
    layer, fast, x, args = make(real_device)
    for model in (layer, fast):
        model.pre_nns[0] = Doubled(*model.pre_nns[0])

    assert_near(run(fast, x, *args), run(layer, x, *args), rtol=1e-9, atol=1e-9)
    assert not reductions

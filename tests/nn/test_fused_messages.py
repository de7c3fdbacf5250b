"""Convolutions that sum their messages without a row for each edge: PyG's results and gradients."""

import copy

import pytest
import torch
from torch.nn import BatchNorm1d, LeakyReLU, Linear, ReLU, Sequential, Tanh
from torch_geometric import nn

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution, linear, weighted_rows, whole_graphs
from pyg_direct.nn.conv import film, gen, res_gated
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import EDGES, NODES, OUT, WIDTH, Batch, assert_near, note_forward

pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")


def network(*more, out=OUT):
    return Sequential(Linear(2 * WIDTH, 6), *more, Linear(6, out))


def of_edges(*more, out=OUT):
    return Sequential(Linear(3, 4), *more, Linear(4, WIDTH * out))


# Those whose edges have rows of three numbers.
WITH_ROWS = {
    "NNConv": lambda: nn.NNConv(WIDTH, OUT, of_edges(ReLU())),
    "NNConv of means": lambda: nn.NNConv(
        WIDTH, OUT, Linear(3, WIDTH * OUT, bias=False), aggr="mean", root_weight=False
    ),
    "GENConv of edges": lambda: nn.GENConv(WIDTH, OUT, edge_dim=3, learn_t=True, num_layers=1),
    "GENConv of means of edges": lambda: nn.GENConv(WIDTH, OUT, edge_dim=3, aggr="mean", num_layers=1),
    "GENConv of maxima of edges": lambda: nn.GENConv(WIDTH, OUT, edge_dim=3, aggr="max", num_layers=1),
    "ResGatedGraphConv of edges": lambda: nn.ResGatedGraphConv(WIDTH, OUT, edge_dim=3),
}
PLAIN = {
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(WIDTH, OUT),
    "FiLMConv": lambda: nn.FiLMConv(WIDTH, OUT),
    "FiLMConv of sums": lambda: nn.FiLMConv(WIDTH, OUT, act=LeakyReLU(0.3), aggr="add"),
    "FiLMConv without activation": lambda: nn.FiLMConv(WIDTH, OUT, act=None),
    "GENConv": lambda: nn.GENConv(WIDTH, OUT, num_layers=1),
    "GENConv of a learned softmax": lambda: nn.GENConv(WIDTH, OUT, learn_t=True, t=0.5, num_layers=1, msg_norm=True),
    "GENConv of half gradients": lambda: nn.GENConv(WIDTH, OUT, aggr="softmax_sg", t=2.0, num_layers=1),
    "GENConv of powers": lambda: nn.GENConv(WIDTH, OUT, aggr="powermean", learn_p=True, p=1.5, num_layers=1),
    "GENConv of sums": lambda: nn.GENConv(WIDTH, OUT, aggr="add", num_layers=1),
    "GENConv of maxima": lambda: nn.GENConv(WIDTH, OUT, aggr="max", num_layers=1),
    "EdgeConv of a matrix": lambda: nn.EdgeConv(nn.Linear(2 * WIDTH, OUT), aggr="add"),
    "EdgeConv of sums": lambda: nn.EdgeConv(network(ReLU()), aggr="add"),
    "EdgeConv of means": lambda: nn.EdgeConv(network(LeakyReLU(0.1)), aggr="mean"),
    "EdgeConv of activated means": lambda: nn.EdgeConv(Sequential(Linear(2 * WIDTH, OUT), ReLU()), aggr="mean"),
    "EdgeConv of two matrices": lambda: nn.EdgeConv(network(), aggr="add"),
}
LAYERS = {**WITH_ROWS, **PLAIN}


@pytest.fixture
def fused(monkeypatch):
    """Let a CPU do as a GPU does, and count the calls that are fused."""
    made, plain = [], weighted_rows.fuse

    def fuse(*args):
        out = plain(*args)
        if out is not None:
            made.append(1)
        return out

    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)
    monkeypatch.setattr(any_convolution, "fuse", fuse)
    for module in (film, gen, res_gated):
        monkeypatch.setattr(module, "find_slow", lambda module: None)
    return made


def give(name, device, dtype=torch.float64, make=None):
    """Return (PyG's layer, an accelerated copy, rows, other arguments)."""
    torch.manual_seed(0)
    layer, batch = (make or LAYERS[name])().to(device, dtype), Batch(device)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    more = [batch.edge_attr.to(dtype)] if name in WITH_ROWS else []
    return layer, fast, torch.randn(batch.num_nodes, WIDTH, dtype=dtype, device=device), [batch.edge_index, *more]


def run(layer, x, args, twice=False):
    """Return result and gradients of rows of nodes and edges and of parameters; with `twice` also theirs."""
    x, more = x.clone().requires_grad_(), [part.clone().requires_grad_() for part in args[1:]]
    leaves = [x, *more, *(part for part in layer.parameters() if part.requires_grad)]
    out = layer(x, args[0], *more)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=twice, allow_unused=True)
    grads = [grad for grad in grads if grad is not None]
    if twice:
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves, allow_unused=True)
        grads += [grad for grad in again if grad is not None]
    return [out, *grads]


@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg_and_its_gradients(device, name, fused):
    layer, fast, x, args = give(name, device)
    expected = run(layer, x, args)

    got = run(fast, x, args)

    assert_near(got, expected, rtol=1e-9, atol=1e-10)
    assert fused == [1]
    assert (fast._paths.accelerated, fast._paths.left) == (1, {})


@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg_in_float32_and_is_near_in_16_bits(real_device, name, fused):
    layer, fast, x, args = give(name, real_device)
    exact = run(layer, x, args)
    narrow = [x.float(), [args[0], *(part.float() for part in args[1:])]]
    plain = run(copy.deepcopy(layer).float(), *narrow)
    assert_near(run(fast.float(), *narrow), plain, rtol=1e-4, atol=1e-4)

    got = run(fast.bfloat16(), x.bfloat16(), [args[0], *(part.bfloat16() for part in args[1:])])

    assert len(fused) == 2
    assert all(part.dtype == torch.bfloat16 for part in got)
    assert (got[0].double() - exact[0]).norm() <= 3e-2 * exact[0].norm()


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "FiLMConv", "GENConv of a learned softmax", "EdgeConv of sums",
                                  "NNConv"])  # fmt: skip
def test_second_gradients_are_those_of_pyg(real_device, name, fused):
    layer, fast, x, args = give(name, real_device)

    assert_near(run(fast, x, args, twice=True), run(layer, x, args, twice=True), rtol=1e-7, atol=1e-8)
    assert fused == [1]


@pytest.mark.parametrize("name", LAYERS)
def test_a_pair_of_rows_and_targets_that_no_edge_leads_to(real_device, name, fused):
    layer, fast, x, args = give(name, real_device)
    pair = x, x[: sum(NODES[:2])].clone()

    assert_near([fast(pair, *args)], [layer(pair, *args)], rtol=1e-9, atol=1e-10)
    assert fused == [1]


@pytest.mark.parametrize("name", LAYERS)
def test_no_edges(real_device, name, fused):
    if name == "EdgeConv of norms":
        # It has no mean of no rows.
        return
    layer, fast, x, args = give(name, real_device)
    none = [torch.empty(2, 0, dtype=torch.int64, device=real_device), *(part[:0] for part in args[1:])]
    register_sorted(none[0], [*NODES], [0] * len(EDGES))

    assert_near(run(fast, x, none), run(layer, x, none), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_graph_that_comes_back_is_served_in_its_own_order_of_edges(real_device, name, fused, monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})
    layer, fast, x, (edge_index, *more) = give(name, real_device)
    order = torch.randperm(edge_index.shape[1], generator=torch.Generator().manual_seed(2)).to(real_device)
    args = [edge_index[:, order].contiguous(), *(part[order] for part in more)]
    # Statistics of a norm, which the first passes change.
    expected = [run(layer, x, args) for _ in range(12)][-1]

    for _ in range(12):
        got = run(fast, x, args)

    assert fused
    assert_near(got, expected, rtol=1e-9, atol=1e-10)


# Rows of each product with a matrix, over a batch whose edges lead to its first 13 of 25 nodes.
@pytest.mark.parametrize(("name", "counts"), [
    ("ResGatedGraphConv", [[25, 25, 13, 25]]),
    ("FiLMConv", [[25, 13, 13, 25, 25, 25]]),
    ("EdgeConv of sums", [[25, 13]]),
])  # fmt: skip
def test_matrices_of_targets_are_multiplied_by_rows_that_edges_lead_to(device, name, counts, fused, monkeypatch):
    _, fast, x, args = give(name, device)
    seen = []
    note_forward(monkeypatch, linear._Each, lambda given, *_: seen.append(given))

    run(fast, x, args)

    assert seen == counts


@pytest.mark.parametrize("make", [lambda: nn.ResGatedGraphConv(WIDTH, OUT, root_weight=False),
                                  lambda: nn.ResGatedGraphConv(WIDTH, OUT, bias=False),
                                  lambda: nn.FiLMConv(WIDTH, OUT, nn=Linear(WIDTH, 2 * OUT, bias=False))])  # fmt: skip
def test_layers_without_some_of_their_parts(device, make, fused):
    layer, fast, x, args = give("", device, make=make)

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert fused == [1]


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "FiLMConv"])
def test_messages_that_are_left_to_pyg_take_the_same_rows(device, name, monkeypatch):
    monkeypatch.setattr(any_convolution, "fuse", lambda *args: None)
    layer, fast, x, args = give(name, device)
    seen = []
    note_forward(monkeypatch, linear._Each, lambda given, *_: seen.append(given))

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "FiLMConv"])
def test_results_have_the_dtype_of_pyg_under_autocast(device, name, fused):
    layer, fast, x, args = give(name, device, torch.float32)

    with torch.autocast(device.type, torch.bfloat16):
        assert fast(x, *args).dtype == layer(x, *args).dtype
    assert fused == [1]


@pytest.mark.parametrize("name", ["ResGatedGraphConv", "FiLMConv"])
def test_matrices_with_hooks_are_called(device, name, fused):
    layer, fast, x, args = give(name, device)
    seen = []
    for part in fast.modules():
        if part is not fast and not list(part.children()):
            part.register_forward_hook(lambda module, given, out: seen.append(len(out)))

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert len(seen) >= 4


def test_equal_calls_give_equal_bits(real_device, fused):
    for name in LAYERS:
        _, fast, x, args = give(name, real_device, torch.float32)
        first, second = (run(copy.deepcopy(fast), x, args) for _ in range(2))

        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)), name


class Own(nn.ResGatedGraphConv):
    def message(self, k_i, q_j, v_j, edge_attr):
        return k_i + q_j + v_j


class Forward(nn.FiLMConv):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).relu()


# Layers, and whether they are fused.
OTHERS = {
    "its own message": (lambda: Own(WIDTH, OUT), False),
    "its own forward": (lambda: Forward(WIDTH, OUT), True),
    "another gate": (lambda: nn.ResGatedGraphConv(WIDTH, OUT, act=Tanh()), False),
    "maxima of gated rows": (lambda: nn.ResGatedGraphConv(WIDTH, OUT, aggr="max"), False),
    "another activation": (lambda: nn.FiLMConv(WIDTH, OUT, act=Tanh()), False),
    "deviations": (lambda: nn.GENConv(WIDTH, OUT, aggr="std"), False),
    "a network without a matrix": (lambda: nn.EdgeConv(ReLU()), False),
    "messages of deviations": (lambda: nn.EdgeConv(network(ReLU()), aggr="std"), False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_keep_their_messages(real_device, name, fused, monkeypatch):
    make, is_fused = OTHERS[name]
    layer, fast, x, args = give(name, real_device, make=make)

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert bool(fused) is is_fused


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_see_messages(real_device, name, fused):
    layer, fast, x, args = give(name, real_device)
    seen = []
    fast.register_message_forward_hook(lambda module, given, out: seen.append(out.shape))

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert len(seen) == 1
    assert not fused


# Also networks of several steps, and maxima, which gain nothing.
@pytest.mark.parametrize("make", [lambda: nn.EdgeConv(network(ReLU())),
                                  lambda: nn.EdgeConv(network(BatchNorm1d(6), Tanh()), aggr="add"),
                                  lambda: nn.EdgeConv(network(ReLU(), Linear(6, 6)), aggr="add")])  # fmt: skip
def test_other_networks_of_edges_run_over_rows_of_edges(device, make, fused):
    layer, fast, x, args = give("", device, make=make)

    assert_near(run(fast, x, args), run(layer, x, args), rtol=1e-9, atol=1e-10)
    assert fused == []


class EdgesOfOne(nn.EdgeConv):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


class GenOfOne(nn.GENConv):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, edge_attr=None)


class MatricesOfOne(nn.NNConv):
    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)


@pytest.mark.parametrize(("name", "make"), [
    ("EdgeConv of sums", lambda: EdgesOfOne(network(ReLU()), aggr="add")),
    ("GENConv of sums", lambda: GenOfOne(WIDTH, WIDTH, aggr="add")),
    ("NNConv", lambda: MatricesOfOne(WIDTH, OUT, of_edges(ReLU()))),
])  # fmt: skip
def test_rows_of_both_ends_may_be_one_tensor(device, name, make, fused):
    layer, fast, x, args = give(name, device, make=make)

    assert_near([fast(x, *args)], [layer(x, *args)], rtol=1e-9, atol=1e-10)
    assert fused == [1]


def test_few_edges_of_many_nodes_get_a_matrix_each(device, fused):
    layer = nn.NNConv(WIDTH, OUT, of_edges(ReLU())).to(device)
    fast = copy.deepcopy(layer)
    accelerate(fast)
    edges = torch.stack([torch.randint(9000, (40,)), torch.randint(9000, (40,)).sort().values]).to(device)
    register_sorted(edges, [9000, 0], [40])
    x, along = torch.randn(9000, WIDTH, device=device), torch.randn(40, 3, device=device)

    assert_near([fast(x, edges, along)], [layer(x, edges, along)], rtol=1e-5, atol=1e-6)
    assert fused == []


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_common_offset_of_rows_costs_edges_no_digits(device, offset, fused):
    layer, fast, x, args = give("EdgeConv of sums", device, torch.float32)
    with torch.no_grad():
        for one in (layer, fast):
            one.nn[0].weight[:, :WIDTH] = 0
    exact = copy.deepcopy(layer).double()(x.double() + offset, *args)

    errors = [(one(x + offset, *args).double() - exact).abs().max() for one in (fast, layer)]

    assert fused == [1]
    # Rows themselves are rounded to float32.
    assert errors[0] <= 4 * errors[1] + 1e-5


def test_a_row_changes_no_bit_of_edges_that_it_has_no_part_in(device, fused):
    _, fast, x, args = give("EdgeConv of sums", device, torch.float32)
    last, other = len(x) - 1, x.clone()
    other[last] = 1e3
    apart = torch.ones(len(x), dtype=torch.bool, device=device)
    apart[args[0][1, args[0][0] == last]] = apart[last] = False

    one, two = fast(x, *args), fast(other, *args)

    assert torch.equal(one[apart], two[apart])
    assert apart.sum() > len(x) // 2
    assert fused == [1, 1]


def test_rows_of_edges_of_another_dtype_are_left_to_pyg(device, fused):
    layer, fast, x, args = give("ResGatedGraphConv of edges", device, torch.float32)
    args[1] = args[1].half()

    assert_near([fast(x, *args)], [layer(x, *args)], rtol=1e-5, atol=1e-6)
    assert fused == []


def test_sums_of_edges_have_the_dtype_of_pyg_under_autocast(device, fused):
    layer, fast, x, args = give("EdgeConv of sums", device, torch.float32)

    with torch.autocast(device.type, torch.bfloat16):
        assert fast(x, *args).dtype == layer(x, *args).dtype == torch.bfloat16
    assert fused == [1]


def test_hooks_of_all_modules_see_those_of_pyg(device, fused):
    layer, fast, x, args = give("EdgeConv of sums", device)
    seen = {one: [] for one in ("plain", "fast")}
    for name, one in (("plain", layer), ("fast", fast)):
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_, name=name: seen[name].append(type(module).__name__)
        )
        one(x, *args)
        hook.remove()

    assert seen["fast"] == seen["plain"]
    assert fused == []

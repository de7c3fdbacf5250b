"""Any `MessagePassing` over edges in a known order: PyG's results and gradients, its reductions through offsets."""

import copy
import io
import threading

import pytest
import torch
from torch.nn import Linear
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric import nn
from torch_geometric.nn import MessagePassing, aggr
from torch_geometric.utils import scatter, softmax

from pyg_direct import accelerate
from pyg_direct.nn import any_convolution
from pyg_direct.nn.conv import supergat, transformer
from pyg_direct.nn.sorted_edges import register_sorted
from tests.nn.convolutions import EDGES, NODES, WIDTH, Batch, assert_near, note_forward

# PyG's own code, which results are compared with, on a GPU without torch_scatter.
pytestmark = pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
OUT = 10
DEGREES = torch.tensor([1, 3, 5, 6, 4, 2])
SCALERS = ["identity", "amplification", "attenuation", "linear"]


class Own(MessagePassing):
    """A layer of a program's own, which names PyG's functions."""

    def __init__(self, aggregation="max"):
        super().__init__(aggr=aggregation)
        self.lin = Linear(2 * WIDTH, OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=(x, x))

    def message(self, x_i, x_j, index, size_i):
        rows = self.lin(torch.cat([x_i, x_j], dim=-1))
        most = scatter(rows.abs(), index, 0, size_i, reduce="max")
        return rows * softmax(rows[:, :3], index, num_nodes=size_i).sum(1, keepdim=True) + most.index_select(0, index)


def of_aggregation(name, **kwargs):
    return lambda: nn.SAGEConv(WIDTH, OUT, aggr=name, aggr_kwargs=kwargs)


# Those that are given rows of edges.
WITH_ROWS = {
    "TransformerConv": lambda: nn.TransformerConv(WIDTH, 5, heads=2, edge_dim=3, beta=True),
    # With one matrix it has a file.
    "PNAConv": lambda: nn.PNAConv(
        WIDTH, OUT, ["mean", "min", "max", "std"], SCALERS, DEGREES, edge_dim=3, towers=2, pre_layers=2
    ),
    "NNConv": lambda: nn.NNConv(WIDTH, OUT, Linear(3, WIDTH * OUT), aggr="mean"),
    "NNConv of sums": lambda: nn.NNConv(WIDTH, OUT, Linear(3, WIDTH * OUT)),
    "GENConv": lambda: nn.GENConv(WIDTH, OUT, edge_dim=3, learn_t=True),
    "ResGatedGraphConv": lambda: nn.ResGatedGraphConv(WIDTH, OUT, edge_dim=3),
    "GATConv": lambda: nn.GATConv(WIDTH, 5, heads=2, edge_dim=3, add_self_loops=False),
    "GATv2Conv": lambda: nn.GATv2Conv(WIDTH, 5, heads=2, edge_dim=3, add_self_loops=False),
    "CGConv": lambda: nn.CGConv(WIDTH, 3),
    "GMMConv": lambda: nn.GMMConv(WIDTH, OUT, 3, 2),
}
PLAIN = {
    "EdgeConv": lambda: nn.EdgeConv(Linear(2 * WIDTH, OUT)),
    "TAGConv": lambda: nn.TAGConv(WIDTH, OUT),
    "ARMAConv": lambda: nn.ARMAConv(WIDTH, OUT, num_stacks=2),
    "LGConv": lambda: nn.LGConv(),
    "GatedGraphConv": lambda: nn.GatedGraphConv(OUT, 2),
    "FiLMConv": lambda: nn.FiLMConv(WIDTH, OUT),
    "SuperGATConv": lambda: nn.SuperGATConv(WIDTH, 5, heads=2, add_self_loops=False, is_undirected=True),
    "GENConv of powers": lambda: nn.GENConv(WIDTH, OUT, aggr="powermean", learn_p=True),
    "GeneralConv": lambda: nn.GeneralConv(WIDTH, OUT, attention=True, heads=2),
    "AGNNConv": lambda: nn.AGNNConv(add_self_loops=False),
    "FeaStConv": lambda: nn.FeaStConv(WIDTH, OUT, heads=2, add_self_loops=False),
    "EGConv": lambda: nn.EGConv(WIDTH, 8, ["sum", "max", "var"], num_heads=2, num_bases=2, add_self_loops=False),
    "LEConv": lambda: nn.LEConv(WIDTH, OUT),
    "a layer of a program": Own,
    **{f"{name} of SAGEConv": of_aggregation(name) for name in ("mul", "var", "std", "softmax", "powermean")},
    "semi-gradients": of_aggregation("softmax", semi_grad=True),
    "several": lambda: nn.SAGEConv(WIDTH, OUT, aggr=["mean", "max", "std", "median", "softmax", "mul", "sum"]),
    "scaled degrees": lambda: nn.SimpleConv(
        aggr.DegreeScalerAggregation(["max", "sum"], SCALERS[:3], DEGREES), combine_root=None
    ),
}
LAYERS = {**WITH_ROWS, **PLAIN}


@pytest.fixture
def everywhere(monkeypatch):
    """Use accelerated reductions wherever possible, and not only if a CPU is faster; return their names as they run."""
    made = []
    monkeypatch.setattr(any_convolution, "_FEW_EDGES", 0)
    monkeypatch.setattr(any_convolution, "gains_on_cpu", lambda self: True)
    monkeypatch.setattr(any_convolution, "_find_slow", lambda src, dim, name: None)
    note_forward(monkeypatch, any_convolution._Reduce, lambda rows, known, count, name: made.append(name))
    note_forward(monkeypatch, any_convolution._Softmax, lambda *args: made.append("softmax"))
    fused = any_convolution.fused_softmax
    monkeypatch.setattr(any_convolution, "fused_softmax", lambda *args, **kwargs: (
        made.append("softmax") or fused(*args, **kwargs)))  # fmt: skip
    fuse = any_convolution.fuse

    def note_fused(*args):
        out = fuse(*args)
        if out is not None:
            made.append("fused")
        return out

    monkeypatch.setattr(any_convolution, "fuse", note_fused)
    # On a GPU these layers have paths of their own.
    attend, attend_more = transformer._sum, supergat._attend
    monkeypatch.setattr(transformer, "_sum", lambda *args: made.append("attention") or attend(*args))
    monkeypatch.setattr(supergat, "_attend", lambda *args: made.append("attention") or attend_more(*args))
    return made


def give(name, device, dtype=torch.float64, seed=1):
    """Return (layer, rows, other arguments of its call)."""
    torch.manual_seed(0)
    layer, batch = LAYERS[name]().to(device, dtype), Batch(device, loops=False, seed=seed)
    more = [batch.edge_attr.to(dtype)] if name in WITH_ROWS else []
    return layer, torch.randn(batch.num_nodes, WIDTH, dtype=dtype, device=device), [batch.edge_index, *more]


def run(layer, x, args, twice=False):
    """Return result and gradients; with `twice` also the gradients of the gradients' squares."""
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    leaves = [x, *layer.parameters()]
    out = layer(x, *args)
    grads = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, create_graph=twice)
    grads = [grad for grad in grads if grad is not None]
    if twice:
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves, allow_unused=True)
        grads += [grad for grad in again if grad is not None]
    return [out, *grads]


@pytest.mark.parametrize("name", LAYERS)
def test_equals_pyg_in_float64(device, name, everywhere):
    layer, x, args = give(name, device)
    expected = run(layer, x, args)

    accelerated = accelerate(layer)

    assert_near(run(layer, x, args), expected, rtol=1e-9, atol=1e-9)
    assert everywhere
    (found,) = accelerated.report().convolutions
    assert found.accelerated > 0
    assert found.left == {}
    assert accelerated.convolutions == {"": type(layer).__name__}


@pytest.mark.parametrize("name", ["TransformerConv", "PNAConv", "EdgeConv", "GENConv", "GATv2Conv", "several"])
def test_equals_pyg_in_float32_and_16_bits(device, name, everywhere):
    layer, x, args = give(name, device, torch.float32)
    expected = run(layer, x, args)
    accelerate(layer)

    assert_near(run(layer, x, args), expected, rtol=1e-4, atol=1e-4)
    everywhere.clear()
    if name != "several":
        narrow, x, args = give(name, device, torch.bfloat16)
        plain = copy.deepcopy(narrow)
        accelerate(narrow)
        errors = [(made.float() - expected[0]).norm() for made in (plain(x, *args), narrow(x, *args))]
        assert narrow(x, *args).dtype == torch.bfloat16
        assert errors[1] <= 1.1 * errors[0]
        assert everywhere


@pytest.mark.parametrize("name", ["TransformerConv", "EdgeConv", "mul of SAGEConv", "std of SAGEConv", "GENConv"])
def test_gradients_have_gradients(device, name, everywhere):
    layer, x, args = give(name, device)
    expected = run(layer, x, args, twice=True)

    accelerate(layer)

    assert_near(run(layer, x, args, twice=True), expected, rtol=1e-8, atol=1e-8)
    assert everywhere


@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_graph_in_any_order_equals_pyg(device, name, everywhere, monkeypatch):
    layer, x, (edge_index, *more) = give(name, device)
    order = torch.randperm(sum(EDGES), generator=torch.Generator().manual_seed(4)).to(device)
    args = [edge_index[:, order].contiguous(), *(part[order] for part in more)]
    expected = run(layer, x, args)
    accelerated = accelerate(layer)
    monkeypatch.setattr("pyg_direct.nn.whole_graphs._WORTH", {"cpu": 0, "gpu": 0})

    for _ in range(12):
        got = run(layer, x, args)

    assert_near(got, expected, rtol=1e-9, atol=1e-9)
    assert everywhere
    # Their weights are of a batch only: of a whole graph the softmax alone is ours.
    assert accelerated.report().convolutions[0].accelerated > 0 or name.startswith("GAT")


@pytest.mark.parametrize("num_edges", [0, 1])
def test_targets_without_edges(device, num_edges, everywhere):
    edge_index = torch.tensor([[2], [1]])[:, :num_edges].contiguous().to(device)
    register_sorted(edge_index, [3, 1], [num_edges])
    for name in ("std of SAGEConv", "mul of SAGEConv", "EdgeConv"):
        layer, x, _ = give(name, device)
        expected = run(layer, x[:4], [edge_index])
        accelerate(layer)

        assert_near(run(layer, x[:4], [edge_index]), expected, rtol=1e-9, atol=1e-9)


def test_products_with_zeros(device, everywhere):
    layer, x, args = give("mul of SAGEConv", device)
    x[::3] = 0
    expected = run(layer, x, args)

    accelerate(layer)

    assert_near(run(layer, x, args), expected, rtol=1e-9, atol=1e-9)


def test_first_edges_of_a_batch_are_known(device, everywhere):
    layer, x, (edge_index, *_) = give("EdgeConv", device)
    first = edge_index[:, : EDGES[0]]
    expected = run(layer, x[: sum(NODES[:2])], [first])

    accelerate(layer)

    assert_near(run(layer, x[: sum(NODES[:2])], [first]), expected, rtol=1e-9, atol=1e-9)
    assert everywhere


class Elsewhere(MessagePassing):
    """A layer that reduces by other nodes than the targets of its edges, and writes to these."""

    def __init__(self, case):
        super().__init__(aggr="max")
        self.case = case

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, edge_index_j, index, size_i):
        if self.case == "sources":
            return x_j * softmax(x_j, edge_index_j, num_nodes=size_i)
        if self.case == "a copy":
            return x_j * softmax(x_j, index.flip(0).flip(0).roll(1), num_nodes=size_i)
        if self.case == "fewer nodes":
            return x_j[:5] * 2
        return x_j + scatter(x_j, index.clone().sort().values, 0, size_i, "sum")[index]

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        if self.case == "fewer nodes":
            return scatter(inputs, index[:5], 0, dim_size, "max")
        return super().aggregate(inputs, index, ptr, dim_size)


@pytest.mark.parametrize("case", ["sources", "a copy", "fewer nodes", "sorted anew"])
def test_an_index_that_is_not_the_targets_is_pygs(device, case, everywhere):
    layer, batch = Elsewhere(case), Batch(device)
    x = torch.randn(batch.num_nodes, WIDTH, dtype=torch.float64, device=device)
    expected = run(layer, x, [batch.edge_index])

    accelerate(layer)

    assert_near(run(layer, x, [batch.edge_index]), expected, rtol=1e-12, atol=1e-12)
    assert "softmax" not in everywhere
    assert "sum" not in everywhere
    assert ("max" in everywhere) == (case != "fewer nodes")


class Writing(MessagePassing):
    """A layer that writes to its edges before it reduces by them."""

    def __init__(self):
        super().__init__(aggr="max")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index):
        index.copy_(index.flip(0))
        return x_j


def test_targets_that_were_written_to_are_not_known(everywhere):
    batch, layer = Batch(), Writing()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = layer(x, batch.edge_index.clone())

    accelerate(layer)

    assert_near([layer(x, batch.edge_index)], [expected])
    assert everywhere == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("edges in no known order", "edges are not known to be sorted"),
        ("the other way", "messages flow target_to_source"),
        ("median", "MedianAggregation has no operator"),
        ("lstm", "LSTMAggregation has no operator"),
        ("of numbers", "dtype"),
        ("decomposed", "its `propagate` was replaced"),
    ],
)
def test_what_is_left_to_pyg_is_pygs_and_says_why(device, case, reason, everywhere):
    torch.manual_seed(0)
    aggregation = "median" if case == "median" else aggr.MaxAggregation()
    options = {"flow": "target_to_source"} if case == "the other way" else {}
    layer = nn.SimpleConv(aggregation, **options)
    if case in ("lstm", "decomposed"):
        layer = nn.SAGEConv(WIDTH, OUT, aggr="lstm") if case == "lstm" else nn.TAGConv(WIDTH, OUT, decomposed_layers=2)
    layer, batch = layer.to(device), Batch(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    x = (10 * x).long() if case == "of numbers" else x
    edges = batch.edge_index.clone() if case == "edges in no known order" else batch.edge_index
    expected = layer(x, edges)

    accelerated = accelerate(layer)

    torch.testing.assert_close(layer(x, edges), expected)
    (found,) = accelerated.report().convolutions
    assert found.accelerated == 0
    assert reason in str(found)
    assert everywhere == []


def test_a_cpu_serves_what_gains_there(everywhere, monkeypatch):
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 3000, (40_000,), generator=generator).sort().values
    edge_index = torch.stack([torch.randint(0, 3000, (40_000,), generator=generator), target])
    register_sorted(edge_index, [3000, 0], [40_000])
    x = torch.randn(3000, WIDTH)
    served = {}
    for name in ("EdgeConv", "several", "mul of SAGEConv", "std of SAGEConv", "TAGConv", "FiLMConv"):
        layer = LAYERS[name]()
        expected = run(layer, x, [edge_index])
        accelerated = accelerate(layer)

        assert_near(run(layer, x, [edge_index]), expected, rtol=1e-3, atol=1e-3)
        found = accelerated.report().convolutions[0]
        served[name] = found.accelerated > 0
        assert (found.reason is None) == bool(accelerated.convolutions) == served[name]
        layer(x[:30], Batch().edge_index)
        assert sum(accelerated.report().convolutions[0].left.values()) > 0

    assert served == {"EdgeConv": True, "several": True, "mul of SAGEConv": True, "std of SAGEConv": False,
                      "TAGConv": False, "FiLMConv": False}  # fmt: skip


def test_rows_that_are_gathered_get_gradients_in_one_order(real_device, everywhere):
    layer, x, args = give("EdgeConv", real_device, torch.float32)
    accelerate(layer)

    first = run(layer, x, args)

    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x, args), first, strict=True))


@pytest.mark.parametrize("name", ["TransformerConv", "PNAConv", "GENConv", "GATv2Conv", "a layer of a program"])
def test_a_layer_is_copied_saved_and_undone(name, everywhere):
    layer, x, args = give(name, "cpu")
    own, parts = set(layer.__dict__), [set(part.__dict__) for part in layer.modules()]
    expected = layer(x, *args)
    accelerated = accelerate(layer)

    copied, file = copy.deepcopy(layer), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    everywhere.clear()
    assert_near([copied(x, *args)], [expected], rtol=1e-9, atol=1e-9)
    assert everywhere
    everywhere.clear()
    assert set(loaded.__dict__) == own
    assert_near([loaded(x, *args)], [expected], rtol=1e-9, atol=1e-9)
    accelerated.undo()
    assert [set(part.__dict__) for part in layer.modules()] == parts
    assert_near([layer(x, *args)], [expected], rtol=1e-9, atol=1e-9)
    assert everywhere == []


def test_layers_are_compiled_and_scripted_as_pygs(everywhere):
    layer, x, args = give("TransformerConv", "cpu")
    expected = layer(x, *args)
    accelerate(layer)

    compiled = torch.compile(layer, backend="eager")(x, *args)
    gen, x_gen, args_gen = give("GENConv", "cpu")
    plain = gen(x_gen, *args_gen)
    accelerate(gen)
    scripted = torch.jit.script(gen)(x_gen, *args_gen)

    assert_near([compiled], [expected], rtol=1e-9, atol=1e-9)
    assert_near([scripted], [plain], rtol=1e-9, atol=1e-9)
    assert everywhere == []
    gen(x_gen, *args_gen)
    assert everywhere


def test_threads_know_their_own_targets(everywhere):
    layer, x, _ = give("a layer of a program", "cpu")
    accelerate(layer)
    batches = [Batch(seed=seed) for seed in range(4)]
    plain = LAYERS["a layer of a program"]().double()
    plain.load_state_dict(layer.state_dict())
    expected = [plain(x, batch.edge_index) for batch in batches]
    wrong = []

    def work(number):
        for _ in range(20):
            if not torch.allclose(layer(x, batches[number].edge_index), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert any_convolution.is_known() is False


def test_hooks_see_the_messages(everywhere):
    layer, x, args = give("EdgeConv", "cpu")
    seen = []
    layer.register_message_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    expected = layer(x, *args)

    accelerate(layer)

    assert_near([layer(x, *args)], [expected], rtol=1e-9, atol=1e-9)
    assert len(seen) == 2


def test_a_step_that_a_program_puts_on_a_layer_is_called(everywhere):
    layer, x, args = give("EdgeConv", "cpu")
    layer.message = lambda x_i, x_j: x_i * x_j
    expected = layer(x, *args)

    accelerate(layer)

    assert_near([layer(x, *args)], [expected], rtol=1e-9, atol=1e-9)


def test_names_of_a_module_are_read_as_they_are_now(everywhere, monkeypatch):
    layer, x, args = give("a layer of a program", "cpu")
    accelerate(layer)
    monkeypatch.setattr(torch, "cat", lambda parts, dim: torch.hstack(parts) * 0)

    assert layer(x, *args).isfinite().all()
    plain = LAYERS["a layer of a program"]().double()
    plain.load_state_dict(layer.state_dict())
    assert_near([layer(x, *args)], [plain(x, *args)], rtol=1e-9, atol=1e-9)


def test_autocast_gives_the_dtypes_of_pyg(everywhere):
    layer, x, args = give("TransformerConv", "cpu", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, *args)
    accelerate(layer)

    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x, *args)

    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.05, atol=0.05)


def test_modes_that_listen_to_torch_hear_pygs_code(everywhere):
    layer, x, args = give("EdgeConv", "cpu")
    expected = layer(x, *args)
    accelerate(layer)

    with FlopCounterMode(display=False) as counter:
        got = layer(x, *args)

    assert_near([got], [expected], rtol=1e-9, atol=1e-9)
    assert counter.get_total_flops() > 0
    assert everywhere == []


def test_explanations_are_pygs_and_layers_may_be_accelerated_after_them(everywhere):
    layer, x, args = give("EdgeConv", "cpu")
    expected = layer(x, *args)
    accelerated = accelerate(layer)

    layer.explain = True
    layer._edge_mask = torch.ones(sum(EDGES), dtype=x.dtype)
    explained = layer(x, *args)

    assert explained.shape == expected.shape
    assert everywhere == []
    assert accelerated.convolutions == {}
    layer.explain = False
    again = accelerate(layer)
    assert_near([layer(x, *args)], [expected], rtol=1e-9, atol=1e-9)
    assert again.convolutions == {"": "EdgeConv"}
    assert everywhere

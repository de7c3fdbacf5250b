"""Accelerated convolutions: PyG's results and gradients, through our operator where they can, else without it."""

import copy
import io

import pytest
import torch
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,  # fmt: skip
)
from torch_geometric.utils import trim_to_layer

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets import synthetic_graph
from pyg_direct.nn import attention, gcn, propagate
from pyg_direct.nn.sorted import register_sorted
from pyg_direct.ops.launch import runs_on_gpu

NODES, EDGES = [4, 9, 12], [16, 30]
WIDTH, OUT = 8, 10


def mlp(width=WIDTH):
    return torch.nn.Linear(width, OUT)


CONVOLUTIONS = {
    "sage": lambda: SAGEConv(WIDTH, OUT),
    "sage max": lambda: SAGEConv(WIDTH, OUT, aggr="max"),
    "sage normalised": lambda: SAGEConv(WIDTH, OUT, aggr="min", normalize=True, project=True),
    "sage narrow": lambda: SAGEConv(1, OUT),
    "sage of 3": lambda: SAGEConv(3, OUT, aggr="sum"),
    "graph": lambda: GraphConv(WIDTH, OUT),
    "graph mean": lambda: GraphConv(WIDTH, OUT, aggr="mean"),
    "gcn": lambda: GCNConv(WIDTH, OUT),
    "gcn without loops": lambda: GCNConv(WIDTH, OUT, add_self_loops=False),
    "gcn not normalised": lambda: GCNConv(WIDTH, OUT, normalize=False),
    "gcn improved": lambda: GCNConv(WIDTH, OUT, improved=True),
    "gcn to narrow rows": lambda: GCNConv(12, 8, bias=False),
    "gin": lambda: GINConv(mlp(), train_eps=True),
    "gine": lambda: GINEConv(mlp(), edge_dim=3),
    "gat": lambda: GATConv(WIDTH, OUT, heads=3),
    "gat without loops": lambda: GATConv(WIDTH, 4, heads=2, concat=False, add_self_loops=False),
    "gat of one head": lambda: GATConv(WIDTH, OUT, residual=True),
    "gat of one narrow head": lambda: GATConv(WIDTH, 2),
    "gatv2": lambda: GATv2Conv(WIDTH, OUT, heads=2),
    "gatv2 of shared weights": lambda: GATv2Conv(WIDTH, OUT, share_weights=True, add_self_loops=False),
}


class Batch:
    """A batch of two hops: targets without edges, parallel edges, a hub that has half of the edges of its hop."""

    def __init__(self, device="cpu", loops=True):
        generator = torch.Generator().manual_seed(1)

        def draw(low, high, count):
            return torch.randint(low, high, (count,), generator=generator)

        first, second = draw(0, NODES[0], EDGES[0]), draw(NODES[0], sum(NODES[:2]), EDGES[1])
        second[: EDGES[1] // 2] = 7
        source = torch.cat([draw(0, sum(NODES[:2]), EDGES[0]), draw(0, sum(NODES), EDGES[1])])
        target = torch.cat([first.sort().values, second.sort().values])
        if not loops:
            source = torch.where(source == target, (source + 1) % NODES[0], source)
            assert not (source == target).any()
        self.edge_index = torch.stack([source, target]).to(device)
        register_sorted(self.edge_index, NODES, EDGES)
        self.num_nodes = sum(NODES)
        self.edge_attr = torch.rand(sum(EDGES), 3, generator=generator).to(device)
        self.edge_weight = torch.rand(sum(EDGES), generator=generator).to(device)


@pytest.fixture
def calls(monkeypatch):
    """Reduces our operator was asked for by convolutions."""
    made = []

    def count(*args, **kwargs):
        made.append(kwargs.get("reduce", "sum"))
        return aggregate(*args, **kwargs)

    aggregate = propagate.aggregate
    for module in (propagate, gcn, attention):
        monkeypatch.setattr(module, "aggregate", count)
    return made


def width_of(conv):
    return conv.in_channels if isinstance(getattr(conv, "in_channels", None), int) else WIDTH


def extras_of(conv, batch):
    return {"edge_attr": batch.edge_attr} if isinstance(conv, GINEConv) else {}


def run(conv, x, *args, grad=None, **kwargs):
    """(result, gradients of x and of the parameters)."""
    x = x.clone().requires_grad_()
    out = conv(x, *args, **kwargs)
    grads = torch.autograd.grad(out, [x, *conv.parameters()], torch.ones_like(out) if grad is None else grad)
    return [out, *grads]


def assert_near(got, expected, rtol=1e-4, atol=1e-5):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# PyG asks for torch_scatter where a GPU takes maxima.
@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("loops", [False, True], ids=["no loops", "loops"])
def test_equals_pyg_with_calls_of_our_operator(device, name, loops, calls):
    batch, conv = Batch(device, loops), CONVOLUTIONS[name]().to(device)
    x, extras = torch.randn(batch.num_nodes, width_of(conv), device=device), extras_of(conv, batch)
    own = run(conv, x, batch.edge_index, **extras)
    grad = torch.rand_like(own[0])
    own = run(conv, x, batch.edge_index, grad=grad, **extras)

    accelerated = accelerate(conv)
    got = run(conv, x, batch.edge_index, grad=grad, **extras)

    assert_near(got, own)
    assert accelerated.convolutions == {"": type(conv).__name__}
    # Torch is faster at narrow rows on a CPU.
    left = ["sage narrow", "sage of 3"] * (not runs_on_gpu(x))
    assert (len(calls) > 0) == (name not in left)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sage", "graph", "gcn", "gin", "gat without loops"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_equal_pyg(device, name, dtype, calls):
    batch, conv = Batch(device), CONVOLUTIONS[name]().to(device, dtype)
    x = torch.randn(batch.num_nodes, WIDTH, device=device, dtype=dtype)
    reference = copy.deepcopy(conv).double()
    expected = run(reference, x.double(), batch.edge_index)

    accelerate(conv)
    got = run(conv, x, batch.edge_index)

    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    # What is rounded on the way grows with the largest item.
    scales = [max(1.0, float(item.detach().abs().max())) for item in expected]
    assert_near([g.double() / s for g, s in zip(got, scales, strict=True)],
                [e / s for e, s in zip(expected, scales, strict=True)], tolerance, tolerance)  # fmt: skip
    assert len(calls) > 0
    assert got[0].dtype == dtype


def test_weights_of_edges_and_their_gradients_equal_pyg(device, calls):
    batch, conv = Batch(device), GraphConv(WIDTH, OUT).to(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    weights = [batch.edge_weight.clone().requires_grad_() for _ in range(2)]

    conv(x, batch.edge_index, weights[0]).square().sum().backward()
    accelerate(conv)
    conv(x, batch.edge_index, weights[1]).square().sum().backward()

    assert_near([weights[1].grad], [weights[0].grad])
    assert len(calls) == 1


class Trimmed(torch.nn.Module):
    """Layers over the part of the batch that they need."""

    def __init__(self, make):
        super().__init__()
        self.convs = torch.nn.ModuleList([make(WIDTH), make(OUT)])

    def forward(self, x, edge_index):
        for layer, conv in enumerate(self.convs):
            x, edge_index, _ = trim_to_layer(layer, NODES, EDGES, x, edge_index)
            x = conv(x, edge_index).relu()
        return x[: NODES[0]]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda w: SAGEConv(w, OUT), lambda w: GCNConv(w, OUT), lambda w: GATConv(w, OUT)],
                         ids=["sage", "gcn", "gat"])  # fmt: skip
def test_trimmed_layers_equal_pyg(device, make, calls):
    batch, model = Batch(device, loops=False), Trimmed(make).to(device)
    x = torch.randn(batch.num_nodes, WIDTH, device=device)
    own = run(model, x, batch.edge_index)

    accelerated = accelerate(model)
    got = run(model, x, batch.edge_index)

    assert_near(got, own)
    assert list(accelerated.convolutions) == ["convs.0", "convs.1"]
    assert len(calls) >= 2


def test_pyg_models_are_accelerated(calls):
    batch, model = Batch(), GraphSAGE(WIDTH, 16, 2, OUT)
    x = torch.randn(batch.num_nodes, WIDTH)
    own = run(model, x, batch.edge_index)

    accelerated = accelerate(model)
    got = run(model, x, batch.edge_index)

    assert_near(got, own)
    assert repr(accelerated) == "Acceleration(convs.0: SAGEConv, convs.1: SAGEConv)"
    assert calls == ["mean", "mean"]


@pytest.mark.slow
@pytest.mark.parametrize("replace", [False, True])
def test_batches_of_the_loader_are_sorted_and_equal_pyg(device, replace, calls):
    data = synthetic_graph("products", scale=0.002, device="cpu").to_data()
    loader = NeighborLoader(data, [5, 3, -1], input_nodes=torch.arange(50), batch_size=50, replace=replace,
                            device=device, seed=0)  # fmt: skip
    batch, model = next(iter(loader)), GraphSAGE(data.num_features, 16, 3, OUT).to(device)
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    counts = {"num_sampled_nodes_per_hop": nodes, "num_sampled_edges_per_hop": edges}
    own = run(model, batch.x, batch.edge_index, **counts)

    accelerate(model)
    got = run(model, batch.x, batch.edge_index, **counts)

    assert bool((batch.edge_index[1].diff() >= 0).all())
    assert_near(got, own, 1e-3, 1e-4)
    assert calls == ["mean"] * 3


def test_bipartite_layers_equal_pyg(calls):
    batch, conv = Batch(), SAGEConv((WIDTH, 5), OUT)
    x, targets = torch.randn(batch.num_nodes, WIDTH), torch.randn(sum(NODES[:2]), 5)
    own = conv((x, targets), batch.edge_index), conv((x, targets), batch.edge_index, size=(25, 13))

    accelerate(conv)

    assert_near([conv((x, targets), batch.edge_index), conv((x, targets), batch.edge_index, size=(25, 13))], own)
    assert len(calls) == 2


OTHERS = {
    "an unknown tensor": lambda conv, batch: batch.edge_index.clone(),
    "sorted otherwise": lambda conv, batch: batch.edge_index.flip(0),
    "some of the edges": lambda conv, batch: batch.edge_index[:, 3:],
    "modified": lambda conv, batch: batch.edge_index.sub_(batch.edge_index // 5),
    "a hook": lambda conv, batch: conv.register_message_forward_hook(lambda *_: None) and batch.edge_index,
    "target to source": lambda conv, batch: setattr(conv, "flow", "target_to_source") or batch.edge_index,
}


@pytest.mark.parametrize("case", OTHERS)
def test_anything_else_takes_the_code_of_pyg(case, calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT, aggr="sum")
    x, accelerated = torch.randn(batch.num_nodes, WIDTH), copy.deepcopy(conv)
    accelerate(accelerated)
    edge_index = OTHERS[case](accelerated, batch)
    if case == "target to source":
        OTHERS[case](conv, batch)

    got = accelerated(x, edge_index)

    assert torch.equal(got, conv(x, edge_index))
    assert calls == []


def test_edges_that_do_not_fit_are_refused_by_pyg(calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    accelerate(conv)

    with pytest.raises(IndexError, match="edge_index"):
        conv(torch.randn(20, WIDTH), batch.edge_index)

    assert calls == []


@pytest.mark.parametrize(("width", "aggr"), [(3, "sum"), (8, "max")])
def test_torch_is_left_what_it_does_faster_on_a_cpu(width, aggr, calls):
    batch, conv = Batch(), SAGEConv(width, OUT, aggr=aggr)
    x = torch.randn(batch.num_nodes, width)
    expected = conv(x, batch.edge_index)

    accelerate(conv)

    assert torch.equal(conv(x, batch.edge_index), expected)
    assert calls == []


def test_subclasses_that_change_messages_stay(calls):
    class Doubled(SAGEConv):
        def message(self, x_j):
            return 2 * x_j

    class Named(SAGEConv):
        pass

    model = torch.nn.ModuleList([Doubled(WIDTH, OUT), Named(WIDTH, OUT), MessagePassing()])

    accelerated = accelerate(model)

    assert accelerated.convolutions == {"1": "Named"}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_undo_brings_back_the_bits_of_pyg(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x, extras = torch.randn(batch.num_nodes, width_of(conv)), extras_of(conv, batch)
    own, attributes = run(conv, x, batch.edge_index, **extras), set(conv.__dict__)

    accelerate(conv).undo()
    got = run(conv, x, batch.edge_index, **extras)

    assert all(torch.equal(a, b) for a, b in zip(got, own, strict=True))
    assert (set(conv.__dict__), calls) == (attributes, [])


@pytest.mark.parametrize("name", ["sage", "gcn", "gat"])
def test_models_are_saved_and_copied_as_before(name, calls):
    batch, conv = Batch(loops=False), CONVOLUTIONS[name]()
    x, keys = torch.randn(batch.num_nodes, WIDTH), list(conv.state_dict())
    accelerate(conv)
    expected = conv(x, batch.edge_index)
    file = io.BytesIO()

    torch.save(conv, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False), copy.deepcopy(conv)
    calls.clear()
    with torch.no_grad():
        copied.get_parameter(keys[0]).add_(1)

    assert list(conv.state_dict()) == keys
    assert_near([loaded(x, batch.edge_index)], [expected])
    assert calls == []
    assert not torch.allclose(copied(x, batch.edge_index), expected)
    assert_near([conv(x, batch.edge_index)], [expected])
    assert len(calls) >= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_models_are_scripted_as_before(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = conv(x, batch.edge_index)
    accelerate(conv)

    scripted = torch.jit.script(conv)

    assert_near([scripted(x, batch.edge_index)], [expected])
    assert calls == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["sage", "gcn"])
def test_compiled_models_take_the_code_of_pyg(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x = torch.randn(batch.num_nodes, WIDTH)
    expected = run(conv, x, batch.edge_index)
    accelerate(conv)

    got = run(torch.compile(conv, backend="aot_eager"), x, batch.edge_index)

    assert_near(got, expected)
    assert calls == []


def test_transformed_functions_take_the_code_of_pyg(calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    x, parameters = torch.randn(batch.num_nodes, WIDTH), dict(conv.named_parameters())

    def compute(values):
        return torch.func.functional_call(conv, values, (x, batch.edge_index)).square().sum()

    expected = torch.func.grad(compute)(parameters)
    accelerate(conv)
    got = torch.func.grad(compute)(parameters)

    assert all(torch.equal(got[name], expected[name]) for name in parameters)
    assert calls == []


def test_explained_models_take_the_code_of_pyg_until_accelerated_again(calls):
    batch, conv = Batch(), SAGEConv(WIDTH, OUT)
    x = torch.randn(batch.num_nodes, WIDTH)
    accelerate(conv)

    conv.explain = True
    conv._edge_mask, conv._apply_sigmoid = torch.zeros(sum(EDGES)), False
    masked = conv(x, batch.edge_index)
    conv.explain = None

    assert_near([masked], [conv.lin_l(torch.zeros_like(x)) + conv.lin_r(x)])
    assert calls == []
    assert accelerate(conv).convolutions == {"": "SAGEConv"}
    conv(x, batch.edge_index)
    assert calls == ["mean"]

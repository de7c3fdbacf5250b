"""Accelerated convolutions: PyG's results and gradients, through accelerated operators if possible, otherwise
without.
"""

import copy

import pytest
import torch
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,
)
from torch_geometric.utils import trim_to_layer

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets import synthetic_graph
from pyg_direct.ops.run_kernel import runs_on_gpu
from tests.nn.convolutions import CONVOLUTIONS, EDGES, NODES, OUT, WIDTH, Batch, assert_near, run
from tests.options import Refused, Seen, check_options


def width_of(conv):
    return conv.in_channels if isinstance(getattr(conv, "in_channels", None), int) else WIDTH


def extras_of(conv, batch):
    return {"edge_attr": batch.edge_attr} if isinstance(conv, GINEConv) else {}


# PyG asks for torch_scatter if a GPU takes maxima.
@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("loops", [False, True], ids=["no loops", "loops"])
@pytest.mark.full
def test_equals_pyg_with_calls_of_our_operator(device, name, loops, calls):
    batch, conv = Batch(device, loops), CONVOLUTIONS[name]().to(device)
    x, extras = torch.randn(batch.num_nodes, width_of(conv), device=device), extras_of(conv, batch)
    own = run(conv, x, batch.edge_index, **extras)
    grad = torch.rand_like(own[0])
    own = run(conv, x, batch.edge_index, grad=grad, **extras)

    accelerated = accelerate(conv)
    got = run(conv, x, batch.edge_index, grad=grad, **extras)

    assert_near(got, own)
    # Narrow rows are torch's on a CPU.
    is_served = runs_on_gpu(x) or width_of(conv) >= WIDTH
    assert accelerated.convolutions == ({"": type(conv).__name__} if is_served else {})
    # Torch is faster at narrow rows on a CPU.
    left = ["sage narrow", "sage of 3"] * (not runs_on_gpu(x))
    assert (len(calls) > 0) == (name not in left)


KINDS_OF_16_BITS = ("sage", "sage max", "graph", "gcn", "gin", "gine", "gat", "gat without loops", "gatv2")


# PyG asks for torch_scatter if a GPU takes maxima.
@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_OF_16_BITS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_equal_pyg(device, name, dtype, calls):
    batch, conv = Batch(device), CONVOLUTIONS[name]().to(device, dtype)
    x = torch.randn(batch.num_nodes, WIDTH, device=device, dtype=dtype)
    # Rounding would decide on which side of ReLU's kink a number lies: the function is linear here, or numbers lie on
    # one side.
    if hasattr(conv, "negative_slope"):
        conv.negative_slope = 1.0
    x = x.abs() + 3 if name == "gine" else x
    reference, extras = copy.deepcopy(conv).double(), {k: v.to(dtype) for k, v in extras_of(conv, batch).items()}
    expected = run(reference, x.double(), batch.edge_index, **{k: v.double() for k, v in extras.items()})

    accelerate(conv)
    got = run(conv, x, batch.edge_index, **extras)

    tolerance = 1e-6 if dtype == torch.float64 else 2e-2
    # The rounding error grows with the largest item.
    scales = [max(1.0, float(item.detach().abs().max())) for item in expected]
    assert_near([g.double() / s for g, s in zip(got, scales, strict=True)],
                [e / s for e, s in zip(expected, scales, strict=True)], tolerance, tolerance)  # fmt: skip
    assert len(calls) > 0
    assert got[0].dtype == dtype


NARROW = {"sage": lambda w: SAGEConv(w, OUT), "graph": lambda w: GraphConv(w, OUT), "gcn": lambda w: GCNConv(w, OUT),
          "gin": lambda w: GINConv(torch.nn.Linear(w, OUT)), "gat": lambda w: GATConv(w, OUT, heads=2)}  # fmt: skip


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_rows_of_random_batches_equal_pyg(device, name, width):
    for seed in range(2, 5):
        batch, conv = Batch(device, seed=seed), NARROW[name](width).to(device)
        x = torch.randn(batch.num_nodes, width, device=device)
        expected = run(conv, x, batch.edge_index)

        accelerate(conv)

        assert_near(run(conv, x, batch.edge_index), expected)


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


# PyG asks for torch_scatter if a GPU takes maxima.
@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_batches_first_met_in_inference_mode_serve_training(device, name):
    batch, conv = Batch(device), CONVOLUTIONS[name]().to(device)
    x = torch.randn(batch.num_nodes, width_of(conv), device=device)
    given = batch.edge_index, *extras_of(conv, batch).values()
    expected = run(conv, x, *given)
    accelerate(conv)

    with torch.inference_mode():
        conv(x, *given)

    assert_near(run(conv, x, *given), expected)


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


def test_maxima_are_ours_without_a_gradient_too(calls):
    batch, conv = Batch(), SAGEConv(8, OUT, aggr="max")
    x = torch.randn(batch.num_nodes, 8)
    expected = conv(x, batch.edge_index)

    accelerate(conv)

    torch.testing.assert_close(conv(x, batch.edge_index), expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize(("width", "aggr"), [(3, "sum"), (3, "max")])
def test_torch_is_left_what_it_does_faster_on_a_cpu(width, aggr, calls):
    batch, conv = Batch(), SAGEConv(width, OUT, aggr=aggr)
    x = torch.randn(batch.num_nodes, width)
    expected = conv(x, batch.edge_index)

    accelerate(conv)

    assert torch.equal(conv(x, batch.edge_index), expected)
    assert calls == []


def test_subclasses_that_change_messages_stay(calls, monkeypatch):
    # PyG writes methods into the class of a layer as it is made: these would be all other layers' too.
    for name in ("propagate", "collect", "_orig_propagate", "_jinja_propagate"):
        monkeypatch.setattr(MessagePassing, name, getattr(MessagePassing, name, None), raising=False)

    class Doubled(SAGEConv):
        def message(self, x_j):
            return 2 * x_j

    class Named(SAGEConv):
        pass

    model = torch.nn.ModuleList([Doubled(WIDTH, OUT), Named(WIDTH, OUT), MessagePassing()])

    accelerated = accelerate(model)

    assert accelerated.convolutions == {"1": "Named"}


@pytest.mark.parametrize("name", ["sage", "graph", "gcn", "gin", "gat", "gatv2"])
def test_messages_that_an_instance_is_given_later_are_sent(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x, accelerated = torch.randn(batch.num_nodes, WIDTH), copy.deepcopy(conv)
    accelerate(accelerated)

    for one in (conv, accelerated):
        one.message = lambda x_j, **_: x_j.square()

    assert torch.equal(accelerated(x, batch.edge_index), conv(x, batch.edge_index))
    assert calls == []


@pytest.mark.parametrize("name", ["sage", "graph", "gcn", "gin", "gine", "gat", "gatv2"])
@pytest.mark.parametrize("of_subclass", [False, True])
def test_messages_that_a_class_is_given_are_sent_as_long_as_it_has_them(name, of_subclass, calls, monkeypatch):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    if of_subclass:
        # PyG writes code for each class by its name.
        conv.__class__ = type(f"Named{type(conv).__name__}", (type(conv),), {})
    x, extras, accelerated = torch.randn(batch.num_nodes, WIDTH), extras_of(conv, batch), copy.deepcopy(conv)
    accelerate(accelerated)

    with monkeypatch.context() as patched:
        patched.setattr(type(conv), "message", lambda self, x_j, **_: x_j.square())
        got, expected = (one(x, batch.edge_index, **extras) for one in (accelerated, conv))
        late = accelerate(copy.deepcopy(conv)).convolutions
        assert (late, calls) == ({}, [])

    assert torch.equal(got, expected)
    assert_near([accelerated(x, batch.edge_index, **extras)], [conv(x, batch.edge_index, **extras)])
    assert len(calls) > 0


def test_each_option_acts_or_is_refused():
    def make(**options):
        return accelerate(**{"model": GraphSAGE(64, 64, 2), **options})

    check_options(
        accelerate,
        make,
        {
            "model": (
                Seen(str, GraphSAGE(64, 64, 2), GraphSAGE(64, 64, 3)),
                Refused([SAGEConv(64, 64)], "model must be a torch.nn.Module, got list"),
            ),
            "replay": (
                Seen(lambda made: made.replay is None, False, True),
                Refused("no", "replay must be True, False, \"auto\" or None, got 'no'"),
            ),
        },
    )


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_undo_brings_back_the_bits_of_pyg(name, calls):
    batch, conv = Batch(), CONVOLUTIONS[name]()
    x, extras = torch.randn(batch.num_nodes, width_of(conv)), extras_of(conv, batch)
    own, attributes = run(conv, x, batch.edge_index, **extras), set(conv.__dict__)

    accelerate(conv).undo()
    got = run(conv, x, batch.edge_index, **extras)

    assert all(torch.equal(a, b) for a, b in zip(got, own, strict=True))
    assert (set(conv.__dict__), calls) == (attributes, [])

"""Convolutions of signals `[B, N, F]` over one structure: PyG's results, gradients and weights, in one pass."""

import copy

import pytest
import torch
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, SAGEConv, TAGConv

from pyg_direct import accelerate
from pyg_direct.nn import whole_graphs
from pyg_direct.nn.sorted_edges import register_sorted
from pyg_direct.nn.whole_graphs import register_whole
from tests.nn.convolutions import assert_near

NODES, SIGNALS, WIDTH = 30, 4, 16
CONVS = {
    "gcn": lambda: GCNConv(WIDTH, 24),
    "gcn narrow": lambda: GCNConv(WIDTH, 8, improved=True),
    "gcn without loops": lambda: GCNConv(WIDTH, 24, add_self_loops=False, bias=False),
    "sage": lambda: SAGEConv(WIDTH, 24),
    "sage sum": lambda: SAGEConv(WIDTH, 24, aggr="sum", normalize=True, project=True, root_weight=False),
    "sage max": lambda: SAGEConv(WIDTH, 24, aggr="max"),
    "graph": lambda: GraphConv(WIDTH, 24, aggr="mean"),
    "gin": lambda: GINConv(Sequential(Linear(WIDTH, 24), ReLU(), Linear(24, 8)), train_eps=True),
    "gin with a norm": lambda: GINConv(Sequential(Linear(WIDTH, 24), BatchNorm1d(NODES))),
}


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    """On a CPU these graphs are too small to gain."""
    monkeypatch.setitem(whole_graphs._WORTH, "cpu", 1)


def make_edges(device, count=200):
    return torch.randint(NODES, (2, count), device=device)


def compute(model, x, *edges):
    x = x.detach().clone().requires_grad_()
    out = model(x, *edges)
    grads = torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVS)
def test_results_and_gradients_are_those_of_pyg(real_device, name):
    theirs = CONVS[name]().double().to(real_device)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edges = torch.randn(SIGNALS, NODES, WIDTH, device=real_device, dtype=torch.float64), make_edges(real_device)
    register_whole(edges, NODES)

    got = compute(ours, x, edges)

    assert_near(got, compute(theirs, x, edges))
    assert ours._paths.accelerated == 1
    assert got[0].shape[:2] == (SIGNALS, NODES)
    # The next convolution copies nothing.
    if name != "gin with a norm":
        assert got[0].transpose(0, 1).is_contiguous()


WEIGHTED = ["gcn", "gcn narrow", "gcn without loops", "graph"]


def make_weighted(name, device):
    """A layer of PyG, the same accelerated, signals, edges and weights; of loops PyG takes any on a GPU, so none."""
    theirs = CONVS[name]().double().to(device)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    edges = make_edges(device)
    edges = edges[:, edges[0] != edges[1]]
    x = torch.randn(SIGNALS, NODES, WIDTH, device=device, dtype=torch.float64)
    return theirs, ours, x, edges, torch.rand(edges.shape[1], device=device, dtype=torch.float64)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_edges_follow_the_order_of_the_edges(real_device, name):
    theirs, ours, x, edges, weight = make_weighted(name, real_device)
    register_whole(edges, NODES)

    assert_near(compute(ours, x, edges, weight), compute(theirs, x, edges, weight))
    assert ours._paths.accelerated == 1


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_edges_that_are_sorted(name):
    theirs, ours, x, edges, weight = make_weighted(name, "cpu")
    edges = edges[:, edges[1].argsort()].contiguous()
    register_sorted(edges, [NODES, 0], [edges.shape[1]])

    assert_near(compute(ours, x, edges, weight), compute(theirs, x, edges, weight))
    assert ours._paths.accelerated == 1


@pytest.mark.gpu
def test_signals_over_other_edges_are_pygs_on_a_gpu():
    theirs, ours, x, edges, _ = make_weighted("graph", "cuda")

    for _ in range(100):
        got = ours(x, edges)

    torch.testing.assert_close(got, theirs(x, edges))
    assert ours._paths.accelerated == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_in_single_and_half_precision(real_device, dtype):
    theirs = SAGEConv(WIDTH, 24).to(real_device, dtype)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x, edges = torch.randn(SIGNALS, NODES, WIDTH, device=real_device, dtype=dtype), make_edges(real_device)
    register_whole(edges, NODES)

    bound = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(ours(x, edges), theirs(x, edges), rtol=bound, atol=bound)
    assert ours._paths.accelerated == 1


def test_signals_of_a_model_are_single_graphs(real_device):
    convs = torch.nn.ModuleList([GCNConv(WIDTH, 24), SAGEConv(24, 24), GraphConv(24, 8)]).to(real_device)
    x, edges = torch.randn(SIGNALS, NODES, WIDTH, device=real_device), make_edges(real_device)
    expected = []
    for signal in x:
        for conv in convs:
            signal = conv(signal, edges).relu()
        expected.append(signal)
    accelerate(convs)
    register_whole(edges, NODES)

    for conv in convs:
        x = conv(x, edges).relu()

    torch.testing.assert_close(x, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert [conv._paths.accelerated for conv in convs] == [1, 1, 1]


def test_what_is_not_served_is_pygs(real_device):
    x, edges = torch.randn(SIGNALS, NODES, WIDTH, device=real_device), make_edges(real_device)
    convs = [TAGConv(WIDTH, 8), GCNConv(WIDTH, 8, cached=True), SAGEConv(WIDTH, 8, node_dim=0)]
    for conv in convs[:2]:
        conv.to(real_device)
        plain = copy.deepcopy(conv)
        accelerate(conv)
        register_whole(edges, NODES)
        torch.testing.assert_close(conv(x, edges), plain(x, edges))
    # Along the first dimension nodes are the signals of another graph.
    other = convs[2].to(real_device)
    turned = x.transpose(0, 1).contiguous()
    plain = copy.deepcopy(other)
    accelerate(other)
    torch.testing.assert_close(other(turned, edges), plain(turned, edges))
    accelerate(attention := GATConv(WIDTH, 8).to(real_device))
    with pytest.raises(AssertionError, match="Static graphs not supported"):
        attention(x, edges)


def test_edges_that_change_are_sorted_anew(real_device):
    conv = SAGEConv(WIDTH, 8).to(real_device)
    plain, edges = copy.deepcopy(conv), make_edges(real_device)
    x = torch.randn(SIGNALS, NODES, WIDTH, device=real_device)
    accelerate(conv)
    register_whole(edges, NODES)
    conv(x, edges)
    edges.copy_(make_edges(real_device))

    torch.testing.assert_close(conv(x, edges), plain(x, edges), rtol=1e-4, atol=1e-5)


def test_edges_that_do_not_fit_are_not_registered(real_device):
    for given in (torch.tensor([[0, 1], [1, NODES]]), torch.tensor([[0, -1], [1, 2]]), torch.empty(2, 0).long()):
        edges = given.to(real_device)
        register_whole(edges, NODES)
        assert whole_graphs.find_whole(edges, NODES, 1 << 20) is None

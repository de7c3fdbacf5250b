"""Whole graphs in any order of edges: PyG's results, through our operator once they have come back often."""

import copy
import gc
import pickle

import pytest
import torch
from torch_geometric.nn import GAT, GCN, GIN, GATv2Conv, GCNConv, GINConv, GraphConv, GraphSAGE, SAGEConv

from pyg_direct import accelerate
from pyg_direct.nn import whole_graphs
from pyg_direct.nn.conv import sage
from pyg_direct.nn.sorted_edges import register_sorted
from pyg_direct.nn.whole_graphs import find_whole
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from tests.nn.convolutions import OUT, WIDTH, assert_near, mlp, run

NUM_NODES, NUM_EDGES = 40, 300
OFTEN = whole_graphs._OFTEN
CONVOLUTIONS = {
    "sage": lambda: SAGEConv(WIDTH, OUT),
    "sage max": lambda: SAGEConv(WIDTH, OUT, aggr="max"),
    "sage without root": lambda: SAGEConv(WIDTH, OUT, root_weight=False),
    "graph": lambda: GraphConv(WIDTH, OUT),
    "gcn": lambda: GCNConv(WIDTH, OUT),
    "gcn not normalised": lambda: GCNConv(WIDTH, OUT, normalize=False),
    "gin": lambda: GINConv(mlp(), train_eps=True),
    "gat": lambda: GAT(WIDTH, OUT, 1, heads=2).convs[0],
    "gatv2": lambda: GATv2Conv(WIDTH, OUT, heads=2, add_self_loops=False),
}
MODELS = {"sage": GraphSAGE, "gcn": GCN, "gin": GIN, "gat": GAT}


def make_edges(device="cpu"):
    """Loops, parallel edges, a hub with half of the edges, and nodes without any."""
    source, target = torch.randint(NUM_NODES - 3, (2, NUM_EDGES))
    target[::2] = 5
    source[:4] = target[:4]
    source[4:9], target[4:9] = 1, 2
    return torch.stack([source, target]).to(device)


@pytest.fixture(autouse=True)
def _small_graphs(monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 0, "gpu": 0})


def meet(edge_index, times=OFTEN, num_targets=NUM_NODES):
    return [find_whole(edge_index, num_targets, WIDTH) for _ in range(times)]


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_equals_pyg_once_edges_came_back(device, name, calls):
    edge_index, conv = make_edges(device), CONVOLUTIONS[name]().to(device)
    x = torch.randn(NUM_NODES, WIDTH, device=device)
    grad = torch.rand_like(conv(x, edge_index))
    expected = run(conv, x, edge_index, grad=grad)
    accelerate(conv)

    for _ in range(OFTEN + 1):
        assert_near(run(conv, x, edge_index, grad=grad), expected)

    assert len(calls) > 0
    with torch.inference_mode():
        assert_near([conv(x, edge_index)], expected[:1])


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_with_pyg(real_device, name, calls):
    edge_index, x = make_edges(real_device), torch.randn(NUM_NODES, WIDTH, device=real_device)
    plain = MODELS[name](WIDTH, 16, 2, OUT).to(real_device)
    losses = []
    for model in (plain, copy.deepcopy(plain)):
        if model is not plain:
            accelerate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(OFTEN + 4):
            optimizer.zero_grad()
            loss = model(x, edge_index).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))

    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(calls) > 0


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_first_kept_under_inference_mode_serves_training(device, name):
    edge_index, conv = make_edges(device), CONVOLUTIONS[name]().to(device)
    x = torch.randn(NUM_NODES, WIDTH, device=device)
    expected = run(conv, x, edge_index)
    accelerate(conv)
    with torch.inference_mode():
        for _ in range(OFTEN + 1):
            conv(x, edge_index)

    assert_near(run(conv, x, edge_index), expected)


def test_edges_of_few_layers_are_not_sorted():
    edge_index = make_edges()

    assert set(meet(edge_index)) == {None}
    assert find_whole(edge_index, NUM_NODES, WIDTH) is not None


def test_narrow_rows_of_few_edges_are_left_to_pyg(monkeypatch):
    edge_index = make_edges()
    monkeypatch.setitem(whole_graphs._WORTH, "gpu" if runs_on_gpu(edge_index) else "cpu", NUM_EDGES * WIDTH)
    meet(edge_index)

    assert find_whole(edge_index, NUM_NODES, WIDTH - 1) is None
    assert find_whole(edge_index, NUM_NODES, WIDTH) is not None


@pytest.mark.gpu
def test_a_kept_graph_is_not_waited_for_and_not_captured():
    edge_index, conv = make_edges("cuda"), SAGEConv(WIDTH, OUT).cuda()
    x = torch.randn(NUM_NODES, WIDTH, device="cuda", requires_grad=True)
    meet(edge_index, OFTEN + 1)
    accelerate(conv)
    conv(x, edge_index).sum().backward()
    with waits_refused():
        conv(x, edge_index).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = find_whole(edge_index, NUM_NODES, WIDTH)
        # Torch warns of an empty graph.
        x.detach().clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        beside = find_whole(edge_index, NUM_NODES, WIDTH)
    assert captured is beside is None
    assert find_whole(edge_index, NUM_NODES, WIDTH) is not None


@pytest.mark.parametrize("write", [
    lambda e: e.add_(0), lambda e: e[0].fill_(3), lambda e: e.numpy().fill(2), lambda e: e.data.fill_(2),
], ids=["written", "part written", "numpy", "data"])  # fmt: skip
def test_edges_that_were_written_to_are_met_anew(write):
    edge_index, conv = make_edges(), SAGEConv(WIDTH, OUT)
    x = torch.randn(NUM_NODES, WIDTH)
    meet(edge_index)
    assert find_whole(edge_index, NUM_NODES, WIDTH) is not None

    write(edge_index)

    expected = conv(x, edge_index)
    accelerate(conv)
    for _ in range(OFTEN + 2):
        assert_near([conv(x, edge_index)], [expected])


@pytest.mark.parametrize("change", [
    lambda e: e[:, : NUM_EDGES // 2], lambda e: e[:, 1:], lambda e: e.t(), lambda e: e.flip(0), lambda e: e.clone(),
    lambda e: torch.nn.Parameter(e, requires_grad=False), lambda e: e.double(), lambda e: e[:1],
    lambda e: e.to_sparse(), lambda e: e[:, :0],
], ids=["first", "last", "turned", "flip", "copy", "subclass", "floats", "one row", "sparse", "empty"])  # fmt: skip
def test_other_tensors_are_other_graphs(change):
    edge_index = make_edges()
    meet(edge_index)

    assert find_whole(change(edge_index), NUM_NODES, WIDTH) is None


def test_weights_of_edges_take_the_code_of_pyg(calls):
    edge_index, x = make_edges(), torch.randn(NUM_NODES, WIDTH)
    weight = torch.rand(NUM_EDGES)
    meet(edge_index)
    for conv in (GraphConv(WIDTH, OUT), GCNConv(WIDTH, OUT), GCNConv(WIDTH, OUT, normalize=False)):
        expected = conv(x, edge_index, weight)
        accelerate(conv)

        assert torch.equal(conv(x, edge_index, weight), expected)
    assert calls == []


@pytest.mark.parametrize("bad", [-1, NUM_NODES])
def test_edges_that_do_not_fit_are_refused_by_pyg(bad):
    edge_index, conv = make_edges(), SAGEConv(WIDTH, OUT)
    edge_index[1, 7] = bad
    accelerate(conv)

    for _ in range(OFTEN + 2):
        with pytest.raises((RuntimeError, ValueError), match=r"out of bounds|invalid .dim_size."):
            conv(torch.randn(NUM_NODES, WIDTH), edge_index)


def test_fewer_and_more_nodes_are_told_apart():
    edge_index = make_edges()
    meet(edge_index)
    found = find_whole(edge_index, NUM_NODES, WIDTH)

    assert found.fits(edge_index, NUM_NODES, NUM_NODES)
    assert not found.fits(edge_index, NUM_NODES - 4, NUM_NODES)
    assert not found.fits(edge_index, NUM_NODES, NUM_NODES + 1)
    assert find_whole(edge_index, NUM_NODES, WIDTH) is found
    more = find_whole(edge_index, 2 * NUM_NODES, WIDTH)
    assert more.view(edge_index).indptr.numel() == 2 * NUM_NODES + 1
    assert find_whole(edge_index, NUM_NODES, WIDTH) is more
    assert find_whole(edge_index, 2, WIDTH) is None


def test_graphs_are_forgotten_with_their_edges():
    gc.collect()
    edge_index = make_edges()
    meet(edge_index, OFTEN + 1)
    del edge_index

    for _ in range(100):
        meet(make_edges(), 1)

    alive = sum(not met.storage.expired() for met in whole_graphs._MET.values())
    assert len(whole_graphs._MET) <= 2 * alive + 2
    assert not any(met.graph is not None and met.storage.expired() for met in whole_graphs._MET.values())


# SAGE and GIN take as many launches as PyG's layers if there are gradients.
@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_small_graph_is_sorted_where_that_saves_a_gpu_launches(device, name, has_gradient, calls, monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 1 << 40, "gpu": 1 << 40})
    edge_index, conv = make_edges(device), CONVOLUTIONS[name]().to(device)
    x = torch.randn(NUM_NODES, WIDTH, device=device)
    expected = conv(x, edge_index)
    accelerate(conv)

    with torch.set_grad_enabled(has_gradient):
        for _ in range(whole_graphs._OFTEN_IF_SMALL // 2):
            conv(x, edge_index)
        before = len(calls)
        # Most layers ask once, some twice.
        for _ in range(whole_graphs._OFTEN_IF_SMALL // 2 + 1):
            got = conv(x, edge_index)

    saves = not has_gradient or name.startswith("gat") or name == "gcn"
    assert (before, len(calls) > 0) == (0, saves and runs_on_gpu(x))
    assert_near([got], [expected])


def test_small_edges_that_come_back_are_not_looked_at_again_until_they_are_told_of(calls, monkeypatch):
    monkeypatch.setattr(whole_graphs, "_WORTH", {"cpu": 1 << 40, "gpu": 1 << 40})
    layer, x = SAGEConv(WIDTH, OUT), torch.randn(6, WIDTH)
    edge_index = torch.tensor([[5, 4, 3, 2], [0, 0, 1, 2]])
    expected = layer(x, edge_index)
    accelerate(layer)
    looked = []
    monkeypatch.setattr(sage, "may_find", lambda *args: looked.append(args) or whole_graphs.may_find(*args))

    for _ in range(3):
        assert torch.equal(layer(x, edge_index), expected)
    assert len(looked) == 1
    assert not calls

    # Copies have seen no edges, nor have models from a file.
    assert_near([pickle.loads(pickle.dumps(layer))(x, edge_index)], [expected])
    assert_near([copy.deepcopy(layer)(x, edge_index)], [expected])
    assert len(looked) == 2

    register_sorted(edge_index, [3, 3], [4])
    assert_near([layer(x, edge_index)], [expected])
    assert len(looked) == 3
    assert calls


@pytest.mark.parametrize("make", [lambda: SAGEConv(WIDTH, OUT), lambda: GINConv(mlp())], ids=["sage", "gin"])
def test_transforms_of_functions_do_not_make_a_batch_unknown(make, calls):
    layer, x, edge_index = make(), torch.randn(6, WIDTH), torch.tensor([[5, 4, 3, 2], [0, 0, 1, 2]])
    register_sorted(edge_index, [3, 3], [4])
    accelerate(layer)
    parameters = dict(layer.named_parameters())

    torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x, edge_index)).square().sum())(parameters)
    assert not calls

    layer(x, edge_index)
    assert calls

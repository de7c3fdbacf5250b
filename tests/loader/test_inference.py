import pickle

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE, MessagePassing, aggr, conv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import coalesce, degree

from pyg_direct import NeighborLoader, accelerate, infer, inference_loader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from pyg_direct.loader import inference
from pyg_direct.runtime.cuda.memory import allocate


def make_data(num_nodes=90, num_edges=400):
    torch.manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges))
    return Data(x=torch.randn(num_nodes, 6), edge_index=edge_index)


def make_model(data, device, cls=GraphSAGE, **options):
    torch.manual_seed(2)
    return cls(data.num_features, 8, num_layers=3, out_channels=5, **options).to(device).eval()


@pytest.mark.parametrize("options", [{}, {"norm": "batch_norm"}, {"jk": "last"}, {"act": None}])
def test_equals_the_model_on_the_whole_graph(device, options):
    data = make_data()
    model = make_model(data, device, **options)
    with torch.no_grad():
        expected = model(data.x.to(device), data.edge_index.to(device))

    got = infer(model, data, batch_size=37, device=device)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class _ByOutDegree(MessagePassing):
    """A convolution of a program that scales rows by how many nodes they are sent to."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="add")
        self.lin = torch.nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        scale = degree(edge_index[0], x.shape[0]).clamp(min=1).rsqrt()
        return self.propagate(edge_index, x=self.lin(x) * scale.view(-1, 1))


class _OfNeighbors(_ByOutDegree):
    """One that looks at neighbors only."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))


class _MinusMean(_ByOutDegree):
    """One that looks at all nodes."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x - x.mean(0)))


class _Of(BasicGNN):
    """A model of convolutions of any kind."""

    supports_edge_weight = supports_edge_attr = False

    def init_conv(self, in_channels, out_channels, *, make):
        return make(in_channels, out_channels)


class _ByPlace(conv.MessagePassing):
    """Adds a row of its own to each node, by the place where it stands."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(in_channels, out_channels)
        self.rows = torch.nn.Embedding(200, out_channels)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x)) + self.rows.weight[: x.size(0)]


CONVOLUTIONS = {
    "gcn": conv.GCNConv, "sg": lambda i, o: conv.SGConv(i, o, K=2), "tag": conv.TAGConv, "arma": conv.ARMAConv,
    "cheb": lambda i, o: conv.ChebConv(i, o, K=3), "ssg": lambda i, o: conv.SSGConv(i, o, alpha=0.1, K=2),
    "eg": lambda i, o: conv.EGConv(i, o, num_heads=1), "cluster": conv.ClusterGCNConv, "le": conv.LEConv,
    "cached": lambda i, o: conv.GCNConv(i, o, cached=True), "out degree": _ByOutDegree, "mean": _MinusMean,
    "neighbors": _OfNeighbors, "place": _ByPlace,
}  # fmt: skip
WHOLE = {
    **{name: (_Of, {"make": make}) for name, make in CONVOLUTIONS.items()},
    "gcn without loops": (GCN, {"add_self_loops": False}), "gcn improved": (GCN, {"improved": True, "bias": False}),
    "gcn not normalized": (GCN, {"normalize": False}), "gcn other way": (GCN, {"flow": "target_to_source"}),
    "gcn batch norm": (GCN, {"norm": "batch_norm", "jk": "last"}), "gcn graph norm": (GCN, {"norm": "graph_norm"}),
    "sage other way": (GraphSAGE, {"flow": "target_to_source"}), "sage pair norm": (GraphSAGE, {"norm": "pair_norm"}),
    "sage layer norm": (GraphSAGE, {"norm": "layer_norm"}), "sage softmax": (GraphSAGE, {"act": torch.nn.Softmax(0)}),
    "sage batch norm without statistics":
        (GraphSAGE, {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}}),
    "gin instance norm": (GIN, {"norm": "instance_norm"}), "sage function": (GraphSAGE, {"act": torch.tanh}),
}  # fmt: skip


def make_looped_data():
    """With loops, some twice, and a hub."""
    data = make_data()
    loops, hub = torch.tensor([3, 8, 8, 40]).expand(2, 4), torch.stack([torch.full((30,), 5), torch.arange(30)])
    data.edge_index = torch.cat([data.edge_index, loops, hub], 1)
    return data


@pytest.mark.parametrize("name", WHOLE)
def test_batches_do_not_matter_whatever_a_layer_looks_at(device, name):
    cls, options = WHOLE[name]
    data = make_looped_data()
    model = make_model(data, device, cls, **options)
    with torch.no_grad():
        expected = model(data.x.to(device), data.edge_index.to(device))

    got = infer(model, data, batch_size=11, device=device)

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gcn", "out degree", "gcn without loops"])
def test_accelerated_models_give_the_same(real_device, name):
    cls, options = WHOLE[name]
    data = make_looped_data()
    model = make_model(data, real_device, cls, **options)
    with torch.no_grad():
        expected = model(data.x.to(real_device), data.edge_index.to(real_device))
    accelerate(model)

    got = infer(model, NeighborLoader(data, [-1], batch_size=11, device=real_device))

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda: "median", lambda: aggr.QuantileAggregation(0.2, fill_value=5.0), lambda: ["mean", "median"],
    lambda: aggr.LSTMAggregation(8, 8), lambda: aggr.GRUAggregation(8, 8),
    lambda: aggr.EquilibriumAggregation(8, 8, [4], 2)])  # fmt: skip
@pytest.mark.parametrize("batch_size", [1, 7])
def test_nodes_without_edges_get_the_rows_of_the_whole_graph(make, batch_size):
    torch.manual_seed(0)
    target = torch.randint(20, (120,)).sort().values
    data = Data(x=torch.randn(40, 8), edge_index=torch.stack([torch.randint(30, (120,)), target]))
    model = _Of(8, 8, 2, 8, make=lambda i, o: conv.SAGEConv(i, o, aggr=make())).eval()
    with torch.no_grad():
        expected = model(data.x, data.edge_index)

    got = infer(model, data, batch_size=batch_size, device="cpu")

    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_inference_draws_no_random_numbers_of_the_program():
    data = make_data()
    model, loader = make_model(data, "cpu"), inference_loader(data, batch_size=30, device="cpu")
    before = torch.get_rng_state()

    infer(model, data, batch_size=30, device="cpu")
    infer(model, loader)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "is_cut"), [("gcn", True), ("neighbors", True), ("sage function", True),
                                              ("cluster", True), ("tag", False)])  # fmt: skip
def test_layers_of_neighbors_see_batches_and_others_all_nodes(name, is_cut):
    cls, options = WHOLE[name]
    data = make_data(3000, 9000)
    model, seen = make_model(data, "cpu", cls, **options), []
    propagate = model.convs[1].propagate

    def watch(edges, **given):
        seen.append(edges.shape[1])
        return propagate(edges, **given)

    model.convs[1].__dict__["propagate"] = watch

    infer(model, data, batch_size=100, device="cpu")

    assert (max(seen) < 9000) == is_cut


def test_what_is_learned_from_batches_is_learned_from_all_nodes_once(device):
    data = make_data()
    models = [make_model(data, device, norm="batch_norm") for _ in range(2)]
    for model in models:
        model.norms[0].train()
    with torch.no_grad():
        expected = models[0](data.x.to(device), data.edge_index.to(device))

    got = infer(models[1], data, batch_size=11, device=device)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(models[1].norms[0].module.running_mean, models[0].norms[0].module.running_mean)


def test_a_graph_that_a_layer_needs_at_once_and_has_no_room_is_told(monkeypatch):
    data = make_data()
    model = make_model(data, "cpu", _Of, make=conv.TAGConv)

    def run(self, layer, x, edge_index, batch_size):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(_Of, "inference_per_layer", run)

    with pytest.raises(MemoryLimitError, match=r"layer 0 of the model \(TAGConv, .*all 90 nodes at once"):
        infer(model, data, batch_size=11, device="cpu")


@pytest.mark.parametrize("cls", [GraphSAGE, GAT])
def test_equals_pygs_own_inference_over_the_same_loader(device, cls):
    data = make_data()
    model = make_model(data, device, cls)
    loader = NeighborLoader(data, [-1], batch_size=32, device=device)
    expected = model.inference(loader, device=device, embedding_device=device)

    got = infer(model, loader)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(infer(model, loader, x=data.x.to(device)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["edge_index", "adj_t"])
def test_a_loader_made_for_it_serves_both(device, form):
    data = make_data()
    data.edge_index = coalesce(data.edge_index)
    model = make_model(data, device)
    expected = infer(model, data, batch_size=32, device=device)
    if form == "adj_t":
        order = (data.edge_index[1] * data.num_nodes + data.edge_index[0]).sort().indices
        row, col = data.edge_index[:, order].flip(0)
        indptr = torch.cat([row.new_zeros(1), torch.bincount(row, minlength=data.num_nodes).cumsum(0)])
        data.adj_t = torch.sparse_csr_tensor(indptr, col, torch.ones(len(col)), (data.num_nodes, data.num_nodes))
        del data.edge_index
    loader = inference_loader(data, 32, device=device)

    got = model.inference(loader, device=device, embedding_device=device)

    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(infer(model, loader), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(infer(model, pickle.loads(pickle.dumps(loader))), expected, rtol=1e-5, atol=1e-5)
    assert loader.data.x is data.x


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_rows_between_layers_may_live_on_the_host(placement):
    data = make_data(500, 4000)
    model = make_model(data, "cuda")
    with torch.no_grad():
        expected = model(data.x.to("cuda"), data.edge_index.to("cuda")).cpu()

    got = infer(model, data, batch_size=64, placement=placement, topology_placement="unified")

    assert got.is_cuda == (placement == "cuda")
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_the_cpu_reads_rows_that_a_gpu_cannot(monkeypatch):
    data = make_data(500, 4000)
    model = make_model(data, "cuda")
    expected = infer(model, data, batch_size=64, placement="cuda").cpu()
    monkeypatch.setattr(inference, "allocate_or_fall_back", lambda num_bytes, *_: allocate(num_bytes, "cpu"))
    monkeypatch.setattr(inference, "place_array", lambda x, *_: (x, x, allocate(0, "cpu")))

    got = infer(model, data, batch_size=64, placement="unified", topology_placement="cuda")

    assert not got.is_cuda
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["unified", "pinned"])
def test_rows_that_are_read_ahead_are_those_of_the_layer(placement):
    data = make_data(20_000, 200_000)
    model = make_model(data, "cuda")
    expected = infer(model, data, batch_size=700, placement="cuda")

    for _ in range(3):
        got = infer(model, data, batch_size=700, placement=placement)

        torch.testing.assert_close(got.cuda(), expected, rtol=1e-5, atol=1e-5)


def test_a_loader_goes_over_all_nodes_in_order(device):
    data = make_data()

    batches = list(inference_loader(data, 40, device=device))

    assert [batch.batch_size for batch in batches] == [40, 40, 10]
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in batches]).tolist() == list(range(90))
    assert sorted(torch.cat([batch.e_id for batch in batches]).tolist()) == list(range(400))
    assert "x" not in batches[0]
    assert inference_loader(data, device=device).batch_size > 90


def test_features_that_are_assigned_to_the_graph_of_a_loader_are_used():
    data, other = make_data(), torch.rand(90, 6)
    model, loader = make_model(data, "cpu"), inference_loader(data, 20, device="cpu")

    loader.data.x = other

    assert torch.equal(infer(model, loader), infer(model, data, x=other, batch_size=20, device="cpu"))
    assert "x" not in next(iter(loader))
    loader.data.x = other[:20]
    with pytest.raises(ArgumentError, match="x must have a row for each of the 90 nodes"):
        infer(model, loader)


def test_an_empty_graph_has_no_rows():
    data = Data(x=torch.empty(0, 6), edge_index=torch.empty(2, 0, dtype=torch.int64))

    assert infer(make_model(data, "cpu"), data, device="cpu").shape == (0, 5)


def test_refuses_what_would_give_wrong_rows():
    data = make_data()
    model = make_model(data, "cpu")
    for loader, words in [
        (NeighborLoader(data, [3], batch_size=9, device="cpu"), "num_neighbors"),
        (NeighborLoader(data, [-1], torch.arange(9), batch_size=9, device="cpu"), "all nodes"),
        (NeighborLoader(data, [-1], batch_size=9, device="cpu", shuffle=True), "shuffle"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            infer(model, loader)
    with pytest.raises(ArgumentError, match="eval"):
        infer(make_model(data, "cpu").train(), data, device="cpu")
    with pytest.raises(ArgumentError, match="jk"):
        infer(make_model(data, "cpu", jk="cat"), data, device="cpu")
    with pytest.raises(ArgumentError, match="x must have a row"):
        infer(model, data, x=data.x[:5], device="cpu")
    with pytest.raises(ArgumentTypeError, match=r"BasicGNN .*model\.inference\(inference_loader\(data\)\)"):
        infer(torch.nn.Linear(1, 1), data, device="cpu")
    with pytest.raises(ArgumentError, match="num_neighbors is settled"):
        inference_loader(data, num_neighbors=[2], device="cpu")


def test_weights_of_the_model_get_no_gradient():
    data = make_data()

    assert not infer(make_model(data, "cpu", GCN), data, device="cpu").requires_grad

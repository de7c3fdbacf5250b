"""The contract of PyG's `NeighborLoader`, from its documentation: what is in a batch, in which order."""

import copy

import pytest
import torch
from hypothesis import given, strategies as st
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.loader.utils import filter_data
from torch_geometric.nn import GCNConv, GraphSAGE, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import trim_to_layer

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentTypeError
from pyg_direct.sampling.random_key import batch_key
from tests.batches import assert_equal_epochs, check_contract, make_data
from tests.graphs import GRAPHS, make_graph, odd_graphs
from tests.poison import poisoned_memory
from tests.reference.sample import sample

# None, all, more than any node has, hops without edges.
FANOUTS = [[], [0], [3], [3, 2], [-1], [-1, 2], [2, 0, 3], [40, 40], [1, 1, 1, 1]]


def load_one(data, num_neighbors, seeds, **options):
    """The single batch around all seeds."""
    with poisoned_memory():
        (batch,) = NeighborLoader(data, num_neighbors, torch.as_tensor(seeds), batch_size=99, seed=5, **options)
    return batch


def test_is_a_loader_of_torch_and_pyg():
    loader = NeighborLoader(make_data(), [3], batch_size=16, device="cpu")

    assert isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(loader, NodeLoader)
    assert (len(loader), loader.batch_size, loader.num_workers) == (5, 16, 0)
    assert repr(loader) == "NeighborLoader(70 seeds, [3], batch_size=16, 5 batches, cpu; not placed yet)"


def test_a_batch_is_what_the_reference_draws_under_its_key(device):
    graph = GRAPHS["unsorted int32"]
    expected = sample(graph.in_rows(), [3, 0, 3], [2, 2], batch_key(5, 0, 0))

    got = load_one(make_data(graph), [2, 2], [3, 0, 3], device=device)

    assert got.n_id.tolist() == expected.n_id
    assert got.edge_index.tolist() == expected.edge_index
    assert got.e_id.tolist() == expected.e_id


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", FANOUTS, ids=str)
def test_batches_keep_the_contract(real_device, fanouts, replace):
    data, nodes = make_data(), torch.randperm(70)[:50]

    batches = list(NeighborLoader(data, fanouts, nodes, replace=replace, batch_size=16, device=real_device))

    assert [batch.batch_size for batch in batches] == [16, 16, 16, 2]
    for batch, seeds in zip(batches, nodes.split(16), strict=True):
        check_contract(data, batch, seeds.tolist(), fanouts, replace)


@pytest.mark.parametrize("name", GRAPHS)
def test_odd_graphs_keep_the_contract(real_device, name):
    data = make_data(GRAPHS[name])

    batches = list(NeighborLoader(data, [2, -1, 1], batch_size=7, device=real_device))

    assert sum(batch.batch_size for batch in batches) == data.num_nodes
    for number, batch in enumerate(batches):
        seeds = range(7 * number, min(7 * number + 7, data.num_nodes))
        check_contract(data, batch, seeds, [2, -1, 1])


@given(graph=odd_graphs(), fanouts=st.lists(st.integers(-1, 4), max_size=3), replace=st.booleans(), draw=st.data())
def test_any_graph_keeps_the_contract(graph, fanouts, replace, draw):
    node = st.integers(0, max(graph.num_nodes - 1, 0))
    seeds = draw.draw(st.lists(node, min_size=1, max_size=12)) if graph.num_nodes else []
    data = make_data(graph)

    batches = list(NeighborLoader(data, fanouts, seeds, replace=replace, batch_size=99, device="cpu"))

    for batch in batches:
        check_contract(data, batch, seeds, fanouts, replace)


def test_everything_in_a_batch_is_on_the_device(real_device):
    batch = load_one(make_data(), [3, 2], [5, 9], device=real_device)

    tensors = {key: value for key, value in batch.to_dict().items() if isinstance(value, torch.Tensor)}

    assert {value.device.type for key, value in tensors.items() if key != "input_id"} == {real_device.type}
    assert set(tensors) == {"x", "edge_index", "edge_attr", "y", "n_id", "e_id", "input_id"}
    assert isinstance(batch, Data)


def test_features_are_those_of_the_nodes_and_edges(real_device):
    data = make_data()

    batch = load_one(data, [3, 2], [5, 9], device=real_device).cpu()

    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])


def test_repeated_seeds_keep_their_rows(real_device):
    data, seeds = make_data(), [4, 4, 0, 4]

    batch = load_one(data, [3, 2], seeds, device=real_device)

    check_contract(data, batch, seeds, [3, 2])
    assert batch.x[:4, 0].tolist() == [4.0, 4.0, 0.0, 4.0]


def test_all_neighbors_are_taken_once_each(real_device):
    graph = make_graph(5, [(1, 0), (1, 0), (2, 0), (0, 1), (3, 1), (4, 3)])

    batch = load_one(make_data(graph), [-1, -1, -1], [0], device=real_device)

    assert batch.n_id.tolist() == [0, 1, 2, 3, 4]
    assert batch.num_sampled_nodes == [1, 2, 1, 1]
    assert batch.num_sampled_edges == [3, 2, 1]
    assert sorted(batch.e_id.tolist()) == list(range(6))


def test_transform_gets_every_batch(real_device):
    seen = []

    def keep(batch):
        seen.append(batch)
        return batch.n_id.sum()

    got = list(NeighborLoader(make_data(), [2], batch_size=32, transform=keep, device=real_device))

    assert [int(value) for value in got] == [int(batch.n_id.sum()) for batch in seen]
    assert [batch.batch_size for batch in seen] == [32, 32, 6]


def test_transform_of_the_sampler_output_comes_before_features(real_device):
    def keep_first_hop(out):
        nodes, edges = sum(out.num_sampled_nodes[:2]), out.num_sampled_edges[0]
        out.node, out.num_sampled_nodes = out.node[:nodes], out.num_sampled_nodes[:2]
        out.row, out.col, out.edge = out.row[:edges], out.col[:edges], out.edge[:edges]
        out.num_sampled_edges = [edges]
        return out

    data = make_data()

    batch = load_one(data, [3, 2], [5, 9], transform_sampler_output=keep_first_hop, device=real_device)

    check_contract(data, batch, [5, 9], [3])
    assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def forget_ids(out):
    out.edge = None
    return out


def test_edges_whose_ids_a_transform_forgets_have_no_attributes(real_device):
    data = make_data()
    data.edge_attr = torch.rand(data.num_edges, 2)

    got = load_one(data, [-1], [5, 9], transform_sampler_output=forget_ids, device=real_device)

    expected = filter_data(data, got.n_id.cpu(), *got.edge_index.cpu(), None)
    assert "edge_attr" not in got
    assert "edge_attr" not in expected
    assert set(expected.keys()) <= set(got.keys())
    assert "e_id" not in got
    assert got.num_edges == expected.num_edges


def test_an_adjacency_whose_ids_a_transform_forgets_has_no_values(real_device):
    data = make_data()
    order = (data.edge_index[1] * data.num_nodes + data.edge_index[0]).sort().indices
    row, col = data.edge_index[:, order].flip(0)
    indptr = torch.cat([row.new_zeros(1), torch.bincount(row, minlength=data.num_nodes).cumsum(0)])
    data.adj_t = torch.sparse_csr_tensor(indptr, col, torch.rand(len(col)), (data.num_nodes, data.num_nodes))
    del data.edge_index

    batch = load_one(data, [-1], [5, 9], transform_sampler_output=forget_ids, device=real_device)

    assert batch.adj_t.values().numel() > 0
    assert bool((batch.adj_t.values() >= 1).all())


@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
def test_batches_hold_what_a_transform_says_of_trees_times_and_counts(real_device, options):
    def say_more(out):
        out.batch, out.num_sampled_nodes, out.num_sampled_edges = out.node % 2, None, None
        out.orig_row, out.orig_col = out.row, out.col
        out.metadata = out.metadata[0], torch.tensor([70, 80])
        return out

    batch = load_one(make_data(), [-1], [5, 9], transform_sampler_output=say_more, device=real_device, **options)

    assert torch.equal(batch.batch, batch.n_id % 2)
    assert batch.seed_time.tolist() == [70, 80]
    assert torch.equal(batch._orig_edge_index, batch.edge_index)
    assert {"num_sampled_nodes", "num_sampled_edges"}.isdisjoint(batch.keys())


def test_a_transform_of_the_sampler_output_that_returns_none_is_named():
    with pytest.raises(ArgumentTypeError, match="transform_sampler_output must return a SamplerOutput, got NoneType"):
        load_one(make_data(), [3], [5, 9], transform_sampler_output=lambda out: None, device="cpu")


def test_a_call_gives_the_batch_around_positions(real_device):
    data, nodes = make_data(), torch.arange(60, 10, -1)
    loader = NeighborLoader(data, [3, 2], nodes, batch_size=4, seed=1, device=real_device)

    batches = [loader(torch.tensor([0, 5, 2])), loader([0, 5, 2])]

    for batch in batches:
        check_contract(data, batch, [60, 55, 58], [3, 2])
        assert batch.input_id.tolist() == [0, 5, 2]
    # Each call draws anew, and no epoch notices.
    assert batches[0].e_id.tolist() != batches[1].e_id.tolist()
    untouched = NeighborLoader(data, [3, 2], nodes, batch_size=4, seed=1, device=real_device)
    assert_equal_epochs(loader, untouched)


def test_pyg_can_drive_the_sampler_itself(real_device):
    data = make_data()
    loader = NeighborLoader(data, [3, 2], batch_size=4, device=real_device)

    batch = loader.filter_fn(loader.collate_fn([7, 8]))

    check_contract(data, batch, [7, 8], [3, 2])
    assert batch.input_id.tolist() == [7, 8]


def test_other_fanouts_can_be_set_between_epochs(real_device):
    loader = NeighborLoader(make_data(), [3, 2], batch_size=16, seed=1, device=real_device)
    first = next(iter(loader))

    loader.node_sampler.num_neighbors = [4]
    second = next(iter(loader))

    assert (len(first.num_sampled_edges), len(second.num_sampled_edges)) == (2, 1)
    check_contract(make_data(), second, range(16), [4])
    check_contract(make_data(), loader([5, 9]), [5, 9], [4])


class TestModels:
    """Models of PyG's give on seeds what they give on the whole graph when all neighbors are taken."""

    @pytest.fixture
    def data(self):
        return make_data(x=torch.randn(70, 5))

    def test_sage(self, real_device, data):
        convs = torch.nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 3)])
        expected = run_layers(convs, data.x, data.edge_index)

        batches = list(NeighborLoader(data, [-1, -1], batch_size=16, device=real_device))

        for batch in batches:
            got = run_layers(convs.to(real_device), batch.x, batch.edge_index)[: batch.batch_size]
            torch.testing.assert_close(got.cpu(), expected[batch.n_id.cpu()[: batch.batch_size]], rtol=1e-4, atol=1e-4)

    def test_gcn_with_edge_weights(self, real_device, data):
        convs = torch.nn.ModuleList([GCNConv(5, 8, normalize=False), GCNConv(8, 3, normalize=False)])
        data.edge_index, data.edge_weight = gcn_norm(data.edge_index, None, 70)
        del data.edge_attr
        expected = run_layers(convs, data.x, data.edge_index, data.edge_weight)

        batches = list(NeighborLoader(data, [-1, -1], batch_size=16, device=real_device))

        for batch in batches:
            got = run_layers(convs.to(real_device), batch.x, batch.edge_index, batch.edge_weight)[: batch.batch_size]
            torch.testing.assert_close(got.cpu(), expected[batch.n_id.cpu()[: batch.batch_size]], rtol=1e-4, atol=1e-4)

    def test_trimmed_layers_give_the_seeds_the_same(self, real_device, data):
        convs = torch.nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 8), SAGEConv(8, 3)]).to(real_device)

        batches = list(NeighborLoader(data, [4, 3, 2], batch_size=16, device=real_device))

        for batch in batches:
            expected = run_layers(convs, batch.x, batch.edge_index)[: batch.batch_size]
            x, edge_index = batch.x, batch.edge_index
            for layer, conv in enumerate(convs):
                x, edge_index, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
                x = conv(x, edge_index).relu()
            torch.testing.assert_close(x[: batch.batch_size], expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("cache", [False, True])
    def test_inference_layer_by_layer(self, real_device, data, cache):
        model = GraphSAGE(5, hidden_channels=8, num_layers=2, out_channels=3).eval()
        expected = model(data.x, data.edge_index)

        loader = NeighborLoader(copy.copy(data), [-1], batch_size=16, device=real_device)
        got = model.to(real_device).inference(loader, real_device, embedding_device=real_device, cache=cache)

        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def run_layers(convs, x, *edges):
    for conv in convs:
        x = conv(x, *edges).relu()
    return x

"""Graphs whose edges are an adjacency, `adj_t`: batches have one, and a layout that is not read is named."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader as PygNeighborLoader

from pyg_direct import HGTLoader, LinkNeighborLoader, NeighborLoader, ShaDowKHopSampler, inference_loader
from pyg_direct.errors import ArgumentError
from tests.batches import make_data
from tests.graphs import make_random_graph


def load_one(data, device):
    """The single batch around two nodes."""
    (batch,) = NeighborLoader(data, [3, 2], torch.tensor([5, 9]), batch_size=99, seed=5, device=device)
    return batch


@pytest.mark.sparse
@pytest.mark.parametrize("with_value", [False, True])
def test_an_adjacency_of_torch_sparse_gives_one(real_device, with_value):
    from torch_sparse import SparseTensor

    graph = make_random_graph(70, 600)
    source, target = graph.edge_index
    value = torch.arange(600.0) if with_value else None
    adj_t = SparseTensor(row=target, col=source, value=value, sparse_sizes=(70, 70))
    data = Data(adj_t=adj_t, x=torch.arange(70.0).view(70, 1))
    rows, columns, values = adj_t.coo()
    twin = Data(edge_index=torch.stack([columns, rows]), x=data.x, num_nodes=70)

    batch, other = load_one(data, real_device), load_one(twin, real_device)

    assert torch.equal(batch.n_id, other.n_id)
    assert torch.equal(batch.e_id, other.e_id)
    assert batch.adj_t.sparse_sizes() == (len(batch.n_id),) * 2
    expected = torch.zeros(len(batch.n_id), len(batch.n_id))
    weight = values[batch.e_id.cpu()] if with_value else torch.ones(len(batch.e_id))
    expected.index_put_(tuple(other.edge_index.cpu().flip(0)), weight, accumulate=True)
    assert torch.equal(batch.adj_t.to_dense().cpu(), expected)


def test_an_adjacency_of_torch_gives_one(real_device):
    dense = torch.zeros(12, 12)
    dense[torch.arange(12), (torch.arange(12) * 5 + 1) % 12] = torch.arange(12.0) + 1
    data = Data(adj_t=dense.to_sparse_csr(), x=torch.arange(12.0).view(12, 1))

    batch = load_one(data, real_device)

    n_id = batch.n_id.cpu()
    expected = dense[n_id][:, n_id]
    # Nodes of the last hop are not expanded.
    expected[sum(batch.num_sampled_nodes[:2]) :] = 0
    assert batch.adj_t.layout == torch.sparse_csr
    assert torch.equal(batch.adj_t.to_dense().cpu(), expected)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(("layout", "kind"), [(torch.sparse_csc, "CSC"), (torch.sparse_coo, "COO")])
@pytest.mark.parametrize("options", [{}, {"disjoint": True}])
def test_an_adjacency_that_is_not_compressed_by_row_is_named(real_device, layout, kind, options):
    data, typed = make_data(), HeteroData()
    del data.edge_index
    typed["paper"].num_nodes = 70
    data.adj_t = typed["paper", "cites", "paper"].adj_t = torch.eye(70).to_sparse(layout=layout)

    for graph, seeds in ((data, None), (typed, "paper")):
        with pytest.raises(
            ArgumentError, match=rf"adj_t must be compressed by row; call to_sparse_csr\(\) on .* {kind}"
        ):
            list(NeighborLoader(graph, [2], seeds, device=real_device, **options))


def make_both(kind, typed, has_loops=False):
    """A graph with `adj_t` and, in another order, `edge_index`; each value tells the ends of its edge."""
    graph = torch.unique(make_random_graph(30, 200).edge_index.long(), dim=1)
    edge_index = graph[:, torch.randperm(graph.shape[1], generator=torch.Generator().manual_seed(3))]
    value = (edge_index[0] * 100 + edge_index[1]).float()
    if kind == "torch":
        adj_t = torch.sparse_coo_tensor(edge_index.flip(0), value, (30, 30)).to_sparse_csr()
    else:
        from torch_sparse import SparseTensor

        adj_t = SparseTensor(row=edge_index[1], col=edge_index[0], value=value, sparse_sizes=(30, 30))
    if has_loops:
        # As `GCNNorm` leaves it: attributes of more edges than `adj_t` has.
        loops = torch.arange(30).repeat(2, 1)
        edge_index, value = torch.cat([edge_index, loops], 1), torch.cat([value, loops[0] * 101.0])
    data = HeteroData() if typed else Data()
    nodes, edges = (data["v"], data["v", "to", "v"]) if typed else (data, data)
    nodes.x = torch.arange(30.0).view(30, 1)
    edges.edge_index, edges.edge_attr, edges.adj_t = edge_index, value, adj_t
    edges.weight, edges.ends = (value >= 1500).float(), value.tolist()
    return data


def list_edges(adj_t):
    """(sources, targets, values) of an adjacency in its order."""
    if isinstance(adj_t, torch.Tensor):
        target, source = adj_t.to_sparse_coo()._indices()
        return source, target, adj_t.values()
    target, source, value = adj_t.coo()
    return source, target, value


LOADERS = {
    "plain": lambda data, **options: NeighborLoader(data, [3, 3], **options),
    "disjoint": lambda data, **options: NeighborLoader(data, [3, 3], disjoint=True, **options),
    "replace": lambda data, **options: NeighborLoader(data, [9, 9], replace=True, **options),
    "induced": lambda data, **options: NeighborLoader(data, [3, 3], subgraph_type="induced", **options),
    "weights": lambda data, **options: NeighborLoader(data, [3, 3], weight_attr="weight", **options),
    "links": lambda data, **options: LinkNeighborLoader(data, [3, 3], options.pop("input_nodes") and ("v", "to", "v"),
                                                        **options),
    "hgt": lambda data, **options: HGTLoader(data, [9, 9], **options),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", pytest.param("torch_sparse", marks=pytest.mark.sparse)])
@pytest.mark.parametrize(
    ("name", "typed"),
    [(name, typed) for name in LOADERS for typed in (False, True) if typed or name != "hgt"],
)
def test_beside_edges_the_adjacency_is_sampled_and_all_values_are_those_of_the_edges(real_device, kind, name, typed):
    data = make_both(kind, typed, has_loops=name == "induced")
    (store,) = data.edge_stores

    loader = LOADERS[name](data, input_nodes="v" if typed else None, batch_size=8, seed=2, device=real_device)
    batch = next(iter(loader))

    (part,) = batch.edge_stores
    n_id = (batch["v"] if typed else batch).n_id
    source, target, _ = list_edges(store.adj_t)
    sampled = torch.stack([source, target])[:, part.e_id.cpu()]
    assert part.e_id.numel() > 8
    assert torch.equal(n_id[part.edge_index].cpu(), sampled)
    ends = (sampled[0] * 100 + sampled[1]).float()
    assert torch.equal(part.edge_attr.cpu(), ends)
    assert part.ends == ends.tolist()
    source, target, value = list_edges(part.adj_t)
    assert value.numel() == part.e_id.numel()
    assert torch.equal(value, (n_id[source] * 100 + n_id[target]).float())
    if name == "weights":
        # One of weight 0 is taken where less than three others lead to its target alone.
        others = torch.bincount(store.edge_index[1, store.weight > 0], minlength=30)
        assert bool((others[sampled[1, ends < 1500]] < 3).all())


@pytest.mark.sparse
@pytest.mark.parametrize("typed", [False, True])
def test_beside_edges_a_batch_is_that_of_pyg(typed):
    data = make_both("torch_sparse", typed)
    # PyG slices no lists.
    del data.edge_stores[0]["ends"]
    options = {"num_neighbors": [-1, -1], "input_nodes": ("v", [3, 5]) if typed else [3, 5], "batch_size": 2}

    (batch,), (expected,) = NeighborLoader(data, **options, device="cpu"), PygNeighborLoader(data, **options)

    (part,), (other,) = batch.edge_stores, expected.edge_stores
    counts = {"num_sampled_nodes", "num_sampled_edges"}
    assert set(part.keys()) - counts == set(other.keys()) - counts
    assert sorted(part.e_id.tolist()) == sorted(other.e_id.tolist())


def test_an_adjacency_of_other_edges_than_those_that_have_attributes_is_named(real_device):
    data = make_both("torch", False)
    source, target = data.edge_index[:, 0].tolist()
    data.edge_index, data.edge_attr = data.edge_index[:, 1:], data.edge_attr[1:]

    with pytest.raises(ArgumentError, match=f"data.edge_index must hold every edge .* none from {source} to {target}"):
        next(iter(NeighborLoader(data, [2], batch_size=8, device=real_device)))
    del data.edge_attr, data.weight, data.ends
    assert "adj_t" in next(iter(NeighborLoader(data, [2], batch_size=8, device=real_device)))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_beside_edges_an_adjacency_may_be_of_coordinates(real_device):
    data, twin = make_both("torch", False), make_both("torch", False)
    data.adj_t = data.adj_t.to_sparse_coo()

    (batch, *_), (other, *_) = (NeighborLoader(own, [3], batch_size=8, seed=1, device=real_device)
                                for own in (data, twin))  # fmt: skip

    assert torch.equal(batch.n_id, other.n_id)
    assert torch.equal(batch.adj_t.to_dense(), other.adj_t.to_dense())


def test_trees_of_shadow_are_made_of_edges_where_there_are_both_as_in_pyg(real_device):
    data = make_both("torch", False)

    batch = next(iter(ShaDowKHopSampler(data, 2, 3, batch_size=4, device=real_device)))

    assert "adj_t" not in batch
    assert "adj_t" in data
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index.to(real_device)[:, batch.e_id])
    assert torch.equal(batch.edge_attr, data.edge_attr.to(real_device)[batch.e_id])


def test_inference_goes_over_the_adjacency_where_there_are_both(real_device):
    data = make_both("torch", False)

    loader = inference_loader(data, batch_size=8, device=real_device)

    assert ("adj_t" in loader.data, "edge_index" in loader.data) == (True, False)

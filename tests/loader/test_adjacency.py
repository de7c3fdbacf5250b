"""Graphs whose edges are an adjacency, `adj_t`: batches have one, and a layout that is not read is named."""

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from pyg_direct import NeighborLoader
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

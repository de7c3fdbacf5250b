import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import ShaDowKHopSampler as PygShaDow
from torch_geometric.utils import k_hop_subgraph

from pyg_direct import ShaDowKHopSampler
from pyg_direct.errors import ArgumentError, ArgumentTypeError


def make_data(num_nodes=60, num_edges=150):
    torch.manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, num_edges))
    return Data(x=torch.arange(num_nodes).float().view(-1, 1), y=torch.arange(num_nodes), edge_index=edge_index,
                edge_attr=torch.arange(num_edges), train_mask=torch.arange(num_nodes) < 30)  # fmt: skip


def test_each_seed_has_the_whole_subgraph_around_it(device):
    data = make_data()

    batch = next(iter(ShaDowKHopSampler(data, 2, -1, torch.tensor([4, 9, 4]), batch_size=3, device=device)))

    assert isinstance(batch, Batch)
    assert batch.num_graphs == 3
    assert batch.y.tolist() == [4, 9, 4]
    assert batch.n_id[batch.root_n_id].tolist() == [4, 9, 4]
    for number, seed in enumerate([4, 9, 4]):
        begin, end = batch.ptr[number : number + 2].tolist()
        nodes, edges, _, mask = k_hop_subgraph(seed, 2, data.edge_index)
        assert (batch.batch[begin:end] == number).all()
        assert batch.n_id[begin:end].tolist() == nodes.tolist()
        inside = (batch.edge_index[0] >= begin) & (batch.edge_index[0] < end)
        assert sorted(batch.edge_attr[inside].tolist()) == mask.nonzero().view(-1).tolist()
        assert int(inside.sum()) == edges.shape[1]
    assert torch.equal(batch.x.view(-1).long(), batch.n_id)
    assert torch.equal(batch.train_mask, batch.n_id < 30)
    ends = batch.n_id[batch.edge_index].cpu()
    assert torch.equal(ends, data.edge_index[:, batch.edge_attr.cpu()])


def test_sampled_neighbors_are_bounded_and_edges_sorted_by_source(device):
    batch = next(iter(ShaDowKHopSampler(make_data(), 2, 2, batch_size=10, device=device, seed=0)))

    assert int(batch.ptr.diff().max()) <= 1 + 2 + 4
    row, col = batch.edge_index.tolist()
    assert sorted(zip(row, col, strict=True)) == list(zip(row, col, strict=True))


@pytest.mark.sparse
@pytest.mark.parametrize("form", ["edge_index", "adj_t"])
def test_equals_pygs_where_all_neighbors_are_taken(form):
    from torch_sparse import SparseTensor

    data = make_data()
    if form == "adj_t":
        data.adj_t = SparseTensor(row=data.edge_index[1], col=data.edge_index[0], sparse_sizes=(60, 60))
        del data.edge_index, data.edge_attr

    ours = next(iter(ShaDowKHopSampler(data, 2, 60, torch.arange(8), batch_size=8, device="cpu")))
    peer = next(iter(PygShaDow(data, 2, 60, torch.arange(8), batch_size=8)))

    assert ours.y.tolist() == peer.y.tolist()
    assert ours.ptr.tolist() == peer.ptr.tolist()
    assert ours.root_n_id.tolist() == peer.root_n_id.tolist()
    assert torch.equal(ours.x, peer.x)
    assert set(peer.keys()) <= set(ours.keys())

    def named(batch):
        if form == "adj_t":
            target, source, _ = batch.adj_t.coo()
        else:
            source, target = batch.edge_index
        graph, names = batch.batch, batch.x.view(-1).long()
        return sorted(zip(graph[source].tolist(), names[source].tolist(), names[target].tolist(), strict=True))

    assert named(ours) == named(peer)


def test_refuses_bad_arguments():
    with pytest.raises(ArgumentTypeError, match="data must be a Data"):
        ShaDowKHopSampler(make_data().edge_index, 2, 2, device="cpu")
    with pytest.raises(ArgumentError, match="depth must be"):
        ShaDowKHopSampler(make_data(), -1, 2, device="cpu")

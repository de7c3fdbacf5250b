"""Embeddings of torch with sparse gradients, beside dense ones, over nodes without features."""

import copy

import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import pyg_direct
from pyg_direct import NeighborLoader


@pytest.fixture
def graph():
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randint(size, (400,), generator=generator) for size in (90, 70)]
    data = HeteroData(user={"num_nodes": 90}, item={"x": torch.randn(70, 8, generator=generator)})
    data["user", "buys", "item"].edge_index = torch.stack(ends)
    data["item", "of", "user"].edge_index = torch.stack(ends[::-1])
    data["item"].y = torch.randint(3, (70,), generator=generator)
    data["item"].columns = torch.randint(5, (70, 2), generator=generator)
    return data


class Model(torch.nn.Module):
    """One layer over users, whose rows are an embedding, and items, whose columns have embeddings."""

    def __init__(self, num_users, sparse):
        super().__init__()
        self.users = torch.nn.Embedding(num_users, 8, sparse=sparse)
        self.columns = torch.nn.ModuleList(torch.nn.Embedding(5, 8) for _ in range(2))
        kinds = [("user", "buys", "item"), ("item", "of", "user")]
        self.layers = torch.nn.ModuleList(HeteroConv({kind: SAGEConv((8, 8), 8) for kind in kinds}) for _ in range(2))

    def forward(self, batch):
        items = batch["item"].x + sum(c(batch["item"].columns[:, i]) for i, c in enumerate(self.columns))
        n_id = batch["user"].n_id
        x = {"user": self.users(n_id.to(self.users.weight.device)).to(n_id.device), "item": items}
        for layer in self.layers:
            x = layer(x, batch.edge_index_dict)
        return x["item"][: batch["item"].batch_size]


def train(model, loader):
    """Take a step for each batch; returns losses, and the rows of users that gradients had."""
    tables = model.users.parameters()
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("users.")]
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.Adam(rest, lr=0.01)]
    losses, touched = [], []
    for batch in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), batch["item"].y[: batch["item"].batch_size])
        loss.backward()
        grad = model.users.weight.grad
        touched.append(set(grad.coalesce().indices()[0].tolist()) if grad.is_sparse else None)
        assert not grad.is_sparse or touched[-1] == set(batch["user"].n_id.tolist())
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, touched


@pytest.mark.parametrize("disjoint", [False, True])
def test_sparse_gradients_have_the_rows_of_a_batch_and_train_as_dense_ones(graph, disjoint):
    torch.manual_seed(0)
    dense = Model(90, sparse=False)
    sparse = Model(90, sparse=True)
    sparse.load_state_dict(copy.deepcopy(dense.state_dict()))
    pyg_direct.accelerate(sparse)
    loader = NeighborLoader(graph, [3, 2], "item", batch_size=20, seed=1, disjoint=disjoint, device="cpu")

    losses, touched = train(sparse, loader)
    loader = NeighborLoader(graph, [3, 2], "item", batch_size=20, seed=1, disjoint=disjoint, device="cpu")
    expected, _ = train(dense, loader)

    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(0 < len(rows) < 90 for rows in touched)
    assert torch.allclose(sparse.users.weight, dense.users.weight, rtol=1e-4, atol=1e-6)

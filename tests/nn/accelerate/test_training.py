"""Training with accelerated models: the losses and the accuracy of PyG's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, HGTConv, RGCNConv, SAGEConv

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets import synthetic_graph
from pyg_direct.nn.conv import hgt, rgcn, sage
from tests.nn.replays import MODELS


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph("products", scale=0.001, device="cpu")


def train(model, graph, device, steps, trims):
    """Losses of as many steps."""
    loader = NeighborLoader(graph.to_data(), [5, 4, 3], graph.train_idx, batch_size=32, shuffle=True, seed=0,
                            device=device)  # fmt: skip
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    while len(losses) < steps:
        for batch in loader:
            counts = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes,
                      "num_sampled_edges_per_hop": batch.num_sampled_edges} if trims else {}  # fmt: skip
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index, **counts)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size].long())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:steps]


@pytest.mark.slow
@pytest.mark.parametrize("trims", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_pyg(real_device, graph, name, trims):
    torch.manual_seed(0)
    plain = MODELS[name](graph.num_features, 32, 3, graph.num_classes).to(real_device)
    fast = copy.deepcopy(plain)
    accelerate(fast)

    expected, got = (train(model, graph, real_device, 5, trims) for model in (plain, fast))

    # Rounding grows from step to step.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-2, atol=1e-3)
    assert min(got) < got[0]


class Typed(torch.nn.Module):
    """Two layers over all types, or over edges of three relations, and a matrix."""

    def __init__(self, make):
        super().__init__()
        self.layers, self.out = torch.nn.ModuleList([make(), make()]), torch.nn.Linear(16, 4)

    def forward(self, batch):
        if isinstance(batch, HeteroData):
            x = batch.x_dict
            for layer in self.layers:
                x = {**x, **{kind: rows.relu() for kind, rows in layer(x, batch.edge_index_dict).items()}}
            x = x["paper"]
        else:
            x, edge_type = batch.x[:, :16], batch.e_id.to(batch.x.device) % 3
            for layer in self.layers:
                x = layer(x, batch.edge_index, edge_type).relu()
        return self.out(x)


SIZES = {"paper": 300, "author": 200}
KINDS = [("author", "writes", "paper"), ("paper", "rev_writes", "author"), ("paper", "cites", "paper")]
TYPED = {"HeteroConv": (lambda: HeteroConv({kind: SAGEConv((16, 16), 16) for kind in KINDS}), sage, "sum_known"),
         "HGT": (lambda: HGTConv(16, 16, ([*SIZES], KINDS), heads=2), hgt, "weigh_values"),
         "RGCN": (lambda: RGCNConv(16, 16, 3), rgcn, "aggregate")}  # fmt: skip


def make_data_with_types():
    draws, data = torch.Generator().manual_seed(0), HeteroData()
    for kind, size in SIZES.items():
        data[kind].x = torch.randn(size, 16, generator=draws)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    for source, name, target in KINDS:
        ends = [torch.randint(SIZES[kind], (900,), generator=draws) for kind in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    return data


@pytest.mark.parametrize("name", TYPED)
def test_losses_over_relations_are_those_of_pyg(real_device, graph, name, monkeypatch):
    make, module, of_ours = TYPED[name]
    if name == "HGT" and real_device.type == "cuda":
        of_ours = "attend_products"
    calls, work = [], getattr(module, of_ours)
    monkeypatch.setattr(module, of_ours, lambda *args, **kwargs: calls.append(1) or work(*args, **kwargs))
    data, seeds = (graph.to_data(), graph.train_idx) if name == "RGCN" else (make_data_with_types(), "paper")
    torch.manual_seed(0)
    plain = Typed(make).to(real_device)
    fast, losses = copy.deepcopy(plain), []
    accelerate(fast)
    for model in (plain, fast):
        loader = NeighborLoader(data, [5, 4], seeds, batch_size=50, seed=0, device=real_device)
        adam, found = torch.optim.Adam(model.parameters(), lr=0.01), []
        for _, batch in zip(range(4), loader, strict=False):
            seen = batch["paper"] if name != "RGCN" else batch
            adam.zero_grad()
            loss = F.cross_entropy(model(batch)[: seen.batch_size], seen.y[: seen.batch_size].long() % 4)
            loss.backward()
            adam.step()
            found.append(float(loss.detach()))
        losses.append(found)

    # Rounding grows from step to step.
    assert losses[1] == pytest.approx(losses[0], rel=1e-2, abs=1e-3)
    assert len(losses[0]) == 4
    assert len(calls) == 2 * 4

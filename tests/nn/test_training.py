"""Training with accelerated models: the losses and the accuracy of PyG's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from pyg_direct import NeighborLoader, accelerate
from pyg_direct.datasets import synthetic_graph

MODELS = {"sage": GraphSAGE, "gcn": GCN, "gin": GIN, "gat": GAT}


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

"""Training where GPU memory holds neither the features nor the topology: all of it, with the batches of a CPU."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyg_direct import NeighborLoader
from tests.batches import hash_batches

MIB = 1 << 20


def make_learnable_data(num_nodes, num_edges, width):
    """Four classes that a row's first numbers tell, and edges that keep to a class for the most part."""
    y = torch.arange(num_nodes) % 4
    x = torch.randn(num_nodes, width)
    x[:, :4] += 3 * F.one_hot(y, 4)
    target = torch.randint(num_nodes, (num_edges,))
    source = (target + 4 * torch.randint(num_nodes // 4, (num_edges,))) % num_nodes
    return Data(x=x, y=y, edge_index=torch.stack([source, target]), num_nodes=num_nodes)


def train(loader, width, device):
    """Mean loss of the first and of the last 16 batches of an epoch."""
    torch.manual_seed(0)
    model = GraphSAGE(width, 16, 2, 4).to(device)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:16]) / 16, sum(losses[-16:]) / 16


# What is larger than the memory, nodes, edges, columns, MiB of GPU memory, and their 16th on a CPU, which has no limit.
CASES = {"features": (1 << 16, 1 << 18, 1024, 192), "topology": (1 << 17, 1 << 24, 16, 96)}


@pytest.mark.slow
# A CPU has one memory: `auto` stands for all there.
@pytest.mark.parametrize("placement", ["auto", "unified"] if torch.cuda.is_available() else ["auto"])
@pytest.mark.parametrize("large", CASES)
def test_training_runs_in_less_memory_than(real_device, request, large, placement):
    on_gpu = real_device.type == "cuda"
    num_nodes, num_edges, width, budget = CASES[large]
    scale = 1 if on_gpu else 16
    data = make_learnable_data(num_nodes // scale, num_edges // scale, width)
    num_bytes = {"features": data.x.numel() * 4, "topology": num_edges // scale * 8}[large]
    assert num_bytes > budget * MIB // scale
    options = {"input_nodes": torch.arange(4096), "batch_size": 32, "shuffle": True, "seed": 1}
    expected = hash_batches(NeighborLoader(data.clone(), [5, 5], device="cpu", **options))
    if on_gpu:
        gc.collect()
        request.getfixturevalue("little_memory")(budget * MIB)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()

    place = placement if on_gpu else "auto"
    loader = NeighborLoader(data, [5, 5], device=real_device, placement=place, **options)
    got = hash_batches(loader)
    first, last = train(loader, width, real_device)

    assert got == expected
    assert last < first / 4
    if on_gpu:
        assert torch.cuda.max_memory_reserved() - before <= budget * MIB
        placed = loader._plan.topology if large == "topology" else loader._general.describe()["x"]
        assert placed.placement == "unified"

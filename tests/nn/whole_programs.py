"""Programs over a whole graph: a model, its loop of steps and evaluations, and a comparison of two such loops."""

import torch
import torch.nn.functional as F
from torch_geometric.nn import BatchNorm, GCNConv, SAGEConv

NODES, EDGES, CLASSES = 60, 300, 5


class Program(torch.nn.Module):
    """As PyG's `gcn.py`."""

    def __init__(self, dropout=0.5, kind=GCNConv):
        super().__init__()
        self.conv1, self.conv2 = kind(32, 16), kind(16, CLASSES)
        self.norm, self.dropout = BatchNorm(16), dropout

    def forward(self, x, edge_index, edge_weight=None):
        x = F.dropout(x, self.dropout, self.training)
        x = self.norm(self.conv1(x, edge_index, edge_weight)).relu()
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index, edge_weight)


class Sage(SAGEConv):
    def forward(self, x, edge_index, edge_weight=None):
        return super().forward(x, edge_index)


class Graph:
    def __init__(self, device, seed=0):
        draw = torch.Generator().manual_seed(seed)
        # Rounding is amplified by Adam, less in double precision.
        self.x = torch.randn(NODES, 32, generator=draw).double().to(device)
        self.edge_index = torch.randint(NODES, (2, EDGES), generator=draw).to(device)
        self.y = torch.randint(CLASSES, (NODES,), generator=draw).to(device)
        self.mask = (torch.rand(NODES, generator=draw) < 0.5).to(device)


def find_loss(model, graph):
    out = model(graph.x, graph.edge_index)
    return F.cross_entropy(out[graph.mask], graph.y[graph.mask])


def train(model, graph, optimizer):
    model.train()
    optimizer.zero_grad()
    loss = find_loss(model, graph)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, graph):
    model.eval()
    return model(graph.x, graph.edge_index)


def make_adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def learn(model, graph, epochs=16, make_optimizer=make_adam, step=train):
    """Train and evaluate; return all losses and results, from the same random numbers."""
    torch.manual_seed(1)
    optimizer = make_optimizer(model)
    losses, results = [], []
    for _ in range(epochs):
        losses.append(step(model, graph, optimizer))
        results.append(evaluate(model, graph))
    return torch.tensor(losses), results


def assert_learns_alike(ordinary, model, graph, **options):
    expected, found = learn(ordinary, graph, **options), learn(model, graph, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-8)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    for one, other in zip(model.state_dict().values(), ordinary.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)

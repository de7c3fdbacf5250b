"""Common parts of tests of accelerated models: convolutions, a sorted batch for them, and comparison of results."""

import torch
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, GraphConv, SAGEConv

from pyg_direct.nn.sorted_edges import register_sorted

NODES, EDGES = [4, 9, 12], [16, 30]
WIDTH, OUT = 8, 10


def mlp(width=WIDTH):
    return torch.nn.Linear(width, OUT)


CONVOLUTIONS = {
    "sage": lambda: SAGEConv(WIDTH, OUT),
    "sage max": lambda: SAGEConv(WIDTH, OUT, aggr="max"),
    "sage normalised": lambda: SAGEConv(WIDTH, OUT, aggr="min", normalize=True, project=True),
    "sage narrow": lambda: SAGEConv(1, OUT),
    "sage of 3": lambda: SAGEConv(3, OUT, aggr="sum"),
    "graph": lambda: GraphConv(WIDTH, OUT),
    "graph mean": lambda: GraphConv(WIDTH, OUT, aggr="mean"),
    "gcn": lambda: GCNConv(WIDTH, OUT),
    "gcn without loops": lambda: GCNConv(WIDTH, OUT, add_self_loops=False),
    "gcn not normalised": lambda: GCNConv(WIDTH, OUT, normalize=False),
    "gcn improved": lambda: GCNConv(WIDTH, OUT, improved=True),
    "gcn to narrow rows": lambda: GCNConv(12, 8, bias=False),
    "gin": lambda: GINConv(mlp(), train_eps=True),
    "gine": lambda: GINEConv(mlp(), edge_dim=3),
    "gat": lambda: GATConv(WIDTH, OUT, heads=3),
    "gat without loops": lambda: GATConv(WIDTH, 4, heads=2, concat=False, add_self_loops=False),
    "gat of one head": lambda: GATConv(WIDTH, OUT, residual=True),
    "gat of two heads and a residual": lambda: GATConv(WIDTH, OUT, heads=2, residual=True),
    "gat of one narrow head": lambda: GATConv(WIDTH, 2),
    "gatv2": lambda: GATv2Conv(WIDTH, OUT, heads=2),
    "gatv2 of shared weights": lambda: GATv2Conv(WIDTH, OUT, share_weights=True, add_self_loops=False),
}


class Batch:
    """A batch of two hops: targets without edges, parallel edges, a hub that has half of the edges of its hop."""

    def __init__(self, device="cpu", loops=True, seed=1):
        generator = torch.Generator().manual_seed(seed)

        def draw(low, high, count):
            return torch.randint(low, high, (count,), generator=generator)

        first, second = draw(0, NODES[0], EDGES[0]), draw(NODES[0], sum(NODES[:2]), EDGES[1])
        second[: EDGES[1] // 2] = 7
        source = torch.cat([draw(0, sum(NODES[:2]), EDGES[0]), draw(0, sum(NODES), EDGES[1])])
        target = torch.cat([first.sort().values, second.sort().values])
        if not loops:
            source = torch.where(source == target, (source + 1) % NODES[0], source)
            assert not (source == target).any()
        self.edge_index = torch.stack([source, target]).to(device)
        register_sorted(self.edge_index, NODES, EDGES)
        self.num_nodes = sum(NODES)
        self.edge_attr = torch.rand(sum(EDGES), 3, generator=generator).to(device)
        self.edge_weight = torch.rand(sum(EDGES), generator=generator).to(device)


def run(conv, x, *args, grad=None, **kwargs):
    """(result, gradients of x and of the parameters)."""
    x = x.clone().requires_grad_()
    out = conv(x, *args, **kwargs)
    grads = torch.autograd.grad(out, [x, *conv.parameters()], torch.ones_like(out) if grad is None else grad)
    return [out, *grads]


def assert_near(got, expected, rtol=1e-4, atol=1e-5):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def note_forward(monkeypatch, kind, note):
    """Make a step of autograd record its arguments when it is computed."""
    plain = kind.forward

    def forward(ctx, *args):
        note(*args)
        return plain(ctx, *args)

    monkeypatch.setattr(kind, "forward", staticmethod(forward))

"""Batches of small graphs whose passes are replayed: results, gradients and norms of ordinary passes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import MLP, BatchNorm, GINConv, GINEConv, global_add_pool, global_max_pool, global_mean_pool

from pyg_direct import DataLoader, accelerate
from pyg_direct.nn.replay import batch_passes
from pyg_direct.nn.sorted_edges import find_graphs
from tests.nn.replay.padded_batch.test_graphs import make_molecules
from tests.nn.replays import record_anywhere

POOLS = {"add": global_add_pool, "mean": global_mean_pool, "max": global_max_pool}


@pytest.fixture
def device(real_device, monkeypatch):
    record_anywhere(real_device, monkeypatch)
    monkeypatch.setattr(batch_passes, "_MARGIN_OF_GRAPHS", 0.3)
    return real_device


class Network(torch.nn.Module):
    """GIN, or GINE, as PyG's examples have it, in double precision."""

    def __init__(self, kind="gin", norm=None, pool="add", has_size=False, width=16):
        super().__init__()
        self.atoms, self.bonds = torch.nn.Embedding(7, width), torch.nn.Linear(3, width)
        conv = GINEConv if kind == "gine" else GINConv
        self.convs = torch.nn.ModuleList(conv(MLP([width, width, width], norm=norm)) for _ in range(2))
        self.norm = BatchNorm(width) if norm else None
        self.head = torch.nn.Linear(width, 2)
        self.kind, self.pool, self.has_size = kind, POOLS[pool], has_size
        self.double()

    def forward(self, x, edge_index, edge_attr, batch, batch_size=None):
        more = (self.bonds(edge_attr),) if self.kind == "gine" else ()
        x = self.atoms(x)
        for conv in self.convs:
            x = conv(x, edge_index, *more).relu()
        x = x if self.norm is None else self.norm(x)
        return self.head(self.pool(x, batch, size=batch_size) if self.has_size else self.pool(x, batch))


class OfBatch(Network):
    def forward(self, data):
        return super().forward(data.x, data.edge_index, data.edge_attr, data.batch, data.num_graphs)


class OfNodes(Network):
    def forward(self, x, edge_index, edge_attr, batch):
        for conv in self.convs:
            x = conv(self.atoms(x) if x.dim() == 1 else x, edge_index).relu()
        return {"nodes": self.head(x), "graphs": [global_add_pool(x, batch)]}


def make_loader(device, count=203, **options):
    torch.manual_seed(5)
    graphs = [graph.apply(lambda value: value.double() if value.is_floating_point() else value)
              for graph in make_molecules(count)]  # fmt: skip
    return DataLoader(graphs, **{"batch_size": 20, "shuffle": True, "seed": 1, "device": device, **options})


def call(model, batch):
    if isinstance(model, OfBatch):
        return model(batch)
    if isinstance(model, OfNodes):
        return model(batch.x, batch.edge_index, batch.edge_attr, batch.batch)
    return model(batch.x, batch.edge_index, batch.edge_attr, batch=batch.batch, batch_size=batch.num_graphs)


def find_loss(out, batch):
    if isinstance(out, dict):
        assert len(out["nodes"]) == batch.num_nodes
        assert len(out["graphs"][0]) == batch.num_graphs
        return out["nodes"].square().mean() + out["graphs"][0].square().mean()
    return F.mse_loss(out, batch.y)


def train(model, loader, epochs=3):
    """Losses, and gradients of the last step."""
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        for batch in loader:
            sgd.zero_grad()
            loss = find_loss(call(model, batch), batch)
            loss.backward()
            sgd.step()
            losses.append(float(loss.detach()))
    return losses


def compare(make, device, *, evaluates=True):
    """Train a model with replay beside one without; return the replay."""
    torch.manual_seed(0)
    ordinary = make().to(device)
    replayed = copy.deepcopy(ordinary)
    handle = accelerate(replayed, replay="auto")
    losses = [train(model, make_loader(device)) for model in (ordinary, replayed)]

    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-6, atol=1e-9)
    for own, theirs in zip(replayed.state_dict().values(), ordinary.state_dict().values(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-9)
    if evaluates and handle.replay.reason is None:
        for model in (ordinary, replayed):
            model.eval()
        with torch.no_grad():
            for _ in range(2):
                for batch in make_loader(device):
                    torch.testing.assert_close(call(replayed, batch), call(ordinary, batch))
    return handle.replay


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
@pytest.mark.parametrize("norm", [None, "batch_norm"])
@pytest.mark.parametrize(("kind", "pool", "has_size"), [("gin", "add", False), ("gine", "mean", True),
                                                        ("gin", "max", False)])  # fmt: skip
def test_passes_over_graphs_are_replayed(device, kind, pool, has_size, norm):
    replay = compare(lambda: Network(kind, norm, pool, has_size), device)

    assert replay.reason is None
    # The last batch of an epoch is smaller, and nine passes come before each recording.
    assert replay.replayed >= 25


def test_models_that_take_a_batch_are_replayed(device):
    replay = compare(lambda: OfBatch("gine", "batch_norm", has_size=True), device)

    assert replay.reason is None
    assert replay.replayed >= 25


def test_results_of_nodes_and_of_graphs_are_cut(device):
    replay = compare(OfNodes, device, evaluates=False)

    assert replay.reason is None
    assert replay.replayed >= 12


def test_a_second_backward_is_computed_anew(device):
    torch.manual_seed(0)
    ordinary = Network().to(device)
    replayed = copy.deepcopy(ordinary)
    handle = accelerate(replayed, replay="auto")
    batches = list(make_loader(device, drop_last=True))
    for batch in 2 * batches:
        find_loss(call(replayed, batch), batch).backward()
    before = handle.replay.replayed
    for model in (ordinary, replayed):
        model.zero_grad()
        loss = find_loss(call(model, batches[0]), batches[0])
        loss.backward(retain_graph=True)
        loss.backward()

    assert handle.replay.replayed > before
    for own, theirs in zip(replayed.parameters(), ordinary.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(own.grad, theirs.grad)


class OverGraphs(Network):
    """A model that looks at all graphs together."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return out - out.mean(0)


class OfEdges(Network):
    def forward(self, x, edge_index, edge_attr, batch, batch_size=None):
        return self.bonds(edge_attr).sum(1, keepdim=True) * self.atoms(x)[edge_index[0]][:, :2]


@pytest.mark.parametrize(("make", "reason"), [(OverGraphs, "depend on nodes that are not their neighbors"),
                                              (OfEdges, "neither those of graphs nor those of nodes")])  # fmt: skip
def test_what_reads_the_padding_or_the_order_of_edges_stays_ordinary(device, make, reason):
    torch.manual_seed(0)
    model = make().to(device)
    handle = accelerate(model, replay="auto")

    for batch in make_loader(device, drop_last=True):
        call(model, batch).sum().backward()

    assert reason in handle.replay.reason
    assert handle.replay.replayed == 0


def test_vectors_that_were_written_or_are_of_others_are_not_known(real_device):
    first, second = make_loader(real_device, count=4, batch_size=2, shuffle=False)
    assert find_graphs(first.batch) is first.ptr

    first.batch.add_(0)

    assert find_graphs(first.batch) is None
    assert find_graphs(second.batch.clone()) is None
    assert find_graphs(second.batch) is second.ptr

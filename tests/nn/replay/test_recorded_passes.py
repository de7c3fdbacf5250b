"""Passes over whole graphs by a recorder that sees nothing but torch's operations and their memory, as a CUDA graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn import APPNP, BatchNorm, GATConv, GCNConv, HGTConv, SAGEConv

from pyg_direct.nn.replay import guards as calls, model_call, model_replay, recorded_passes
from tests.nn.tape import TapeRecorder

NODES, EDGES, CLASSES = 40, 160, 4


class StillRecorder(TapeRecorder):
    """Recorder that moves no statistics and draws no numbers, as a graph that is only recorded."""

    def record(self, work):
        with calls.left_as_it_was(work.__self__._model(), torch.device("cpu")):
            return super().record(work)


@pytest.fixture(autouse=True)
def _tapes(monkeypatch):
    monkeypatch.setattr(recorded_passes, "Recorder", StillRecorder)
    monkeypatch.setattr(model_call, "_can_record", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


class Norms(torch.nn.Module):
    """Statistics of norms, and numbers outside of the model."""

    def __init__(self, **settings):
        super().__init__()
        self.first, self.second = SAGEConv(8, 8), GATConv(8, CLASSES, heads=2, concat=False, add_self_loops=False)
        self.norm, self.settings = BatchNorm(8), settings

    def forward(self, x, edge_index):
        x = self.norm(self.first(x, edge_index)).relu() * self.settings.get("scale", 1.0)
        return self.second(x, edge_index)


class Cached(torch.nn.Module):
    """Layers that keep normalized edges."""

    def __init__(self):
        super().__init__()
        self.first = GCNConv(8, CLASSES, cached=True, add_self_loops=False)
        self.last = APPNP(2, 0.1, add_self_loops=False)

    def forward(self, x, edge_index):
        return self.last(self.first(x, edge_index), edge_index)


@pytest.fixture
def graph():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 8, generator=draw, dtype=torch.float64)
    return [x, torch.randint(NODES, (2, EDGES), generator=draw)]


def make_pair(model):
    torch.manual_seed(0)
    model = model.double()
    return copy.deepcopy(model), model, model_replay.watch_passes(model, is_strict=True)


def learn(model, graph, epochs=12):
    """Return losses and results of a loop from equal random numbers."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*graph), torch.arange(NODES) % CLASSES)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            seen += [loss.detach(), model(*graph)]
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def compare(ordinary, model, graph, **options):
    for found, expected in zip(learn(model, graph, **options), learn(ordinary, graph, **options), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


# Eight passes of each kind come before the one that is recorded; a layer that keeps edges changes in its first.
@pytest.mark.parametrize(("kind", "replayed"), [(Norms, 6), (Cached, 5)])
def test_steps_and_evaluations_are_replayed(kind, replayed, graph):
    ordinary, model, replay = make_pair(kind())

    compare(ordinary, model, graph)

    assert (replay.replayed, replay.ordinary, replay.reason) == (replayed, 24 - replayed, None)


def test_numbers_written_into_the_same_tensors_are_read(graph):
    ordinary, model, replay = make_pair(Norms())
    compare(ordinary, model, graph)
    before = replay.replayed
    graph[0].mul_(0.5)

    compare(ordinary, model, graph, epochs=2)

    assert replay.replayed == before + 4


def test_edges_written_into_the_same_tensor_take_ordinary_passes(graph):
    ordinary, model, replay = make_pair(Norms())
    compare(ordinary, model, graph)
    before = replay.replayed
    graph[1].copy_(graph[1].flip(1).roll(3, 0))

    compare(ordinary, model, graph, epochs=2)

    assert replay.replayed == before


def test_tensors_that_are_new_in_each_pass_are_copied(graph):
    ordinary, model, replay = make_pair(Norms())
    for _ in range(14):
        x, found = torch.randn(NODES, 8, dtype=torch.float64), []
        for trained in (model, ordinary):
            rows = x.clone().requires_grad_()
            out = trained(rows * 1, graph[1])
            out.square().sum().backward()
            found.append((out.detach(), rows.grad))
            del out
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)

    assert replay.replayed == 5


def test_settings_inside_a_dict_are_seen(graph):
    ordinary, model, replay = make_pair(Norms(scale=1.0))
    compare(ordinary, model, graph)
    assert replay.replayed > 0
    for trained in (ordinary, model):
        trained.settings["scale"] = 3.0

    compare(ordinary, model, graph)


def test_kept_edges_that_are_dropped_are_made_again(graph):
    ordinary, model, replay = make_pair(Cached())
    compare(ordinary, model, graph)
    assert replay.replayed > 0
    graph[1] = graph[1].flip(0).contiguous()
    for trained in (ordinary, model):
        trained.first._cached_edge_index = None

    compare(ordinary, model, graph)


def test_models_with_types():
    metadata = ["a", "b"], [("a", "to", "b"), ("b", "of", "a")]

    class Typed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = HGTConv(8, 8, metadata, heads=2)

        def forward(self, x_dict, edge_index_dict):
            return {kind: x.relu() for kind, x in self.conv(x_dict, edge_index_dict).items()}

    ordinary, model, replay = make_pair(Typed())
    x_dict = {kind: torch.randn(NODES, 8, dtype=torch.float64) for kind in metadata[0]}
    edges = {kind: torch.randint(NODES, (2, EDGES)) for kind in metadata[1]}
    for _ in range(12):
        found = []
        for trained in (model, ordinary):
            trained.zero_grad()
            out = trained(dict(x_dict), dict(edges))
            (out["a"].sum() + out["b"].square().sum()).backward()
            found.append([out["a"].detach(), *(part.grad for part in trained.parameters() if part.grad is not None)])
            del out
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)

    assert replay.replayed == 3


def test_a_pass_that_runs_backward_twice_draws_the_same(graph):
    class Drops(Norms):
        def forward(self, x, edge_index):
            return super().forward(F.dropout(x, 0.5, self.training), edge_index)

    _, model, replay = make_pair(Drops())
    learn(model, graph)
    model.train()
    model.zero_grad()
    statistics = model.norm.module.running_mean.clone()
    before = replay.replayed
    loss = model(*graph).square().sum()
    assert replay.replayed == before + 1
    moved = model.norm.module.running_mean.clone()

    loss.backward(retain_graph=True)
    once = [part.grad.clone() for part in model.parameters()]
    model(*graph)
    kept = model.norm.module.running_mean.clone()
    loss.backward()

    for part, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(part.grad, 2 * first)
    assert not torch.equal(statistics, moved)
    # Statistics are not moved by the pass that is computed anew.
    assert torch.equal(model.norm.module.running_mean, kept)

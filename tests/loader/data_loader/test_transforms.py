"""A data set whose transform is known to draw nothing is joined once, and its batches are PyG's."""

import copy
import logging

import pytest
import torch
import torch_geometric.transforms as T
from torch.utils.data import Subset
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct import progress
from pyg_direct.loader import DataLoader
from pyg_direct.loader.collate import graph_sources
from pyg_direct.loader.collate.graph_sources import _PURE, is_pure
from tests.loader.data_loader.small_graphs import InMemory, assert_equal, make_molecules

GRAPHS = make_molecules(11)
TRANSFORMS = {
    "one": T.ToUndirected(reduce="max"),
    "two": T.Compose([T.OneHotDegree(30), T.Compose([T.AddSelfLoops()])]),
    "with nodes": T.VirtualNode(),
    "features": T.Constant(value=2.0),
}


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch):
    """What the logger said, each line once for a test."""
    monkeypatch.setattr(progress, "_SAID", set())
    caplog.set_level(logging.INFO, "pyg_direct")
    return caplog


def load(kind, dataset, **options):
    torch.manual_seed(4)
    loader = kind(dataset, **{"batch_size": 3, "shuffle": True, "follow_batch": ["x"], **options})
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("select", [lambda d: d, lambda d: d[3:9], lambda d: Subset(d, [7, 1, 1, 5]), lambda d: d[4:5]])
def test_batches_are_pygs(name, select, said):
    dataset = select(InMemory(GRAPHS, TRANSFORMS[name]))

    got = load(DataLoader, dataset, device="cpu")

    assert_equal(got, load(PygDataLoader, dataset))
    assert "one by one" not in said.text


def test_graphs_are_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(T.Constant, "forward", lambda self, data, real=T.Constant.forward: calls.append(1) or real(
        self, data))  # fmt: skip

    load(DataLoader, InMemory(GRAPHS, T.Constant())[2:7], device="cpu")

    assert len(calls) == 5


@pytest.mark.parametrize("when", ["between", "within"])
def test_edits_are_in_the_next_batches(when):
    def edit(dataset):
        dataset._data.x[0] = 70.0

    def run(kind, **options):
        dataset = InMemory([copy.deepcopy(graph) for graph in GRAPHS], T.Constant(value=2.0))
        loader = kind(dataset, batch_size=3, **options)
        first = iter(loader)
        begun = [next(first)]
        if when == "between":
            begun += first
        edit(dataset)
        rest = list(loader if when == "between" else first)
        dataset.transform.value = 5.0
        return [*begun, *rest, *loader]

    with pytest.warns(UserWarning, match="written") if when == "within" else pytest.MonkeyPatch.context():
        got = run(DataLoader, device="cpu", prefetch=0)

    assert_equal(got, run(PygDataLoader))


def test_a_transform_that_fails_fails_at_its_graph_as_with_pyg(said):
    dataset = InMemory(GRAPHS, T.OneHotDegree(1))

    for kind, options in ((DataLoader, {"device": "cpu"}), (PygDataLoader, {})):
        with pytest.raises(RuntimeError):
            list(kind(dataset, batch_size=3, **options))
    assert "its transform fails" in said.text


def test_transforms_that_make_graphs_too_large_run_batch_by_batch(monkeypatch, said):
    # A fifth of it: some graphs with a column for each degree do not fit.
    monkeypatch.setattr(graph_sources, "available_bytes", lambda: 5 * 10_000)
    dataset = InMemory(GRAPHS, T.OneHotDegree(200))

    got = load(DataLoader, dataset, device="cpu")

    assert_equal(got, load(PygDataLoader, dataset))
    assert "would take a large part of the free memory" in said.text


def test_a_transform_is_known_by_its_class_alone():
    class Own(T.Constant):
        pass

    patched = T.Constant()
    patched.forward = lambda data: data

    assert is_pure(T.Compose([T.ToUndirected(), T.Center()]))
    assert not any(map(is_pure, [Own(), patched, T.RandomFlip(0), T.Compose([T.Constant(), T.RandomJitter(1.0)]), len]))
    # None of them draws: what they read by name would be a change of PyG's.
    assert len(_PURE) > 15
    state = torch.get_rng_state()
    for graph in GRAPHS:
        T.Compose([T.LocalDegreeProfile(), T.GCNNorm(), T.RemoveIsolatedNodes()])(copy.copy(graph))
    assert torch.equal(torch.get_rng_state(), state)

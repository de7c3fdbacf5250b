"""Graphs of the Open Graph Benchmark, from a fake of its package, which downloads them."""

import os
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyg_direct.datasets import load_ogb
from pyg_direct.errors import ArgumentError

TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class OgbDataset:
    """Fake of `NodePropPredDataset` with a graph of four nodes."""

    num_classes = 3

    def __init__(self, name, root):
        assert (name, root, os.environ[TRUST]) == ("ogbn-arxiv", "data", "1")
        warnings.warn(f"Environment variable {TRUST} is set", UserWarning, stacklevel=2)

    def get_idx_split(self):
        return {"train": np.array([0, 1]), "valid": np.array([2]), "test": np.array([3])}

    def __getitem__(self, index):
        graph = {"num_nodes": 4, "edge_index": np.array([[0, 1], [1, 3]]),
                 "node_feat": np.arange(8, dtype=np.float64).reshape(4, 2)}  # fmt: skip
        return graph, np.array([[0.0], [np.nan], [2.0], [1.0]])


@pytest.fixture
def ogb(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", SimpleNamespace(NodePropPredDataset=OgbDataset))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_graph_is_read_and_torch_is_left_as_it_was(ogb, monkeypatch, before):
    monkeypatch.delenv(TRUST, raising=False)
    if before is not None:
        monkeypatch.setenv(TRUST, before)

    graph = load_ogb("ogbn-arxiv", "data", undirected=False)

    assert os.environ.get(TRUST) == before
    assert graph.edge_index.tolist() == [[0, 1], [1, 3]]
    assert torch.equal(graph.x, torch.arange(8.0).view(4, 2))
    assert graph.y.tolist() == [0, -1, 2, 1]
    assert [graph.train_idx.tolist(), graph.val_idx.tolist(), graph.test_idx.tolist()] == [[0, 1], [2], [3]]
    assert str(graph) == "NodeDataset(name='ogbn-arxiv', num_nodes=4, num_edges=2, num_features=2, num_classes=3)"


def test_edges_get_their_reverse(ogb):
    graph = load_ogb("ogbn-arxiv", "data", undirected=True)

    assert sorted(graph.edge_index.T.tolist()) == [[0, 1], [1, 0], [1, 3], [3, 1]]


def test_an_unknown_name_is_refused():
    with pytest.raises(ArgumentError, match=r"name must be one of ogbn-products, ogbn-arxiv, .* got 'ogbn-mag'"):
        load_ogb("ogbn-mag", "data")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)

    with pytest.raises(ModuleNotFoundError, match=r'load_ogb needs the package ogb[.\w]*: pip install "\.\[ogb\]"'):
        load_ogb("ogbn-arxiv", "data")

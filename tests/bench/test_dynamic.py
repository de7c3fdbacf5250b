"""What dynamic graph networks are measured beside may fail, and is told."""

import sys
from types import SimpleNamespace

import torch
from torch_geometric.data import Data

from pyg_direct.bench import dynamic
from pyg_direct.dynamic import nn


def test_a_model_that_cannot_be_compiled_ends_nothing(monkeypatch):
    class Refused:
        def __init__(self, *args):
            pass

        def epoch(self):
            raise RuntimeError("no compiler\nat all")

    monkeypatch.setitem(sys.modules, "torch_geometric_temporal.nn", SimpleNamespace(recurrent=nn))
    monkeypatch.setitem(sys.modules, "torch_geometric_temporal", SimpleNamespace())
    way = "resident PyGT, torch.compile"
    monkeypatch.setitem(dynamic.WAYS, way, Refused)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    signal = [Data(x=torch.randn(3, 2), edge_index=edges, edge_attr=torch.rand(3), y=torch.randn(3)) for _ in range(4)]

    rows = list(dynamic.measure_dynamic_epochs({"tiny": signal}, ["T-GCN"], [way], window=2, hidden=2, epochs=1,
                                               device="cpu"))  # fmt: skip

    assert [row.note for row in rows if row.metric == f"{way}, failed"] == ["no compiler"]
    assert "ours, FrameTrainer" in {row.metric for row in rows}

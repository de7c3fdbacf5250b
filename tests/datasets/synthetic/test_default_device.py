"""Graphs are made on the CPU whatever torch's default device is."""

import json

import numpy as np
import pytest
import torch

from pyg_direct.datasets import load_folder, synthetic_graph
from pyg_direct.datasets.dynamic_graphs import DynamicShape, draw_snapshots, load_temporal, synthetic_dtdg
from tests.datasets.folder.test_folder import FEATURES, GRAPH

PART = {"edges": [[0, 1], [2, 0]], "weights": [1, 2], "y": [1, 2, 3], "X": [[1, 2]] * 3}
MAPPING = {"edge_index": {t: [[0, 1], [1, 1]] for t in "012"}, "edge_weight": {t: [1.0, 2.0] for t in "012"}}
TEXTS = {
    "numbered": {"0": PART, "1": PART, "time_periods": 2},
    "mapped": {"edge_mapping": MAPPING, "time_periods": 3, "y": [[1, 2], [2, 4], [4, 3]]},
    "static": {"edges": [[0, 1]], "node_ids": {}, "FX": [[1, 2], [2, 4], [4, 3]]},
}
ARCHIVES = {
    "edges": {"ptr": [0, 2, 3], "src": [0, 1, 0], "dst": [1, 2, 2], "num_nodes": 3},
    "papers": {"edge_index": [[1, 2, 2], [0, 0, 1]], "node_year": [2000, 2001, 2003]},
}


def read_text(folder, name):
    (folder / "a.json").write_text(json.dumps(TEXTS[name]))
    return load_temporal(folder / "a.json", lags=2)


def read_archive(folder, name):
    np.savez(folder / "a.npz", **ARCHIVES[name])
    return load_temporal(folder / "a.npz")


def read_folder(folder):
    np.savez(folder / "graph.npz", **GRAPH)
    np.savez(folder / "x.npz", **FEATURES)
    return [load_folder(folder).to_data()]


MAKERS = {
    "synthetic_dtdg": lambda folder: synthetic_dtdg(20, 50, 3, weighted=True),
    "draw_snapshots": lambda folder: draw_snapshots(DynamicShape(20, 50, 3)),
    "synthetic_graph": lambda folder: [synthetic_graph("reddit", num_nodes=50, device="cpu").to_data()],
    "load_folder": read_folder,
    **{f"load_temporal {name}": lambda folder, name=name: read_text(folder, name) for name in TEXTS},
    **{f"load_temporal {name}": lambda folder, name=name: read_archive(folder, name) for name in ARCHIVES},
}


def list_tensors(graph):
    return [graph] if isinstance(graph, torch.Tensor) else [graph[key] for key in sorted(graph.keys())]


@pytest.mark.parametrize("name", MAKERS)
def test_a_default_device_is_none_of_a_graph(name, tmp_path):
    expected = MAKERS[name](tmp_path)

    with torch.device("meta"):
        got = MAKERS[name](tmp_path)

    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(list_tensors(mine), list_tensors(other), rtol=0, atol=0)

"""Graphs to train and measure on, each as a `NodeDataset`: drawn from one seed in the shape of a standard
graph (`synthetic_graph`), read from a local folder (`load_folder`), or taken from the Open Graph Benchmark
(`load_ogb`).
"""

from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.datasets.features import fill_features
from pyg_direct.datasets.folder import load_folder
from pyg_direct.datasets.ogb import load_ogb
from pyg_direct.datasets.presets import PRESETS, Preset
from pyg_direct.datasets.synthetic import synthetic_graph

__all__ = ["PRESETS", "NodeDataset", "Preset", "fill_features", "load_folder", "load_ogb", "synthetic_graph"]

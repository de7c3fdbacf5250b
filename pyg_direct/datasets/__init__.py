"""Graphs for training and measurement, each as a `NodeDataset`.

- `synthetic_graph` draws a graph from one seed in the shape of a standard graph.
- `synthetic_igbh` draws a graph with types in the shape of IGBH-Full; `write_igbh` writes it to files out of core, and
  `load_igbh` opens them.
- `load_folder` reads a graph from a local folder.
- `load_ogb` reads a graph of the Open Graph Benchmark.
- `dynamic_graphs.py` generates and reads dynamic graphs.
"""

from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.datasets.folder import load_folder, load_ogb
from pyg_direct.datasets.igbh import load_igbh, synthetic_igbh, write_igbh
from pyg_direct.datasets.synthetic import PRESETS, Preset, fill_features, synthetic_graph

__all__ = ["PRESETS", "NodeDataset", "Preset", "fill_features", "load_folder", "load_igbh", "load_ogb",
           "synthetic_graph", "synthetic_igbh", "write_igbh"]  # fmt: skip

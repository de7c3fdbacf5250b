"""Samplers for PyG's loaders, under PyG's names: `NeighborSampler` and `HGTSampler`.

- `keyed_sampler.py`: keys of draws, and samples in PyG's form: the interface between our loaders and our samplers.
- `graph_reader.py`, `link_seeds.py`: the graph, and links as seeds.
- `graph_store.py`: PyG's interface to edges.
"""

from pyg_direct.sampler.hgt_sampler import HGTSampler
from pyg_direct.sampler.neighbor_sampler import NeighborSampler

__all__ = ["HGTSampler", "NeighborSampler"]

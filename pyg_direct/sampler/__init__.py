"""Samplers for PyG's loaders, under PyG's names: `NeighborSampler` and `HGTSampler`.

- `keyed_sampler.py`: what our loaders know of our samplers beyond PyG's interface: keys, and samples in PyG's form.
- `graph_reader.py`, `link_seeds.py`: the graph, and links as seeds.
"""

from pyg_direct.sampler.hgt_sampler import HGTSampler
from pyg_direct.sampler.neighbor_sampler import NeighborSampler

__all__ = ["HGTSampler", "NeighborSampler"]

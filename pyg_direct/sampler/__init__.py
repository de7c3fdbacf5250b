"""Samplers for PyG's loaders, under PyG's names: `NeighborSampler` and `HGTSampler`.

- `keyed_sampler.py`: what our loaders know of our samplers beyond PyG's interface.
- `graph_reader.py`, `link_seeds.py`, `output.py`: the graph, links as seeds, and samples in PyG's form.
- `edge_order.py`: sorted edges of batches, reported to the aggregation or to PyG.
"""

from pyg_direct.sampler.hgt_sampler import HGTSampler
from pyg_direct.sampler.neighbor_sampler import NeighborSampler

__all__ = ["HGTSampler", "NeighborSampler"]

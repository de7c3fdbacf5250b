"""Mini-batches, sampled and fetched ahead while the model trains on the last one."""

from pyg_direct.loader.hgt import HGTLoader
from pyg_direct.loader.layers import NeighborSampler
from pyg_direct.loader.link import LinkLoader, LinkNeighborLoader
from pyg_direct.loader.neighbor import NeighborLoader
from pyg_direct.loader.node import NodeLoader
from pyg_direct.loader.rows import FeatureStore
from pyg_direct.loader.shadow import ShaDowKHopSampler
from pyg_direct.loader.subgraph import SubGraphLoader

__all__ = [
    "FeatureStore",
    "HGTLoader",
    "LinkLoader",
    "LinkNeighborLoader",
    "NeighborLoader",
    "NeighborSampler",
    "NodeLoader",
    "ShaDowKHopSampler",
    "SubGraphLoader",
]

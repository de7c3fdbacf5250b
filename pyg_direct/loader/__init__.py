"""Mini-batches, sampled and fetched ahead while the model trains on the last one.

- `neighbor_loader.py`, `link_loader.py`, `node_loader.py`, `hgt_loader.py`: PyG's loaders of these names.
- `data_loader.py`: batches of many small graphs.
- `shadow_loader.py`, `subgraph_loader.py`, `legacy_neighbor_loader.py`: further loaders.
- `base_loader.py`: epochs and batches that all of them share; `arguments.py`: their options.
- `collate/`, `prefetch/`: the content of a batch, and batches made ahead.
- `memory_placement.py`, `hot_row_ranking.py`: the memory of rows, and the rows that a loader will read most.
- `profiler.py`, `batch_report.py`: times of batches, and the report.
- `inference.py`, `receptive_field.py`: layer-wise inference.
"""

from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.loader.data_loader import DataLoader
from pyg_direct.loader.hgt_loader import HGTLoader
from pyg_direct.loader.legacy_neighbor_loader import NeighborSampler
from pyg_direct.loader.link_loader import LinkLoader, LinkNeighborLoader
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.loader.node_loader import NodeLoader
from pyg_direct.loader.shadow_loader import ShaDowKHopSampler
from pyg_direct.loader.subgraph_loader import SubGraphLoader

__all__ = [
    "DataLoader",
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

"""Mini-batches, sampled and fetched ahead while the model trains on the previous one.

- `neighbor_loader.py`, `link_loader.py`, `node_loader.py`, `hgt_loader.py`: PyG's loaders of these names.
- `graph_loader.py`, `data_loader.py`: batches of many small graphs, joined, stacked or listed.
- `prefetch_loader.py`: batches of any loader, copied ahead (`PrefetchLoader`) or kept (`CachedLoader`).
- `legacy_neighbor_loader.py`: PyG's first `NeighborSampler`; `SubGraphLoader` is in `neighbor_loader.py`.
- `induced_loader.py`: batches induced by sets of nodes: around each seed, and for `cluster_loader.py`, which has parts
  of nodes, and `graph_saint.py`.
- `ppr_loader.py`: seeds with the nodes that personalised PageRank ranks highest around them.
- `walk_models.py`: batches of random walks, and PyG's models that train with them.
- `temporal_dataloader.py`, `tgn.py`: batches of events, latest neighbors, and the memory of temporal graph networks.
- `base_loader.py`: epochs and batches of all loaders; `arguments.py`: their options.
- `collate/`, `prefetch/`: the content of a batch, and prefetched batches.
- `memory_placement.py`, `hot_row_ranking.py`: the memory of rows, and the rows that a loader will read most.
- `batch_report.py`: times of batches, and the report; `lightning.py`: logged by Lightning.
- `inference.py`, `receptive_field.py`, `whole_table.py`: layer-wise inference, and files that a GPU holds whole.
"""

from pyg_direct.features.feature_store import FeatureStore
from pyg_direct.loader.cluster_loader import ClusterData, ClusterLoader, RandomNodeLoader
from pyg_direct.loader.data_loader import DataListLoader, DataLoader, DenseDataLoader
from pyg_direct.loader.graph_saint import (
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    GraphSAINTSampler,
)
from pyg_direct.loader.hgt_loader import HGTLoader
from pyg_direct.loader.induced_loader import ShaDowKHopSampler
from pyg_direct.loader.legacy_neighbor_loader import NeighborSampler
from pyg_direct.loader.link_loader import LinkLoader, LinkNeighborLoader
from pyg_direct.loader.neighbor_loader import NeighborLoader, SubGraphLoader
from pyg_direct.loader.node_loader import NodeLoader
from pyg_direct.loader.ppr_loader import PPRLoader
from pyg_direct.loader.prefetch_loader import CachedLoader, PrefetchLoader
from pyg_direct.loader.temporal_dataloader import TemporalDataLoader
from pyg_direct.loader.tgn import LastNeighborLoader, TGNMemory
from pyg_direct.loader.walk_models import MetaPath2Vec, Node2Vec

__all__ = [
    "CachedLoader", "ClusterData", "ClusterLoader", "DataListLoader", "DataLoader", "DenseDataLoader", "FeatureStore",
    "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler", "GraphSAINTRandomWalkSampler", "GraphSAINTSampler", "HGTLoader",
    "LastNeighborLoader", "LinkLoader", "LinkNeighborLoader", "MetaPath2Vec", "NeighborLoader", "NeighborSampler",
    "Node2Vec", "NodeLoader", "PPRLoader", "PrefetchLoader", "RandomNodeLoader", "ShaDowKHopSampler", "SubGraphLoader",
    "TGNMemory", "TemporalDataLoader",
]  # fmt: skip

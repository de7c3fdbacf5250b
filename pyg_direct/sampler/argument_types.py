"""Types of the arguments that samplers and loaders share, for type checkers.

PyG's classes stand here by name: checkers that read PyG's source find wrong graphs and batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from pyg_direct.graph.hetero_topo import EdgeType

# A graph in tensors, or in stores, of which the second may be None beside a sampler that has the edges.
Graph: TypeAlias = Data | HeteroData | tuple[FeatureStore, GraphStore | None]
# Fanouts of each hop, or these for each relation.
FanoutsOf: TypeAlias = Sequence[int] | Mapping[EdgeType, Sequence[int]] | NumNeighbors
# Ids of nodes, or a mask.
Ids: TypeAlias = Tensor | np.ndarray | Sequence[int]
# Seeds; with types, a type or (type, seeds).
InputNodes: TypeAlias = Ids | str | tuple[str, Ids | None] | None
# Links; with types, a relation or (relation, links).
InputLinks: TypeAlias = Tensor | EdgeType | tuple[EdgeType, Tensor | None] | None
Subgraph: TypeAlias = str | SubgraphType
Negatives: TypeAlias = NegativeSampling | str | Mapping[str, Any] | None

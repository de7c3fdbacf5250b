"""GPU neighbor sampling and feature collection for PyTorch Geometric."""

from pyg_direct.features.feature import Feature
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.loader.neighbor import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.sampling.graphsage import Adj, GraphSageSampler

__version__ = "0.1.0"

__all__ = ["Adj", "CSRTopo", "Feature", "GraphSageSampler", "NeighborLoader", "__version__", "accelerate"]

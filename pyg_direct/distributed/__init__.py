"""Graphs over several processes and machines: partitions on disk, exchange of frontiers and rows, loaders over both."""

from pyg_direct.distributed.feature import DistFeature, PartitionInfo
from pyg_direct.distributed.graph import DistGraph
from pyg_direct.distributed.loader import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
from pyg_direct.distributed.partition import partition_graph
from pyg_direct.distributed.replicas import AccessCounter, plan_replicas
from pyg_direct.distributed.sampler import DistNeighborSampler

__all__ = [
    "AccessCounter",
    "DistFeature",
    "DistGraph",
    "DistLinkNeighborLoader",
    "DistNeighborLoader",
    "DistNeighborSampler",
    "DistSubGraphLoader",
    "PartitionInfo",
    "partition_graph",
    "plan_replicas",
]

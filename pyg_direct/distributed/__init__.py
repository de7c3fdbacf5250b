"""Graphs over several processes and machines: partitions on disk, exchange of frontiers and rows, loaders.

- `partitioning/`: graphs cut into parts and written to disk.
- `dist_graph.py`, `graph_part.py`: a partitioned graph in the memory of one process, and one part of it.
- `part_plan.py`: the plan of one rank, on a GPU and on a CPU.
- `exchange_plan.py`, `captured_rows.py`: sampling and rows over NCCL without a wait between hops, as one captured plan.
- `frontier_exchange.py`, `row_exchange.py`: sampling of a hop by the owners of its nodes, and rows by id from their
  owners, by exchanges of the host.
- `row_foresight.py`: rows that several of the next batches read, kept so that they travel once.
- `segment_rows.py`: rows by id over NCCL, for edges and for single requests.
- `dist_loader.py`: the loaders; `dist_neighbor_sampler.py`: PyG's sampler interface.
- `shared_graph.py`: all parts in one memory of a host or of a clique of GPUs.
- `server/`: parts on servers, for clients that hold none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyg_direct.distributed.dist_feature import DistFeature, PartitionInfo
    from pyg_direct.distributed.dist_graph import DistGraph
    from pyg_direct.distributed.dist_loader import DistLinkNeighborLoader, DistNeighborLoader, DistSubGraphLoader
    from pyg_direct.distributed.dist_neighbor_sampler import DistNeighborSampler
    from pyg_direct.distributed.partitioning.partition_graph import partition_graph
    from pyg_direct.distributed.partitioning.replicas import AccessCounter, plan_replicas

__all__ = [
    "AccessCounter", "DistFeature", "DistGraph", "DistLinkNeighborLoader", "DistNeighborLoader", "DistNeighborSampler",
    "DistSubGraphLoader", "PartitionInfo", "partition_graph", "plan_replicas",
]  # fmt: skip

# Public names of each module, which is imported when one is read: a server of a part needs no loaders, and so no PyG.
_NAMES = {
    "dist_feature": "DistFeature PartitionInfo",
    "dist_graph": "DistGraph",
    "dist_loader": "DistLinkNeighborLoader DistNeighborLoader DistSubGraphLoader",
    "dist_neighbor_sampler": "DistNeighborSampler",
    "partitioning.partition_graph": "partition_graph",
    "partitioning.replicas": "AccessCounter plan_replicas",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:
    # Type checkers would take every name for one of the room.
    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

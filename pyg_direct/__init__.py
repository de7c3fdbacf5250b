"""GPU neighbor sampling and feature collection for PyTorch Geometric."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyg_direct.old_import_paths import serve_old_paths as _serve_old_paths

if TYPE_CHECKING:
    from pyg_direct import (
        bench as bench,
        datasets as datasets,
        distributed as distributed,
        dynamic as dynamic,
        errors as errors,
        loader as loader,
        nn as nn,
        sampler as sampler,
    )
    from pyg_direct.features.feature import Feature
    from pyg_direct.features.feature_store import FeatureStore
    from pyg_direct.features.hot_rows import count_reads, expected_edge_reads, expected_reads
    from pyg_direct.features.packed_rows import pack_rows
    from pyg_direct.features.row_files import DeviceConfig, save_rows
    from pyg_direct.features.unified_device import enable_unified_device, unified_device
    from pyg_direct.features.unified_tensor import MemAdvise, UnifiedTensor, to_unified
    from pyg_direct.graph.csr_topo import CSRTopo
    from pyg_direct.loader.cluster_loader import ClusterData, ClusterLoader, RandomNodeLoader
    from pyg_direct.loader.data_loader import DataListLoader, DataLoader, DenseDataLoader
    from pyg_direct.loader.graph_saint import GraphSAINTEdgeSampler, GraphSAINTNodeSampler, GraphSAINTRandomWalkSampler
    from pyg_direct.loader.hgt_loader import HGTLoader
    from pyg_direct.loader.induced_loader import ShaDowKHopSampler
    from pyg_direct.loader.inference import infer, inference_loader
    from pyg_direct.loader.link_loader import LinkLoader, LinkNeighborLoader
    from pyg_direct.loader.neighbor_loader import NeighborLoader, SubGraphLoader
    from pyg_direct.loader.node_loader import NodeLoader
    from pyg_direct.loader.ppr_loader import PPRLoader
    from pyg_direct.loader.prefetch.processes import Producers
    from pyg_direct.loader.prefetch_loader import CachedLoader, PrefetchLoader
    from pyg_direct.loader.row_order import order_by_reads
    from pyg_direct.loader.temporal_dataloader import TemporalDataLoader
    from pyg_direct.loader.tgn import LastNeighborLoader, TGNMemory
    from pyg_direct.loader.walk_models import MetaPath2Vec, Node2Vec
    from pyg_direct.nn.accelerate import accelerate
    from pyg_direct.nn.node_embedding import NodeEmbedding
    from pyg_direct.nn.replay.graphed_step import GraphedStep
    from pyg_direct.nn.sorted_edges import to_edge_index
    from pyg_direct.nn.sparse_optimizers import SparseAdagrad, SparseAdam, SparseSGD
    from pyg_direct.noedit.install import install, uninstall
    from pyg_direct.runtime.cuda.peer_memory import DeviceGroup, init_p2p, p2pCliqueTopo
    from pyg_direct.sampler.graph_store import GraphStore
    from pyg_direct.sampling.graphsage_sampler import Adj, GraphSageSampler, MixedGraphSageSampler, SampleJob
    from pyg_direct.sampling.negative_links import RandomNegativeSampler
    from pyg_direct.sampling.random_walks import random_walk

_serve_old_paths()

# Log records of the package appear only if the program configures logging.
logging.getLogger("pyg_direct").addHandler(logging.NullHandler())

__version__ = "0.2.0"

__all__ = [
    "Adj", "CSRTopo", "CachedLoader", "ClusterData", "ClusterLoader", "DataListLoader", "DataLoader", "DenseDataLoader",
    "DeviceConfig", "DeviceGroup", "Feature", "FeatureStore", "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler",
    "GraphSAINTRandomWalkSampler", "GraphSageSampler", "GraphStore", "GraphedStep", "HGTLoader", "LastNeighborLoader",
    "LinkLoader", "LinkNeighborLoader", "MemAdvise", "MetaPath2Vec", "MixedGraphSageSampler", "NeighborLoader",
    "Node2Vec", "NodeEmbedding", "NodeLoader", "PPRLoader", "PrefetchLoader", "Producers", "RandomNegativeSampler",
    "RandomNodeLoader", "SampleJob", "ShaDowKHopSampler", "SparseAdagrad", "SparseAdam", "SparseSGD", "SubGraphLoader",
    "TGNMemory", "TemporalDataLoader", "UnifiedTensor", "__version__", "accelerate", "count_reads",
    "enable_unified_device", "expected_edge_reads", "expected_reads", "infer", "inference_loader", "init_p2p",
    "install", "order_by_reads", "p2pCliqueTopo", "pack_rows", "random_walk", "save_rows", "to_edge_index",
    "to_unified", "unified_device", "uninstall",
]  # fmt: skip

# Public names of each module; a room is imported when the first of its names is read.
_NAMES = {
    "features.feature": "Feature",
    "features.feature_store": "FeatureStore",
    "features.hot_rows": "count_reads expected_edge_reads expected_reads",
    "features.packed_rows": "pack_rows",
    "features.row_files": "DeviceConfig save_rows",
    "features.unified_device": "enable_unified_device unified_device",
    "features.unified_tensor": "MemAdvise UnifiedTensor to_unified",
    "graph.csr_topo": "CSRTopo",
    "loader.cluster_loader": "ClusterData ClusterLoader RandomNodeLoader",
    "loader.data_loader": "DataListLoader DataLoader DenseDataLoader",
    "loader.graph_saint": "GraphSAINTEdgeSampler GraphSAINTNodeSampler GraphSAINTRandomWalkSampler",
    "loader.hgt_loader": "HGTLoader",
    "loader.induced_loader": "ShaDowKHopSampler",
    "loader.inference": "infer inference_loader",
    "loader.link_loader": "LinkLoader LinkNeighborLoader",
    "loader.neighbor_loader": "NeighborLoader SubGraphLoader",
    "loader.node_loader": "NodeLoader",
    "loader.ppr_loader": "PPRLoader",
    "loader.prefetch.processes": "Producers",
    "loader.prefetch_loader": "CachedLoader PrefetchLoader",
    "loader.row_order": "order_by_reads",
    "loader.temporal_dataloader": "TemporalDataLoader",
    "loader.tgn": "LastNeighborLoader TGNMemory",
    "loader.walk_models": "MetaPath2Vec Node2Vec",
    "nn.accelerate": "accelerate",
    "nn.node_embedding": "NodeEmbedding",
    "nn.replay.graphed_step": "GraphedStep",
    "nn.sorted_edges": "to_edge_index",
    "nn.sparse_optimizers": "SparseAdagrad SparseAdam SparseSGD",
    "noedit.install": "install uninstall",
    "runtime.cuda.peer_memory": "DeviceGroup init_p2p p2pCliqueTopo",
    "sampler.graph_store": "GraphStore",
    "sampling.graphsage_sampler": "Adj GraphSageSampler MixedGraphSageSampler SampleJob",
    "sampling.negative_links": "RandomNegativeSampler",
    "sampling.random_walks": "random_walk",
}
_ROOMS = {name: module for module, names in _NAMES.items() for name in names.split()}
# Rooms that programs read names from.
_PACKAGES = ("bench", "datasets", "distributed", "dynamic", "errors", "loader", "nn", "sampler")


if not TYPE_CHECKING:
    # Type checkers would take every name for one of the package.
    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"pyg_direct.{name}")
        if name not in _ROOMS:
            raise AttributeError(f"module 'pyg_direct' has no attribute {name!r}{_suggest_name(name)}")
        value = globals()[name] = getattr(import_module(f"pyg_direct.{_ROOMS[name]}"), name)
        return value


def _suggest_name(name: str) -> str:
    """The end of the message about a name that is missing: the public names that are spelt nearly so."""
    if name.startswith("_"):
        # Python and its tools ask for such names to see if they are there.
        return ""
    from difflib import get_close_matches

    spelt = {public.lower(): public for public in (*_ROOMS, *_PACKAGES)}
    near = [spelt[match] for match in get_close_matches(name.lower(), spelt, 2, 0.75)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})

"""GPU neighbor sampling and feature collection for PyTorch Geometric."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from pyg_direct.features.expected import expected_edge_reads, expected_reads
    from pyg_direct.features.feature import Feature
    from pyg_direct.features.hotness import count_reads
    from pyg_direct.features.parts import DeviceConfig
    from pyg_direct.features.save import save_rows
    from pyg_direct.features.unified import MemAdvise, UnifiedTensor, to_unified
    from pyg_direct.features.unified_device import enable_unified_device, unified_device
    from pyg_direct.graph.topology import CSRTopo
    from pyg_direct.loader.hgt import HGTLoader
    from pyg_direct.loader.inference import infer, inference_loader
    from pyg_direct.loader.link import LinkLoader, LinkNeighborLoader
    from pyg_direct.loader.neighbor import NeighborLoader
    from pyg_direct.loader.node import NodeLoader
    from pyg_direct.loader.order import to_edge_index
    from pyg_direct.loader.producers import Producers
    from pyg_direct.loader.rows import FeatureStore
    from pyg_direct.loader.shadow import ShaDowKHopSampler
    from pyg_direct.loader.subgraph import SubGraphLoader
    from pyg_direct.nn.accelerate import accelerate
    from pyg_direct.nn.graphed import GraphedStep
    from pyg_direct.noedit.install import install, uninstall
    from pyg_direct.runtime.peer import DeviceGroup, init_p2p, p2pCliqueTopo
    from pyg_direct.sampling.graphsage import Adj, GraphSageSampler
    from pyg_direct.sampling.mixed import MixedGraphSageSampler, SampleJob
    from pyg_direct.sampling.random_negative import RandomNegativeSampler

# What the package logs is seen where a program sets logging up.
logging.getLogger("pyg_direct").addHandler(logging.NullHandler())

__version__ = "0.2.0"

__all__ = [
    "Adj",
    "CSRTopo",
    "DeviceConfig",
    "DeviceGroup",
    "Feature",
    "FeatureStore",
    "GraphSageSampler",
    "GraphedStep",
    "HGTLoader",
    "LinkLoader",
    "LinkNeighborLoader",
    "MemAdvise",
    "MixedGraphSageSampler",
    "NeighborLoader",
    "NodeLoader",
    "Producers",
    "RandomNegativeSampler",
    "SampleJob",
    "ShaDowKHopSampler",
    "SubGraphLoader",
    "UnifiedTensor",
    "__version__",
    "accelerate",
    "count_reads",
    "enable_unified_device",
    "expected_edge_reads",
    "expected_reads",
    "infer",
    "inference_loader",
    "init_p2p",
    "install",
    "p2pCliqueTopo",
    "save_rows",
    "to_edge_index",
    "to_unified",
    "unified_device",
    "uninstall",
]

# Where each name lives: a room is entered when the first of its names is read.
_ROOMS = {
    "Adj": "sampling.graphsage",
    "CSRTopo": "graph.topology",
    "DeviceConfig": "features.parts",
    "DeviceGroup": "runtime.peer",
    "Feature": "features.feature",
    "FeatureStore": "loader.rows",
    "GraphSageSampler": "sampling.graphsage",
    "GraphedStep": "nn.graphed",
    "HGTLoader": "loader.hgt",
    "LinkLoader": "loader.link",
    "LinkNeighborLoader": "loader.link",
    "MemAdvise": "features.unified",
    "MixedGraphSageSampler": "sampling.mixed",
    "NeighborLoader": "loader.neighbor",
    "NodeLoader": "loader.node",
    "Producers": "loader.producers",
    "RandomNegativeSampler": "sampling.random_negative",
    "SampleJob": "sampling.mixed",
    "ShaDowKHopSampler": "loader.shadow",
    "SubGraphLoader": "loader.subgraph",
    "UnifiedTensor": "features.unified",
    "accelerate": "nn.accelerate",
    "count_reads": "features.hotness",
    "enable_unified_device": "features.unified_device",
    "expected_edge_reads": "features.expected",
    "expected_reads": "features.expected",
    "infer": "loader.inference",
    "inference_loader": "loader.inference",
    "init_p2p": "runtime.peer",
    "install": "noedit.install",
    "p2pCliqueTopo": "runtime.peer",
    "save_rows": "features.save",
    "to_edge_index": "loader.order",
    "to_unified": "features.unified",
    "unified_device": "features.unified_device",
    "uninstall": "noedit.install",
}
# Rooms that programs read names from.
_PACKAGES = ("bench", "datasets", "distributed", "dynamic", "errors", "loader", "nn", "sampler")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"pyg_direct.{name}")
    if name not in _ROOMS:
        raise AttributeError(f"module 'pyg_direct' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"pyg_direct.{_ROOMS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})

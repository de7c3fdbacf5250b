"""Import paths of public names before 0.2.0: they go on working, with a warning, until the next minor version.

Objects that were pickled by 0.1.0 name these modules, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

_PACKAGE = "pyg_direct."
# Old modules that held public names, and their new homes.
MOVED = {
    "datasets.dynamic": "datasets.dynamic_graphs",
    "datasets.features": "datasets.synthetic",
    "datasets.ogb": "datasets.folder",
    "datasets.presets": "datasets.synthetic",
    "datasets.temporal": "datasets.dynamic_graphs",
    "distributed.client": "distributed.server.client_graph",
    "distributed.engine": "distributed.server.ray_servers",
    "distributed.feature": "distributed.dist_feature",
    "distributed.graph": "distributed.dist_graph",
    "distributed.loader": "distributed.dist_loader",
    "distributed.partition": "distributed.partitioning.partition_graph",
    "distributed.replicas": "distributed.partitioning.replicas",
    "distributed.sampler": "distributed.dist_neighbor_sampler",
    "dynamic.nn.attention": "dynamic.nn.gated_units",
    "dynamic.nn.chebyshev": "dynamic.nn.gated_units",
    "dynamic.nn.diffusion": "dynamic.nn.gated_units",
    "dynamic.nn.evolve": "dynamic.nn.evolve_gcn",
    "dynamic.nn.mpnn": "dynamic.nn.mpnn_lstm",
    "dynamic.nn.plain": "dynamic.nn.accelerate_snapshots",
    "dynamic.nn.tgcn": "dynamic.nn.gated_units",
    "dynamic.swap": "dynamic.nn.accelerate_snapshots",
    "dynamic.trainer": "dynamic.frame_trainer",
    "features.expected": "features.hot_rows",
    "features.hotness": "features.hot_rows",
    "features.parts": "features.row_files",
    "features.save": "features.row_files",
    "features.unified": "features.unified_tensor",
    "graph.relation": "graph.hetero_topo",
    "graph.topology": "graph.csr_topo",
    "loader.hgt": "loader.hgt_loader",
    "loader.layers": "loader.legacy_neighbor_loader",
    "loader.link": "loader.link_loader",
    "loader.neighbor": "loader.neighbor_loader",
    "loader.node": "loader.node_loader",
    "loader.order": "nn.sorted_edges",
    "loader.producers": "loader.prefetch.processes",
    "loader.rows": "features.feature_store",
    "loader.sampler": "sampler.neighbor_sampler",
    "loader.shadow": "loader.induced_loader",
    "loader.subgraph": "loader.neighbor_loader",
    "nn.graphed": "nn.replay.graphed_step",
    "runtime.peer": "runtime.cuda.peer_memory",
    "sampling.graphsage": "sampling.graphsage_sampler",
    "sampling.mixed": "sampling.graphsage_sampler",
    "sampling.random_negative": "sampling.negative_links",
}


class _OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of old modules; each hands on the names of its new home."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find an old module, after all other finders have failed."""
        if fullname.removeprefix(_PACKAGE) not in MOVED or not fullname.startswith(_PACKAGE):
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Take an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Hand on every name of the new home, and warn whoever imports the old path."""
        home = import_module(_PACKAGE + MOVED[module.__name__.removeprefix(_PACKAGE)])

        def read(name: str) -> Any:
            try:
                return getattr(home, name)
            except AttributeError:
                raise AttributeError(f"module {home.__name__!r} has no attribute {name!r}") from None

        module.__dict__["__getattr__"] = read
        warnings.warn(
            f"{module.__name__} is {home.__name__} since 0.2.0; import from there, or from a "
            "package that lists its names, such as pyg_direct or pyg_direct.loader",
            DeprecationWarning,
            stacklevel=2,
        )


def serve_old_paths() -> None:
    """Let old import paths of public names find their new homes, once a process."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        sys.meta_path.append(_OldPaths())

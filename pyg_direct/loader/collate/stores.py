"""Batches of PyG's `FeatureStore` and `GraphStore`, with rows of nodes and edges."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore as OwnStore
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.loader.collate.attributes import check_rows
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.sampler.graph_reader import count_edges, is_edge_attr, list_relations, read_stores


def _check_counts(features: FeatureStore, topology: HeteroTopo) -> None:
    """Check tables of our store against the topology: a table with fewer rows may have been put after the topology was
    read.
    """
    if not isinstance(features, OwnStore):
        return
    num_nodes, num_edges = sum(topology.num_nodes.values()), sum(topology.num_edges.values())
    counts: dict[Any, int] = {**topology.num_nodes, **topology.num_edges}
    for attr in features.get_all_tensor_attrs():
        kind, num_rows, name = attr.group_name, features.find(attr).shape[0], f"the table {attr.attr_name!r}"
        if topology.is_homogeneous:
            is_edge = is_edge_attr(attr, num_rows, num_nodes, num_edges)
            needed = num_edges if is_edge else num_nodes
        else:
            is_edge = not isinstance(kind, str)
            name, needed = f"{name} of {kind!r}", counts.get(tuple(kind) if is_edge and kind else kind, 0)
        check_rows(name, num_rows, "edge" if is_edge else "node", needed)


class StoreAttributes:
    """Batches of a graph in stores: rows of nodes by node id, rows of edges by edge id, on the device.

    Args:
        features, graph: The stores, read for every batch. Without a `graph` (None) batches have the sampler's edges,
            and an attribute without a type belongs to edges if its name contains `edge`.
        custom_cls: Class of the batch; None is PyG's class.
        topology: The topology of a sampler of ours.

    Raises:
        ArgumentError: a table of our store has fewer rows than the topology has nodes, or edges, of its type.
    """

    def __init__(self, features: FeatureStore, graph: GraphStore | None, device: torch.device, custom_cls: Any,
                 topology: HeteroTopo | None = None) -> None:  # fmt: skip
        if topology is not None:
            _check_counts(features, topology)
        self._features, self._graph, self._device, self._class = features, graph, device, custom_cls
        self._topology, self.marks = topology, Marks(features)
        self._edge_types = None if graph is None else list_relations(graph)
        self._num_edges = self._num_nodes = 0
        if graph is not None and self._edge_types == [None]:
            self._num_nodes, edges, *_ = read_stores(features, graph, None)
            self._num_edges = count_edges(edges)

    def renew(self) -> StoreAttributes:
        """Make the same object over the current rows of the store.

        Raises:
            ArgumentError: see the constructor.
        """
        if self._topology is not None:
            _check_counts(self._features, self._topology)
        made = copy.copy(self)
        made.marks = Marks(self._features)
        return made

    def describe(self) -> dict[str, Any]:
        """Return the attributes by name."""
        tables = {}
        for attr in self._features.get_all_tensor_attrs():
            name = str(attr.attr_name if attr.group_name is None else (attr.group_name, attr.attr_name))
            table = self._features.find(attr) if isinstance(self._features, OwnStore) else None
            tables[name] = table if isinstance(table, Feature) else "in a store"
        return tables

    def on_host(self) -> dict[str, Any]:
        """Return an empty dict: batches share no rows."""
        return {}

    def summarise(self) -> list[Any]:
        """Return an empty list: nothing is placed here."""
        return []

    def list_reads(self, out: SamplerOutput | HeteroSamplerOutput) -> list[tuple[Feature, Tensor]]:
        """List (table, ids `[n]`) of the rows that the batch of an output reads from our store."""
        if not isinstance(self._features, OwnStore):
            return []
        found = [(self._features.find(attr), ids) for attr, ids in self._list_wanted(out)]
        return [(table, ids) for table, ids in found if isinstance(table, Feature)]

    def _list_wanted(self, out: SamplerOutput | HeteroSamplerOutput) -> list[tuple[TensorAttr, Tensor]]:
        wanted = []
        for attr in self._features.get_all_tensor_attrs():
            if isinstance(out, SamplerOutput):
                size = self._features.get_tensor_size(attr)
                is_edge = is_edge_attr(attr, size[0], self._num_nodes, self._num_edges)
                ids = out.edge if is_edge else out.node
            elif isinstance(attr.group_name, str):
                ids = out.node.get(attr.group_name)
            else:
                ids = (out.edge or {}).get(tuple(attr.group_name))
            if ids is not None:
                wanted.append((attr, ids))
        return wanted

    def build(self, out: SamplerOutput | HeteroSamplerOutput) -> Data | HeteroData:
        """Build the batch of a sampler's output with final edge ids."""
        return self._build_hetero(out) if isinstance(out, HeteroSamplerOutput) else self._build(out)

    def _build(self, out: SamplerOutput) -> Data:
        data = Data() if self._class is None else self._class()
        data.edge_index = torch.stack([out.row, out.col])
        data.num_nodes = out.node.numel()
        self._read([(attr, ids, data) for attr, ids in self._list_wanted(out)])
        return data

    def _build_hetero(self, out: HeteroSamplerOutput) -> HeteroData:
        data = HeteroData() if self._class is None else self._class()
        wanted = [(attr, ids, data[attr.group_name]) for attr, ids in self._list_wanted(out)]
        for kind, ids in out.node.items():
            data[kind].num_nodes = ids.numel()
        self._read(wanted)
        for edge_type in out.row if self._edge_types is None else self._edge_types:
            if edge_type in out.row:
                data[edge_type].edge_index = torch.stack([out.row[edge_type], out.col[edge_type]])
        return data

    def _read(self, wanted: list[tuple[TensorAttr, Tensor, Any]]) -> None:
        """Fetch rows into the parts of a batch, all in one call."""
        attrs = []
        for attr, ids, _ in wanted:
            attr = copy.copy(attr)
            # Stores with rows on a GPU declare that they take ids there; PyG's loaders pass ids on the CPU.
            attr.index = ids if getattr(self._features, "takes_device_ids", False) else ids.cpu()
            attrs.append(attr)
        for (attr, _, part), value in zip(wanted, self._features.multi_get_tensor(attrs), strict=True):
            rows = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            part[attr.attr_name] = rows.to(self._device) if isinstance(rows, Tensor) else rows

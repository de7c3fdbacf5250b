"""The door to PyG's `FeatureStore` and `GraphStore`: the parts of a graph, and batches with rows of nodes and edges."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr, remote_backend_utils
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature
from pyg_direct.graph.hetero import HeteroTopo
from pyg_direct.loader.placed import check_rows
from pyg_direct.loader.rows import FeatureStore as OwnStore
from pyg_direct.loader.written import Marks

# Of several layouts of a relation, the one that needs no sorting comes first.
_PREFERENCE = (EdgeLayout.CSC, EdgeLayout.COO, EdgeLayout.CSR)


def read_stores(features: FeatureStore, graph: GraphStore, time_attr: str | None) -> tuple[Any, Any, Any, Any]:
    """(number of nodes, edges, times of nodes, times of edges) of a graph in stores.

    Edge ids are positions in the layout that the store keeps.

    Raises:
        ArgumentError: no times of that name, or of nodes and edges at once; a table of ours with too few rows; edges
            without types that have no size.
    """
    best: dict[Any, Any] = {}
    for attr in graph.get_all_edge_attrs():
        known = best.get(attr.edge_type)
        if known is None or _PREFERENCE.index(attr.layout) < _PREFERENCE.index(known.layout):
            best[attr.edge_type] = attr
    edges = {edge_type: _read_layout(graph, attr) for edge_type, attr in best.items()}
    if list(edges) == [None]:
        size = best[None].size
        if size is None or None in size:
            raise ArgumentError(
                "edges in the graph store must have a size, size=(num_nodes, num_nodes), as nothing else tells the "
                f"number of nodes, got {size}"
            )
        num_nodes: Any = max(size)
        _check_tables(features, {None: num_nodes}, edges)
        node_time, edge_time = _read_times(features, time_attr, num_nodes, edges)
        return num_nodes, edges[None], node_time, edge_time
    names = [attr.group_name for attr in features.get_all_tensor_attrs() if isinstance(attr.group_name, str)]
    names += [edge_type[end] for edge_type in edges for end in (0, 2)]
    num_nodes = {name: int(remote_backend_utils.num_nodes(features, graph, name)) for name in dict.fromkeys(names)}
    _check_tables(features, num_nodes, edges)
    node_time, edge_time = _read_times(features, time_attr, num_nodes, edges)
    return num_nodes, edges, node_time, edge_time


def list_relations(graph: GraphStore | None) -> list[Any]:
    """The relations that a store has edges of; [None] where there are no types, or no store."""
    if graph is None:
        return [None]
    return list(dict.fromkeys(attr.edge_type for attr in graph.get_all_edge_attrs()))


def list_links(graph: GraphStore | None, edge_type: Any) -> Tensor:
    """The edges of a relation, or of a graph without types for None, as the store lists them: `[2, E]`.

    Raises:
        ArgumentError: the store has none of that name, or there is no store.
    """
    if graph is None:
        raise ArgumentError(
            f"edge_label_index must have the links where data has no GraphStore to list them, got {edge_type}"
        )
    edge_type, known = None if edge_type is None else tuple(edge_type), list_relations(graph)
    if edge_type not in known:
        raise ArgumentError(f"edge_label_index must name a known relation, got {edge_type} of {known}")
    rows, cols, _ = graph.coo([edge_type])
    return torch.stack([rows, cols] if edge_type is None else [rows[edge_type], cols[edge_type]])


def _read_layout(graph: GraphStore, attr: Any) -> Any:
    first, second = graph.get_edge_index(attr)
    if attr.layout == EdgeLayout.COO:
        whole = first._base
        is_list = whole is not None and whole is second._base and type(whole) is Tensor and whole.dim() == 2
        if is_list and all(part.data_ptr() == row.data_ptr() and part.shape == row.shape and part.dtype == row.dtype
                           and part.stride() == row.stride()
                           for part, row in zip((first, second), whole, strict=False)) and len(whole) == 2:  # fmt: skip
            # What the store has, of which writes are seen.
            return whole
        return torch.stack([first, second])
    if attr.layout == EdgeLayout.CSC:
        return {"indptr": second, "indices": first, "direction": "in"}
    return {"indptr": first, "indices": second, "direction": "out"}


def count_edges(edges: Any) -> int:
    """Edges of what `read_stores` gives for a relation."""
    return int(edges["indices"].numel() if isinstance(edges, dict) else edges.shape[1])


def _check_tables(features: FeatureStore, num_nodes: dict[Any, int], edges: dict[Any, Any]) -> None:
    """Refuse tables that have no row for some nodes or edges; other stores than ours may keep rows in a way of their
    own."""
    if not isinstance(features, OwnStore):
        return
    for attr in features.get_all_tensor_attrs():
        kind, what, num_rows = attr.group_name, "nodes", features.find(attr).shape[0]
        needed = num_nodes.get(kind) if kind is None or isinstance(kind, str) else None
        if kind is None and is_edge_attr(attr, num_rows, num_nodes[None], count_edges(edges[None])):
            what, needed = "edges", count_edges(edges[None])
        elif needed is None and kind in edges:
            what, needed = "edges", count_edges(edges[kind])
        if needed is not None and num_rows < needed:
            table = f"{attr.attr_name!r}" if kind is None else f"{attr.attr_name!r} of {kind!r}"
            raise ArgumentError(
                f"the table {table} in the feature store must have a row for each of the {needed} {what} of the graph "
                f"store, got {num_rows}: put one with more rows, or edges of a smaller size"
            )


def _check_counts(features: FeatureStore, topology: HeteroTopo) -> None:
    """Check tables of ours against what is sampled from: one with fewer rows may have been put after that was read."""
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


def _read_times(features: FeatureStore, time_attr: str | None, num_nodes: Any, edges: dict[Any, Any]
                ) -> tuple[Any, Any]:  # fmt: skip
    if time_attr is None:
        return None, None
    found = [copy.copy(attr) for attr in features.get_all_tensor_attrs() if attr.attr_name == time_attr]
    if not found:
        raise ArgumentError(f"time_attr must name an attribute of the feature store, got {time_attr!r}")
    for attr in found:
        attr.index = None
    values = features.multi_get_tensor(found)
    if list(edges) == [None]:
        is_edge = is_edge_attr(found[0], len(values[0]), num_nodes, count_edges(edges[None]))
        return (None, values[0]) if is_edge else (values[0], None)
    node_time = {a.group_name: v for a, v in zip(found, values, strict=True) if isinstance(a.group_name, str)}
    edge_time = {tuple(a.group_name): v for a, v in zip(found, values, strict=True)
                 if not isinstance(a.group_name, str)}  # fmt: skip
    if node_time and edge_time:
        raise ArgumentError(f"time_attr must name times of nodes or of edges, {time_attr!r} names both")
    return node_time or None, edge_time or None


def is_edge_attr(attr: TensorAttr, num_rows: int, num_nodes: int, num_edges: int) -> bool:
    """Whether an attribute of a graph without types belongs to its edges: by its rows, else by its name."""
    if num_nodes == num_edges:
        return "edge" in str(attr.attr_name)
    return num_rows == num_edges


class StoreAttributes:
    """Batches of a graph in stores: rows of nodes by node id, rows of edges by edge id, on the device.

    Args:
        features, graph: The stores; asked anew for every batch. Without a `graph` (None) batches have the edges that
            the sampler gives, and an attribute without a type belongs to edges where its name says so.
        device: The device of batches.
        custom_cls: What makes the empty batch, if not PyG's class.
        topology: What a sampler of ours samples from.

    Raises:
        ArgumentError: a table of ours has fewer rows than the topology nodes, or edges, of its type.
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
        """The same of rows as the store has them now.

        Raises:
            ArgumentError: as of the constructor.
        """
        if self._topology is not None:
            _check_counts(self._features, self._topology)
        made = copy.copy(self)
        made.marks = Marks(self._features)
        return made

    def describe(self) -> dict[str, Any]:
        """The attributes by name."""
        tables = {}
        for attr in self._features.get_all_tensor_attrs():
            name = str(attr.attr_name if attr.group_name is None else (attr.group_name, attr.attr_name))
            table = self._features.find(attr) if isinstance(self._features, OwnStore) else None
            tables[name] = table if isinstance(table, Feature) else "in a store"
        return tables

    def on_host(self) -> dict[str, Any]:
        """What batches could share: nothing."""
        return {}

    def summarise(self) -> list[Any]:
        """Nothing is placed here."""
        return []

    def build(self, out: SamplerOutput | HeteroSamplerOutput) -> Data | HeteroData:
        """The batch of what a sampler returned, whose edge ids are final."""
        return self._build_hetero(out) if isinstance(out, HeteroSamplerOutput) else self._build(out)

    def _build(self, out: SamplerOutput) -> Data:
        data = Data() if self._class is None else self._class()
        data.edge_index = torch.stack([out.row, out.col])
        data.num_nodes = out.node.numel()
        wanted = []
        for attr in self._features.get_all_tensor_attrs():
            size = self._features.get_tensor_size(attr)
            is_edge = is_edge_attr(attr, size[0], self._num_nodes, self._num_edges)
            if not is_edge or out.edge is not None:
                wanted.append((attr, out.edge if is_edge else out.node, data))
        self._read(wanted)
        return data

    def _build_hetero(self, out: HeteroSamplerOutput) -> HeteroData:
        data = HeteroData() if self._class is None else self._class()
        wanted = []
        for attr in self._features.get_all_tensor_attrs():
            if isinstance(attr.group_name, str):
                ids = out.node.get(attr.group_name)
            else:
                ids = (out.edge or {}).get(tuple(attr.group_name))
            if ids is not None:
                wanted.append((attr, ids, data[attr.group_name]))
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
            # Stores that keep their rows on a GPU say so; PyG's loaders give others ids on the CPU.
            attr.index = ids if getattr(self._features, "takes_device_ids", False) else ids.cpu()
            attrs.append(attr)
        for (attr, _, part), value in zip(wanted, self._features.multi_get_tensor(attrs), strict=True):
            rows = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            part[attr.attr_name] = rows.to(self._device) if isinstance(rows, Tensor) else rows

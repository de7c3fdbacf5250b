"""Batches of PyG's `Data`, and of its `FeatureStore` and `GraphStore`: attributes are placed once, and batches are
built on the device.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature
from pyg_direct.features.feature_store import FeatureStore as OwnStore
from pyg_direct.features.hot_rows import Listing
from pyg_direct.features.multi_read import group_narrow
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.loader.collate.attributes import (
    FrameRows,
    PlacedRows,
    Slicer,
    check_rows,
    choose_slicer,
    slice_adjacency,
)
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.loader.memory_placement import Placed
from pyg_direct.loader.prefetch.batch_groups import SharedRows
from pyg_direct.sampler.graph_reader import (
    count_edges,
    is_edge_attr,
    list_relations,
    place_rows,
    read_stores,
    refuse_features,
)
from pyg_direct.sampling.induced_plan import InducedGroup
from pyg_direct.sampling.sampling_options import Sample

_NODE_KEYS = ("x", "feat", "pos", "node_type", "n_id")


class Ranking(NamedTuple):
    """Source of the ranking of rows for a cache: the neighbor lists in memory that the GPU reads, which speeds up
    counting.
    """

    indices: Tensor
    node_count: int
    edge_count: int

    @classmethod
    def of(cls, placed: PlacedTopology) -> Ranking:
        """Make the ranking of a placed topology."""
        return cls(placed.indices, placed.num_nodes, placed.num_edges)


def summarise(topology: CSRTopo, placed: PlacedTopology) -> Placed:
    """Describe the topology in the report of placement."""
    where = str(placed.device) if placed.placement == "cuda" else placed.placement
    return Placed("topology", topology.num_bytes, where)


class Attributes(PlacedRows):
    """Node and edge attributes of a `Data`, each placed in memory that batches read.

    Args:
        data: The graph; read again for every epoch, so that edits take effect.
        topology: Source of the ranking of rows; None takes the first rows as hot.
        device, placement, feature_cache, store_dtype, sharing: See `PlacedRows`.
        edges: Source of the ranking of rows of edges; None for no hot rows.
        by_adjacency: True if ids of edges refer to `adj_t` if there is one, as in our samplers and PyG's; otherwise ids
            are row numbers.
        counts: Numbers of nodes (`node`) and edges (`edge`) to sample; each placed attribute must have as many rows.

    Raises:
        ArgumentError: an attribute has fewer rows.
    """

    def __init__(self, data: Data, topology: Listing | None, device: torch.device, placement: str,
                 feature_cache: int | str | None, store_dtype: torch.dtype | None = None,
                 sharing: Mapping[str, str] = MappingProxyType({}), edges: Listing | None = None,
                 by_adjacency: bool = True, counts: Mapping[str, int] = MappingProxyType({})) -> None:  # fmt: skip
        super().__init__(device, placement, feature_cache, store_dtype, sharing)
        refuse_features(data)
        self._others: dict[str, Callable[[Any, Sample], Any]] = {}
        # The row of each edge, if it differs from its id.
        self._places = place_rows(data._store, "data", device) if by_adjacency else None
        kinds = self._sort_out(data)
        edges = edges if self._places is None else None
        if self._places is not None:
            counts = {**counts, "edge": data.edge_index.shape[1]}
        with_frames = kinds | {key: kind for key, (_, _, kind) in self._frames.items()}
        for key, kind in with_frames.items():
            check_rows(f"data.{key}", len(data[key]), kind, counts.get(kind, 0))
        rankings = {key: topology if kind == "node" else edges for key, kind in with_frames.items()}
        self._place_all({key: data[key] for key in kinds}, kinds, rankings)
        self._of_nodes, self._of_edges = RowsAlike(self._node), RowsAlike(self._edge)
        # Afterwards: moving rows may write to them.
        self.marks = Marks(data)
        # Other slicers may return any object.
        self._is_all_known = {"edge_index", "num_nodes"}.issuperset(self._others)

    def _sort_out(self, data: Data) -> dict[str, str]:
        """List `node` or `edge` for each attribute with rows; slicers of other attributes are noted."""
        store, kinds = data._store, {}
        for key, value in store.items():
            if key == "edge_index":
                self._others[key] = lambda _, sample: sample.edge_index
                continue
            if key == "batch":
                # As in PyG, it has the tree of each node, and is missing without trees.
                continue
            if key in ("adj_t", "num_nodes"):
                self._others[key] = _slice_adjacency if key == "adj_t" else lambda _, sample: sample.n_id.numel()
                continue
            kind = "node" if store.is_node_attr(key) else "edge" if store.is_edge_attr(key) else "other"
            if key in _NODE_KEYS and kind != "node" and isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
                raise ArgumentError(
                    f"data.{key} must have a row for each of the {data.num_nodes} nodes, got {value.shape[0]}"
                )
            if kind == "other":
                continue
            slicer = choose_slicer(f"data.{key}", value, data.__cat_dim__(key, value, store), self._device)
            if slicer is None:
                kinds[key] = kind
                continue
            if isinstance(slicer, FrameRows):
                self._frames[key] = slicer, value, kind
            self._others[key] = partial(_slice_sampled, kind, slicer, self._places)
        return kinds

    def read_group(self, group: InducedGroup) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Read rows of several samples in one step each.

        Returns:
            (rows of each sample by attribute; the tensors that own their memory)
        """
        memory: list[Tensor] = []
        edges = group.e_id if self._places is None or not self._edge else self._places[group.e_id]
        of_nodes, of_edges = self._of_nodes.read(group.n_id, memory), self._of_edges.read(edges, memory)
        found: list[dict[str, Tensor]] = [{} for _ in group]
        for rows_of, counts in ((of_nodes, group.node_counts), (of_edges, group.edge_counts)):
            for key, rows in rows_of.items():
                # Not views: writes to one batch do not count for another.
                for own, part in zip(found, torch.unsafe_split_with_sizes(rows, counts), strict=True):
                    own[key] = part
        return found, memory

    def build(self, data: Data, sample: Sample, input_id: Tensor, *, checked: bool = True,
              shared: Mapping[str, SharedRows] = MappingProxyType({}), memory: list[Any] | None = None,
              counts_seeds: bool = True, read: Mapping[str, Tensor] | None = None) -> Data:  # fmt: skip
        """Build the batch as PyG's loader does, on the device; `data` is the sampled graph.

        Args:
            data: Source of attributes that are not sliced; sliced attributes were placed by the constructor.
            input_id: Positions of the seeds among the input nodes.
            checked: True if the ids come from the sampler; a user's transform may return others.
            shared: Node attributes whose rows were read already, together with other batches.
            memory: Receives the tensors that own the batch's memory, if all are known.
            counts_seeds: Add the number of seeds as `batch_size`.
            read: All rows of the sample, by attribute, if `read_group` has read them.
        """
        held: list[Any] = [*sample.memory]
        out = copy_data(data)
        # PyG's own setter takes as long as the launch of a kernel.
        store = out._store._mapping
        if read is None:
            self._read_alone(store, sample, checked, shared, held)
        else:
            store.update((key, rows) for key, rows in read.items() if key in store)
        for key, slicer in self._others.items():
            if key in store:
                store[key] = slicer(store[key], sample)
        store.pop("batch", None)
        store.setdefault("n_id", sample.n_id)
        store.setdefault("e_id", sample.e_id)
        store["num_sampled_nodes"] = sample.num_sampled_nodes
        store["num_sampled_edges"] = sample.num_sampled_edges
        store["input_id"] = input_id
        if counts_seeds:
            store["batch_size"] = input_id.numel()
        if memory is not None and checked and sample.memory and self._is_all_known:
            memory += held
        return out

    def _read_alone(self, store: dict[str, Any], sample: Sample, checked: bool, shared: Mapping[str, SharedRows],
                    held: list[Any]) -> None:  # fmt: skip
        """Read the rows of a sample into the attributes of its batch; see `build`."""
        edges = sample.e_id if self._places is None else self._places[sample.e_id]
        for ids, alike, features in ((sample.n_id, self._of_nodes, self._node), (edges, self._of_edges, self._edge)):
            if not checked:
                store.update((key, feature[ids]) for key, feature in features.items() if key in store)
            elif store.keys() >= features.keys():
                store.update(alike.read(ids, held, shared))
            else:
                # The program has removed attributes since they were placed.
                rows = {key: feature.read(ids) for key, feature in features.items() if key in store}
                store.update(rows)
                held += rows.values()


class RowsAlike:
    """Features that are read by the same ids, short rows in one launch."""

    def __init__(self, features: Mapping[str, Feature]) -> None:
        self._groups = group_narrow(features)
        grouped = {name for group in self._groups for name in group.names}
        self._single = {name: feature for name, feature in features.items() if name not in grouped}

    def read(self, ids: Tensor, memory: list[Any], shared: Mapping[str, SharedRows] = MappingProxyType({})
             ) -> dict[str, Tensor]:  # fmt: skip
        """Return the rows of ids that a sampler made, by name.

        Args:
            memory: Receives the tensors that own the memory of all rows.
            shared: Rows that were read already, together with other batches.
        """
        found = {key: shared[key].read(ids) if key in shared else feature.read(ids)
                 for key, feature in self._single.items()}  # fmt: skip
        memory += found.values()
        for group in self._groups:
            found.update(group.read(ids, memory))
        return found


def _slice_sampled(kind: str, slicer: Slicer, places: Tensor | None, value: Any, sample: Sample) -> Any:
    if kind == "node":
        return slicer(value, sample.n_id)
    return slicer(value, sample.e_id if places is None else places[sample.e_id])


def _slice_adjacency(adj_t: Any, sample: Sample) -> Any:
    # Edges without ids, after a user's transform, have no values.
    source, target = sample.edge_index
    ids = sample.e_id if sample.e_id.numel() == source.numel() else None
    size = sample.n_id.numel()
    return slice_adjacency(adj_t, source, target, ids, (size, size))


def copy_data(data: Data) -> Data:
    """Copy a graph as `copy.copy(data)` does, in a third of the time."""
    if type(data).__copy__ is not Data.__copy__:
        return copy.copy(data)
    batch = data.__class__.__new__(data.__class__)
    batch.__dict__.update(data.__dict__)
    batch.__dict__["_store"] = copy_store(data._store, weakref.ref(batch))
    return batch


def copy_store(store: Any, parent: weakref.ref[Any]) -> Any:
    """Copy a store of a graph for another graph, as `copy.copy(store)` does, in a third of the time."""
    made = store.__class__.__new__(store.__class__)
    values = made.__dict__
    values.update(store.__dict__)
    values["_mapping"], values["_parent"] = values["_mapping"].copy(), parent
    if "_cached_attr" in values:
        del values["_cached_attr"]
    return made


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

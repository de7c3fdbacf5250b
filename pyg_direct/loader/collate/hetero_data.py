"""Batches of PyG's `HeteroData`: attributes of all types are placed once, and batches are built on the device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.sampler import HeteroSamplerOutput

from pyg_direct.errors import ArgumentError
from pyg_direct.features.hot_rows import Listing
from pyg_direct.features.multi_read import TypedRows
from pyg_direct.graph.hetero_topo import HeteroTopo, tell_apart
from pyg_direct.loader.collate.attributes import (
    FrameRows,
    PlacedRows,
    Slicer,
    check_rows,
    choose_slicer,
    slice_adjacency,
)
from pyg_direct.loader.collate.data import copy_store
from pyg_direct.loader.collate.stale_rows import Marks
from pyg_direct.runtime.host.tensor_views import LazyDict
from pyg_direct.sampler.graph_reader import place_rows, refuse_features
from pyg_direct.sampler.keyed_sampler import PackedOutput
from pyg_direct.sampling.hetero_sample import GeneralSample

# Rows by (type, key), and the tensors that own their memory.
Read: TypeAlias = tuple[Mapping[Any, Tensor], Sequence[Tensor]]
NOTHING: Read = {}, ()
# Attributes of relations, and of node types, that batches read, or that no mark is kept of.
_NOT_BARE = {"adj_t", "batch", "e_id", "num_nodes"}
_NOT_KEPT = {"adj_t", "batch", "edge_index"}


class Form(NamedTuple):
    """Parts of the store of a type or relation that are equal in all batches.

    Attributes:
        values: Attributes of the stores themselves, except for their mapping and their parent.
        keys: Names of the attributes that are read, and their names among the rows of a batch.
        has_count, has_ids: True if the mapping has `num_nodes` and `n_id`.
    """

    kind: Any
    cls: Any
    values: dict[str, Any]
    mapping: dict[str, Any]
    keys: Sequence[tuple[str, Any]]
    has_count: bool
    has_ids: bool

    @classmethod
    def of(cls, kind: Any, store: Any, keys: Sequence[str] = ()) -> Form:
        """Read the store of a graph."""
        values = {name: value for name, value in vars(store).items()
                  if name not in ("_cached_attr", "_mapping", "_parent")}  # fmt: skip
        mapping = dict(store._mapping)
        names = [(key, (kind, key)) for key in keys]
        return cls(kind, type(store), values, mapping, names, "num_nodes" in mapping, "n_id" in mapping)


class TypeRanking:
    """Source of the ranking of a node type's rows for a cache: the neighbor lists that contain its nodes."""

    def __init__(self, topology: HeteroTopo, kind: str) -> None:
        self._topology, self._number = topology, topology.node_types.index(kind)
        relations = np.flatnonzero(topology.reached == self._number)
        self._parts = [slice(int(topology.edge_starts[r]), int(topology.edge_starts[r + 1])) for r in relations]
        self.node_count = topology.num_nodes[kind]
        self.edge_count = sum(part.stop - part.start for part in self._parts)

    @property
    def indices(self) -> Tensor:
        """Ids within the type, list after list."""
        start, indices = int(self._topology.type_starts[self._number]), self._topology.indices
        if start == 0 and len(self._parts) == 1:
            return indices[self._parts[0]]
        return torch.cat([indices[part] - start for part in self._parts] or [indices[:0]])


class HeteroAttributes(PlacedRows):
    """Attributes of a `HeteroData`, each placed in memory that batches read.

    Args:
        data: The graph; read again for every epoch, so that edits take effect.
        topology: The sampled topology; None if it is not known.
        device, placement, feature_cache, store_dtype, sharing: See `PlacedRows`.
        by_adjacency: See `Attributes`.
        rankings: Source of the ranking of rows, by node type; the first rows of missing types are hot.

    Raises:
        ArgumentError: an attribute has fewer rows than the topology has nodes, or edges, of its type.
    """

    def __init__(self, data: HeteroData, topology: HeteroTopo | None, device: torch.device, placement: str,
                 feature_cache: int | str | None, store_dtype: torch.dtype | None = None,
                 sharing: Mapping[str, str] = MappingProxyType({}), by_adjacency: bool = True,
                 rankings: Mapping[Any, Listing] = MappingProxyType({})) -> None:  # fmt: skip
        super().__init__(device, placement, feature_cache, store_dtype, sharing)
        refuse_features(data)
        counts: dict[Any, int] = {} if topology is None else {**topology.num_nodes, **topology.num_edges}
        self._others: dict[tuple[Any, str], Slicer] = {}
        # Ids of a type that a batch does not have.
        self._none = torch.empty(0, dtype=torch.int64, device=device)
        # The rows of the edges of a relation, if they differ from the ids.
        places = {kind: place_rows(store, f"data[{kind}]", device) for kind, store in data.edge_items()
                  if by_adjacency and "adj_t" in store}  # fmt: skip
        self._places = {kind: own for kind, own in places.items() if own is not None}
        # By (type or relation, key).
        values: dict[Any, Any] = {}
        kinds: dict[Any, str] = {}
        ranked: dict[Any, Listing | None] = {}
        # The sliced attributes of each type or relation, and the ones left over after types are read together.
        self._keys: dict[Any, list[str]] = {}
        self._keys_beside: dict[Any, list[str]] = {}
        for place, stores in (("node", data.node_items()), ("edge", data.edge_items())):
            for kind, store in stores:
                placed = self._sort_out(data, place, kind, store)
                for key in (*placed, *(own for its, own in self._frames if its == kind)):
                    rows = counts.get(kind, 0) if kind not in self._places else store.edge_index.shape[1]
                    check_rows(f"data[{kind!r}].{key}", len(store[key]), place, rows)
                    ranked[kind, key] = rankings.get(kind) if place == "node" else None
                for key in placed:
                    values[kind, key], kinds[kind, key] = store[key], place
        self._place_all(values, kinds, ranked)
        # Afterwards: moving rows may write to them.
        self.marks = Marks(data)
        # Readers of the nodes of all types, and of the edges of all relations.
        self._typed: list[TypedRows] = []
        if topology is not None:
            of_edges = {name: feature for name, feature in self._edge.items() if name[0] not in self._places}
            self._typed = [TypedRows(self._node, topology.node_types), TypedRows(of_edges, topology.edge_types)]
        self._together = {name for typed in self._typed for name in typed.names}
        for kind, key in (*values, *self._others):
            self._keys.setdefault(kind, []).append(key)
            if (kind, key) not in self._together:
                self._keys_beside.setdefault(kind, []).append(key)
        # Relations as batches have them, for a graph whose relations have no sparse matrices or ids, and rows in memory
        # alone. `marks` notices changes of what they hold, except of rows that processes share.
        self._source = weakref.ref(data)
        self._relations: list[Form] | None = None
        if (not (sharing and self._edge)
                and all("edge_index" in store and not _NOT_BARE & store._mapping.keys() for store in data.edge_stores)
                and not any(kind in data._edge_store_dict for kind, _ in self._others)):  # fmt: skip
            self._relations = [Form.of(kind, store, self._keys.get(kind, ())) for kind, store in data.edge_items()]
        # Likewise node types, in the order of samples, if all attributes are rows in memory. Changes of values are not
        # looked for if processes share rows.
        self._types: list[Form] | None = None
        self._type_names = [*data._node_store_dict]
        if (topology is not None and not (sharing or self._others)
                and not any(_NOT_KEPT & store._mapping.keys() for store in data.node_stores)):  # fmt: skip
            self._types = [Form.of(kind, store, self._keys.get(kind, ())) for kind, store in data.node_items()]

    def _name_all(self) -> dict[Any, str]:
        # "paper.x", "author writes paper.edge_attr".
        return tell_apart({(kind, key): f"{kind if isinstance(kind, str) else ' '.join(kind)}.{key}"
                           for kind, key in (*self._node, *self._edge)})  # fmt: skip

    def _sort_out(self, data: HeteroData, place: str, kind: Any, store: Any) -> list[str]:
        """List the attributes whose rows will be placed; slicers of other attributes are noted."""
        placed = []
        for key, value in store.items():
            if key in ("edge_index", "adj_t", "num_nodes"):
                continue
            if key == "x" and isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0 \
                    and place == "node" and len(value) != store.num_nodes:  # fmt: skip
                raise ArgumentError(
                    f"data[{kind!r}].x must have a row for each of the {store.num_nodes} nodes, got {len(value)}"
                )
            if not (store.is_node_attr(key) if place == "node" else store.is_edge_attr(key)):
                continue
            slicer = choose_slicer(f"data[{kind!r}].{key}", value, data.__cat_dim__(key, value, store), self._device)
            if slicer is None:
                placed.append(key)
                continue
            if isinstance(slicer, FrameRows):
                self._frames[kind, key] = slicer, value, place
            self._others[kind, key] = slicer
        return placed

    def read_together(self, outs: Sequence[HeteroSamplerOutput]) -> list[Read]:
        """Read rows of nodes and edges for batches that were sampled together, if few launches can read the rows of
        all.
        """
        packed = [out.packed for out in outs if isinstance(out, PackedOutput)]
        samples = [sample for sample in packed if sample is not None]
        edges = [sample.packed for sample in samples if sample.packed is not None]
        if not self._together or len(edges) < len(outs):
            return [NOTHING] * len(outs)
        first = samples[0]
        nodes, _, edge_ids = first.memory
        sizes = [size for sample in samples for size in _count_nodes(sample)]
        if first.num_together != sum(sizes) or any(sample.memory[0] is not nodes for sample in samples):
            # Each batch has its own memory, or some batches that share it are missing here.
            return [NOTHING] if len(outs) == 1 else [self.read_together([out])[0] for out in outs]
        of_nodes, of_edges = self._typed
        rows, shared = of_nodes.read(nodes, sizes, first.starts)
        if of_edges.names:
            counts = [size for own in edges for size in own.sizes]
            edge_rows, more = of_edges.read(edge_ids, counts, first.edge_starts)
            rows, shared = [*map(_join, rows, edge_rows)], [*shared, *more]
        return [(own, shared) for own in rows]

    def build(self, data: HeteroData, out: HeteroSamplerOutput, *, checked: bool = True,
              memory: list[Any] | None = None, read: Read | None = None, notes: bool = False
              ) -> HeteroData:  # fmt: skip
        """Build the batch of a sampler's output, as PyG's loader does, on the device.

        Args:
            data: Source of attributes that are not sliced.
            out: Nodes, edges with final ids; types may be missing, which are then empty.
            checked: True if the ids come from our sampler.
            memory: Receives the tensors that own the batch's memory, if types share memory.
            read: Rows from `read_together`; None to read them here.
            notes: Write ids, trees and counts of the output too, see `note_typed`.
        """
        packed = out.packed if checked and isinstance(out, PackedOutput) else None
        made: list[Any] = [] if packed is None else [*packed.memory]
        if packed is not None and out.batch is not packed.batch:
            made += (out.batch or {}).values()
        if read is None:
            (read,) = self.read_together([out]) if checked else [NOTHING]
        rows, shared = read
        made += shared
        none, make = self._none, None
        together = self._together if shared else ()
        if notes and packed is not None and self._relations is not None and self._is_plain(data, packed, out):
            types = self._types if self._types is not None and self._is_whole(out, packed) else None
            # Rows that were read together are viewed at the first use.
            if len(together) < len(self._node) + len(self._edge):
                beside = {name: feature.read(ids[name[0]])
                          for ids, features in (({} if types is None else out.node, self._node), (out.edge, self._edge))
                          for name, feature in features.items() if name[0] in ids and name not in together}  # fmt: skip
                rows, made = {**rows, **beside}, [*made, *beside.values()]
            make = partial(_make_relations, self._relations, packed, rows)
            if types is not None:
                if memory is not None:
                    memory += made
                return _compose(data, types, out, packed, rows, make)
        is_plain, batch = make is not None, _copy_stores(data, make)
        nodes, keys = batch._node_store_dict, self._keys_beside if together else self._keys
        known = nodes if is_plain else {**nodes, **batch._edge_store_dict}
        for (kind, key), value in rows.items():
            mapping = known[kind]._mapping if kind in known else {}
            if key in mapping:
                mapping[key] = value
        for kind, store in nodes.items():
            mapping = store._mapping
            if kind in keys:
                self._slice(kind, keys[kind], mapping, out.node.get(kind, none), checked, made)
            if "num_nodes" in mapping:
                mapping["num_nodes"] = out.node.get(kind, none).numel()
        edge: Mapping[Any, Any] = {} if is_plain else out.edge or {}
        for kind, store in {} if is_plain else batch._edge_store_dict.items():
            pair, mapping, ids = None if packed is None else packed.edge_index.get(kind), store._mapping, edge.get(kind)
            if pair is None:
                is_sampled = packed is None and kind in out.row
                pair = torch.stack([out.row[kind], out.col[kind]] if is_sampled else [none, none])
                ids = none if ids is None and not is_sampled else ids
            if "edge_index" in mapping:
                mapping["edge_index"] = pair
            if "adj_t" in mapping:
                sizes = out.node.get(kind[2], none).numel(), out.node.get(kind[0], none).numel()
                store.adj_t = slice_adjacency(store.adj_t, pair[0], pair[1], ids, sizes)
                made.append(store.adj_t)
            if kind in keys:
                places = self._places.get(kind)
                own = ids if ids is None or places is None else places[ids]
                self._slice(kind, keys[kind], mapping, own, checked, made)
        if notes:
            note_typed(batch, out, has_edges=is_plain)
        if packed is not None and memory is not None:
            memory += made
        return batch

    def _is_plain(self, data: HeteroData, packed: GeneralSample, out: HeteroSamplerOutput) -> bool:
        """Report whether relations get their edges, the ids of edges, counts and rows, in the sample's order."""
        source: Any = self._source()
        # Lists: names that are one object are equal without a look at them.
        return (packed.packed is not None and source is data
                and out.edge is packed.edge and out.num_sampled_edges is packed.num_sampled_edges is not None
                and type(data).__copy__ is HeteroData.__copy__
                and [*data._edge_store_dict] == [*packed.packed.relations])  # fmt: skip

    def _is_whole(self, out: HeteroSamplerOutput, sample: GeneralSample) -> bool:
        """Report whether an output has all node types of its sample, in order, and at most trees of its own."""
        names = [*sample.sizes]
        return (out.node is sample.node and out.num_sampled_nodes is sample.num_sampled_nodes and out.orig_row is None
                and names == self._type_names
                and (out.batch is sample.batch or (out.batch is not None and [*out.batch] == names)))  # fmt: skip

    def _slice(self, kind: Any, keys: Sequence[str], mapping: dict[str, Any], ids: Tensor | None, checked: bool,
               made: list[Any]) -> None:  # fmt: skip
        """Take the rows of these attributes of a type or relation; new tensors are added to `made`."""
        for key in keys:
            if key not in mapping:
                continue
            if ids is None:
                # Merged edges have no attributes.
                del mapping[key]
                continue
            name = kind, key
            if name in self._others:
                value = self._others[name](mapping[key], ids)
            else:
                feature = self._node[name] if name in self._node else self._edge[name]
                value = feature.read(ids) if checked else feature[ids]
            mapping[key] = value
            made.append(value)


def note_typed(batch: Any, out: HeteroSamplerOutput, has_edges: bool = False) -> None:
    """Write ids, trees and counts into a batch; with `has_edges` those of relations are there already."""
    # PyG's own setter takes as long as the launch of a kernel.
    trees, nodes = (getattr(out, name) or {} for name in ("batch", "num_sampled_nodes"))
    known = batch._node_store_dict
    for kind, ids in out.node.items():
        store = (known[kind] if kind in known else batch[kind])._mapping
        if ids is not None:
            store.setdefault("n_id", ids)
        if (tree := trees.get(kind)) is not None:
            store["batch"] = tree
        if (counts := nodes.get(kind)) is not None:
            store["num_sampled_nodes"] = counts
    known, edges = batch._edge_store_dict, {} if has_edges else out.num_sampled_edges or {}
    for kind, ids in {} if has_edges else (out.edge or dict.fromkeys(edges)).items():
        store = (known[kind] if kind in known else batch[kind])._mapping
        if ids is not None:
            store.setdefault("e_id", ids)
        if (counts := edges.get(kind)) is not None:
            store["num_sampled_edges"] = counts
    for kind in out.orig_row or {}:
        batch[kind]._orig_edge_index = torch.stack([out.orig_row[kind], out.orig_col[kind]])


def _join(rows: Mapping[Any, Tensor], more: Mapping[Any, Tensor]) -> LazyDict[Any, Tensor]:
    """Join rows of nodes and of edges, which are viewed at the first use."""
    return LazyDict(lambda: {**rows, **more})


def _count_nodes(sample: GeneralSample) -> Iterable[int]:
    return sample.sizes.values() or [ids.numel() for ids in sample.node.values()]


def _compose(data: HeteroData, types: Sequence[Form], out: HeteroSamplerOutput, sample: GeneralSample,
             rows: Mapping[Any, Tensor], make: Callable[[weakref.ref[Any]], dict[Any, Any]]) -> HeteroData:  # fmt: skip
    """Build the batch of a sample as `HeteroAttributes.build` does; its types and relations are made at the first use.

    Args:
        out, sample: Output of the sampler, and its sample, with all node types.
        make: See `_copy_stores`.
    """
    batch, parent = _open_batch(data)
    values = batch.__dict__
    values["_node_store_dict"] = LazyDict(partial(_make_types, types, sample, out.batch, rows, parent))
    values["_edge_store_dict"] = LazyDict(partial(make, parent))
    return batch


def _make_types(types: Sequence[Form], sample: GeneralSample, trees: Mapping[str, Tensor] | None,
                rows: Mapping[Any, Tensor], parent: weakref.ref[Any]) -> dict[Any, Any]:  # fmt: skip
    """Make the node types of a batch, with the nodes of a sample, their rows, trees and counts."""
    made: dict[Any, Any] = {}
    counts = sample.num_sampled_nodes
    # Without a call or a look-up for each value.
    for (kind, cls, values, given, keys, has_count, has_ids), ids, size in zip(
        types, sample.node.values(), sample.sizes.values(), strict=True
    ):
        made[kind] = store = cls.__new__(cls)
        own = store.__dict__
        own.update(values)
        own["_parent"] = parent
        own["_mapping"] = mapping = given.copy()
        for key, name in keys:
            mapping[key] = rows[name]
        if has_count:
            mapping["num_nodes"] = size
        if not has_ids:
            mapping["n_id"] = ids
        if trees is not None:
            mapping["batch"] = trees[kind]
        if counts is not None:
            mapping["num_sampled_nodes"] = counts[kind]
    return made


def _open_batch(data: HeteroData) -> tuple[HeteroData, weakref.ref[Any]]:
    """Return (a copy of a graph whose types and relations are still those of the graph, a reference to the copy)."""
    batch = data.__class__.__new__(data.__class__)
    parent, values = weakref.ref(batch), batch.__dict__
    values.update(data.__dict__)
    values["_global_store"] = copy_store(data._global_store, parent)
    return batch, parent


def _copy_stores(data: HeteroData, make: Callable[[weakref.ref[Any]], dict[Any, Any]] | None) -> HeteroData:
    """Copy a graph as `copy.copy(data)` does, which is slow for many types.

    Args:
        make: Makes the relations of the copy at their first use; None copies those of the graph.
    """
    if type(data).__copy__ is not HeteroData.__copy__:
        return copy.copy(data)
    batch, parent = _open_batch(data)
    values = batch.__dict__
    values["_node_store_dict"] = {kind: copy_store(store, parent) for kind, store in data._node_store_dict.items()}
    if make is None:
        values["_edge_store_dict"] = {kind: copy_store(store, parent) for kind, store in data._edge_store_dict.items()}
    else:
        values["_edge_store_dict"] = LazyDict(partial(make, parent))
    return batch


def _make_relations(relations: Sequence[Form], sample: GeneralSample, rows: Mapping[Any, Tensor],
                    parent: weakref.ref[Any]) -> dict[Any, Any]:  # fmt: skip
    """Make the relations of a batch, with the edges of a sample, their ids, counts and rows."""
    assert sample.packed is not None
    made: dict[Any, Any] = {}
    # Without a call, a look-up or a copy for each relation, of which there may be a hundred.
    columns: Any = sample.packed.view_all()
    if type(sample.edge_index) is not LazyDict or type(sample.edge) is not LazyDict:
        # Tensors that the program has are those of its batch, whose writes torch counts.
        columns = sample.edge_index.values(), sample.edge.values(), columns[2]
    for (kind, cls, values, given, keys, _, _), pair, ids, counts in zip(relations, *columns, strict=True):
        made[kind] = store = cls.__new__(cls)
        own = store.__dict__
        own.update(values)
        own["_parent"] = parent
        own["_mapping"] = mapping = given.copy()
        mapping["edge_index"] = pair
        for key, name in keys:
            mapping[key] = rows[name]
        mapping["e_id"] = ids
        mapping["num_sampled_edges"] = counts
    return made

"""The door to PyG's `Data`: its attributes placed once, and batches of them put together on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.features.feature import Feature
from pyg_direct.features.hotness import Listing, Ranked
from pyg_direct.features.rowfile import as_tensor
from pyg_direct.features.shares import Demand, share_budget
from pyg_direct.features.together import group_narrow
from pyg_direct.graph.placed import PlacedTopology
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.loader.copied import copy_data
from pyg_direct.loader.counted import tell_count
from pyg_direct.loader.graph import refuse_features
from pyg_direct.loader.placement import Choice, Placed, Rows, choose_places
from pyg_direct.loader.slicer import Slicer, choose_slicer
from pyg_direct.loader.superbatch import SharedRows
from pyg_direct.runtime.device import budget_of, free_bytes
from pyg_direct.runtime.mode import version_of
from pyg_direct.runtime.probe import choose_host_memory
from pyg_direct.sampling.sample import Sample

_NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id")
_FEATURES: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], weakref.ref[Feature]]] = {}
_TOPOLOGIES: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[CSRTopo]]] = {}
# Compressing on the GPU takes about this many bytes an edge at its peak.
_COMPRESS_BYTES = 64


def read_topology(data: Data, device: torch.device) -> CSRTopo:
    """The topology of a graph; loaders over the same edges share one."""
    edges = data.adj_t if "edge_index" not in data and "adj_t" in data else data.edge_index
    if edges is None:
        return CSRTopo(torch.empty(2, 0, dtype=torch.int64), num_nodes=int(data.num_nodes))
    if isinstance(edges, np.ndarray):
        raise ArgumentTypeError("data.edge_index must be a tensor, got ndarray")
    key = (id(edges), version_of(edges), int(data.num_nodes), device)
    known = _TOPOLOGIES.get(key)
    if known is not None and known[0]() is edges and known[1]() is not None:
        return known[1]()  # type: ignore[return-value]
    if isinstance(edges, Tensor) and edges.layout == torch.strided:
        try:
            topology = _compress(edges, int(data.num_nodes), device)
        except IdError as error:
            raise IdError(tell_count(str(error), data)) from error
    else:
        if isinstance(edges, Tensor) and edges.layout == torch.sparse_csc:
            # Its compressed dimension would be the sources.
            raise ArgumentError("data.adj_t must be compressed by row; call to_sparse_csr() on this CSC tensor")
        topology = CSRTopo(edges)
        if topology.node_count != data.num_nodes:
            raise ArgumentError(
                f"data.num_nodes must equal the rows {topology.node_count} of adj_t, got {data.num_nodes}"
            )
    _remember(_TOPOLOGIES, key, edges, topology)
    return topology


def _compress(edges: Tensor, num_nodes: int, device: torch.device) -> CSRTopo:
    """The topology of a list of edges, made on the GPU where there is room."""
    if device.type == "cuda" and edges.shape[-1] * _COMPRESS_BYTES < free_bytes(device.index) // 2:
        try:
            return CSRTopo(edges.to(device), num_nodes=num_nodes)
        except torch.OutOfMemoryError:
            # What is free need not be in one piece, and may have been taken meanwhile.
            pass
        torch.cuda.empty_cache()
    return CSRTopo(edges.cpu(), num_nodes=num_nodes)


def _remember(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], source: Any, value: Any) -> None:
    for old in [k for k, (ref, made) in table.items() if ref() is None or made() is None]:
        del table[old]
    table[key] = (weakref.ref(source), weakref.ref(value))


class Ranking(NamedTuple):
    """What ranks rows for a cache: the neighbor lists where the GPU reads them, which counts them faster."""

    indices: Tensor
    node_count: int
    edge_count: int

    @classmethod
    def of(cls, placed: PlacedTopology) -> Ranking:
        """The lists of a placed topology."""
        return cls(placed.indices, placed.num_nodes, placed.num_edges)


def summarise(topology: CSRTopo, placed: PlacedTopology) -> Placed:
    """The topology in the line about placement."""
    where = str(placed.device) if placed.placement == "cuda" else placed.placement
    return Placed("topology", topology.num_bytes, where)


class PlacedRows:
    """The attributes of a graph with rows, each placed where batches read it.

    Args:
        device: The device of batches.
        placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`.
        feature_cache: GPU memory for hot rows of attributes on the host: bytes, `"2G"` or `"20%"`. None is what
            `auto` leaves free of its budget (see `budget_of`), else nothing.
        store_dtype: What float32 rows of more than 16 bytes are kept as; see `Feature`.
        sharing: `cache_policy` and `cold_policy` of the `Feature` of each wide node attribute, which the processes of
            the group then share; empty for none.
    """

    def __init__(self, device: torch.device, placement: str, feature_cache: int | str | None,
                 store_dtype: torch.dtype | None,
                 sharing: Mapping[str, str] = MappingProxyType({})) -> None:  # fmt: skip
        self._device, self._placement, self._cache, self._store_dtype = device, placement, feature_cache, store_dtype
        self._sharing = dict(sharing)
        self._node: dict[str, Feature] = {}
        self._edge: dict[str, Feature] = {}

    def _is_shared(self, value: Any, kind: str) -> bool:
        """Whether all processes keep the rows together; the same in each of them, whatever memory it has free."""
        return bool(self._sharing) and kind == "node" and not Rows("", _count_bytes(value), len(value), True).is_narrow

    def _choose_shared(self, values: dict[str, Any]) -> dict[str, Choice]:
        """What GPU memory goes to the hot rows of attributes that processes share."""
        total = sum(map(_count_bytes, values.values()))
        fills = self._device.type == "cuda" and self._placement == "auto" and self._cache is None
        budget = budget_of(free_bytes(self._device.index)) if fills else 0
        return {key: Choice("host", budget * _count_bytes(value) // total) for key, value in values.items()}

    def _choose(self, values: dict[str, Any], kinds: dict[str, str], ranked_edges: bool = False) -> dict[str, Choice]:
        """Where each attribute goes; what an earlier epoch put on the GPU is no longer free there, and stays."""
        shared = {key: value for key, value in values.items() if self._is_shared(value, kinds[key])}
        if shared:
            alone = {key: value for key, value in values.items() if key not in shared}
            places = self._choose_shared(shared) | self._choose(alone, kinds, ranked_edges)
            return {key: places[key] for key in values}
        if self._device.type == "cpu":
            return dict.fromkeys(values, Choice("host"))
        if self._placement == "cuda":
            return dict.fromkeys(values, Choice("cuda"))
        is_auto = self._placement == "auto"
        rows = [Rows(key, _count_bytes(value), len(value), ranked_edges or kinds[key] == "node")
                for key, value in values.items()]  # fmt: skip
        there = [row.name for row in rows if as_tensor(values[row.name]).is_cuda
                 or ((is_auto or row.is_narrow) and self._find(values[row.name], "cuda") is not None)]  # fmt: skip
        rows = [row for row in rows if row.name not in there]
        kept = [row for row in rows if self._find(values[row.name], self._placement) is not None]
        places = choose_places([row for row in rows if row not in kept], budget_of(free_bytes(self._device.index)),
                               is_auto=is_auto, fill_cache=is_auto and self._cache is None)  # fmt: skip
        places |= dict.fromkeys((row.name for row in kept), Choice("host")) | dict.fromkeys(there, Choice("cuda"))
        return {key: places[key] for key in values}

    def _place_all(self, values: dict[str, Any], kinds: dict[str, str], rankings: Mapping[str, Listing | None]) -> None:
        """Place attributes; `kinds` says `node` or `edge` for each, `rankings` what ranks the rows of some."""
        is_one = not self._sharing and any(kinds[key] == "edge" and isinstance(ranking, Ranked)
                                           for key, ranking in rankings.items())  # fmt: skip
        choices = self._choose(values, kinds, is_one)
        caches: dict[str, int | str] = {
            key: choice.hot_bytes if self._cache is None or kinds[key] == "edge" else self._cache
            for key, choice in choices.items()}  # fmt: skip
        if is_one:
            caches |= self._share_cache(values, choices, rankings)
        for key, choice in choices.items():
            places = self._node if kinds[key] == "node" else self._edge
            places[key] = self._place(values[key], kinds[key], choice, caches[key], rankings.get(key))

    def _share_cache(self, values: dict[str, Any], choices: Mapping[str, Choice],
                     rankings: Mapping[str, Listing | None]) -> dict[str, int]:  # fmt: skip
        """Bytes for hot rows of attributes of nodes and edges whose chances are known, from one budget."""
        demands = {}
        for key, choice in choices.items():
            ranking, tensor = rankings.get(key), as_tensor(values[key])
            if (
                choice.place == "host"
                and isinstance(ranking, Ranked)
                and self._find(values[key], self._placement) is None
            ):
                dtype = self._narrow(tensor).get("store_dtype", tensor.dtype)
                demands[key] = Demand(ranking.scores, tensor[:1].numel() * dtype.itemsize)
        filled = sum(choices[key].hot_bytes for key in demands)
        return share_budget(demands, filled if self._cache is None else self._cache)

    def _place(self, value: Any, kind: str, choice: Choice, cache: int | str, ranking: Listing | None) -> Feature:
        placement = "cuda" if choice.place == "cuda" else self._placement
        known = self._find(value, placement)
        if known is not None:
            return known
        tensor = as_tensor(value)
        if placement == "cuda":
            cache = tensor.numel() * tensor.element_size()
        host = placement if placement in ("unified", "pinned") else "unified"
        if placement == "auto" and self._device.type == "cuda":
            host = choose_host_memory(self._device.index)
        if self._is_shared(value, kind):
            many: dict[str, Any] = {"device_list": "group", **self._sharing}
            if many["cold_policy"] == "auto" and self._placement in ("unified", "pinned"):
                many["cold_policy"] = self._placement
            cache = "100%" if self._placement == "cuda" else cache
        else:
            many = {}
        feature = Feature(device_cache_size=cache, csr_topo=ranking, device=self._device, placement=host, **many,
                          **self._narrow(tensor))  # fmt: skip
        feature.from_cpu_tensor(tensor)
        if kind == "edge":
            # Scores of edges take GPU memory.
            feature.csr_topo = None
        # Moving gave the tensor another address: the key is made afterwards.
        _remember(_FEATURES, self._key(value, placement), value, feature)
        return feature

    def _narrow(self, tensor: Tensor) -> dict[str, Any]:
        """Labels and other short rows are kept as they are."""
        is_narrow = Rows("", tensor.numel() * tensor.element_size(), len(tensor), False).is_narrow
        is_stored = self._store_dtype is not None and tensor.dtype == torch.float32 and not is_narrow
        return {"store_dtype": self._store_dtype} if is_stored else {}

    def _key(self, value: Any, placement: str) -> tuple[Any, ...]:
        tensor = as_tensor(value)
        return (id(value), tensor.data_ptr(), version_of(tensor), tensor.shape, self._device, placement, self._cache,
                self._store_dtype, *self._sharing.values())  # fmt: skip

    def _find(self, value: Any, placement: str) -> Feature | None:
        """The feature that holds `value` in this placement already."""
        source, feature = _FEATURES.get(self._key(value, placement), (None, None))
        return feature() if source is not None and feature is not None and source() is value else None

    def describe(self) -> dict[str, Feature]:
        """The placed attributes by name."""
        return {**self._node, **self._edge}

    def on_host(self) -> dict[str, Feature]:
        """The node attributes that the GPU reads over the link, by name."""
        return {name: feature for name, feature in self._node.items() if feature.placement in ("unified", "pinned")}

    def summarise(self) -> list[Placed]:
        """The attributes in the line about placement: wide ones one by one, labels and masks together."""
        wide, narrow = [], Placed("", 0, str(self._device))
        for name, feature in self.describe().items():
            num_rows, num_bytes = feature.shape[0], feature.shape.numel() * feature.dtype.itemsize
            where = str(self._device) if feature.placement == "cuda" else feature.placement
            if where == narrow.where and Rows(name, num_bytes, num_rows, False).is_narrow:
                narrow = Placed(f"{narrow.name}+{name}".lstrip("+"), narrow.num_bytes + num_bytes, where)
            else:
                hot = 0.0 if feature.placement == "cuda" else feature.num_hot_rows / max(1, num_rows)
                wide.append(Placed(name, num_bytes, where, hot))
        return [*wide, narrow] if narrow.name else wide


class Attributes(PlacedRows):
    """The node and edge attributes of a `Data`, each placed where batches read it.

    Args:
        data: The graph; read anew for every epoch, so that edits take effect.
        topology: What ranks rows; None takes the first ones for hot.
        device, placement, feature_cache, store_dtype, sharing: See `PlacedRows`.
        edges: What ranks rows of edges; None leaves them without hot ones.
    """

    def __init__(self, data: Data, topology: Listing | None, device: torch.device, placement: str,
                 feature_cache: int | str | None, store_dtype: torch.dtype | None = None,
                 sharing: Mapping[str, str] = MappingProxyType({}), edges: Listing | None = None) -> None:  # fmt: skip
        super().__init__(device, placement, feature_cache, store_dtype, sharing)
        refuse_features(data)
        self._others: dict[str, Callable[[Any, Sample], Any]] = {}
        kinds = self._sort_out(data)
        rankings = {key: topology if kind == "node" else edges for key, kind in kinds.items()}
        self._place_all({key: data[key] for key in kinds}, kinds, rankings)
        self._groups = group_narrow(self._node)
        grouped = {name for group in self._groups for name in group.names}
        self._single = {name: feature for name, feature in self._node.items() if name not in grouped}
        # Other slicers may make what they like.
        self._is_all_known = {"edge_index", "num_nodes"}.issuperset(self._others)

    def _sort_out(self, data: Data) -> dict[str, str]:
        """`node` or `edge` for each attribute with rows; how to slice what batches take in another way is noted."""
        store, kinds = data._store, {}
        for key, value in store.items():
            if key == "edge_index":
                self._others[key] = lambda _, sample: sample.edge_index
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
            else:
                self._others[key] = partial(_slice_sampled, kind, slicer)
        return kinds

    def build(self, data: Data, sample: Sample, input_id: Tensor, *, checked: bool = True,
              shared: Mapping[str, SharedRows] = MappingProxyType({}),
              memory: list[Any] | None = None) -> Data:  # fmt: skip
        """The batch as PyG's loader gives it, on the device; `data` is the graph it was sampled from.

        Args:
            data: Read for what is not sliced; what is was placed when this object was made.
            sample: The sampled nodes and edges.
            input_id: Positions of the seeds among the input nodes.
            checked: Whether the ids are as the sampler made them; a user's transform may give others.
            shared: Node attributes whose rows were read already, together with those of other batches.
            memory: Gets what the memory of the batch belongs to, where all of that is known.
        """
        held: list[Any] = [*sample.memory]
        out = copy_data(data)
        # PyG's own way to set one attribute takes as long as a kernel's launch.
        store = out._store._mapping
        if checked:
            for group in self._groups:
                for key, rows in group.read(sample.n_id, held).items():
                    if key in store:
                        store[key] = rows
        for key, feature in (self._single if checked else self._node).items():
            if key in shared:
                store[key] = shared[key].read(sample.n_id)
                held.append(store[key])
            elif key in store:
                store[key] = feature.read(sample.n_id) if checked else feature[sample.n_id]
                held.append(store[key])
        for key, feature in self._edge.items():
            if key in store:
                store[key] = feature.read(sample.e_id) if checked else feature[sample.e_id]
                held.append(store[key])
        for key, slicer in self._others.items():
            if key in store:
                store[key] = slicer(store[key], sample)
        store.setdefault("n_id", sample.n_id)
        store.setdefault("e_id", sample.e_id)
        store["num_sampled_nodes"] = sample.num_sampled_nodes
        store["num_sampled_edges"] = sample.num_sampled_edges
        store["input_id"] = input_id
        store["batch_size"] = input_id.numel()
        if memory is not None and checked and sample.memory and self._is_all_known:
            memory += held
        return out


def _count_bytes(value: Any) -> int:
    tensor = as_tensor(value)
    return tensor.numel() * tensor.element_size()


def _slice_sampled(kind: str, slicer: Slicer, value: Any, sample: Sample) -> Any:
    return slicer(value, sample.n_id if kind == "node" else sample.e_id)


def _slice_adjacency(adj_t: Any, sample: Sample) -> Any:
    source, target = sample.edge_index
    size = sample.n_id.numel()
    # Edges without ids, which a user's transform left, have no values.
    has_ids = sample.e_id.numel() == source.numel()
    if isinstance(adj_t, Tensor):
        values = (
            adj_t.values().to(source.device)[sample.e_id] if has_ids else torch.ones(source.numel()).to(source.device)
        )
        return torch.sparse_coo_tensor(torch.stack([target, source]), values, (size, size)).to_sparse_csr()
    value = adj_t.storage.value()
    value = None if value is None or not has_ids else value.to(source.device)[sample.e_id]
    return type(adj_t)(row=target, col=source, value=value, sparse_sizes=(size, size), is_sorted=False, trust_data=True)

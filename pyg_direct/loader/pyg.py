"""The door to PyG's `Data`: its attributes placed once, and batches of them put together on the device."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.errors import ArgumentError
from pyg_direct.features.feature import Feature
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.runtime.device import free_bytes
from pyg_direct.sampling.sample import Sample

_NODE_KEYS = ("x", "feat", "pos", "batch", "node_type", "n_id")
# Share of the free GPU memory that node and edge attributes may take under placement="auto".
_GPU_SHARE = 0.5
# Rows of at most so many bytes, such as labels and masks, go to the GPU also where wider ones stay on the host: a
# read over the link costs the same for one byte as for a line.
_NARROW_ROW = 16
_FEATURES: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], weakref.ref[Feature]]] = {}
_TOPOLOGIES: dict[tuple[Any, ...], tuple[weakref.ref[Any], weakref.ref[CSRTopo]]] = {}
# Compressing on the GPU takes about this many bytes an edge at its peak.
_COMPRESS_BYTES = 64


def read_topology(data: Data, device: torch.device) -> CSRTopo:
    """The topology of a graph; loaders over the same edges share one."""
    edges = data.adj_t if "edge_index" not in data and "adj_t" in data else data.edge_index
    if edges is None:
        raise ArgumentError("data must hold edge_index or adj_t, got neither")
    key = (id(edges), getattr(edges, "_version", 0), int(data.num_nodes), device)
    known = _TOPOLOGIES.get(key)
    if known is not None and known[0]() is edges and known[1]() is not None:
        return known[1]()  # type: ignore[return-value]
    if not isinstance(edges, Tensor) or edges.layout != torch.strided:
        topology = CSRTopo(edges)
        if topology.node_count != data.num_nodes:
            raise ArgumentError(
                f"data.num_nodes must equal the rows {topology.node_count} of adj_t, got {data.num_nodes}"
            )
    else:
        on_gpu = device.type == "cuda" and edges.shape[-1] * _COMPRESS_BYTES < free_bytes(device.index) // 2
        topology = CSRTopo(edges.to(device) if on_gpu else edges.cpu(), num_nodes=int(data.num_nodes))
    _remember(_TOPOLOGIES, key, edges, topology)
    return topology


def _remember(table: dict[tuple[Any, ...], Any], key: tuple[Any, ...], source: Any, value: Any) -> None:
    for old in [k for k, (ref, made) in table.items() if ref() is None or made() is None]:
        del table[old]
    table[key] = (weakref.ref(source), weakref.ref(value))


class Attributes:
    """The node and edge attributes of a `Data`, each placed where batches read it.

    Args:
        data: The graph; read anew for every epoch, so that edits take effect.
        topology: Its topology, to rank rows by.
        device: The device of batches.
        placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`.
        feature_cache: GPU memory for hot rows of attributes on the host: bytes, `"2G"` or `"20%"`; None for none.
    """

    def __init__(self, data: Data, topology: CSRTopo, device: torch.device, placement: str,
                 feature_cache: int | str | None) -> None:  # fmt: skip
        self._device, self._cache, self._topology = device, feature_cache, topology
        self._node: dict[str, Feature] = {}
        self._edge: dict[str, Feature] = {}
        self._other_dim: dict[str, tuple[Any, int, str]] = {}
        store = data._store
        rows = []
        for key, value in store.items():
            if key in ("edge_index", "adj_t", "num_nodes"):
                continue
            kind = "node" if store.is_node_attr(key) else "edge" if store.is_edge_attr(key) else "other"
            if key in _NODE_KEYS and kind != "node" and isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0:
                raise ArgumentError(
                    f"data.{key} must have a row for each of the {data.num_nodes} nodes, got {value.shape[0]}"
                )
            if kind == "other" or not isinstance(value, (Tensor, np.ndarray)):
                continue
            dim = data.__cat_dim__(key, value, store)
            if dim in (0, -value.ndim):
                rows.append((key, value, kind))
            else:
                self._other_dim[key] = (_as_tensor(value), dim, kind)
        left = 0 if device.type == "cpu" else int(_GPU_SHARE * free_bytes(device.index))
        for key, value, kind in sorted(rows, key=lambda row: _count_bytes(row[1])):
            num_bytes, target = _count_bytes(value), placement
            narrow = num_bytes <= _NARROW_ROW * len(value)
            # What an earlier epoch put on the GPU is no longer free there, and stays.
            if device.type == "cuda" and (narrow or target == "auto") and self._find(value, "cuda") is not None:
                target = "cuda"
            elif device.type == "cuda" and (
                (narrow and 4 * num_bytes <= left) or (target == "auto" and num_bytes <= left)
            ):
                target = "cuda"
                left -= num_bytes
            (self._node if kind == "node" else self._edge)[key] = self._place(value, kind, target)

    def _place(self, value: Any, kind: str, placement: str) -> Feature:
        known = self._find(value, placement)
        if known is not None:
            return known
        tensor = _as_tensor(value)
        cache: int | str = 0 if self._cache is None or kind == "edge" else self._cache
        if placement == "cuda":
            cache = tensor.numel() * tensor.element_size()
        feature = Feature(device_cache_size=cache, csr_topo=self._topology if kind == "node" else None,
                          device=self._device, placement=placement if placement == "pinned" else "unified")  # fmt: skip
        feature.from_cpu_tensor(tensor)
        # Moving gave the tensor another address: the key is made afterwards.
        _remember(_FEATURES, self._key(value, placement), value, feature)
        return feature

    def _key(self, value: Any, placement: str) -> tuple[Any, ...]:
        tensor = _as_tensor(value)
        return id(value), tensor.data_ptr(), tensor._version, tensor.shape, self._device, placement, self._cache

    def _find(self, value: Any, placement: str) -> Feature | None:
        """The feature that holds `value` in this placement already."""
        source, feature = _FEATURES.get(self._key(value, placement), (None, None))
        return feature() if source is not None and feature is not None and source() is value else None

    def describe(self) -> dict[str, Feature]:
        """The placed attributes by name."""
        return {**self._node, **self._edge}

    def build(self, data: Data, sample: Sample, input_id: Tensor) -> Data:
        """The batch as PyG's loader gives it, on the device; `data` is the graph it was sampled from."""
        out = copy.copy(data)
        store = out._store
        for key in list(data._store.keys()):
            if key == "edge_index":
                store[key] = sample.edge_index
            elif key == "adj_t":
                store[key] = _slice_adjacency(data.adj_t, sample)
            elif key == "num_nodes":
                store[key] = sample.n_id.numel()
            elif key in self._node:
                store[key] = self._node[key][sample.n_id]
            elif key in self._edge:
                store[key] = self._edge[key][sample.e_id]
            elif key in self._other_dim:
                value, dim, kind = self._other_dim[key]
                index = sample.n_id if kind == "node" else sample.e_id
                store[key] = value.index_select(dim, index.to(value.device)).to(self._device)
            elif data._store.is_node_attr(key):
                store[key] = [data[key][i] for i in sample.n_id.tolist()]
        if "n_id" not in out:
            out.n_id = sample.n_id
        if "e_id" not in out:
            out.e_id = sample.e_id
        out.num_sampled_nodes = sample.num_sampled_nodes
        out.num_sampled_edges = sample.num_sampled_edges
        out.input_id = input_id
        out.batch_size = input_id.numel()
        return out


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    with warnings.catch_warnings():
        # A read-only memory map is only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(value)


def _count_bytes(value: Any) -> int:
    tensor = _as_tensor(value)
    return tensor.numel() * tensor.element_size()


def _slice_adjacency(adj_t: Any, sample: Sample) -> Any:
    source, target = sample.edge_index
    size = sample.n_id.numel()
    if isinstance(adj_t, Tensor):
        values = adj_t.values().to(source.device)[sample.e_id]
        return torch.sparse_coo_tensor(torch.stack([target, source]), values, (size, size)).to_sparse_csr()
    value = adj_t.storage.value()
    value = None if value is None else value.to(source.device)[sample.e_id]
    return type(adj_t)(row=target, col=source, value=value, sparse_sizes=(size, size), is_sorted=False, trust_data=True)

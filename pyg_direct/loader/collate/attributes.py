"""Attributes of a graph, with their rows in the memory that batches read; loaders over one graph share the rows.

`choose_slicer` selects how batches read attributes that are not dense rows in memory.

Columns of a `TensorFrame` of PyTorch Frame are placed in memory that batches read, as other attributes are. Columns of
one kind are a table: numbers, categories, times, embeddings, and the frame's target. Values of any length,
such as words, are cut out by the frame itself, where the program put them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor, TensorFrame

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.features.feature import Feature
from pyg_direct.features.hot_rows import Demand, Listing, Ranked, share_budget
from pyg_direct.features.row_files import as_tensor, slice_along
from pyg_direct.graph.pyg_edges import as_rows
from pyg_direct.loader.memory_placement import Choice, Placed, Rows, choose_places
from pyg_direct.loader.prefetch.drivers import parts_of_frame
from pyg_direct.ops.compute_content_hash import Content, has_content, read_content
from pyg_direct.runtime.cuda.device import budget_of, free_bytes
from pyg_direct.runtime.cuda.memory import choose_host_memory
from pyg_direct.runtime.host.host_memory import parse_size
from pyg_direct.runtime.host.tensor_views import version_of
from pyg_direct.sampler.graph_reader import remember

_FEATURES: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], weakref.ref[Feature], Content | None]] = {}


def check_rows(name: str, num_rows: int, kind: str, count: int) -> None:
    """Check that an attribute has a row for each node or edge (`kind`) that a sampler may return."""
    if num_rows < count:
        raise ArgumentError(
            f"{name} must have a row for each of the {count} {kind}s that batches are sampled from, got {num_rows}: "
            "edit edges and rows together, or make a new loader for another graph"
        )


class PlacedRows:
    """Attributes of a graph with rows, each placed in memory that batches read.

    Args:
        placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`.
        feature_cache: GPU memory for hot rows of attributes on the host: bytes, `"2G"` or `"20%"`. None is the free
            part of the budget with `auto` (see `budget_of`), otherwise 0.
        store_dtype: Dtype in which float32 rows of more than 16 bytes are kept; see `Feature`.
        sharing: `cache_policy` and `cold_policy` of the `Feature` of each wide node attribute. The processes of the
            group then share these attributes; empty for no sharing.
    """

    def __init__(self, device: torch.device, placement: str, feature_cache: int | str | None,
                 store_dtype: torch.dtype | None,
                 sharing: Mapping[str, str] = MappingProxyType({})) -> None:  # fmt: skip
        self._device, self._placement, self._cache, self._store_dtype = device, placement, feature_cache, store_dtype
        self._sharing = dict(sharing)
        # By id of an attribute: True if it still equals its copy.
        self._compared: dict[int, bool] = {}
        # Ids of attributes that processes share: a new placement of them is collective.
        self._shared: set[int] = set()
        # True if one of them was found to differ from the shared rows.
        self.is_behind = False
        # By key; in a graph with types, by (type or relation, key).
        self._node: dict[Any, Feature] = {}
        self._edge: dict[Any, Feature] = {}
        # Of frames: their slicers, what they are of, and their tables.
        self._frames: dict[Any, tuple[FrameRows, Any, str]] = {}
        self._columns: dict[Columns, Feature] = {}

    def _is_shared(self, value: Any, kind: str) -> bool:
        """Check if all processes share the rows; equal in all of them, for any amount of free memory."""
        return bool(self._sharing) and kind == "node" and not Rows("", _count_bytes(value), len(value), True).is_narrow

    def _choose_shared(self, values: dict[Any, Any]) -> dict[Any, Choice]:
        """Choose the GPU memory for hot rows of attributes that processes share."""
        total = sum(map(_count_bytes, values.values()))
        fills = self._device.type == "cuda" and self._placement == "auto" and self._cache is None
        budget = budget_of(free_bytes(self._device.index)) if fills else 0
        return {key: Choice("host", budget * _count_bytes(value) // total) for key, value in values.items()}

    def _choose(self, values: dict[Any, Any], kinds: dict[Any, str], ranked_edges: bool = False) -> dict[Any, Choice]:
        """Choose the place of each attribute; memory that an earlier epoch took on the GPU is no longer free."""
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
        there = [row.key for row in rows if as_tensor(values[row.key]).is_cuda
                 or ((is_auto or row.is_narrow) and self._find(values[row.key], "cuda") is not None)]  # fmt: skip
        rows = [row for row in rows if row.key not in there]
        kept = [row for row in rows if self._find(values[row.key], self._placement) is not None]
        places = choose_places([row for row in rows if row not in kept], budget_of(free_bytes(self._device.index)),
                               is_auto=is_auto, fill_cache=is_auto and self._cache is None)  # fmt: skip
        places |= dict.fromkeys((row.key for row in kept), Choice("host")) | dict.fromkeys(there, Choice("cuda"))
        return {key: places[key] for key in values}

    def _place_all(self, values: dict[Any, Any], kinds: dict[Any, str], rankings: Mapping[Any, Listing | None]) -> None:
        """Place attributes, and the tables of frames.

        Args:
            kinds: `node` or `edge` for each attribute without its frames.
            rankings: Source of the ranking of rows, also of frames.
        """
        tables = {Columns(key, kind): (table, place, rankings.get(key))
                  for key, (_, frame, place) in self._frames.items() for kind, table in list_tables(frame)}  # fmt: skip
        values = {**values, **{key: table for key, (table, _, _) in tables.items()}}
        kinds = {**kinds, **{key: place for key, (_, place, _) in tables.items()}}
        rankings = {**{key: ranking for key, ranking in rankings.items() if key not in self._frames},
                    **{key: ranking for key, (_, _, ranking) in tables.items()}}  # fmt: skip
        self._shared = {id(value) for key, value in values.items() if self._is_shared(value, kinds[key])}
        is_one = not self._sharing and any(kinds[key] == "edge" and isinstance(ranking, Ranked)
                                           for key, ranking in rankings.items())  # fmt: skip
        choices = self._choose(values, kinds, is_one)
        caches: dict[Any, int | str] = {
            key: choice.hot_bytes if self._cache is None or kinds[key] == "edge" else self._cache
            for key, choice in choices.items()}  # fmt: skip
        if is_one:
            caches |= self._share_cache(values, choices, rankings)
        for key, choice in choices.items():
            feature = self._place(values[key], kinds[key], choice, caches[key], rankings.get(key))
            if isinstance(key, Columns):
                slicer, frame, _ = self._frames[key.key]
                self._columns[key] = feature
                slicer.put(frame, key.kind, feature)
            else:
                (self._node if kinds[key] == "node" else self._edge)[key] = feature

    def _share_cache(self, values: dict[Any, Any], choices: Mapping[Any, Choice],
                     rankings: Mapping[Any, Listing | None]) -> dict[Any, int]:  # fmt: skip
        """Share one budget of bytes for hot rows among node and edge attributes with known probabilities."""
        ranked, sizes = {}, {}
        for key, choice in choices.items():
            ranking, tensor = rankings.get(key), as_tensor(values[key])
            if (
                choice.place == "host"
                and isinstance(ranking, Ranked)
                and self._find(values[key], self._placement) is None
            ):
                dtype = self._narrow(tensor).get("store_dtype", tensor.dtype)
                ranked[key], sizes[key] = ranking, tensor[:1].numel() * dtype.itemsize
        filled = sum(choices[key].hot_bytes for key in ranked)
        budget = filled if self._cache is None else self._cache
        whole = {key: len(values[key]) * size for key, size in sizes.items()}
        most = parse_size(budget, sum(whole.values()), "feature_cache")
        if most == 0 or most >= sum(whole.values()):
            # The budget holds no row, or all rows: probabilities are not needed.
            return whole if most else dict.fromkeys(whole, 0)
        return share_budget({key: Demand(own.scores, sizes[key]) for key, own in ranked.items()}, budget)

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
        # Of a small graph also few bytes are meant.
        size = cache if isinstance(cache, str) else f"{int(cache)}B"
        feature = Feature(device_cache_size=size, csr_topo=ranking, device=self._device, placement=host, **many,
                          **self._narrow(tensor))  # fmt: skip
        feature.from_cpu_tensor(tensor)
        if kind == "edge":
            # Scores of edges take GPU memory.
            feature.csr_topo = None
        # Moving changed the tensor's address: the key is made afterwards.
        content = None if feature.reads_in_place(as_tensor(value)) else read_content(value)
        self._compared[id(value)] = True
        remember(_FEATURES, self._key(value, placement), value, feature, content)
        return feature

    def _narrow(self, tensor: Tensor) -> dict[str, Any]:
        """Return the options for the dtype: labels and other short rows keep theirs."""
        is_narrow = Rows("", tensor.numel() * tensor.element_size(), len(tensor), False).is_narrow
        is_stored = self._store_dtype is not None and tensor.dtype == torch.float32 and not is_narrow
        return {"store_dtype": self._store_dtype} if is_stored else {}

    def _key(self, value: Any, placement: str) -> tuple[Any, ...]:
        tensor = as_tensor(value)
        # A process that has written cannot place shared rows alone.
        version = 0 if id(value) in self._shared else version_of(tensor)
        return (id(value), tensor.data_ptr(), version, tensor.shape, self._device, placement, self._cache,
                self._store_dtype, *self._sharing.values())  # fmt: skip

    def _find(self, value: Any, placement: str) -> Feature | None:
        """Find the feature that already holds `value` in this placement."""
        source, feature, content = _FEATURES.get(self._key(value, placement), (None, None, None))
        if source is None or feature is None or source() is not value:
            return None
        if content is not None:
            # Cached, as it is requested several times in a row.
            if id(value) not in self._compared:
                self._compared[id(value)] = has_content(value, content)
            if not self._compared[id(value)]:
                if id(value) not in self._shared:
                    return None
                self.is_behind = True
        return feature()

    def _name_all(self) -> dict[Any, str]:
        """Name the placed attributes in messages and reports, uniquely, by key."""
        return {key: str(key) for key in (*self._node, *self._edge)}

    def _name_columns(self) -> dict[str, Feature]:
        """Return the tables of frames by name."""
        return {f"{key.key if isinstance(key.key, str) else '.'.join(map(str, key.key))}.{key.kind}": feature
                for key, feature in self._columns.items()}  # fmt: skip

    def describe(self) -> dict[str, Feature]:
        """Return the placed attributes by name."""
        named = {name: self._node[key] if key in self._node else self._edge[key]
                 for key, name in self._name_all().items()}  # fmt: skip
        return named | self._name_columns()

    def on_host(self) -> dict[Any, Feature]:
        """The node attributes that the GPU reads over the link, by key."""
        return {key: feature for key, feature in self._node.items() if feature.placement in ("unified", "pinned")}

    def summarise(self) -> list[Placed]:
        """List the attributes in the report of placement: wide ones separately, labels and masks together."""
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


def _count_bytes(value: Any) -> int:
    tensor = as_tensor(value)
    return tensor.numel() * tensor.element_size()


# Slices an attribute by ids of nodes or edges.
Slicer = Callable[[Any, Tensor], Any]


def find_learned(data: Any) -> str | None:
    """Find an attribute of nodes or edges that requires a gradient, by its name in messages; None without one.

    As in PyG, its rows carry the gradient to the graph, and have the values after the optimizer's last step. So they
    are read when their batch is requested.
    """
    for store in data.stores if isinstance(data, (Data, HeteroData)) else ():
        for key, value in store.items():
            if _is_learned(value) and (key == "adj_t" or store.is_node_attr(key) or store.is_edge_attr(key)):
                return f"data.{key}" if store._key is None else f"data[{store._key!r}].{key}"
    return None


def has_learned(batch: Any) -> bool:
    """Check if a batch, or a tuple that a transform returned, carries a gradient."""
    if isinstance(batch, (Data, HeteroData)):
        batch = batch.stores
    elif isinstance(batch, Mapping):
        batch = [*batch.values()]
    return any(map(has_learned, batch)) if isinstance(batch, (tuple, list)) else _is_learned(batch)


def _is_learned(value: Any) -> bool:
    if isinstance(value, TensorFrame):
        return any(isinstance(part, Tensor) and part.requires_grad for part in parts_of_frame(value))
    # A method in `torch_sparse`'s tensors.
    return bool(value.requires_grad() if isinstance(value, SparseTensor) else getattr(value, "requires_grad", False))


def choose_slicer(name: str, value: Any, dim: int, device: torch.device) -> Slicer | None:
    """Choose how batches take an attribute of nodes or edges; None for dense rows without gradient, which are placed.

    Raises:
        ArgumentTypeError: an array with a dtype that torch lacks, or a sparse layout other than COO.
    """
    if isinstance(value, TensorFrame) and not _is_learned(value):
        return FrameRows(device)
    if isinstance(value, TensorFrame):
        return lambda value, ids: value[ids.to(value.device)].to(device)
    if not isinstance(value, (Tensor, np.ndarray)):
        return lambda value, ids: [value[i] for i in ids.tolist()]
    if has_rows(name, value) and dim in (0, -value.ndim):
        return None
    return partial(slice_along, dim, device)


def has_rows(name: str, value: Tensor | np.ndarray) -> bool:
    """Check if rows lie in memory one after another. A COO tensor is left to torch, and so are a tensor that requires a
    gradient and PyG's `Index`.
    """
    if isinstance(value, Tensor):
        if value.layout not in (torch.strided, torch.sparse_coo):
            raise ArgumentTypeError(f"{name} must be dense or of layout torch.sparse_coo, got {value.layout}")
        return value.layout == torch.strided and not value.requires_grad and not hasattr(value, "as_tensor")
    try:
        as_tensor(value[:0])
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} must have a dtype that torch knows, got {value.dtype}") from error
    return True


def slice_adjacency(adj_t: Any, source: Tensor, target: Tensor, ids: Tensor | None, sizes: tuple[int, int]) -> Any:
    """Build the adjacency of the edges of a batch, of the graph's class, compressed by row.

    Args:
        source, target: Ends, int64 `[E']`, on the device of batches.
        ids: Ids of these edges in the graph, to copy their values; None for no values.
    """
    device = source.device
    if isinstance(adj_t, Tensor):
        values = torch.ones(source.numel(), device=device) if ids is None else as_rows(adj_t).values().to(device)[ids]
        # Not through COO, which would add up the values of edges that were drawn twice.
        order = (target * sizes[1] + source).sort(stable=True).indices
        begins = torch.searchsorted(target[order], torch.arange(sizes[0] + 1, device=device))
        return torch.sparse_csr_tensor(begins, source[order], values[order], sizes, check_invariants=False)
    value = adj_t.storage.value()
    value = None if value is None or ids is None else value.to(device)[ids]
    return type(adj_t)(row=target, col=source, value=value, sparse_sizes=sizes, is_sorted=False, trust_data=True)


def without_edge_attributes(data: Data) -> Data:
    """Copy a graph without attributes of edges, as a sample may have other edges."""
    data = copy.copy(data)
    store = data._store
    for key in [key for key in store if store.is_edge_attr(key) and key not in ("edge_index", "adj_t")]:
        del store[key]
    return data


# Name of a frame's target among its kinds of columns.
_TARGET = "y"


class Columns(NamedTuple):
    """Key of a placed table of a frame.

    Attributes:
        key: Key of the attribute that is the frame.
        kind: Kind of the columns, or "y".
    """

    key: Any
    kind: Any


def list_tables(frame: Any) -> Iterator[tuple[Any, Tensor]]:
    """List (kind of columns, rows of all of them `[N, ...]`); embeddings are one row after the other."""
    for kind, column in [*frame.feat_dict.items(), (_TARGET, frame.y)]:
        table = column if isinstance(column, Tensor) else _find_embeddings(column)
        if table is not None and table.layout == torch.strided and table.dim() and len(table) == frame.num_rows:
            yield kind, table


def _find_embeddings(column: Any) -> Tensor | None:
    """Return the rows of columns of embeddings; None for values of any length, which `offset` counts for each row."""
    values, offset = getattr(column, "values", None), getattr(column, "offset", None)
    if not (isinstance(values, Tensor) and isinstance(offset, Tensor)) or values.dim() != 2:
        return None
    return values if offset.numel() == column.num_cols + 1 else None


class FrameRows:
    """Slicer of a frame: rows of placed tables, and what the frame cuts out itself.

    Args:
        device: Device of batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._features: dict[Any, Feature] = {}
        # Ends of the columns of embeddings, on the device of batches.
        self._offsets: dict[Any, Tensor] = {}

    def put(self, frame: Any, kind: Any, feature: Feature) -> None:
        """Take the place of a table."""
        self._features[kind] = feature
        column = None if kind == _TARGET else frame.feat_dict[kind]
        if column is not None and not isinstance(column, Tensor):
            self._offsets[kind] = column.offset.to(self._device)

    def __call__(self, frame: Any, ids: Tensor) -> Any:
        """Return the frame of some rows, on the device of batches.

        Args:
            ids: int64 `[n]` on the device of batches.
        """
        made = copy.copy(frame)
        columns: dict[Any, Any] = {}
        own: Tensor | None = None
        for kind, column in [*frame.feat_dict.items(), (_TARGET, frame.y)]:
            feature = self._features.get(kind)
            if feature is not None:
                columns[kind] = self._fill(kind, column, feature[ids])
            elif column is not None:
                own = ids.to(frame.device) if own is None else own
                columns[kind] = {name: part[own].to(self._device) for name, part in column.items()} \
                    if isinstance(column, dict) else column[own].to(self._device)  # fmt: skip
        made.y = columns.pop(_TARGET, None)
        made.feat_dict = columns
        if made._num_rows is not None:
            made._num_rows = ids.numel()
        return made

    def _fill(self, kind: Any, column: Any, rows: Tensor) -> Any:
        """Return columns like these of other rows."""
        if isinstance(column, Tensor):
            return rows
        # The constructor would wait for a GPU.
        made = copy.copy(column)
        made.num_rows, made.values, made.offset = len(rows), rows, self._offsets[kind]
        return made

"""Arguments of a model's call: those of a sampled batch, of a batch of many small graphs, or of a whole graph.

A model is given a batch, or its tensors, such as `model(batch.x, batch.edge_index)`. Edges that are known to be sorted
distinguish a call for a sampled batch. The batch vector, which the loader registers, distinguishes one for graphs.

`read_call` reads the arguments. Calls of one kind can be served by one recording (`recorded_passes.py`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.typing import TensorFrame

from pyg_direct.nn import sorted_edges
from pyg_direct.nn.replay.guards import CONTAINERS, SETTINGS, TENSORS, State, read_version, remember_forms
from pyg_direct.nn.replay.padded_batch import EDGES, NODES, Counts, GraphSizes, Relation, Sizes, find_input, read_sizes
from pyg_direct.nn.sorted_edges import SortedBatch, find_batch, find_graphs


class Call(NamedTuple):
    """Arguments of a model's call.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        nest: Arguments without their tensors; see `fill_in`.
        tensors: The tensors, in the order of the nest; for a batch of graphs also `ptr`, at the end.
        sizes: `Sizes` or `GraphSizes` of the batch; None for tensors that may come back, as of a whole graph.
        roles: For a sampled batch, the type or relation of each tensor, and whether it holds the edges of a relation.
            Instead of a type, the number of rows that every batch has, such as those of the seeds.
            For a batch of graphs, the kind of its rows.
        seeds: Type of the seeds and their number, if a batch with types among the arguments has them.
        addresses: Without a batch, memory of each tensor, and the count of writes of ids.
    """

    kind: tuple[Any, ...]
    nest: Any
    tensors: list[Tensor]
    sizes: Any = None
    roles: tuple[Any, ...] = ()
    seeds: tuple[str, int] | None = None
    addresses: tuple[Any, ...] = ()

    def drop_tensors(self) -> Call:
        """Return the call without its tensors."""
        # `_replace` takes twice as long.
        return Call(self.kind, self.nest, [], self.sizes, self.roles, self.seeds, self.addresses)

    def pair_edges(self) -> dict[Relation, Tensor]:
        """Return the edges of each relation of a sampled batch."""
        return {key: tensor for (key, is_edges), tensor in zip(self.roles, self.tensors, strict=True) if is_edges}

    def join(self) -> Batch:
        """Return a batch of graphs with the tensors, those with rows of nodes and edges by their position."""
        batch = Batch(_base_cls=Data)
        mapping = batch._store._mapping
        for place, (role, tensor) in enumerate(zip(self.roles, self.tensors, strict=True)):
            mapping[name_rows(place, role)] = tensor
        mapping["num_nodes"] = self.sizes.nodes
        batch._store.__dict__["_num_graphs"] = self.sizes.graphs
        return batch


def name_rows(place: int, role: str) -> str:
    """Return the name of a tensor of a call for a batch of graphs, in the batch of `Call.join`."""
    return f"rows_{place}" if role in ("node", "edge") else role


# Stand in a nest for a tensor, for the nodes or edges of each hop, and for the number of nodes or graphs.
_TENSOR, _HOPS, _COUNT = "tensor", "hops", "count"
# For columns of a table, of a class that holds their values side by side.
_COLUMNS = "columns"
_A_TENSOR = (_TENSOR,)
# Arguments that hold the number of graphs if they are equal to it.
_COUNTS = frozenset(("batch_size", "num_graphs", "size", "dim_size"))


def take_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Move the tensors of nested lists, tuples and dicts to a list; return the nest without them.

    Returns:
        A hashable description; None if the value holds anything but tensors, containers and settings.
    """
    kind = type(value)
    if kind in TENSORS:
        tensors.append(value)
        return _A_TENSOR
    if kind in SETTINGS:
        return kind, value
    if kind not in CONTAINERS:
        return None
    parts = tuple([take_tensors(item, tensors) for item in (value.values() if kind is dict else value)])
    if None in parts:
        return None
    return (kind, parts, tuple(value)) if kind is dict else (kind, parts)


def fill_in(nest: Any, tensors: Iterator[Tensor], sizes: Any = None) -> Any:
    """Return what `take_tensors` or a reader of arguments was given, with these tensors and sizes."""
    kind, *rest = nest
    if kind is _TENSOR:
        return next(tensors)
    if kind is _COUNT:
        return sum(sizes.find(rest[0]))
    if kind is _HOPS:
        return rest[1](sizes.find(rest[0]))
    if kind is HeteroData:
        data = HeteroData()
        for key, names, parts in rest[0]:
            store = data if key is None else data[key]
            for name, part in zip(names, parts, strict=True):
                store[name] = fill_in(part, tensors, sizes)
        return data
    if kind is TensorFrame:
        key, columns, *parts = rest
        found, labels = (fill_in(part, tensors, sizes) for part in parts)
        return TensorFrame(found, {kind: list(names) for kind, names in columns}, labels, sum(sizes.find(key)))
    if kind is _COLUMNS:
        make, key, num_cols, *parts = rest
        return make(sum(sizes.find(key)), num_cols, *[fill_in(part, tensors, sizes) for part in parts])
    if kind is Batch:
        batch = Batch(_base_cls=Data)
        for name in rest[0]:
            batch[name] = next(tensors)
        batch._store.__dict__["_num_graphs"] = sizes.graphs
        return batch
    if kind not in CONTAINERS:
        return rest[0]
    filled = [fill_in(part, tensors, sizes) for part in rest[0]]
    return dict(zip(rest[1], filled, strict=True)) if kind is dict else kind(filled)


def read_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Call | None:
    """Read the arguments of a model's call; None if its kind does not determine a pass."""
    last = state.last
    if (last is not None and last.is_again(args, kwargs) and _can_record(last.device)
            and state.read(model, last.device) is last.call.kind[-1]):  # fmt: skip
        return last.call
    return _read_anew(model, args, kwargs, state)


def _read_anew(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Call | None:
    values = [*args, *kwargs.values()]
    batches = [(value, known) for value in values
               if type(value) is Tensor and (known := find_batch(value)) is not None]  # fmt: skip
    if (len(batches) == 1 and _PARTS.issuperset(map(type, values))
            and all(find_graphs(value) is None for value in values)):  # fmt: skip
        return _read_batch(model, args, kwargs, state, *batches[0])
    typed = _read_types(model, args, kwargs, state)
    if typed is not None:
        return typed
    graphs = _read_graphs(model, args, kwargs, state)
    if graphs is not None:
        return graphs if _can_record(graphs.tensors[-1].device) else None
    tensors: list[Tensor] = []
    nest = take_tensors((args, kwargs), tensors)
    if nest is None or not tensors or not _can_record(tensors[0].device):
        return None
    device = tensors[0].device
    if len(batches) == 1:
        return _read_batch(model, args, kwargs, state, *batches[0])
    if any(find_batch(tensor) is not None for tensor in tensors):
        return None
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device != device or tensor.is_inference():
            return None
    found = state.read(model, device)
    if found is None:
        return None
    forms = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in tensors]
    # Orders of edges are remembered by their count of writes.
    addresses = tuple([(tensor.data_ptr(), -1 if tensor.is_floating_point() else tensor._version)
                       for tensor in tensors])  # fmt: skip
    call = Call((nest, *forms, found), nest, tensors, addresses=addresses)
    state.last = _Last.of(args, kwargs, call, device)
    return call


class _Last(NamedTuple):
    """Last call of a model with arguments that may be given again as they are, in other containers too.

    Attributes:
        args: Its arguments, if they have no names and none is a container; otherwise None.
        given, call, device: Its arguments by `_flatten`, what was read of them, and their device.
        tensors: The tensors among them, each once.
        ids: Tensors of ids among them, whose writes count.
        has_forms: Check of `remember_forms` of the tensors.
        places: Their memory, writes of ids, and the number of registrations of edges.
    """

    args: tuple[Any, ...] | None
    given: list[Any]
    call: Call
    device: torch.device
    tensors: list[Tensor]
    ids: list[Tensor]
    has_forms: Callable[..., bool]
    places: list[int]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, device: torch.device) -> _Last | None:
        """Remember a call; None if an argument has a gradient."""
        if any(tensor.requires_grad for tensor in call.tensors):
            return None
        tensors = list({id(tensor): tensor for tensor in call.tensors}.values())
        ids = [tensor for tensor in tensors if not tensor.is_floating_point()]
        plain = None if kwargs or not CONTAINERS.isdisjoint(map(type, args)) else args
        return cls(plain, _flatten((args, kwargs)), call, device, tensors, ids, remember_forms(tensors),
                   cls._read(tensors, ids))  # fmt: skip

    @staticmethod
    def _read(tensors: list[Tensor], ids: list[Tensor]) -> list[int]:
        return [*map(Tensor.data_ptr, tensors), *map(read_version, ids), sorted_edges.told]

    def is_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Report whether these are the same arguments, unchanged."""
        plain = self.args
        if plain is None or kwargs or len(args) != len(plain) or not all(map(is_, args, plain)):
            given = _flatten((args, kwargs))
            if len(given) != len(self.given) or not all(map(is_, given, self.given)):
                return False
        try:
            return self._read(self.tensors, self.ids) == self.places and self.has_forms(*self.tensors)
        except RuntimeError:
            # A tensor has no memory any more.
            return False


def _flatten(nest: Any) -> list[Any]:
    """List the items of nested lists, tuples and dicts, each container as its class, its length, and its keys."""
    # Without a call of Python for each item.
    containers: list[Any] = [nest]
    items: list[Any] = []
    for container in containers:
        kind = type(container)
        items += (kind, len(container))
        if kind is dict:
            items += container
            container = container.values()
        if CONTAINERS.isdisjoint(map(type, container)):
            items += container
            continue
        for item in container:
            if type(item) in CONTAINERS:
                containers.append(item)
                item = _NEST
            items.append(item)
    return items


# Stands among flat items for a container, which follows.
_NEST = object()


# Classes of attributes of nodes or edges.
_ROWS = frozenset((list, tuple, TensorFrame, *TENSORS))
# Classes of arguments for a sampled batch without types.
_PARTS = SETTINGS | {Tensor, list, tuple}


def _read_batch(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State, edge_index: Tensor,
                known: SortedBatch) -> Call | None:  # fmt: skip
    """Read arguments for a sampled batch without types: its edges, rows of nodes or edges, and counts of the hops."""
    values = [*args, *kwargs.values()]
    hops = known.read_hops(edge_index)
    if hops is None or not _can_record(edge_index.device):
        return None
    num_nodes, num_edges = map(sum, hops)
    keys = {} if num_nodes == num_edges else {num_nodes: NODES, num_edges: EDGES}
    reader = _SampleReader(Sizes({NODES: hops[0]}, {EDGES: hops[1]}), edge_index.device, {EDGES: edge_index})
    parts: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in SETTINGS:
            parts.append((kind, value))
        elif isinstance(value, Tensor):
            key = EDGES if value is edge_index else keys.get(value.shape[0]) if value.dim() > 0 else None
            if not reader.take(value, key):
                return None
            parts.append(_A_TENSOR)
        elif kind in (list, tuple) and all(type(item) is int for item in value) and tuple(value) in hops:
            parts.append((_HOPS, NODES if len(value) == len(hops[0]) else EDGES, kind))
        else:
            return None
    found = state.read(model, edge_index.device)
    if found is None:
        return None
    count = len(args)
    nest = tuple, ((tuple, tuple(parts[:count])), (dict, tuple(parts[count:]), tuple(kwargs)))
    return reader.make(nest, (len(hops[1]), known.max_degree, found))


class _Reader:
    """Reader of arguments: tensors go to a list, and are described by what they have rows of.

    A batch loses attributes that have no row for each node or edge, such as the labels of graphs.

    Args:
        sizes: Of the batch.
        device: Of its tensors.
    """

    def __init__(self, sizes: Any, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self.tensors: list[Tensor] = []
        self.roles: list[Any] = []
        # What the places of a tensor depend on.
        self.forms: list[Any] = []

    def read(self, value: Any, key: Any = None) -> Any:
        """Return a hashable description of a value; None if a pass is not determined by it.

        Args:
            key: What the value belongs to; None if it is not known.
        """
        kind = type(value)
        if kind in TENSORS:
            return _A_TENSOR if self.take(value, key) else None
        found = self._read_own(value, key)
        if found is not None:
            return found
        if kind in SETTINGS:
            return kind, value
        if kind not in CONTAINERS:
            return None
        if kind is dict:
            parts = tuple([self.read(item, self._find_key(name, key)) for name, item in value.items()])
            return None if None in parts else (kind, parts, tuple(value))
        parts = tuple([self.read(item, self._find_key(None, key)) for item in value])
        return None if None in parts else (kind, parts)

    def make(self, nest: Any, rest: Sequence[Any], seeds: tuple[str, int] | None = None) -> Call:
        """Make the call of a nest; the last of `rest` is the state of the model."""
        return Call((nest, *self.forms, *rest), nest, self.tensors, self._sizes, tuple(self.roles), seeds)

    def _find_key(self, name: Any, key: Any) -> Any:
        """Return what an item of a container belongs to."""
        raise NotImplementedError

    def _read_own(self, value: Any, key: Any) -> Any:
        """Return the description of a batch or a count; None for any other value."""
        raise NotImplementedError

    def take(self, tensor: Tensor, key: Any) -> bool:
        """Add a tensor of a key; False if it is none of its rows or edges."""
        raise NotImplementedError

    def _is_other(self, tensor: Tensor) -> bool:
        return (type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad
                or tensor.device != self._device or tensor.dim() == 0)  # fmt: skip


class _SampleReader(_Reader):
    """Reader of arguments for a sampled batch; a tensor belongs to a type or relation.

    In a dict by types and relations, and in a batch, it belongs to its key.

    Args:
        pairs: Edges by relation, of those that are known to be sorted.
        seeds: Type of the seeds, which may have attributes of their own, and their number.
    """

    def __init__(self, sizes: Sizes, device: torch.device, pairs: Mapping[Relation, Tensor] = MappingProxyType({}),
                 seeds: tuple[str, int] | None = None) -> None:  # fmt: skip
        super().__init__(sizes, device)
        self._pairs, self._seeds = dict(pairs), seeds

    def _find_key(self, name: Any, key: Any) -> Any:
        return name if name in self._sizes.nodes or name in self._sizes.edges else key

    def _read_own(self, value: Any, key: Any) -> Any:
        kind = type(value)
        if kind is HeteroData:
            return kind, tuple(self._read_store(name, store) for name, store in _list_stores(value))
        if kind is TensorFrame and key is not None:
            return self._read_frame(value, key)
        if (kind in (list, tuple) and key is not None and all(type(item) is int for item in value)
                and tuple(value) == self._sizes.find(key)):  # fmt: skip
            return _HOPS, key, kind
        return None

    def _read_store(self, key: Any, mapping: Mapping[str, Any]) -> Any:
        names, parts = [], []
        for name, value in mapping.items():
            if key is not None and name == "num_nodes":
                part: Any = (_COUNT, key)
            elif type(value) in SETTINGS or (key is not None and type(value) in _ROWS):
                part = self.read(value, key)
            else:
                part = None
            if part is not None:
                names.append(name)
                parts.append(part)
        return key, tuple(names), tuple(parts)

    def _read_frame(self, frame: Any, key: Any) -> Any:
        parts = []
        for columns in frame.feat_dict.values():
            if isinstance(columns, Tensor):
                parts.append(self.read(columns, key))
                continue
            values, offset = (getattr(columns, name, None) for name in ("values", "offset"))
            # Other classes have a varying number of values in each row.
            if not (isinstance(values, Tensor) and isinstance(offset, Tensor) and values.dim() == 2
                    and offset.numel() == columns.num_cols + 1):  # fmt: skip
                return None
            pair = self.read(values, key), self.read(offset, offset.numel())
            parts.append(None if None in pair else (_COLUMNS, type(columns), key, columns.num_cols, *pair))
        labels = self.read(frame.y, key)
        if None in parts or labels is None:
            return None
        names = tuple((kind, tuple(own)) for kind, own in frame.col_names_dict.items())
        return TensorFrame, key, names, (dict, tuple(parts), tuple(frame.feat_dict)), labels

    def take(self, tensor: Tensor, key: Any) -> bool:
        if key is None or self._is_other(tensor):
            return False
        count = sum(self._sizes.find(key))
        is_edges = key in self._sizes.edges and tensor.shape == (2, count) and not tensor.is_floating_point()
        if not is_edges and tensor.shape[0] != count:
            if (key, tensor.shape[0]) != self._seeds:
                return False
            key = tensor.shape[0]
        if is_edges and self._pairs.get(key) is not tensor:
            # A relation has one place.
            if key in self._pairs or (count > 0 and find_batch(tensor) is None):
                return False
            self._pairs[key] = tensor
        self.tensors.append(tensor)
        self.roles.append((key, is_edges))
        self.forms.append((key, tensor.dtype, None if is_edges else tensor.shape[1:]))
        return True


def _list_stores(batch: HeteroData) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    yield None, batch._global_store._mapping
    for stores in (batch._node_store_dict, batch._edge_store_dict):
        for key, store in stores.items():
            yield key, store._mapping


def _read_types(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Call | None:
    """Read arguments for a batch with types; None if they are for another one."""
    values = [*args, *kwargs.values()]
    batches = [value for value in values if type(value) is HeteroData]
    if len(batches) == 1:
        sizes = read_sizes(batches[0])
    elif not batches and any(type(value) is dict for value in values):
        sizes = _find_sizes([value for value in values if type(value) is dict])
    else:
        sizes = None
    if sizes is None:
        return None
    seeds = None
    if batches:
        kind = find_input(batches[0])
        assert kind is not None, "read with the sizes"
        seeds = kind, int(batches[0][kind].batch_size)
        if sizes.nodes[kind][0] != seeds[1]:
            # The first rows of the batch would lie in places of several hops.
            return None
    device = _find_device(batches[0] if batches else values)
    if device is None or not _can_record(device):
        return None
    reader = _SampleReader(sizes, device, seeds=seeds)
    nest = reader.read((args, kwargs))
    if nest is None or not any(is_edges for _, is_edges in reader.roles):
        return None
    found = state.read(model, device)
    if found is None:
        return None
    return reader.make(nest, (len(next(iter(sizes.edges.values()))), found), seeds)


def _find_device(value: Any) -> torch.device | None:
    """Find the device of the edges of a batch, or of a dict among values; None without any."""
    if type(value) is HeteroData:
        found = (store._mapping.get("edge_index") for store in value.edge_stores)
    else:
        found = (item for part in value if type(part) is dict for key, item in part.items() if type(key) is tuple)
    return next((item.device for item in found if isinstance(item, Tensor)), None)


def _find_sizes(dicts: Iterable[Mapping[Any, Any]]) -> Sizes | None:
    """Find the sizes of a batch by its registered edges; None if they are not known to be sorted."""
    nodes: dict[str, Counts] = {}
    edges: dict[Relation, Counts] = {}
    empty: list[Relation] = []
    others: dict[str, int] = {}
    for part in dicts:
        for key, value in part.items():
            if not isinstance(value, Tensor):
                continue
            if type(key) is str:
                others[key] = value.shape[0] if value.dim() > 0 else -1
            if type(key) is not tuple or len(key) != 3 or value.is_floating_point() or value.dim() != 2:
                continue
            known = find_batch(value)
            counts = None if known is None else known.read_relation(value)
            if counts is not None:
                for kind, own in ((key[0], counts[0]), (key[-1], counts[1])):
                    if nodes.setdefault(kind, own) != own:
                        return None
                edges[key] = counts[2]
            elif value.shape[1] == 0:
                empty.append(key)
            else:
                return None
    if not edges:
        return None
    hops = len(next(iter(edges.values())))
    if any(len(own) != hops for own in edges.values()):
        return None
    edges.update(dict.fromkeys(empty, (0,) * hops))
    # Types that no edge meets in this batch.
    for kind in {*others, *(end for key in empty for end in (key[0], key[-1]))} - nodes.keys():
        if others.get(kind, 0) != 0:
            return None
        nodes[kind] = (0,) * (hops + 1)
    return Sizes(dict(sorted(nodes.items())), dict(sorted(edges.items())))


class _GraphsReader(_Reader):
    """Reader of arguments for a batch of graphs.

    Args:
        begins: First node of each graph, and the end.
    """

    def __init__(self, sizes: GraphSizes, begins: Tensor, device: torch.device) -> None:
        super().__init__(sizes, device)
        self._begins = begins

    def _find_key(self, name: Any, key: Any) -> Any:
        return None

    def _read_own(self, value: Any, key: Any) -> Any:
        if type(value) is int and key in _COUNTS and value == self._sizes.graphs:
            return _COUNT, "graphs"
        if isinstance(value, Batch):
            return Batch, tuple(name for name, item in value._store._mapping.items()
                                if type(item) is Tensor and self.take(item))  # fmt: skip
        return None

    def take(self, tensor: Tensor, key: Any = None) -> bool:
        if self._is_other(tensor) or tensor.is_inference():
            return False
        sizes, is_ids = self._sizes, tensor.dtype == torch.int64
        if tensor is self._begins:
            role = "ptr"
        elif find_graphs(tensor) is self._begins:
            role = "batch"
        elif is_ids and tensor.shape == (2, sizes.edges):
            role = "edge_index"
        elif tensor.shape[0] == sizes.nodes:
            role = "node"
        elif tensor.shape[0] == sizes.edges:
            role = "edge"
        else:
            return False
        is_rows = role in ("node", "edge")
        # Edges and batch vector have one place.
        if not is_rows and role in self.roles and self.tensors[self.roles.index(role)] is not tensor:
            return False
        self.tensors.append(tensor)
        self.roles.append(role)
        self.forms.append((role, tensor.dtype, tensor.shape[1:] if is_rows else None))
        return True


def _read_graphs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Call | None:
    """Read arguments for a batch of graphs; None if they are for another one, or do not determine a pass."""
    values = [*args, *kwargs.values()]
    begins = None
    for value in values:
        vector = value._store._mapping.get("batch") if isinstance(value, Batch) else value
        begins = find_graphs(vector) if type(vector) is Tensor else None
        if begins is not None:
            break
    if begins is None:
        return None
    nodes, graphs = int(vector.numel()), begins.numel() - 1
    edges = _find_edges(values)
    if edges is None or edges.device != vector.device:
        return None
    sizes = GraphSizes(nodes, int(edges.shape[1]), graphs)
    # Rows are told apart by their number.
    if len({2, nodes, sizes.edges, graphs, graphs + 1}) < 5:
        return None
    reader = _GraphsReader(sizes, begins, vector.device)
    names = _list_names(type(model))
    parts = [reader.read(value, name) for value, name in zip(args, [*names, *[None] * len(args)], strict=False)]
    named = [reader.read(value, name) for name, value in kwargs.items()]
    if None in parts or None in named or not {"edge_index", "batch"}.issubset(reader.roles):
        return None
    found = state.read(model, vector.device)
    if found is None:
        return None
    nest = tuple, ((tuple, tuple(parts)), (dict, tuple(named), tuple(kwargs)))
    reader.tensors.append(begins)
    reader.roles.append("ptr")
    return reader.make(nest, (graphs, found))


def _find_edges(values: Sequence[Any]) -> Tensor | None:
    """Find the first edges among arguments."""
    for value in values:
        edges = value._store._mapping.get("edge_index") if isinstance(value, Batch) else value
        if type(edges) is Tensor and edges.dtype == torch.int64 and edges.dim() == 2 and len(edges) == 2:
            return edges
    return None


def _list_names(kind: type) -> list[str]:
    """List the names of a model's positional arguments."""
    names = _NAMES.get(kind)
    if names is None:
        try:
            names = list(inspect.signature(kind.forward).parameters)[1:]  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            names = []
        _NAMES[kind] = names
    return names


_NAMES: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()

"""Arguments of a model's call: those of a batch without types, of a batch with types, or of a whole graph.

Those of a batch of small graphs are in `graphs_call.py`.

`read_call` reads them. Calls of one kind can be served by one recording (`recorded_passes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_direct.nn import sorted_edges
from pyg_direct.nn.replay.graphs_call import GraphsCall, read_graphs
from pyg_direct.nn.replay.guards import CONTAINERS, SETTINGS, TENSORS, State, read_forms, read_version
from pyg_direct.nn.replay.padded_batch import Relation, Sizes, TypedSizes, find_input, read_typed_sizes
from pyg_direct.nn.sorted_edges import find_batch


class BatchCall(NamedTuple):
    """Arguments of a model's call for a batch of a loader.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        sizes: Nodes and edges of each hop of the batch.
        rows: Tensors of rows by the position of the argument.
    """

    kind: tuple[Any, ...]
    sizes: Sizes
    edge_index: Tensor
    rows: dict[int, Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def pack(self) -> tuple[Any, list[Tensor]]:
        """Return the call without its tensors, and these."""
        tensors: list[Tensor] = []
        nest = take_tensors((self.args, self.kwargs), tensors)
        return (self.kind, self.sizes, tuple(self.rows), nest), tensors

    @staticmethod
    def unpack(packed: Any, tensors: Sequence[Tensor] | None) -> BatchCall:
        """Return the call of `pack`; without tensors it has the sizes alone."""
        kind, sizes, places, nest = packed
        if tensors is None:
            return BatchCall(kind, sizes, _NOTHING, {}, (), {})
        args, kwargs = fill_in(nest, iter(tensors))
        values = [*args, *kwargs.values()]
        edges = next(value for place, value in enumerate(values) if isinstance(value, Tensor) and place not in places)
        return BatchCall(kind, sizes, edges, {place: values[place] for place in places}, args, kwargs)


class TypedCall(NamedTuple):
    """Arguments of a model's call for a batch with types of a loader.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        sizes: Nodes of each type and edges of each relation in each hop of the batch.
        nest: Arguments without their tensors; see `_TypedReader`.
        tensors: Rows and edges, in the order of the nest.
        roles: Of each tensor the type or relation, and whether it holds the edges of a relation.
        seeds: Type of the seeds and their number, if a batch among the arguments tells them.
    """

    kind: tuple[Any, ...]
    sizes: TypedSizes
    nest: Any
    tensors: list[Tensor]
    roles: tuple[tuple[Any, bool], ...]
    seeds: tuple[str, int] | None

    def pair_edges(self) -> dict[Relation, Tensor]:
        """Return the edges of each relation."""
        return {key: tensor for (key, is_edges), tensor in zip(self.roles, self.tensors, strict=True) if is_edges}

    def pack(self) -> tuple[Any, list[Tensor]]:
        """Return the call without its tensors, and these."""
        return (self.kind, self.sizes, self.nest, self.roles, self.seeds), self.tensors

    @staticmethod
    def unpack(packed: Any, tensors: Sequence[Tensor] | None) -> TypedCall:
        """Return the call of `pack`; without tensors it has the sizes alone."""
        kind, sizes, nest, roles, seeds = packed
        if tensors is None:
            return TypedCall(kind, sizes, None, [], (), seeds)
        return TypedCall(kind, sizes, nest, list(tensors), roles, seeds)


class WholeCall(NamedTuple):
    """Arguments of a model's call that may come back, such as a whole graph.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        nest: Arguments without their tensors; see `take_tensors`.
        addresses: Memory of each, and the count of writes of ids.
    """

    kind: tuple[Any, ...]
    nest: Any
    tensors: list[Tensor]
    addresses: tuple[Any, ...]

    def pack(self) -> tuple[Any, list[Tensor]]:
        """Return the call without its tensors, and these."""
        return (self.kind, self.nest, self.addresses), self.tensors

    @staticmethod
    def unpack(packed: Any, tensors: Sequence[Tensor] | None) -> WholeCall:
        """Return the call of `pack`."""
        kind, nest, addresses = packed
        return WholeCall(kind, nest, [] if tensors is None else list(tensors), addresses)


_NOTHING = torch.empty(0)
# Stand in a nest for a tensor, for the nodes or edges of each hop, and for their number.
_TENSOR, _HOPS, _COUNT = "tensor", "hops", "count"


def take_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Move the tensors of nested lists, tuples and dicts to a list; return the nest without them.

    Returns:
        A hashable description; None if the value holds anything but tensors, containers and settings.
    """
    kind = type(value)
    if kind in TENSORS:
        tensors.append(value)
        return (_TENSOR,)
    if kind in SETTINGS:
        return kind, value
    if kind not in CONTAINERS:
        return None
    parts = tuple([take_tensors(item, tensors) for item in (value.values() if kind is dict else value)])
    if None in parts:
        return None
    return (kind, parts, tuple(value)) if kind is dict else (kind, parts)


def fill_in(nest: Any, tensors: Iterator[Tensor]) -> Any:
    """Return what `take_tensors` was given, with these tensors."""
    kind, *rest = nest
    if kind is _TENSOR:
        return next(tensors)
    if kind not in CONTAINERS:
        return rest[0]
    parts = [fill_in(part, tensors) for part in rest[0]]
    return dict(zip(rest[1], parts, strict=True)) if kind is dict else kind(parts)


def fill_in_types(nest: Any, tensors: Iterator[Tensor], places: TypedSizes) -> Any:
    """Return what `_TypedReader` was given, with these tensors and sizes."""
    kind, *rest = nest
    if kind is _TENSOR:
        return next(tensors)
    if kind is _COUNT:
        return sum(places.find(rest[0]))
    if kind is _HOPS:
        return rest[1](places.find(rest[0]))
    if kind is HeteroData:
        data = HeteroData()
        for key, names, parts in rest[0]:
            store = data if key is None else data[key]
            for name, part in zip(names, parts, strict=True):
                store[name] = fill_in_types(part, tensors, places)
        return data
    if kind not in CONTAINERS:
        return rest[0]
    filled = [fill_in_types(part, tensors, places) for part in rest[0]]
    return dict(zip(rest[1], filled, strict=True)) if kind is dict else kind(filled)


def read_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State
              ) -> BatchCall | TypedCall | GraphsCall | WholeCall | None:  # fmt: skip
    """Read the arguments of a model's call; None if its kind does not determine a pass."""
    last = state.last
    if (last is not None and last.is_again((args, kwargs)) and _can_record(last.device)
            and state.read(model, last.device) is last.call.kind[-1]):  # fmt: skip
        return last.call
    return _read_anew(model, args, kwargs, state)


def _read_anew(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State
               ) -> BatchCall | TypedCall | GraphsCall | WholeCall | None:  # fmt: skip
    typed = _read_types(model, args, kwargs, state)
    if typed is not None:
        return typed
    graphs = read_graphs(model, args, kwargs, state)
    if graphs is not None:
        return graphs if _can_record(graphs.begins.device) else None
    tensors: list[Tensor] = []
    nest = take_tensors((args, kwargs), tensors)
    if nest is None or not tensors or not _can_record(tensors[0].device):
        return None
    device = tensors[0].device
    if any(find_batch(tensor) is not None for tensor in tensors):
        return _read_batch(model, args, kwargs, state)
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
    call = WholeCall((nest, *forms, found), nest, tensors, addresses)
    state.last = _Last.of((args, kwargs), call, device)
    return call


class _Last(NamedTuple):
    """Last call of a model with arguments that may be given again as they are, in other containers too.

    Attributes:
        given, call, device: Its arguments by `_flatten`, what was read of them, and their device.
        ids: Tensors of ids among them, whose writes count.
        forms: Their forms, and the number of registrations of edges.
    """

    given: list[Any]
    call: WholeCall
    device: torch.device
    ids: list[Tensor]
    forms: list[Any]

    @classmethod
    def of(cls, nest: Any, call: WholeCall, device: torch.device) -> _Last | None:
        """Remember a call; None if an argument has a gradient."""
        if any(tensor.requires_grad for tensor in call.tensors):
            return None
        ids = [tensor for tensor in call.tensors if not tensor.is_floating_point()]
        return cls(_flatten(nest), call, device, ids, cls._read(call.tensors, ids))

    @staticmethod
    def _read(tensors: list[Tensor], ids: list[Tensor]) -> list[Any]:
        return [*read_forms(tensors), *map(read_version, ids), sorted_edges.told]

    def is_again(self, nest: Any) -> bool:
        """Report whether these are the same arguments, unchanged."""
        given = _flatten(nest)
        if len(given) != len(self.given) or not all(map(is_, given, self.given)):
            return False
        try:
            return self._read(self.call.tensors, self.ids) == self.forms
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
        for item in container:
            if type(item) in CONTAINERS:
                containers.append(item)
                item = _NEST
            items.append(item)
    return items


# Stands among flat items for a container, which follows.
_NEST = object()


def _read_batch(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> BatchCall | None:
    values = [*args, *kwargs.values()]
    batches = [(place, known) for place, value in enumerate(values)
               if isinstance(value, Tensor) and (known := find_batch(value)) is not None]  # fmt: skip
    if len(batches) != 1:
        return None
    edges_at, known = batches[0]
    edge_index = values[edges_at]
    sizes = known.read_hops(edge_index)
    if sizes is None:
        return None
    num_nodes, num_edges, rows = sum(sizes[0]), sum(sizes[1]), {}
    kinds: list[Any] = [len(args), *kwargs, len(sizes[1]), known.max_degree, edge_index.dtype]
    for place, value in enumerate(values):
        if place == edges_at:
            kinds.append("edge_index")
        elif isinstance(value, Tensor):
            count = value.shape[0] if value.dim() > 0 else -1
            if (
                type(value) is not Tensor
                or value.layout is not torch.strided
                or value.requires_grad
                or value.device != edge_index.device
                or num_nodes == num_edges
                or count not in (num_nodes, num_edges)
            ):
                return None
            rows[place] = value
            kinds.append(("nodes" if count == num_nodes else "edges", value.dtype, value.shape[1:]))
        elif isinstance(value, (list, tuple)):
            if not all(type(item) is int for item in value) or tuple(value) not in sizes:
                return None
            kinds.append("nodes of hops" if len(value) == len(sizes[0]) else "edges of hops")
        elif type(value) in SETTINGS:
            kinds.append((type(value), value))
        else:
            return None
    found = state.read(model, edge_index.device)
    return None if found is None else BatchCall((*kinds, found), Sizes(*sizes), edge_index, rows, args, kwargs)


class _TypedReader:
    """Reader of arguments: tensors go to a list, and are described by the type or relation that they belong to.

    In a dict by types and relations, and in a batch, a tensor belongs to its key. A batch loses attributes that have
    no row for each node or edge.

    Args:
        sizes: Of the batch.
        device: Of its tensors.
    """

    def __init__(self, sizes: TypedSizes, device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self.tensors: list[Tensor] = []
        self.roles: list[tuple[Any, bool]] = []
        self._pairs: dict[Any, Tensor] = {}
        # What the places of a tensor depend on.
        self.forms: list[Any] = []

    def read(self, value: Any, key: Any = None) -> Any:
        """Return a hashable description of a value; None if a pass is not determined by it."""
        kind = type(value)
        if kind in TENSORS:
            return (_TENSOR,) if self._take(value, key) else None
        if kind in SETTINGS:
            return kind, value
        if kind is HeteroData:
            return kind, tuple(self._read_store(name, store) for name, store in _list_stores(value))
        if kind is dict:
            parts = tuple([self.read(item, name if self._knows(name) else key) for name, item in value.items()])
            return None if None in parts else (kind, parts, tuple(value))
        if kind not in CONTAINERS:
            return None
        if key is not None and tuple(value) == self._sizes.find(key):
            return _HOPS, key, kind
        parts = tuple([self.read(item, key) for item in value])
        return None if None in parts else (kind, parts)

    def _knows(self, key: Any) -> bool:
        return key in self._sizes.nodes or key in self._sizes.edges

    def _read_store(self, key: Any, mapping: Mapping[str, Any]) -> Any:
        names, parts = [], []
        for name, value in mapping.items():
            if key is not None and name == "num_nodes":
                part: Any = (_COUNT, key)
            elif type(value) in SETTINGS or (key is not None and type(value) in (list, tuple, *TENSORS)):
                part = self.read(value, key)
            else:
                part = None
            if part is not None:
                names.append(name)
                parts.append(part)
        return key, tuple(names), tuple(parts)

    def _take(self, tensor: Tensor, key: Any) -> bool:
        """Add a tensor of a type or relation; False if it is none of its rows or edges."""
        if (key is None or type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.requires_grad
                or tensor.device != self._device or tensor.dim() == 0):  # fmt: skip
            return False
        count = sum(self._sizes.find(key))
        is_edges = key in self._sizes.edges and tensor.shape == (2, count) and not tensor.is_floating_point()
        if not is_edges and tensor.shape[0] != count:
            return False
        if is_edges and count > 0 and find_batch(tensor) is None:
            return False
        # A relation has one place.
        if is_edges and self._pairs.setdefault(key, tensor) is not tensor:
            return False
        self.tensors.append(tensor)
        self.roles.append((key, is_edges))
        self.forms.append((tensor.dtype, None if is_edges else tensor.shape[1:]))
        return True


def _list_stores(batch: HeteroData) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    yield None, batch._global_store._mapping
    for stores in (batch._node_store_dict, batch._edge_store_dict):
        for key, store in stores.items():
            yield key, store._mapping


def _read_types(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> TypedCall | None:
    """Read arguments for a batch with types; None if they are for another one."""
    values = [*args, *kwargs.values()]
    batches = [value for value in values if type(value) is HeteroData]
    if len(batches) == 1:
        sizes = read_typed_sizes(batches[0])
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
    reader = _TypedReader(sizes, device)
    nest = reader.read((args, kwargs))
    if nest is None or not any(is_edges for _, is_edges in reader.roles):
        return None
    found = state.read(model, device)
    if found is None:
        return None
    return TypedCall((nest, *reader.forms, len(next(iter(sizes.edges.values()))), found), sizes, nest, reader.tensors,
                     tuple(reader.roles), seeds)  # fmt: skip


def _find_device(value: Any) -> torch.device | None:
    """Find the device of the edges of a batch, or of a dict among values; None without any."""
    if type(value) is HeteroData:
        found = (store._mapping.get("edge_index") for store in value.edge_stores)
    else:
        found = (item for part in value if type(part) is dict for key, item in part.items() if type(key) is tuple)
    return next((item.device for item in found if isinstance(item, Tensor)), None)


def _find_sizes(dicts: Iterable[Mapping[Any, Any]]) -> TypedSizes | None:
    """Find the sizes of a batch by its registered edges; None if they are not known to be sorted."""
    nodes: dict[str, tuple[int, ...]] = {}
    edges: dict[Relation, tuple[int, ...]] = {}
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
    return TypedSizes(dict(sorted(nodes.items())), dict(sorted(edges.items())))


def _can_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()

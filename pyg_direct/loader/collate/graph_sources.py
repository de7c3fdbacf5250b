"""Data sets of many small graphs: lists of graphs, and PyG's `InMemoryDataset` with its slices.

`read_source` finds the data set below subsets and index selections. `leaves` of a source are its attributes, each with
the values of all graphs, joined or separate.
"""

from __future__ import annotations

import copy
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset
from torch_geometric import transforms
from torch_geometric.data import Batch, Data, Dataset, HeteroData, InMemoryDataset
from torch_geometric.data.separate import separate

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.collate.stale_rows import GraphMarks, is_watched
from pyg_direct.ops.compute_content_hash import have_contents, read_content
from pyg_direct.runtime.host.host_memory import available_bytes

# Names that PyG's `collate` treats specially.
SPECIAL = ("num_nodes", "ptr")
# Share of the free host memory for transformed graphs, which are there twice while they are joined.
_TRANSFORMED_SHARE = 0.2
_READ_VERSION = operator.attrgetter("_version")
_WAY_OUT = "add it there, or name it in exclude_keys"
# Transforms of PyG that give equal graphs for equal graphs, and graphs not much larger.
_PURE = frozenset(getattr(transforms, name) for name in (
    "AddRemainingSelfLoops", "AddSelfLoops", "Cartesian", "Center", "Constant", "Distance", "FaceToEdge", "GCNNorm",
    "LocalCartesian", "LocalDegreeProfile", "NormalizeFeatures", "NormalizeScale", "OneHotDegree", "PointPairFeatures",
    "Polar", "RemoveDuplicatedEdges", "RemoveIsolatedNodes", "RemoveSelfLoops", "Spherical", "TargetIndegree",
    "ToUndirected", "VirtualNode") if hasattr(transforms, name))  # fmt: skip


class OneByOneError(Exception):
    """Graphs of a data set can only be made one by one; the message has the reason."""


class Leaf(NamedTuple):
    """An attribute of all graphs, or a part of a nested one.

    Attributes:
        store: Node type or relation of its storage; None without types.
        key: The name that PyG passes to `__inc__` and `__cat_dim__`: the key of a dictionary, otherwise the attribute's
            name.
        path: Name of the attribute, then keys or indices within its value.
        values: One value per graph; None if they are joined.
        table, slices: The joined values, and the first row of each graph in them.
    """

    store: Any
    key: Any
    path: tuple[Any, ...]
    values: Sequence[Any] | None
    table: Any = None
    slices: Any = None

    @property
    def name(self) -> str:
        """The name of the attribute in messages."""
        where = "" if self.store is None else f"[{self.store!r}]."
        return f"{where}{self.path[0]}" + "".join(f"[{part!r}]" for part in self.path[1:])

    def value_of(self, graph: Any) -> Any:
        """Return the value of one graph."""
        value = find_store(graph, self.store)._mapping[self.path[0]]
        for part in self.path[1:]:
            value = value[part]
        return value


def find_store(graph: Any, key: Any) -> Any:
    """Find the storage of a node type or a relation; for None the only storage of `Data`, or the global one of
    `HeteroData`.
    """
    if not isinstance(graph, HeteroData):
        return graph._store
    if key is None:
        return graph._global_store
    return (graph._edge_store_dict if isinstance(key, tuple) else graph._node_store_dict)[key]


class ListedValues(Sequence[Any]):
    """Values of one attribute in the storages of graphs, found when they are asked for."""

    def __init__(self, stores: Sequence[Mapping[str, Any]], name: str) -> None:
        self._stores, self._name = stores, name

    def __len__(self) -> int:
        return len(self._stores)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [store[self._name] for store in self._stores[place]]
        return self._stores[place][self._name]

    def __iter__(self) -> Iterator[Any]:
        return map(operator.itemgetter(self._name), self._stores)


class GraphList:
    """Graphs of a list, each once.

    Attributes:
        is_checked_whole: False, because `were_written` checks only the graphs that it is given.

    Args:
        numbers: Indices of the data set's items in `graphs`, int64 `[D]`.
        places: Indices of the graphs in the user's list; None for the whole list.
        follows: True if the graphs come from a list of the user, which may change.
    """

    is_checked_whole = False

    def __init__(self, graphs: Sequence[Any], numbers: Tensor, places: list[int] | None = None,
                 follows: bool = True) -> None:  # fmt: skip
        # A copy, as the user may change the list.
        self.graphs, self.numbers = list(graphs), numbers
        self._places, self._follows = places, follows
        self.example = graphs[0] if graphs else Data()
        kind = type(self.example)
        for number, graph in enumerate(graphs):
            if type(graph) is kind:
                continue
            if not isinstance(graph, (Data, HeteroData)) or isinstance(graph, Data) != isinstance(self.example, Data):
                raise ArgumentTypeError(f"dataset must hold graphs of one kind, {kind.__name__} as its first, got a "
                                        f"{type(graph).__name__} as graph {number}")  # fmt: skip
            raise OneByOneError(f"its graphs are of several classes, {kind.__name__} and {type(graph).__name__}")
        self._marks = GraphMarks(self.graphs)

    def were_written(self, numbers: Sequence[int]) -> bool:
        """Check if graphs have other values than when they were read, or values with more counted writes."""
        return self._marks.were_written(numbers)

    @cached_property
    def has_one_order(self) -> bool:
        """True if all graphs have their attributes in one order."""
        return len({read_order(graph, frozenset()) for graph in self.graphs}) == 1

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self.graphs)

    @property
    def used(self) -> Sequence[int]:
        """Numbers of the graphs that batches may use."""
        return range(len(self.graphs))

    def make_graph(self, number: int) -> Any:
        """Return the graph of a number."""
        return self.graphs[number]

    keep_graph = make_graph

    def is_current(self, base: Any, places: list[int] | None) -> bool:
        """Check if a data set still has these graphs, in this order, and none was written since they were read.

        Writes that torch does not count are searched in some graphs, as far as `has_content` looks.

        Args:
            places: Indices of its items; None for all.
        """
        if not self._follows or not isinstance(base, (list, tuple)) or places != self._places:
            return False
        graphs = base if places is None else [base[place] for place in dict.fromkeys(places)]
        if len(graphs) != len(self.graphs) or not all(map(operator.is_, graphs, self.graphs)):
            return False
        return self._marks.are_current()

    def list_orders(self, excluded: frozenset[str], way_out: str = _WAY_OUT) -> tuple[list[Any], list[int] | None]:
        """List (orders of attributes, index of each graph's order or None if all have the first); see `read_order`.

        Args:
            excluded: Attributes that batches do not have.
            way_out: Advice for a graph that misses an attribute, for the message.

        Raises:
            ArgumentError: a graph misses an attribute that another has.
        """
        if not self.graphs:
            return [], None
        orders: dict[Any, int] = {}
        of_graph = array("I", (orders.setdefault(read_order(graph, excluded), len(orders)) for graph in self.graphs))
        known = list(orders)
        first = {key: set(names) for key, names in known[0]}
        for place, order in enumerate(known[1:], 1):
            own = {key: set(names) for key, names in order}
            if own != first:
                self._refuse_order(first, own, of_graph.index(place), way_out)
        return known, None if len(known) == 1 else of_graph.tolist()

    @staticmethod
    def _refuse_order(first: Mapping[Any, set[str]], own: Mapping[Any, set[str]], number: int, way_out: str) -> None:
        rule = "dataset must hold graphs with equal attributes"
        for key in [*first, *own]:
            if (key in first) != (key in own):
                here, there = (number, 0) if key in own else (0, number)
                raise ArgumentError(f"{rule}: graph {here} has the type {key!r}, graph {there} has not")
            for name in sorted(first[key] ^ own[key]):
                here, there = (number, 0) if name in own[key] else (0, number)
                where = "" if key is None else f"[{key!r}]."
                raise ArgumentError(f"{rule}: graph {here} has {where}{name}, graph {there} has not; {way_out}")

    def count_nodes(self, key: Any) -> Sequence[Any] | None:
        """Return the values of `num_nodes` of a storage, if graphs have the attribute."""
        stores = [find_store(graph, key)._mapping for graph in self.graphs]
        if not stores or "num_nodes" not in stores[0]:
            return None
        counts = [store["num_nodes"] for store in stores]
        for number, count in enumerate(counts):
            if not isinstance(count, Tensor) and (not isinstance(count, Integral) or count < 0):
                raise ArgumentError("dataset must hold graphs with num_nodes as an integer of at least 0, got "
                                    f"{count!r} of graph {number}")  # fmt: skip
        return counts

    def leaves(self, key: Any, names: Sequence[str]) -> Iterator[Leaf]:
        """Iterate over the attributes of a storage."""
        stores = [find_store(graph, key)._mapping for graph in self.graphs]
        for name in names:
            yield Leaf(key, name, (name,), ListedValues(stores, name))


def read_order(graph: Any, excluded: frozenset[str]) -> tuple[Any, ...]:
    """Read the storages of a graph with the names of their attributes: the order of a batch that begins with it."""
    if excluded:
        return tuple((store._key, tuple(name for name in store._mapping if name not in excluded))
                     for store in graph.stores)  # fmt: skip
    return tuple((store._key, tuple(store._mapping)) for store in graph.stores)


class CollatedDataset:
    """Graphs that an `InMemoryDataset` keeps joined.

    Attributes:
        is_checked_whole: True, because `were_written` checks all graphs, and need not be given any.

    Args:
        dataset: The data set, with at least two graphs.
        places: Indices of its items; None for all.

    Raises:
        ArgumentError: slices contradict each other or the values; an index is no number of a graph.
    """

    has_one_order = True
    is_checked_whole = True

    def __init__(self, dataset: InMemoryDataset, places: list[int] | None = None) -> None:
        self._dataset, self.data, self.slices = dataset, dataset._data, dataset.slices
        self._transform = dataset.transform
        self.count = dataset.len()
        for store in self.data.stores:
            for name, slices in self._slices_of(store).items():
                self._check_slices(name, slices)
        self._kind, self._indices, self._places = type(dataset), _copy_indices(dataset), places
        self.numbers = torch.tensor(list(self._indices), dtype=torch.int64, device="cpu")
        if places is not None:
            self.numbers = self.numbers[torch.tensor(places, dtype=torch.int64, device="cpu")]
        # Loops read the slices of these graphs without a check.
        is_bad = (self.numbers < 0) | (self.numbers >= self.count)
        if bool(is_bad.any()):
            raise ArgumentError(f"indices of dataset must be numbers of its {self.count} graphs, got "
                                f"{int(self.numbers[is_bad][0])}")  # fmt: skip
        # Of each storage the values and their slices, by name.
        self._held = [(dict(store._mapping), self._slices_of(store)) for store in self.data.stores]
        self._values = [value for parts in self._held for part in parts for value in part.values()]
        self._watched = list(filter(is_watched, self._values))
        self._versions = list(map(_READ_VERSION, self._watched))
        self._contents = [read_content(value) for value in self._values]

    def _slices_of(self, store: Any) -> dict[str, Any]:
        own: Any = self.slices if store._key is None else self.slices.get(store._key, {})
        return {name: own[name] for name in own if name in store._mapping}

    def _check_slices(self, name: str, slices: Any) -> None:
        if not isinstance(slices, Tensor):
            return
        if slices.dim() != 1 or slices.numel() != self.count + 1:
            first: Any = self.slices
            while isinstance(first, Mapping):
                known, first = next(iter(first.items()))
            raise ArgumentError(f"slices of {name} must have {self.count + 1} entries for {self.count} graphs, as "
                                f"slices of {known} have, got shape {tuple(slices.shape)}")  # fmt: skip
        is_bad = (slices[1:] < slices[:-1]) | (slices[:-1] < 0)
        if bool(is_bad.any()):
            number = int(is_bad.nonzero()[0])
            raise ArgumentError(f"slices of {name} must ascend from 0 on, got [{int(slices[number])}, "
                                f"{int(slices[number + 1])}) for graph {number}")  # fmt: skip

    @property
    def example(self) -> Any:
        """A graph of the class of all graphs."""
        return self.data

    @property
    def used(self) -> Sequence[int]:
        """Numbers of the graphs that batches may use."""
        used: list[int] = self.numbers.unique().tolist()
        return used

    def keep_graph(self, number: int) -> Any:
        """Return the graph of a number, which the data set caches, as in PyG."""
        return self._dataset.get(number)

    def make_graph(self, number: int) -> Any:
        """Make the graph of a number."""
        return separate(type(self.data), batch=self.data, idx=number, slice_dict=self.slices, decrement=False)

    def is_current(self, base: Any, places: list[int] | None) -> bool:
        """Check if a data set still has these joined graphs, and none was written, as far as `has_content` looks.

        Args:
            places: Indices of its items; None for all.
        """
        if type(base) is not self._kind or base._data is not self.data or base.slices is not self.slices:
            return False
        if base.transform is not self._transform or places != self._places or _copy_indices(base) != self._indices:
            return False
        return not self.were_written() and have_contents(self._values, self._contents)

    def were_written(self, numbers: Sequence[int] = ()) -> bool:
        """Check if the joined values were replaced since they were read, or have more counted writes.

        Args:
            numbers: See `GraphList`; all graphs are checked.
        """
        # Called for each batch: columns that Python compares in one step each.
        if list(map(_READ_VERSION, self._watched)) != self._versions or len(self.data.stores) != len(self._held):
            return True
        for store, (values, slices) in zip(self.data.stores, self._held, strict=True):
            own: Any = self.slices if store._key is None else self.slices.get(store._key, {})
            if len(store._mapping) != len(values) or not (_holds(store._mapping, values) and _holds(own, slices)):
                return True
        return False

    def list_orders(self, excluded: frozenset[str], way_out: str = _WAY_OUT) -> tuple[list[Any], list[int] | None]:
        """List orders, see `GraphList`; all graphs have the attributes with slices."""
        used, order = self.used, []
        for store in self.data.stores:
            key, names = store._key, list(self._slices_of(store))
            if "_num_nodes" in store.__dict__:
                names = [name for name in names if name != "num_nodes"] + ["num_nodes"]
            order.append((key, tuple(name for name in names if name not in excluded)))
        if not used:
            return [tuple(order)], None
        own = read_order(self.make_graph(used[0]), excluded)
        if [(key, set(names)) for key, names in own] != [(key, set(names)) for key, names in order]:
            raise OneByOneError(f"a {type(self.data).__name__} has attributes as it is made that no slices are of")
        return [own], None

    def count_nodes(self, key: Any) -> Sequence[Any] | None:
        """Return the values of `num_nodes` of a storage, if graphs have the attribute."""
        values = find_store(self.data, key).__dict__.get("_num_nodes")
        if values is not None and len(values) != self.count:
            raise ArgumentError(f"dataset must hold one _num_nodes for each of its {self.count} graphs, got "
                                f"{len(values)}")  # fmt: skip
        return values  # type: ignore[no-any-return]

    def leaves(self, key: Any, names: Sequence[str]) -> Iterator[Leaf]:
        """Iterate over the attributes of a storage."""
        values = find_store(self.data, key)._mapping
        slices = self.slices if key is None else self.slices.get(key, {})
        for name in names:
            yield Leaf(key, name, (name,), None, values[name], slices[name])


def _copy_indices(dataset: InMemoryDataset) -> Sequence[int]:
    indices = dataset.indices()
    return indices if isinstance(indices, range) else list(indices)


def _holds(mapping: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Check if a mapping still has these values."""
    return all(map(operator.is_, map(mapping.get, values), values.values()))


class TransformedDataset(CollatedDataset):
    """Graphs of an `InMemoryDataset` behind its transform, which draws nothing: made and joined once.

    Args:
        source: The graphs before the transform.
        dataset: Their data set.

    Raises:
        OneByOneError: the transform fails for a graph, or its results cannot be joined.
    """

    def __init__(self, source: GraphList | CollatedDataset, dataset: InMemoryDataset) -> None:
        used = list(source.used)
        joined = InMemoryDataset()
        try:
            joined._data, joined.slices = InMemoryDataset.collate(_transform(source, dataset, used))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise OneByOneError(f"its graphs cannot be joined: {error}") from error
        super().__init__(joined)
        self._source, self._described = source, _describe_transform(dataset.transform)
        self.numbers = torch.searchsorted(torch.tensor(used, dtype=torch.int64, device="cpu"), source.numbers)

    def is_current(self, base: Any, places: list[int] | None) -> bool:
        """Check if a data set still has these graphs and an equal transform; see `CollatedDataset`."""
        return self._source.is_current(base, places) and _describe_transform(base.transform) == self._described

    def were_written(self, numbers: Sequence[int] = ()) -> bool:
        """Check if the graphs before the transform were written; see `CollatedDataset`."""
        return self._source.were_written(self._source.used)


def _transform(source: Any, dataset: InMemoryDataset, numbers: Sequence[int]) -> list[Any]:
    made: list[Any] = []
    room = int(_TRANSFORMED_SHARE * available_bytes())
    for number in numbers:
        try:
            graph = dataset.transform(copy.copy(source.make_graph(number)))  # type: ignore[misc]
        except Exception as error:
            # As where each batch makes its graphs, the program hears of it when it comes to this graph.
            raise OneByOneError(f"its transform fails: {error}") from error
        made.append(graph)
        room -= sum(value.nbytes for store in graph.stores for value in store._mapping.values()
                    if isinstance(value, Tensor) and value.layout is torch.strided)  # fmt: skip
        if room < 0:
            raise OneByOneError("its transformed graphs would take a large part of the free memory")
    return made


def is_pure(transform: Any) -> bool:
    """Report whether a transform is known to give equal graphs for equal graphs."""
    if type(transform) is transforms.Compose:
        return all(map(is_pure, transform.transforms))
    return type(transform) in _PURE and "forward" not in transform.__dict__


def _describe_transform(transform: Any) -> str:
    """Describe a transform with its options, as they are now."""
    parts = map(_describe_transform, transform.transforms) if type(transform) is transforms.Compose else ()
    return f"{type(transform).__name__} {vars(transform)} {list(parts)}"


Source = GraphList | CollatedDataset


def read_source(dataset: Any, known: Source | None = None) -> Source:
    """Read the graphs of a data set, in the order of its items.

    Args:
        dataset: A list of `Data` or `HeteroData`, an `InMemoryDataset`, or a `Subset` of one.
        known: An earlier result, which is returned if the data set has not changed.

    Raises:
        ArgumentError, ArgumentTypeError: `dataset`, rule and the number of the graph that breaks it.
    """
    places: list[int] | None = None
    while type(dataset) is Subset:
        chosen = [int(index) for index in dataset.indices]
        places = chosen if places is None else [chosen[place] for place in places]
        dataset = dataset.dataset
    if known is not None and known.is_current(dataset, places):
        return known
    if isinstance(dataset, InMemoryDataset):
        return _read_in_memory(dataset, places)
    if not isinstance(dataset, (list, tuple)):
        raise OneByOneError(f"a {type(dataset).__name__} is neither a list of graphs nor an InMemoryDataset")
    base = list if isinstance(dataset, list) else tuple
    for name in ("__getitem__", "__len__", "__getitems__"):
        if getattr(type(dataset), name, None) is not getattr(base, name, None):
            raise OneByOneError(f"{type(dataset).__name__}.{name} is code of its own")
    return _read_list(dataset, places)


def _read_list(graphs: Sequence[Any], places: list[int] | None) -> GraphList:
    if graphs and graphs[0] is None:
        raise ArgumentTypeError("dataset must hold graphs, got None as graph 0")
    if graphs and not isinstance(graphs[0], (Data, HeteroData)):
        raise OneByOneError(f"its items are no Data or HeteroData, but of {type(graphs[0]).__name__}")
    if graphs and isinstance(graphs[0], Batch):
        raise OneByOneError("its graphs are batches themselves")
    if places is None:
        return GraphList(graphs, torch.arange(len(graphs), device="cpu"))
    own: dict[int, int] = {}
    numbers = [own.setdefault(place, len(own)) for place in places]
    return GraphList([graphs[place] for place in own], torch.tensor(numbers, dtype=torch.int64, device="cpu"), places)


def _read_in_memory(dataset: InMemoryDataset, places: list[int] | None) -> Source:
    kind, transform = type(dataset), dataset.transform
    if transform is not None and not is_pure(transform):
        raise OneByOneError("it has a transform, which is called for each graph of each batch; what draws no numbers "
                            "may be its pre_transform")  # fmt: skip
    for name, owner in (("get", InMemoryDataset), ("len", InMemoryDataset), ("indices", Dataset),
                        ("__getitem__", Dataset), ("__len__", Dataset)):  # fmt: skip
        if getattr(kind, name) is not getattr(owner, name) or name in dataset.__dict__:
            raise OneByOneError(f"{kind.__name__}.{name} is code of its own, which is called for each graph")
    if hasattr(kind, "__getitems__"):
        raise OneByOneError(f"{kind.__name__}.__getitems__ is code of its own")
    if not isinstance(dataset._data, (Data, HeteroData)) or isinstance(dataset._data, Batch):
        raise OneByOneError(f"its graphs are of {type(dataset._data).__name__}")
    source = _read_untransformed(dataset, places)
    if transform is None:
        return source
    if len(source.used) > 1:
        return TransformedDataset(source, dataset)
    return GraphList(_transform(source, dataset, source.used), torch.zeros_like(source.numbers), follows=False)


def _read_untransformed(dataset: InMemoryDataset, places: list[int] | None) -> GraphList | CollatedDataset:
    if dataset.len() != 1 and not _has_other_graphs(dataset):
        return CollatedDataset(dataset, places)
    items = range(len(dataset)) if places is None else places
    indices = dataset.indices()
    own: dict[int, int] = {}
    numbers = [own.setdefault(indices[item], len(own)) for item in items]
    kept = [dataset._data] if dataset.len() == 1 else dataset._data_list
    graphs = [dataset.get(number) if kept[number] is None else kept[number] for number in own]
    return GraphList(graphs, torch.tensor(numbers, dtype=torch.int64, device="cpu"), follows=False)


def _has_other_graphs(dataset: InMemoryDataset) -> bool:
    """Check if the program put its own graphs into the data set's cache of single graphs."""
    kept: list[Any] = [graph for graph in dataset._data_list or () if graph is not None]
    whole = {value.untyped_storage().data_ptr() for store in dataset._data.stores for value in store._mapping.values()
             if isinstance(value, Tensor) and value.layout is torch.strided}  # fmt: skip
    return any(value.numel() > 0 and value.untyped_storage().data_ptr() not in whole
               for graph in kept for store in graph.stores for value in store._mapping.values()
               if isinstance(value, Tensor) and value.layout is torch.strided)  # fmt: skip

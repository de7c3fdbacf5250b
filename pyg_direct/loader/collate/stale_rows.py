"""Writes of a program to values that a loader has read: batches prefetched before a write get the current rows.

Marks of the graphs of a list show writes since it was read. They take few bytes per graph, and are compared before each
epoch.
"""

from __future__ import annotations

import operator
import struct
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, chain, islice
from operator import attrgetter, is_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore as PygFeatureStore, HeteroData
from torch_geometric.typing import TensorFrame

from pyg_direct.errors import LoaderWarning, warn
from pyg_direct.features.feature import Feature
from pyg_direct.loader.prefetch.drivers import take_memory
from pyg_direct.ops.compute_content_hash import Content, has_content, read_content
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.runtime.host.tensor_views import as_bytes, ordinary_tensors

# Attributes that batches take from the sampler.
_SAMPLED = ("adj_t", "batch", "edge_index", "num_nodes")
# Placeholder for a batch whose rows are read when it is handed over.
LATER = object()
_READ_VERSION, _GET = attrgetter("_version"), cast(Any, dict.get)
# In a store of another package: depth of nested dicts that are searched, and limit of tables.
_DEPTH, _MOST_HELD = 3, 1 << 12
# Numbers of an attribute that are compared for each batch, spread by the golden ratio: no column is preferred.
_LOOKED_AT = np.arange(1, 65) * 0.6180339887498949 % 1


class Marks:
    """Marks of a graph's attributes when their rows were placed: the values, and the number of writes to each.

    Torch counts writes to a tensor, but not writes through NumPy or `.data`. In a store of another package, the tensors
    in its attributes, or in dicts there, are checked. Writes are not detected in a store that returns copies or keeps
    rows elsewhere.

    Args:
        data: A `Data`, a `HeteroData`, a feature store, a pair that begins with one, or dicts of tables in a list.
    """

    def __init__(self, data: Any) -> None:
        is_tables = isinstance(data, list) and all(type(part) is dict for part in data)
        data = data[0] if isinstance(data, (tuple, list)) and not is_tables else data
        self._held: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
        if is_tables:
            mappings = data
        else:
            mappings = _list_mappings(data)
            if not mappings and isinstance(data, PygFeatureStore):
                self._held = _list_held(data)
            # The tables of a frame are values as those of the graph are.
            mappings = [*mappings, *(value.feat_dict for mapping in mappings for value in mapping.values()
                                     if isinstance(value, TensorFrame))]  # fmt: skip
        self._mappings, self._sizes = mappings, list(map(len, mappings))
        self._parts = [(mapping, key, value, _count_writes(value)) for mapping in mappings
                       for key, value in mapping.items() if key not in _SAMPLED]  # fmt: skip
        # Columns, which Python compares in one step each: this is called twice per batch.
        self._places, self._keys, self._values = ([part[column] for part in self._parts] for column in range(3))
        inner = [part for value in self._values for part in _list_inner(value)]
        self._tensors = [value for value in (*self._values, *inner)
                         if isinstance(value, Tensor) and not value.is_inference()]  # fmt: skip
        self._versions = list(map(_READ_VERSION, self._tensors))
        self._features = [(value, value.num_writes) for value in self._values if isinstance(value, Feature)]

    def were_written(self) -> bool:
        """Check if values that are still there have been written since."""
        return any(mapping.get(key) is value and _count_writes(value) != writes
                   for mapping, key, value, writes in self._parts)  # fmt: skip

    def are_current(self) -> bool:
        """Check if nothing has been written, replaced or added since."""
        if list(map(_READ_VERSION, self._tensors)) != self._versions or any(
                feature.num_writes != writes for feature, writes in self._features):  # fmt: skip
            return False
        if not all(map(is_, map(_GET, self._places, self._keys), self._values)):
            return False
        for mapping, key, value, versions in self._held:
            if any(_count_writes(tensor) != writes for tensor, writes in versions):
                return False
            # A store may keep anything under its own names, such as the rows of its last read.
            if mapping is not None and mapping.get(key, value) is not value:
                return False
        return list(map(len, self._mappings)) == self._sizes


class Glance:
    """A few numbers of the attributes on the host, to detect writes that torch does not count (NumPy, `.data`).

    Args:
        marks: Marks of the placed rows; None if there are none.
    """

    def __init__(self, marks: Marks | None) -> None:
        values = [] if marks is None else marks._values
        self._seen = [(value, _find_address(value), words, places, words[places].tobytes())
                      for value in values for words, places in _view_words(value)]  # fmt: skip

    def is_current(self) -> bool:
        """Check that these numbers have not changed."""
        return all(words[places].tobytes() == known and _find_address(value) == address
                   for value, address, words, places, known in self._seen)  # fmt: skip


def _find_address(value: Any) -> int:
    address: int = value.data_ptr() if isinstance(value, Tensor) else value.ctypes.data
    return address


def _view_words(value: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """View the numbers of an attribute, with the places of those that are compared; nothing if it is no plain array."""
    if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided:
        if value.is_contiguous() and value.numel():
            words = as_bytes(value).numpy().view(f"u{min(value.element_size(), 8)}")
            yield words, (_LOOKED_AT * len(words)).astype(np.int64)
    elif type(value) is np.ndarray and value.flags.c_contiguous and value.size and value.dtype.kind in "biufc":
        words = value.reshape(-1).view(f"u{min(value.itemsize, 8)}")
        yield words, (_LOOKED_AT * len(words)).astype(np.int64)


def _list_held(store: PygFeatureStore) -> list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]]:
    """List tables of a store of another package: (mapping with the table, its key, the value, its tensors with their
    writes).
    """
    names = {attr.attr_name for attr in store.get_all_tensor_attrs()}
    held: list[tuple[Any, Any, Any, list[tuple[Tensor, int]]]] = []
    waiting = [(vars(store), 0)]
    while waiting and len(held) < _MOST_HELD:
        mapping, depth = waiting.pop()
        for key, value in list(mapping.items()):
            if isinstance(value, dict):
                waiting += [(value, depth + 1)] if depth < _DEPTH else []
                continue
            parts = value if isinstance(value, (tuple, list)) else [value]
            versions = [(part, _count_writes(part)) for part in parts[:_MOST_HELD] if isinstance(part, Tensor)]
            if versions:
                is_table = key in names or (isinstance(key, tuple) and not names.isdisjoint(key))
                held.append((mapping if is_table else None, key, value, versions))
    return held


def _count_writes(value: Any) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    if isinstance(value, Feature):
        return value.num_writes
    return sum(map(_count_writes, _list_inner(value)))


def _list_inner(value: Any) -> list[Tensor]:
    """List the tensors of a frame beside its tables: its target; and of columns of embeddings."""
    if isinstance(value, TensorFrame):
        found = value.y
    else:
        found = getattr(value, "values", None) if hasattr(value, "offset") else None
    return [found] if isinstance(found, Tensor) else []


class Values:
    """Identity of the values of a graph, for any content.

    Args:
        data: A `Data`, a `HeteroData`, or a pair of stores; stores of other packages are not checked.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._known = [(mapping, dict(mapping)) for mapping in _list_mappings(data)]

    def are_those_of(self, data: Any) -> bool:
        """Check if this is the same graph, and no value has been assigned, added or removed."""
        if data is not self._data or len(_list_mappings(data)) != len(self._known):
            return False
        return all(mapping.keys() == known.keys() and all(mapping[key] is value for key, value in known.items())
                   for mapping, known in self._known)  # fmt: skip


def _list_mappings(data: Any) -> list[Any]:
    """List the mappings with a graph's values; empty for unknown stores."""
    if isinstance(data, (tuple, list)):
        return [mapping for part in data for mapping in _list_mappings(part)]
    if isinstance(data, (Data, HeteroData)):
        return [store._mapping for store in data.stores]
    tables = getattr(data, "_features", None)
    return [tables] if isinstance(tables, dict) and hasattr(data, "find") else []


class FreshRows:
    """Maker of batches with the rows that the graph holds when they are handed over, as in PyG's loader without
    workers.

    A batch that was prefetched before a write is read again; after that only sampling is prefetched, so that rows are
    read once. On a CPU, a few numbers of each attribute are compared too: torch does not count all writes.

    Args:
        make: Samples a batch again: (number, seeds) -> sample.
        fetch: The stage of the loader, or of its groups: (sample, number, work item) -> batch, or batches.
        is_ahead: True if it is called before a batch is requested.
    """

    def __init__(self, loader: Any, make: Callable[[int, Any], Any], fetch: Callable[..., Any], is_ahead: bool
                 ) -> None:  # fmt: skip
        self._loader, self._make, self._fetch, self._is_ahead = loader, make, fetch, is_ahead
        self._made: dict[int, tuple[Any, Any, Any]] = {}
        self._glance = self._look() if is_ahead and loader.device.type == "cpu" and not loader._keeps_rows else None
        # The user's functions are called from one thread at a time.
        self._lock = None if loader._is_own() else threading.Lock()

    def _look(self) -> Glance:
        return Glance(getattr(self._loader._rows(), "marks", None))

    def fetch(self, sample: Any, number: int, item: Any) -> Any:
        """Run the stage, and note the rows that were read."""
        loader = self._loader
        if not self._is_ahead:
            self._made[number] = sample, item, loader._current_rows()
            return self._fetch(sample, number, item)
        # Noted before the read: a write meanwhile is found when the batch is handed over.
        self._made[number] = sample, item, loader._rows()
        if loader._reads_late:
            return [LATER] * len(item) if isinstance(item, list) else LATER
        if self._lock is None:
            return self._fetch(sample, number, item)
        with self._lock:
            return self._fetch(sample, number, item)

    def hand_out(self, number: int, made: Any) -> Iterator[Any]:
        """Iterate over the batches of a call of `fetch`, one or a group, each with the current rows."""
        sample, item, rows = self._made.pop(number)
        is_group = isinstance(item, list)
        if not (is_group or self._is_ahead):
            # Read just now.
            yield made
            return
        ready, samples = (made, list(sample)) if is_group else ([made], [sample])
        work: list[tuple[int, Any]] = list(item) if is_group else [(number, item)]
        del made, sample
        # The batches of a group are released one by one.
        while ready:
            own, seeds = work.pop(0)
            yield self._renew(ready.pop(0), samples.pop(0), own, seeds, rows)

    def _renew(self, batch: Any, sample: Any, number: int, seeds: Any, rows: Any) -> Any:
        loader, is_later = self._loader, batch is LATER
        is_seen = self._glance is None or self._glance.is_current()
        if not is_later and (loader._keeps_rows or (is_seen and are_current(rows))):
            return batch
        if not is_later and self._is_ahead:
            tell_written(loader)
            loader._reads_late = True
        if not is_seen and are_current(loader._rows()):
            with ordinary_tensors():
                loader._follow_rows()
        loader._current_rows()
        if self._glance is not None:
            self._glance = self._look()
        if not loader._is_own() and not is_later:
            # The user's functions may have changed the sample.
            sample = self._make(number, seeds)
        if loader.device.type == "cuda":
            sample.record_stream(current_stream(loader.device.index))
        if self._lock is None:
            batch = loader._fetch(sample, number, seeds)
        else:
            with self._lock:
                batch = loader._fetch(sample, number, seeds)
        # The batch is made on the stream that uses it.
        take_memory(batch)
        return batch


def are_current(rows: Any) -> bool:
    """Check if the graph still holds the rows that were placed; True if that is not known."""
    marks: Marks | None = getattr(rows, "marks", None)
    return marks is None or marks.are_current()


def were_written(rows: Any) -> bool:
    """Check if placed rows were written in place; replaced values do not count."""
    marks: Marks | None = getattr(rows, "marks", None)
    return marks is not None and marks.were_written()


def tell_written(loader: Any) -> None:
    """Warn, once per loader, that rows are written while an epoch runs."""
    if not loader._reads_late:
        saving = "prefetch=0" if loader.prefetch > 0 else "super_batch=1"
        warn(
            "rows of data were written while an epoch runs: batches made ahead are read again, and rows are read when "
            f"a batch is asked for from now on; {saving} saves the second read. Where rows are copies, on a GPU or in "
            "store_dtype, each batch after a write copies its attribute anew",
            LoaderWarning,
        )


# Graphs whose content is compared at the start of an epoch, to find writes that torch does not count.
_COMPARED = 32
# Tensors up to this many bytes are compared whole.
_FEW_BYTES = 16 << 10
# Values whose writes are read at a time, whose objects stay in the processor's cache meanwhile.
_TOGETHER = 512
# Addresses of objects, as NumPy writes the type.
_ADDRESS = f"<i{struct.calcsize('P')}"
_READ_BASE = operator.attrgetter("_base")


class GraphMarks:
    """Marks of the values of graphs: the values, and the number of writes to each that torch counted.

    Torch counts writes to a tensor, but not writes through NumPy or `.data`. Those are searched in 32 graphs.

    Args:
        graphs: `Data` or `HeteroData`.
    """

    def __init__(self, graphs: Sequence[Any]) -> None:
        begins, mappings = array("Q", [0]), []
        for graph in graphs:
            mappings += [store._mapping for store in graph.stores]
            begins.append(len(mappings))
        self._mappings: list[Any] = mappings
        # None if each graph has one storage.
        self._begins = None if len(mappings) == len(graphs) else begins
        # None if all storages have equally many values.
        widths = set(map(len, mappings))
        self._width = widths.pop() if len(widths) == 1 else None
        self._firsts = array("Q", [] if self._width is not None else accumulate(map(len, mappings), initial=0))
        total = len(mappings) * self._width if self._width is not None else self._firsts[-1] if mappings else 0
        # An array, as a list of objects takes more memory while it grows.
        self._values = np.fromiter(self._iterate(), object, total)
        watched = self._values
        if not all(map(is_watched, watched)):
            watched = _pack(list(filter(is_watched, self._values)))
        self._counters = _list_counters(watched)
        self._counts = _count_each(self._counters)
        # Writes to each value when it was read; 0 for values that count none.
        if watched is not self._values:
            self._writes = np.array([value._version if is_watched(value) else 0 for value in self._values], np.uint32)
        else:
            self._writes = self._counts if self._counters is watched else _count_each(watched)
        self._contents = [(value, _read_content(value)) for value in self._list_samples(len(graphs))]

    def _iterate(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._mappings))

    def _list_samples(self, count: int) -> list[Any]:
        """List values of some graphs, or of all in a small data set."""
        chosen = range(0, count, -(-count // _COMPARED) or 1)
        return [value for number in chosen for place in self._places_of(number)
                for value in self._mappings[place].values()]  # fmt: skip

    def _places_of(self, number: int) -> range:
        """Return the places of a graph's mappings."""
        if self._begins is None:
            return range(number, number + 1)
        return range(self._begins[number], self._begins[number + 1])

    def were_written(self, numbers: Sequence[int]) -> bool:
        """Check if graphs have other values than when they were read, or values with more counted writes."""
        values, writes = self._values, self._writes
        for number in numbers:
            for place in self._places_of(number):
                mapping = self._mappings[place]
                first, end = (place * self._width, (place + 1) * self._width) if self._width is not None else (
                    self._firsts[place], self._firsts[place + 1])  # fmt: skip
                if len(mapping) != end - first:
                    return True
                for at, value in enumerate(mapping.values(), first):
                    if value is not values[at] or (is_watched(value) and value._version != writes[at]):
                        return True
        return False

    def are_current(self) -> bool:
        """Check that all graphs have the values that they had, with equally many counted writes, and that the content
        of some is equal.
        """
        if self._width is None:
            if not all(map(operator.eq, accumulate(map(len, self._mappings), initial=0), self._firsts)):
                return False
        elif not set(map(len, self._mappings)) <= {self._width}:
            return False
        values = self._iterate()
        for at in range(0, len(self._values), _TOGETHER):
            known = self._values[at : at + _TOGETHER]
            own = np.fromiter(islice(values, len(known)), object, len(known))
            if not np.array_equal(_read_addresses(own), _read_addresses(known)):
                return False
        return all(np.array_equal(own, self._counts[at : at + len(own)]) for at, own in _read_writes(self._counters)) \
            and all(_has_content(value, known) for value, known in self._contents)  # fmt: skip


def _read_writes(tensors: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Read the number of writes to each tensor, uint32, some at a time: (index of the first, numbers)."""
    for at in range(0, len(tensors), _TOGETHER):
        part = tensors[at : at + _TOGETHER].tolist()
        yield at, np.fromiter(map(_READ_VERSION, part), np.uint32, len(part))


def _count_each(tensors: np.ndarray) -> np.ndarray:
    """Read the number of writes to each tensor."""
    # Most numbers fit one byte.
    counts = np.zeros(len(tensors), np.uint8)
    for at, own in _read_writes(tensors):
        if own.max() > np.iinfo(counts.dtype).max:
            counts = counts.astype(np.uint32)
        counts[at : at + len(own)] = own
    return counts


class _Addresses:
    """Addresses of the objects of an array, int64, without a copy."""

    def __init__(self, objects: np.ndarray) -> None:
        # NumPy keeps this object as long as its view.
        self._objects = objects
        self.__array_interface__ = {"data": (objects.ctypes.data, True), "typestr": _ADDRESS, "shape": objects.shape,
                                    "version": 3}  # fmt: skip


def _read_addresses(objects: np.ndarray) -> np.ndarray:
    """Read the addresses of objects, `[n]`: equal ones are of one object.

    Args:
        objects: Contiguous, of dtype object; its memory is the result's.
    """
    return np.asarray(_Addresses(objects))


def _pack(values: Collection[Any]) -> np.ndarray:
    """Pack objects into an array, without a look into them."""
    return np.fromiter(values, object, len(values))


def _list_counters(tensors: np.ndarray) -> np.ndarray:
    """List tensors that count all writes to these: views count them with their base, as in a list of the graphs of an
    `InMemoryDataset`.
    """
    if not any(base is not None for base in map(_READ_BASE, tensors)):
        return tensors
    owners = {id(own): own for own in map(_choose_counter, tensors)}
    return tensors if len(owners) == len(tensors) else _pack(owners.values())


def _choose_counter(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None or base.is_inference() else base


def is_watched(value: Any) -> bool:
    """Check if torch counts the writes to a value."""
    return isinstance(value, Tensor) and not value.is_inference()


def _read_content(value: Any) -> bytes | Content:
    """Read the content of a value: its bytes, if it is small."""
    is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    if is_plain and value.nbytes <= _FEW_BYTES and not (value.is_conj() or value.is_neg()):
        return as_bytes(value.contiguous()).numpy().tobytes()
    return read_content(value)


def _has_content(value: Any, known: bytes | Content) -> bool:
    return _read_content(value) == known if isinstance(known, bytes) else has_content(value, known)

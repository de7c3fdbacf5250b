"""Marks of the graphs of a list: which values they had when they were read, and the writes to them since.

They take few bytes per graph, and are compared before each epoch. `stale_rows.py` has the marks of one large graph.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.ops.compute_content_hash import Content, has_content, read_content
from pyg_direct.runtime.host.tensor_views import as_bytes

# Graphs whose content is compared at the start of an epoch, to find writes that torch does not count.
_COMPARED = 32
# Tensors up to this many bytes are compared whole.
_FEW_BYTES = 16 << 10
# Values whose writes are read at a time, whose objects stay in the processor's cache meanwhile.
_TOGETHER = 512
# Addresses of objects, as NumPy writes the type.
_ADDRESS = f"<i{struct.calcsize('P')}"
_READ_BASE, _READ_VERSION = operator.attrgetter("_base"), operator.attrgetter("_version")


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
        self._counts = _count_writes(self._counters)
        # Writes to each value when it was read; 0 for values that count none.
        if watched is not self._values:
            self._writes = np.array([value._version if is_watched(value) else 0 for value in self._values], np.uint32)
        else:
            self._writes = self._counts if self._counters is watched else _count_writes(watched)
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


def _count_writes(tensors: np.ndarray) -> np.ndarray:
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

"""Batches of many small graphs, cut out of one collated store, equal to PyG's `Batch.from_data_list`.

`GraphCollection` reads a data set once: it joins each attribute of all graphs. Methods that PyG calls on graphs for
each batch are called once. A batch then takes a few gathers, for any number of graphs.

`BatchesTogether` makes several batches at once on a GPU: their rows by one launch, their places by a few array steps.
Each equals the batch that `GraphCollection` makes alone, and has memory of its own.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_direct.errors import IdError
from pyg_direct.loader.collate.data import copy_data
from pyg_direct.loader.collate.graph_collation import GraphStore, read_stores
from pyg_direct.loader.collate.graph_columns import Chosen, Column, Numbers, Objects, Rows, Steps
from pyg_direct.loader.collate.graph_sources import SPECIAL, Source, find_store
from pyg_direct.ops.rows.graph_rows import (
    BatchesOfGraphs,
    Layout,
    LoopChoice,
    MadeRows,
    RowBegins,
    RowNumbers,
    TableRows,
    sum_before,
)
from pyg_direct.runtime.host.tensor_views import version_of

# Copies on GPUs by their source tensor, kept while a loader uses them.
_COPIES: weakref.WeakValueDictionary[tuple[int, int, str], Tensor] = weakref.WeakValueDictionary()
# Devices on which several batches are made together.
_TOGETHER_ON = ("cuda",)
# Attributes of a graph with storages only: an empty one can be copied.
_STORES = {"_store", "_global_store", "_node_store_dict", "_edge_store_dict", "_tensor_attr_cls", "_edge_attr_cls"}


class GraphCollection:
    """All graphs of a data set, and batches of any of them.

    Attributes:
        device: Device of the joined values and of batches; None before they are placed.

    Args:
        follow_batch: Attributes for which batches have the graph of each row.
        exclude_keys: Attributes that batches do not have.

    Raises:
        OneByOneError: host memory cannot hold the joined graphs, or there are none to join.
        ArgumentError, ArgumentTypeError: a graph misses an attribute, or has another width or dtype; slices contradict
            each other.
    """

    def __init__(self, source: Source, follow_batch: Iterable[str] | None, exclude_keys: Iterable[str] | None) -> None:
        self.source = source
        self.device: torch.device | None = None
        self._follow = frozenset(follow_batch or ())
        excluded = frozenset(exclude_keys or ())
        self._orders, self._order_of = source.list_orders(excluded)
        self._stores: dict[Any, GraphStore] = {}
        if source.count and len(source.used):
            self._stores, self._spans = read_stores(source, self._orders[0])
        self._templates: list[Any] = [None] * len(self._orders)
        self._together: BatchesTogether | None = None

    def count_bytes(self) -> int:
        """Count the bytes of the joined values."""
        return sum(column.count_bytes() for store in self._stores.values() for column in store.columns.values())

    def place(self, device: torch.device) -> None:
        """Move the joined values, and later batches, to a device."""
        self.device, self._together = device, None
        for store in self._stores.values():
            for column in store.columns.values():
                column.place(lambda table: copy_once(table, device))

    def collate(self, numbers: Tensor) -> Any:
        """Build the batch of these graphs.

        Args:
            numbers: int64 `[B]` on the CPU.
        """
        if numbers.numel() == 0:
            raise IdError("a batch must have at least one graph, got none: a batch sampler gave an empty list")
        assert self.device is not None
        with LoopChoice() as is_by_loops:
            return self._join(Chosen(numbers, self._spans, self.device, self.source.keep_graph, is_by_loops))

    @property
    def makes_groups(self) -> bool:
        """True if several batches can be made together, by a kernel."""
        if self._together is None or not self._together.is_current():
            self._together = None
            device = self.device
            if device is not None and device.type in _TOGETHER_ON and BatchesTogether.can_make(self._stores):
                self._together = BatchesTogether(self._stores, self._spans, self._follow, device)
        return self._together is not None

    def collate_group(self, batches: Sequence[Tensor], most_bytes: int) -> list[tuple[Any, list[Tensor]]]:
        """Make the first batches together, as many as take `most_bytes` on the GPU, and at least one.

        Args:
            batches: Numbers of the graphs of each batch, int64 `[B]` on the CPU.

        Returns:
            (batch, tensors that own its memory) of each.
        """
        sizes = list(map(Tensor.numel, batches))
        # An empty batch is refused at its turn.
        end = sizes.index(0) if 0 in sizes else len(sizes)
        if end == 0 or not self.makes_groups:
            return [(self.collate(batches[0]), [])]
        assert self._together is not None
        return self._together.make(batches[:end], most_bytes, self._open, self.source.keep_graph)

    def _open(self, chosen: Chosen) -> tuple[Any, Any]:
        """Make a batch without attributes: (batch, order of its attributes)."""
        place = 0 if self._order_of is None else self._order_of[int(chosen.numbers[0])]
        return self._open_batch(place, chosen), self._orders[place]

    def _join(self, chosen: Chosen) -> Any:
        batch, order = self._open(chosen)
        all_slices: dict[Any, Any] = {}
        all_increments: dict[Any, Any] = {}
        for key, names in order:
            slices, increments = (all_slices, all_increments) if key is None else ({}, {})
            self._fill(find_store(batch, key), self._stores[key], names, chosen, slices, increments)
            if key is not None and slices:
                all_slices[key], all_increments[key] = slices, increments
        if chosen.rows is not None:
            chosen.rows.finish()
        close_batch(batch, chosen.count, all_slices, all_increments)
        return batch

    def _fill(self, target: Any, store: GraphStore, names: Sequence[str], chosen: Chosen, slices: dict[str, Any],
              increments: dict[str, Any]) -> None:  # fmt: skip
        """Write the attributes of one storage in PyG's order."""
        for name in names:
            if name == "num_nodes" or name not in SPECIAL:
                collate_alone(target, name, store, chosen, slices, increments, self._follow)
        if store.nodes is not None:
            target._mapping["batch"], target._mapping["ptr"] = chosen.batch_and_ptr(store.nodes)

    def _open_batch(self, place: int, chosen: Chosen) -> Any:
        """Make a batch without attributes."""
        template = self._templates[place]
        if template is None:
            template = _make_empty(self.source.example if self._order_of is None else chosen.graphs[0])
            if not set(template.__dict__) <= _STORES or any(len(store) for store in template.stores):
                # Its class writes attributes in the constructor, which batches must not share.
                return template
            self._templates[place] = template
        return copy_data(template) if isinstance(template, Data) else copy.copy(template)


def copy_once(table: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; loaders over parts of one data set share the copy."""
    if table.device == device:
        return table
    key = (id(table), version_of(table), str(device))
    known = _COPIES.get(key)
    # Another tensor may have the same id by now.
    if known is None or known.copied_from() is not table:  # type: ignore[attr-defined]
        known = _COPIES[key] = table.to(device)
        known.copied_from = weakref.ref(table)  # type: ignore[attr-defined]
    return known


def _make_empty(example: Any) -> Any:
    batch = Batch(_base_cls=type(example))
    batch.stores_as(example)
    return batch


# Lists of one number per graph on the CPU: 0, 1, 2, ... B; zeros; first rows of a group; their pairs; or sums of steps.
_EACH, _NONE, _SLICES, _SUMS, _STEPS = "each", "none", "slices", "sums", "steps"


class _Read(NamedTuple):
    """A column that a launch reads.

    Attributes:
        value: Index of its layout.
        slices, increments: Indices of its lists, as in PyG's batches.
        follow: Indices of the layouts of PyG's `batch` and `ptr` for it; None if batches do not have these.
    """

    value: int
    slices: int
    increments: int
    follow: tuple[int, int] | None


class BatchesTogether:
    """Maker of several batches of the graphs of a data set on a GPU.

    Args:
        stores: Storages of all graphs on the GPU, which `can_make` accepts.
        spans: See `Chosen`.
        follow: Attributes for which batches have the graph of each row.
    """

    def __init__(self, stores: Mapping[Any, GraphStore], spans: Tensor, follow: frozenset[str], device: torch.device
                 ) -> None:  # fmt: skip
        self._stores, self._spans, self._follow, self._device = stores, spans, follow, device
        self._layouts: list[Layout] = []
        self._lists: list[tuple[str, Any]] = []
        self._reads = {(key, name): self._plan(name, column) for key, store in stores.items()
                       for name, column in store.columns.items() if isinstance(column, Rows)}  # fmt: skip
        self._nodes = {key: self._number(store.nodes) for key, store in stores.items() if store.nodes is not None}
        self._rows = BatchesOfGraphs(spans, self._layouts, device)

    @staticmethod
    def can_make(stores: Mapping[Any, GraphStore]) -> bool:
        """Check if all columns are tensors that a kernel reads, numbers, or objects."""
        columns = [column for store in stores.values() for column in store.columns.values()]
        return any(map(_is_read, columns)) and all(
            type(column) in (Numbers, Objects) or _is_read(column) for column in columns)  # fmt: skip

    def is_current(self) -> bool:
        """Check that the tables may be read as when this was made."""
        return self._rows.is_current()

    def _plan(self, name: str, column: Rows) -> _Read:
        steps, group = column.steps, column.group
        added = steps.reshape(len(steps), -1).numpy() if isinstance(steps, Tensor) else steps
        self._layouts.append(TableRows(column.table, column.dim, group, added))
        value = len(self._layouts) - 1
        follow = self._number(group) if name in self._follow and group is not None else None
        slices = (_EACH, None) if group is None else (_SLICES, group)
        return _Read(value, self._find_list(*slices), self._find_list(*_describe(steps)), follow)

    def _number(self, group: int) -> tuple[int, int]:
        """Add the layouts of PyG's `batch` and `ptr`."""
        self._layouts += RowNumbers(group), RowBegins(group)
        return len(self._layouts) - 2, len(self._layouts) - 1

    def _find_list(self, kind: str, of: Any) -> int:
        for place, (known, other) in enumerate(self._lists):
            if known == kind and (other is of if isinstance(of, Tensor) else other == of):
                return place
        self._lists.append((kind, of))
        return len(self._lists) - 1

    def make(self, batches: Sequence[Tensor], most_bytes: int, open_batch: Callable[[Chosen], tuple[Any, Any]],
             make_graph: Callable[[int], Any]) -> list[tuple[Any, list[Tensor]]]:  # fmt: skip
        """Make the first batches, as many as take `most_bytes` on the GPU, and at least one.

        Args:
            batches: Numbers of the graphs of each batch, int64 `[B]` on the CPU; at least one batch and graph.
            open_batch: Makes a batch without attributes: (batch, order of its attributes).
            make_graph: Makes the graph of a number.

        Returns:
            (batch, tensors that own its memory) of each.
        """
        made = self._rows.read(batches, most_bytes)
        ready = []
        for numbers, values, lists, memory in zip(batches, made.values, self._make_lists(made), made.memory,
                                                  strict=False):  # fmt: skip
            chosen = Chosen(numbers, self._spans, self._device, make_graph, False)
            batch, order = open_batch(chosen)
            self._fill(batch, order, values, lists, chosen)
            ready.append((batch, memory))
        return ready

    def _fill(self, batch: Any, order: Any, values: Sequence[Tensor], lists: Sequence[Tensor], chosen: Chosen) -> None:
        """Write the attributes of a batch, in PyG's order."""
        all_slices: dict[Any, Any] = {}
        all_increments: dict[Any, Any] = {}
        for key, names in order:
            slices, increments = (all_slices, all_increments) if key is None else ({}, {})
            store, target = self._stores[key], find_store(batch, key)
            mapping = target._mapping
            for name in names:
                read = self._reads.get((key, name))
                if read is not None:
                    mapping[name] = values[read.value]
                    slices[name], increments[name] = lists[read.slices], lists[read.increments]
                    if read.follow is not None:
                        mapping[f"{name}_batch"], mapping[f"{name}_ptr"] = (values[place] for place in read.follow)
                    elif name in self._follow:
                        follow(target, name, store.columns[name], slices[name], chosen)
                elif name == "num_nodes" or name not in SPECIAL:
                    collate_alone(target, name, store, chosen, slices, increments, self._follow)
            if key in self._nodes:
                mapping["batch"], mapping["ptr"] = (values[place] for place in self._nodes[key])
            if key is not None and slices:
                all_slices[key], all_increments[key] = slices, increments
        close_batch(batch, chosen.count, all_slices, all_increments)

    def _make_lists(self, made: MadeRows) -> Iterator[Sequence[Tensor]]:
        """Make the lists of each batch, int64 `[B, ...]` or `[B + 1]` each, in memory of its own."""
        count, most = made.numbers.shape
        lists = [self._list_numbers(made, kind, of) for kind, of in self._lists]
        joined = np.concatenate([own.reshape(count, -1) for own in lists], 1)
        shapes = [own.shape[1:] for own in lists]
        widths, are_flat = list(map(math.prod, shapes)), all(len(shape) == 1 for shape in shapes)
        for row, number in zip(joined, made.counts, strict=True):
            cut: Sequence[Tensor] = torch.unsafe_split_with_sizes(torch.from_numpy(row.copy()), widths)
            if not are_flat or number < most:
                cut = [own.view(shape)[: shape[0] + number - most] for own, shape in zip(cut, shapes, strict=True)]
            yield cut

    @staticmethod
    def _list_numbers(made: MadeRows, kind: str, of: Any) -> np.ndarray:
        """List one number, or some, per graph for all batches, int64 `[n, B, ...]` or `[n, B + 1]`."""
        count, most = made.numbers.shape
        if kind == _EACH:
            return np.broadcast_to(np.arange(most + 1), (count, most + 1))
        if kind == _NONE:
            return np.zeros((count, most), np.int64)
        if kind == _SLICES:
            return made.ptr[of]
        if kind == _STEPS:
            return sum_before(of.numpy()[made.numbers])
        if len(of) == 1:
            return made.ptr[of[0], :, :-1]
        return made.ptr[list(of), :, :-1].transpose(1, 2, 0)[..., None]


def _is_read(column: Column) -> bool:
    return isinstance(column, Rows) and column.is_read_by_kernel


def _describe(steps: Steps) -> tuple[str, Any]:
    if steps is None:
        return _NONE, None
    return (_STEPS, steps) if isinstance(steps, Tensor) else (_SUMS, tuple(steps))


def follow(target: Any, name: str, column: Column, slices: Any, chosen: Chosen) -> None:
    """Write PyG's `batch` and `ptr` for an attribute into a storage of a batch."""
    for suffix, value in zip(("batch", "ptr"), column.follow(chosen, slices), strict=True):
        # PyG's storages drop None.
        target[f"{name}_{suffix}"] = value


def collate_alone(target: Any, name: str, store: GraphStore, chosen: Chosen, slices: dict[str, Any],
                  increments: dict[str, Any], followed: frozenset[str]) -> None:  # fmt: skip
    """Write one attribute into a storage of a batch."""
    if name == "num_nodes":
        assert store.num_nodes is not None
        values = [store.num_nodes[number] for number in chosen.listed]
        target._num_nodes = values
        target._mapping[name] = sum(values)
        return
    column = store.columns[name]
    target._mapping[name], slices[name], increments[name] = column.collate(chosen)
    if name in followed:
        follow(target, name, column, slices[name], chosen)


def close_batch(batch: Any, count: int, slices: dict[Any, Any], increments: dict[Any, Any]) -> None:
    """Write the number of graphs, slices and increments into a batch."""
    # PyG's own setters take as long as a gather.
    find_store(batch, None).__dict__.update(_num_graphs=count, _slice_dict=slices, _inc_dict=increments)

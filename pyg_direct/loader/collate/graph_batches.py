"""Batches of many small graphs, cut out of one collated store, equal to PyG's `Batch.from_data_list`.

`GraphCollection` reads a data set once: it joins each attribute of all graphs. Methods that PyG calls on graphs for
each batch are called once. A batch then takes a few gathers, for any number of graphs.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_direct.errors import IdError
from pyg_direct.loader.collate.batches_together import BatchesTogether, close_batch, collate_alone
from pyg_direct.loader.collate.data import copy_data
from pyg_direct.loader.collate.graph_collation import GraphStore, read_stores
from pyg_direct.loader.collate.graph_columns import Chosen
from pyg_direct.loader.collate.graph_sources import SPECIAL, Source, find_store
from pyg_direct.ops.rows.graph_rows import LoopChoice
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
        sizes = list(map(len, batches))
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

"""Batches of graphs of equal shapes, stacked along a new first dimension, as PyG's `DenseDataLoader` does.

`DenseCollection` stacks the graphs of a list once; joined graphs of a data set are stacked as views. A batch is then
one gather per attribute. `StaticCollection` keeps one structure for signals over it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch_geometric.data import Batch, Data

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.loader.collate.graph_batches import copy_once
from pyg_direct.loader.collate.graph_collation import (
    ForeignError,
    check_alike,
    check_kinds,
    check_memory,
    check_shapes,
    kind_of,
    read_slices,
)
from pyg_direct.loader.collate.graph_columns import move_all
from pyg_direct.loader.collate.graph_sources import Leaf, Source
from pyg_direct.nn.whole_graphs import register_whole
from pyg_direct.ops.rows.graph_rows import to_device

_WAY_OUT = "add it there, or delete it from all"


class _Stack(Protocol):
    """One attribute of all graphs."""

    def take(self, numbers: Tensor, device: torch.device) -> Any:
        """Gather the attribute of a batch, of graphs int64 `[B]` on the CPU, to a device."""

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the tables by `move`."""

    def count_bytes(self) -> int:
        """Count the bytes of the tables."""


class DenseCollection:
    """All graphs of a data set, and batches that stack any of them.

    Attributes:
        device: Device of the tables and of batches; None before they are placed.

    Args:
        excluded: Attributes that batches do not have.

    Raises:
        OneByOneError: host memory cannot hold the stacked graphs, or they are of several classes.
        ArgumentError, ArgumentTypeError: a graph misses an attribute, or has another shape or dtype; slices contradict
            each other.
    """

    def __init__(self, source: Source, excluded: frozenset[str] = frozenset()) -> None:
        if not isinstance(source.example, Data):
            raise ArgumentTypeError(f"dataset must hold Data to be stacked, got {type(source.example).__name__}: take "
                                    "DataLoader")  # fmt: skip
        self.source = source
        self.device: torch.device | None = None
        self._stacks: dict[str, _Stack] = {}
        self._empty: Batch = Batch()
        orders, self._order_of = source.list_orders(excluded, _WAY_OUT)
        # The order in which PyG lists the names of a graph.
        self._names = [list({name for _, names in order for name in names}) for order in orders]
        if source.count and len(source.used):
            self._read([name for _, names in orders[0] for name in names])

    def _read(self, names: Sequence[str]) -> None:
        counts = self.source.count_nodes(None) if "num_nodes" in names else None
        joined = [name for name in names if name != "num_nodes" or counts is None]
        leaves = list(self.source.leaves(None, joined))
        leaves = self._take_shared(leaves)
        check_memory(leaves)
        for leaf in leaves:
            self._stacks[leaf.path[0]] = _make_stack(leaf, self.source)
        if counts is not None:
            self._stacks["num_nodes"] = _make_stack(Leaf(None, "num_nodes", ("num_nodes",), counts), self.source)

    def _take_shared(self, leaves: list[Leaf]) -> list[Leaf]:
        """Take attributes of which batches have one value for all graphs; returns the other ones."""
        return leaves

    def count_bytes(self) -> int:
        """Count the bytes of the tables."""
        return sum(stack.count_bytes() for stack in self._stacks.values())

    def place(self, device: torch.device) -> None:
        """Move the tables, and later batches, to a device."""
        self.device = device
        for stack in self._stacks.values():
            stack.place(lambda table: copy_once(table, device))

    def collate(self, numbers: Tensor) -> Batch:
        """Build the batch of these graphs.

        Args:
            numbers: int64 `[B]` on the CPU.
        """
        if numbers.numel() == 0:
            raise IdError("a batch must have at least one graph, got none: a batch sampler gave an empty list")
        assert self.device is not None
        # A copy takes a tenth of the time of PyG's constructor.
        batch = copy.copy(self._empty)
        for name in self._names[0 if self._order_of is None else self._order_of[int(numbers[0])]]:
            if name in self._stacks:
                batch[name] = self._stacks[name].take(numbers, self.device)
        return batch


class StaticCollection(DenseCollection):
    """Signals over one graph, and batches of any of them: `Data` with one `edge_index`, and rows `[B, N, ...]`.

    Rows of a node stand side by side in memory, as accelerated convolutions take them. Attributes of edges that are
    equal in all graphs are kept once, as the edges are.

    Args:
        excluded: Attributes that batches do not have.

    Raises:
        OneByOneError: host memory cannot hold the stacked graphs, or they are of several classes.
        ArgumentError, ArgumentTypeError: graphs have no `edge_index`, or different ones; see `DenseCollection`.
    """

    def __init__(self, source: Source, excluded: frozenset[str] = frozenset()) -> None:
        self._shared: dict[str, Tensor] = {}
        super().__init__(source, excluded)
        self._num_nodes = int(source.example.num_nodes or 0)
        if source.count and len(source.used):
            if "edge_index" not in self._shared:
                raise ArgumentError("dataset must hold graphs with edge_index for static_graph=True, got "
                                    f"{sorted(self._names[0])}")  # fmt: skip
            self._num_nodes = int(source.make_graph(source.used[0]).num_nodes)

    def _take_shared(self, leaves: list[Leaf]) -> list[Leaf]:
        example = self.source.make_graph(self.source.used[0])
        others = []
        for leaf in leaves:
            name = leaf.path[0]
            if name == "edge_index" or example.is_edge_attr(name):
                found = _find_shared(leaf, self.source)
                if isinstance(found, Tensor):
                    self._shared[name] = found
                    continue
                if name == "edge_index":
                    raise ArgumentError("dataset must hold graphs with one edge_index for static_graph=True, got "
                                        f"another in graph {found}: leave static_graph out")  # fmt: skip
            others.append(leaf)
        self._of_nodes = {leaf.path[0] for leaf in others if example.is_node_attr(leaf.path[0])}
        return others

    def count_bytes(self) -> int:
        """Count the bytes of the tables."""
        return super().count_bytes() + sum(value.nbytes for value in self._shared.values())

    def place(self, device: torch.device) -> None:
        """Move the tables and the structure, and later batches, to a device."""
        super().place(device)
        self._shared = {name: copy_once(value, device) for name, value in self._shared.items()}
        if "edge_index" in self._shared:
            register_whole(self._shared["edge_index"], self._num_nodes)

    def collate(self, numbers: Tensor) -> Any:
        """Build the batch of these graphs, int64 `[B]` on the CPU.

        Raises:
            IdError: `numbers` is empty.
        """
        made, batch = super().collate(numbers), Data()
        for name, value in made._store.items():
            is_signal = name in self._of_nodes and isinstance(value, Tensor) and value.dim() > 2
            # Rows of a node side by side.
            batch[name] = value.transpose(0, 1).contiguous().transpose(0, 1) if is_signal else value
        for name, value in self._shared.items():
            batch[name] = value
        batch.num_nodes, batch.batch_size = self._num_nodes, numbers.numel()
        return batch


def _find_shared(leaf: Leaf, source: Source) -> Tensor | int:
    """Return the tensor that all graphs have, or the number of the first graph that has another."""
    first = None
    for number in source.used:
        value = leaf.values[number] if leaf.values is not None else source.make_graph(number)[leaf.path[0]]
        if type(value) is not Tensor or value.requires_grad:
            return number
        if first is None:
            first = value
        elif value is not first and not (value.dtype == first.dtype and torch.equal(value, first)):
            return number
    assert first is not None, "there are graphs"
    # Its own memory, as joined graphs share theirs.
    return first if leaf.values is not None else first.contiguous()


class _Table:
    """Tensors of equal shapes, stacked.

    Args:
        table: The tensors of all graphs, one after the other along `dim`, or one graph per row.
        dim: That dimension; None for one graph per row.
        start: The first row of the first graph.
    """

    def __init__(self, table: Tensor, dim: int | None = None, width: int = 1, start: int = 0, count: int = 0) -> None:
        self._table, self._dim, self._width, self._start, self._count = table, dim, width, start, count

    def take(self, numbers: Tensor, device: torch.device) -> Tensor:
        """See `_Stack`."""
        stacked, dim = self._table, self._dim
        if dim is not None:
            stacked = stacked.narrow(dim, self._start, self._count * self._width)
            shape = [*stacked.shape[:dim], self._count, self._width, *stacked.shape[dim + 1 :]]
            stacked = stacked.view(shape).movedim(dim, 0)
        return stacked.index_select(0, to_device(numbers, device))

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `_Stack`."""
        self._table = move(self._table)

    def count_bytes(self) -> int:
        """See `_Stack`."""
        return self._table.nbytes


class _Rows:
    """Tensors with equal shapes in all graphs of batches; graphs outside of batches have other shapes.

    Args:
        table: The tensors of all graphs, one after the other along `dim`.
        starts: First row of each graph, int64 `[G]` on the CPU.
    """

    def __init__(self, table: Tensor, dim: int, starts: Tensor, width: int) -> None:
        self._table, self._dim, self._starts, self._width = table, dim, starts, width

    def take(self, numbers: Tensor, device: torch.device) -> Tensor:
        """See `_Stack`."""
        rows = self._starts.index_select(0, numbers).unsqueeze(1) + torch.arange(self._width, device="cpu")
        found = self._table.index_select(self._dim, to_device(rows.view(-1), device))
        shape = [*found.shape[: self._dim], numbers.numel(), self._width, *found.shape[self._dim + 1 :]]
        return found.view(shape).movedim(self._dim, 0).contiguous()

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `_Stack`."""
        self._table = move(self._table)

    def count_bytes(self) -> int:
        """See `_Stack`."""
        return self._table.nbytes


class _Values:
    """Values that torch's own code stacks for each batch: numbers, strings, and containers of tensors.

    Args:
        find: Finds the value of a graph by its number.
    """

    def __init__(self, find: Callable[[int], Any]) -> None:
        self._find = find

    def take(self, numbers: Tensor, device: torch.device) -> Any:
        """See `_Stack`."""
        return move_all(default_collate([self._find(number) for number in numbers.tolist()]), device)

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `_Stack`."""

    def count_bytes(self) -> int:
        """See `_Stack`."""
        return 0


def _make_stack(leaf: Leaf, source: Source) -> _Stack:
    """Stack an attribute of all graphs.

    Raises:
        ArgumentError, ArgumentTypeError: the number of a graph of another shape or dtype; slices contradict each other.
    """
    try:
        return _stack(leaf) if leaf.values is not None else _cut(leaf, source)
    except ForeignError:
        if leaf.values is not None:
            return _make_values(leaf, list(leaf.values).__getitem__, 0)
        return _make_values(leaf, lambda number: source.keep_graph(number)[leaf.path[0]], source.used[0])


def _make_values(leaf: Leaf, find: Callable[[int], Any], example: int) -> _Values:
    try:
        default_collate([find(example)])
    except (TypeError, RuntimeError) as error:
        # As torch raises for sparse tensors.
        raise ArgumentTypeError(f"dataset must hold graphs with {leaf.name} that can be stacked, as dense tensors, "
                                f"numbers and strings can, got {type(find(example)).__name__} of graph {example}"
                                ) from error  # fmt: skip
    return _Values(find)


def _stack(leaf: Leaf) -> _Stack:
    assert leaf.values is not None
    kinds = {kind_of(value) for value in leaf.values}
    if len(kinds) > 1:
        check_kinds(leaf)
    if kinds != {"rows"}:
        raise ForeignError
    check_shapes(leaf, None)
    check_alike(leaf)
    return _Table(torch.stack(list(leaf.values)))


def _cut(leaf: Leaf, source: Source) -> _Stack:
    """Cut values that a data set keeps joined, as PyG's `separate` does."""
    table, name = leaf.table, leaf.path[0]
    if isinstance(table, list) and isinstance(leaf.slices, Tensor):
        if len(table) != source.count:
            raise ArgumentError(f"dataset must hold one {leaf.name} for each of its {source.count} graphs, got "
                                f"{len(table)}")  # fmt: skip
        return _make_values(leaf, table.__getitem__, source.used[0])
    if not isinstance(table, Tensor) or kind_of(table) != "rows" or table.dim() == 0 or table.requires_grad:
        raise ForeignError
    dim = source.example.__cat_dim__(name, table, source.example._store)
    if (dim is not None and (isinstance(dim, bool) or not isinstance(dim, int))) or not isinstance(leaf.slices, Tensor):
        raise ForeignError
    slices = read_slices(leaf, dim)
    if dim is None:
        return _Table(table.narrow(0, int(slices[0]), source.count))
    dim %= table.dim()
    widths = slices.diff()
    used = torch.tensor(source.used, device="cpu")
    own = widths[used]
    if bool((own != own[0]).any()):
        first, other = int(used[0]), int(used[int((own != own[0]).nonzero()[0])])
        shapes = [(*table.shape[:dim], int(widths[number]), *table.shape[dim + 1 :]) for number in (first, other)]
        raise ArgumentError(f"dataset must hold graphs with {leaf.name} of one width, shape {shapes[0]} as graph "
                            f"{first}, got {shapes[1]} of graph {other}")  # fmt: skip
    width = int(own[0])
    if bool((widths == width).all()):
        # Graphs outside of batches are not checked, so that the tensor of the data set itself stays the table.
        return _Table(table, dim, width, int(slices[0]), source.count)
    return _Rows(table, dim, slices[:-1], width)

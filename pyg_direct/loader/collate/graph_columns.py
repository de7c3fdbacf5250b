"""Columns of a collated data set: one attribute of all its graphs, and its part of a batch.

A column returns the result of PyG's `collate` for the attribute: (value, slices, increments).
Values of an attribute of a list of graphs are one table: joined, or found where they lie together already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, repeat
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.collate import _batch_and_ptr, _collate

from pyg_direct.ops.rows.graph_rows import GraphRows, GraphRowsOnGpu, to_device

# Values that are joined at a time: their copy is small beside the table.
_TOGETHER = 64
# Least share of a tensor's rows that its views have, if it is the table itself; a GPU keeps all of its rows.
_SHARE = 0.5


def count_rows(values: Sequence[Tensor], dim: int) -> Tensor:
    """Count the rows of each value along a dimension, int64 `[G]`."""
    return torch.from_numpy(np.fromiter((value.size(dim) for value in values), np.int64, len(values)))


def join_rows(values: Sequence[Tensor], dim: int, sizes: Tensor) -> tuple[Tensor, Tensor | None]:
    """Join values along a dimension, without a second list of them.

    The graphs of an `InMemoryDataset`, or of a part of it, are views of its joined tensors: these are the table, which
    takes no memory.

    Args:
        values: Of one dtype, one device, and one width in all other dimensions.
        dim: At least 0.
        sizes: Result of `count_rows`.

    Returns:
        The table, and the first row of each value in it, int64 `[G]`; None if values follow each other from row 0.
    """
    found = _find_whole(values, dim, sizes)
    if found is not None:
        return found
    first = values[0]
    table = first.new_empty([*first.shape[:dim], int(sizes.sum()), *first.shape[dim + 1 :]])
    at = 0
    for part in _cut(values):
        joined = torch.cat(part, dim)
        table.narrow(dim, at, joined.size(dim)).copy_(joined)
        at += joined.size(dim)
    return table, None


def stack_values(values: Sequence[Tensor]) -> Tensor:
    """Stack values of one shape along a new first dimension, without a second list of them."""
    table = values[0].new_empty([len(values), *values[0].shape])
    for number, part in enumerate(_cut(values)):
        torch.stack(part, out=table.narrow(0, number * _TOGETHER, len(part)))
    return table


def _cut(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    items = iter(values)
    while part := list(islice(items, _TOGETHER)):
        yield part


def _find_whole(values: Sequence[Tensor], dim: int, sizes: Tensor) -> tuple[Tensor, Tensor] | None:
    """Find the tensor that the values are ranges of rows of, and the first row of each."""
    whole, first = values[0]._base, values[0]
    if whole is None or type(whole) is not Tensor or whole.requires_grad or whole.is_inference():
        return None
    is_like = (whole.dtype, whole.device, whole.layout) == (first.dtype, first.device, first.layout)
    if not is_like or not whole.is_contiguous() or whole.is_conj() or whole.is_neg() or whole.dim() != first.dim():
        return None
    step, rows = whole.stride(dim), whole.size(dim)
    shape = [*whole.shape[:dim], *whole.shape[dim + 1 :]]
    if step == 0 or shape != [*first.shape[:dim], *first.shape[dim + 1 :]] or int(sizes.sum()) < _SHARE * rows:
        return None
    if not all(map(operator.is_, map(operator.attrgetter("_base"), values), repeat(whole))):
        return None
    if {value.stride() for value in values} != {whole.stride()} or any(value.is_neg() for value in values):
        return None
    offsets = torch.from_numpy(np.fromiter((value.storage_offset() for value in values), np.int64, len(values)))
    offsets -= int(whole.storage_offset())
    begins = offsets // step
    is_range = (begins * step == offsets) & (begins >= 0) & (begins + sizes <= rows)
    return (whole, begins) if bool(is_range.all()) else None


# Up to this many rows are gathered one by one if rows run along the last dimension, as in `edge_index`.
_FEW_ROWS = 8


class Chosen:
    """Graphs of a batch, with their rows in all tables; tables with equal slices are a group.

    Args:
        numbers: Numbers of the graphs, int64 `[B]` on the CPU, at least one.
        spans: First row of each graph in each group of tables, then its number of rows in each, int64 `[G, 2 * K]` on
            the CPU.
        is_by_loops: On a CPU, let loops copy rows instead of torch.
    """

    def __init__(self, numbers: Tensor, spans: Tensor, device: torch.device, make_graph: Callable[[int], Any],
                 is_by_loops: bool) -> None:  # fmt: skip
        self.numbers, self.count, self.device = numbers, numbers.numel(), device
        self._make_graph, self._is_by_loops = make_graph, is_by_loops
        self._listed: list[int] | None = None
        self._graphs: list[Any] | None = None
        self._lasting: dict[str, Tensor] = {}
        self._spans, self._num_groups = spans, spans.shape[1] // 2

    @cached_property
    def rows(self) -> GraphRows | GraphRowsOnGpu | None:
        """The reader by CPU loops or a kernel, which `finish` completes; None if torch gathers rows."""
        if self.device.type == "cuda":
            return GraphRowsOnGpu(self.numbers, self._spans, self.device)
        return GraphRows(self.numbers, self._spans) if self._is_by_loops and self.device.type == "cpu" else None

    @cached_property
    def _own_spans(self) -> Tensor:
        """Spans of the graphs, by group, so that each group is contiguous, int64 `[2 * K, B]`."""
        return self._spans.index_select(0, self.numbers).t().contiguous()

    @cached_property
    def _ptr(self) -> Tensor:
        if self.rows is not None:
            return self.rows.ptr
        ptr = torch.zeros(self._num_groups, self.count + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(self._own_spans[self._num_groups :], 1, out=ptr[:, 1:])
        return ptr

    @cached_property
    def _ptrs(self) -> tuple[Tensor, ...]:
        return self._ptr.unbind()

    @cached_property
    def _cuts(self) -> list[Cut]:
        firsts, own_sizes = self._own_spans.split(self._num_groups) if self._num_groups else (self._own_spans,) * 2
        # One copy to a GPU for all groups.
        own = to_device(torch.cat((firsts - self._ptr[:, :-1], own_sizes)), self.device)
        shifts, sizes = own.split(self._num_groups) if self._num_groups else ((), ())
        totals = self._ptr[:, -1].tolist()
        return [Cut(*parts) for parts in zip(self._ptrs, sizes, shifts, totals, strict=True)]

    def cut(self, group: int) -> Cut:
        """Cut the rows of the graphs out of the tables of a group, given by its index."""
        return self._cuts[group]

    def slice(self, group: int | None) -> Tensor:
        """Return the slices of the tables of a group, or of one row per graph, int64 `[B + 1]` on the CPU."""
        return self.each if group is None else self._ptrs[group]

    def batch_and_ptr(self, group: int) -> tuple[Tensor, Tensor]:
        """Return PyG's vectors `batch` and `ptr` for a group, with the graph of each row; each call returns new
        tensors.
        """
        if self.rows is None:
            return self.cut(group).batch_and_ptr()
        return self.rows.number_rows(group), self.rows.list_ptr(group)

    def sum_nodes(self, groups: Sequence[int]) -> Tensor:
        """Sum the rows of the graphs before each one, int64 `[B]` of one group, `[B, K, 1]` of several, on the CPU."""
        if len(groups) == 1:
            return self._ptrs[groups[0]][:-1]
        return torch.stack([self._ptrs[group][:-1] for group in groups], 1).unsqueeze(2)

    def sum_before(self, steps: Tensor) -> Tensor:
        """Sum the steps of the graphs before each one, int64 `[B, ...]` on the CPU.

        Args:
            steps: Steps of all graphs, int64 `[G, ...]`.
        """
        chosen = steps.index_select(0, self.numbers)
        sums = torch.zeros_like(chosen)
        torch.cumsum(chosen[:-1], 0, out=sums[1:])
        return sums

    @property
    def listed(self) -> list[int]:
        """Numbers of the graphs."""
        if self._listed is None:
            self._listed = self.numbers.tolist()
        return self._listed

    @property
    def graphs(self) -> list[Any]:
        """The graphs themselves, as objects."""
        if self._graphs is None:
            self._graphs = [self._make_graph(number) for number in self.listed]
        return self._graphs

    @property
    def each(self) -> Tensor:
        """Slices of one item per graph, int64 `[B + 1]` on the CPU."""
        if "each" not in self._lasting:
            self._lasting["each"] = torch.arange(self.count + 1, device="cpu")
        return self._lasting["each"]

    @property
    def none(self) -> Tensor:
        """Increments of zero, int64 `[B]` on the CPU."""
        if "none" not in self._lasting:
            self._lasting["none"] = torch.zeros(self.count, dtype=torch.int64, device="cpu")
        return self._lasting["none"]

    @property
    def rows_of_each(self) -> Tensor:
        """Rows in tables with one row per graph, int64 `[B]` on the device."""
        if "rows" not in self._lasting:
            self._lasting["rows"] = to_device(self.numbers, self.device)
        return self._lasting["rows"]


class Cut:
    """Rows of the graphs of a batch in the tables of a group.

    Args:
        ptr: First row of each graph in the batch, and the end, int64 `[B + 1]` on the CPU.
        sizes: Rows of each graph, int64 `[B]` on the device.
        shifts: Offset from rows of the batch to rows of the tables for each graph, int64 `[B]` on the device.
    """

    def __init__(self, ptr: Tensor, sizes: Tensor, shifts: Tensor, total: int) -> None:
        self.ptr, self._sizes, self._shifts, self.total = ptr, sizes, shifts, total
        self._segment: Tensor | None = None
        self._rows: Tensor | None = None
        self._is_given = False

    @property
    def segment(self) -> Tensor:
        """Index of the graph in the batch for each row, int64 `[total]` on the device."""
        if self._segment is None:
            self._segment = torch.repeat_interleave(self._sizes, output_size=self.total)
        return self._segment

    @property
    def rows(self) -> Tensor:
        """Rows in the tables, int64 `[total]` on the device."""
        if self._rows is None:
            self._rows = self._shifts.index_select(0, self.segment)
            self._rows.add_(torch.arange(self.total, device=self._rows.device))
        return self._rows

    def batch_and_ptr(self) -> tuple[Tensor, Tensor]:
        """Return PyG's vectors `batch` and `ptr`, with the graph of each row, on the device; each call returns new
        tensors.
        """
        batch = self.segment.clone() if self._is_given else self.segment
        self._is_given = True
        return batch, self.ptr.clone() if batch.device.type == "cpu" else to_device(self.ptr, batch.device)


class Column(Protocol):
    """One attribute of all graphs."""

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """Collate some graphs: (value, slices, increments), as PyG's `collate` does."""

    def follow(self, chosen: Chosen, slices: Any) -> tuple[Any, Any]:
        """Return PyG's `batch` and `ptr` for the attribute, for `follow_batch`."""

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the tables by `move`."""

    def count_bytes(self) -> int:
        """Count the bytes of the tables."""


class Rows:
    """Tensors, joined along one dimension.

    Args:
        table: The tensors of all graphs, one after the other along `dim`.
        dim: That dimension, counted from the first.
        group: Index of the group of tables with these slices; None for one row per graph.
        steps: See `sum_steps`.
    """

    def __init__(self, table: Tensor, dim: int, group: int | None, steps: Steps) -> None:
        self.table, self.dim, self.group, self.steps = table, dim, group, steps
        self._is_narrow = table.dim() == 2 and dim == 1 and 0 < len(table) <= _FEW_ROWS
        # Loops read the bytes of the table, as it was when it was checked.
        self._shape = table.shape if table.is_contiguous() and not (table.is_conj() or table.is_neg()) else None
        self._is_shifted = table.dtype == torch.int64 and dim == table.dim() - 1 < 2 and group is not None
        # The group whose rows are added to all items, -1 for none.
        self._shift = -1
        if self._is_shifted and steps is not None and not isinstance(steps, Tensor) and len(steps) == 1:
            self._shift = steps[0]

    @property
    def is_read_by_kernel(self) -> bool:
        """True if a kernel can read the rows of several batches, with their increments."""
        if self.table.shape != self._shape or self.table.requires_grad:
            return False
        if self.steps is None or isinstance(self.steps, Tensor):
            return self.steps is None or self._is_shifted
        return self._is_shifted and (len(self.steps) == 1 or self.table.shape[:-1] == (len(self.steps),) == (2,))

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        slices, increments, table = chosen.slice(self.group), sum_steps(self.steps, chosen), self.table
        is_by_loops = chosen.rows is not None and table.shape == self._shape and not table.requires_grad
        if chosen.rows is not None and is_by_loops and (self.steps is None or self._shift >= 0):
            return chosen.rows.read(table, self.dim, self.group, self._shift), slices, increments
        # PyG skips adding zeros, except to tensors.
        is_added = self.steps is not None and (increments.dim() > 1 or int(increments[-1]) != 0)
        if chosen.rows is not None and is_by_loops:
            if not is_added:
                return chosen.rows.read(table, self.dim, self.group), slices, increments
            if self._is_shifted:
                assert self.group is not None
                shifts = increments.reshape(chosen.count, -1)
                return chosen.rows.read_shifted(table, self.group, shifts), slices, increments
        rows = chosen.rows_of_each if self.group is None else chosen.cut(self.group).rows
        if self._is_narrow and table.device.type == "cpu" and increments.dim() == 1:
            return self._gather_lines(rows, self._spread(increments, chosen) if is_added else None), slices, increments
        value = table.index_select(self.dim, rows)
        if is_added:
            value = self._increment(value, to_device(increments, value.device), chosen)
        return value, slices, increments

    def _gather_lines(self, rows: Tensor, each: Tensor | None) -> Tensor:
        """Gather rows along the last of two dimensions, line by line: on a CPU, torch is slower for all lines
        together.
        """
        lines = [line.index_select(0, rows) for line in self.table.unbind()]
        if each is None:
            return torch.stack(lines)
        value = self.table.new_empty(len(lines), rows.numel())
        for line, target in zip(lines, value.unbind(), strict=True):
            torch.add(line, each, out=target)
        return value

    def _spread(self, increments: Tensor, chosen: Chosen) -> Tensor:
        """Repeat the increment of each graph for its rows, in the table's dtype, as PyG adds it."""
        each = increments.to(self.table.dtype)
        return each if self.group is None else each.index_select(0, chosen.cut(self.group).segment)

    def _increment(self, value: Tensor, increments: Tensor, chosen: Chosen) -> Tensor:
        if increments.dim() == 1:
            return value.add_(self._spread(increments, chosen).view(-1, *[1] * (value.dim() - 1 - self.dim)))
        # One item along the dimension of rows, which `is_addable` ensures.
        shape = [1] * (value.dim() + 1 - increments.dim()) + list(increments.shape[1:])
        del shape[self.dim]
        each = increments.reshape(-1, *shape).movedim(0, self.dim)
        if self.group is not None:
            each = each.index_select(self.dim, chosen.cut(self.group).segment)
        return value + each

    def follow(self, chosen: Chosen, slices: Any) -> tuple[Any, Any]:
        """See `Column`."""
        if self.group is None:
            return torch.arange(chosen.count, device=chosen.device), torch.arange(
                chosen.count + 1, device=chosen.device
            )
        return chosen.batch_and_ptr(self.group)

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `Column`."""
        self.table = move(self.table)

    def count_bytes(self) -> int:
        """See `Column`."""
        return self.table.nbytes


# Increments: none, the rows of groups (one for a number, several for a column), or a tensor `[G, ...]`.
Steps = None | Sequence[int] | Tensor


def sum_steps(steps: Steps, chosen: Chosen) -> Tensor:
    """Sum up the increment of each graph of a batch, int64 `[B, ...]` on the CPU.

    Args:
        steps: Steps of each graph, by which it increments the following ones.
    """
    if isinstance(steps, Tensor):
        return chosen.sum_before(steps)
    return chosen.none if steps is None else chosen.sum_nodes(steps)


def is_addable(table: Tensor, dim: int, steps: Steps) -> bool:
    """Check if `Rows` adds increments as PyG does: integers that keep the shape of the table."""
    if steps is None:
        return True
    own = steps.shape[1:] if isinstance(steps, Tensor) else () if len(steps) == 1 else (len(steps), 1)
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool or len(own) > table.dim():
        return False
    shape = (1,) * (table.dim() - len(own)) + tuple(own)
    return not own or (shape[dim] == 1 and all(
        size in (1, table.shape[place]) for place, size in enumerate(shape) if place != dim))  # fmt: skip


class _OfEach:
    """Base of columns with one value per graph, without rows."""

    def follow(self, chosen: Chosen, slices: Any) -> tuple[Any, Any]:
        """See `Column`."""
        batch, ptr = _batch_and_ptr(slices)
        return move_all(batch, chosen.device), move_all(ptr, chosen.device)

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `Column`."""

    def count_bytes(self) -> int:
        """See `Column`."""
        return 0


class Numbers(_OfEach):
    """Numbers, which a batch joins to a tensor.

    Args:
        steps: See `sum_steps`.
    """

    def __init__(self, values: Sequence[Any], steps: Steps) -> None:
        self.values, self.steps = values, steps

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        value = torch.tensor([self.values[number] for number in chosen.listed], device="cpu")
        increments = sum_steps(self.steps, chosen)
        if self.steps is not None and int(increments[-1]) != 0:
            value.add_(increments)
        return to_device(value, chosen.device), chosen.each, increments


class Objects(_OfEach):
    """Values of any class, which a batch joins to a list."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        return [self.values[number] for number in chosen.listed], chosen.each, None


class Matrices(_OfEach):
    """Sparse CSR matrices, joined along the diagonal.

    Args:
        degrees: Items of each row of all matrices, int64 `[N]`.
        targets: Columns of the items, int64 `[E]`.
        values: Items, `[E, ...]`.
        groups: Indices of the groups of their rows, their columns and their items.
    """

    def __init__(self, degrees: Tensor, targets: Tensor, values: Tensor, groups: tuple[int, int, int]) -> None:
        self._tables, self._groups = [degrees, targets, values], groups

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        rows, columns, items = map(chosen.cut, self._groups)
        degrees, targets, values = self._tables
        crow = degrees.new_zeros(rows.total + 1)
        torch.cumsum(degrees.index_select(0, rows.rows), 0, out=crow[1:])
        offsets = to_device(columns.ptr[:-1], chosen.device).index_select(0, items.segment)
        size = (rows.total, columns.total, *values.shape[1:])
        value = torch.sparse_csr_tensor(crow, targets.index_select(0, items.rows).add_(offsets),
                                        values.index_select(0, items.rows), size, device=chosen.device)  # fmt: skip
        return value, torch.stack((rows.ptr, columns.ptr), 1), None

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `Column`."""
        self._tables = [move(table) for table in self._tables]

    def count_bytes(self) -> int:
        """See `Column`."""
        return sum(table.nbytes for table in self._tables)


class Nested(_OfEach):
    """Dictionaries or lists of attributes.

    Args:
        columns: The attributes, by key or in order.
    """

    def __init__(self, columns: Mapping[Any, Column] | Sequence[Column]) -> None:
        self.columns = columns

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        if isinstance(self.columns, Mapping):
            parts = {key: column.collate(chosen) for key, column in self.columns.items()}
            return tuple({key: part[place] for key, part in parts.items()} for place in range(3))  # type: ignore[return-value]
        listed = [column.collate(chosen) for column in self.columns]
        return tuple([part[place] for part in listed] for place in range(3))  # type: ignore[return-value]

    def _list(self) -> list[Column]:
        return list(self.columns.values() if isinstance(self.columns, Mapping) else self.columns)

    def place(self, move: Callable[[Tensor], Tensor]) -> None:
        """See `Column`."""
        for column in self._list():
            column.place(move)

    def count_bytes(self) -> int:
        """See `Column`."""
        return sum(column.count_bytes() for column in self._list())


class Foreign(_OfEach):
    """Values that PyG's own code joins for each batch, such as sparse matrices.

    Args:
        find_store: Finds the storage of the attribute in a graph.
    """

    def __init__(self, name: str, find_store: Callable[[Any], Any]) -> None:
        self._name, self._find_store = name, find_store

    def collate(self, chosen: Chosen) -> tuple[Any, Any, Any]:
        """See `Column`."""
        stores = [self._find_store(graph) for graph in chosen.graphs]
        values = [store[self._name] for store in stores]
        value, slices, increments = _collate(self._name, values, chosen.graphs, stores, True)
        return move_all(value, chosen.device), slices, increments


def move_all(value: Any, device: torch.device) -> Any:
    """Move the tensors in a program's values to a GPU; on the CPU values are unchanged."""
    if device.type == "cpu":
        return value
    if isinstance(value, Mapping):
        return {key: move_all(part, device) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_all(part, device) for part in value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [move_all(part, device) for part in value]
    return value.to(device) if hasattr(value, "to") else value

"""Columns of a data set of small graphs, read once: methods that PyG calls for each batch are called once per graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import N_KEYS, NodeStorage
from torch_geometric.typing import SparseTensor, TensorFrame

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader.collate.graph_columns import (
    Column,
    Foreign,
    Matrices,
    Nested,
    Numbers,
    Objects,
    Rows,
    Steps,
    count_rows,
    is_addable,
    join_rows,
    stack_values,
)
from pyg_direct.loader.collate.graph_sources import SPECIAL, Leaf, OneByOneError, Source, find_store
from pyg_direct.profiling import show_bytes
from pyg_direct.runtime.host.host_memory import HOST_SHARE, available_bytes


class GraphStore(NamedTuple):
    """One storage of all graphs.

    Attributes:
        num_nodes: Values of its attribute `num_nodes`, one per graph; None without this attribute.
        nodes: Index of the group that counts its nodes, for PyG's vector `batch`; None if batches have no such vector.
    """

    columns: Mapping[str, Column]
    num_nodes: Sequence[Any] | None
    nodes: int | None


def read_stores(source: Source, order: Any) -> tuple[dict[Any, GraphStore], Tensor]:
    """Read (storages of a data set with their attributes, spans of `Chosen`).

    Args:
        source: At least one graph.
        order: Storages with the names of their attributes, from `Source.list_orders`.

    Raises:
        OneByOneError: host memory cannot hold the joined graphs, or they cannot be joined.
        ArgumentError, ArgumentTypeError: the number of a graph of another width, dtype or kind; slices contradict each
            other.
    """
    reader = _Reader(source, order)
    if reader.questions:
        for number in source.used:
            graph = source.make_graph(number)
            for question in reader.questions:
                question.put(number, graph)
    stores = {key: reader.make_store(key) for key, _ in order}
    return stores, reader.join_spans()


class ForeignError(Exception):
    """Signal that PyG's own code must join the values of an attribute."""


class _Question:
    """Call that PyG makes on a graph for each batch; here once per graph.

    Args:
        what: The attribute and the call, for messages.
    """

    def __init__(self, what: str, ask: Callable[[Any], Any]) -> None:
        self.what, self._ask = what, ask
        self.answers: dict[int, Any] = {}

    def put(self, number: int, graph: Any) -> None:
        """Make the call on a graph."""
        try:
            self.answers[number] = self._ask(graph)
        except Warning:
            raise
        except Exception as error:
            raise ArgumentError(f"dataset must hold graphs that know {self.what}, got graph {number}, which says: "
                                f"{error}") from error  # fmt: skip


class _Plan(NamedTuple):
    """Conversion of a leaf to a column.

    Attributes:
        kind: `rows`, `matrices`, `numbers`, `objects`, `nested`, or `foreign`.
        parts: Plans of nested values, by key or in order.
        dim: The dimension that tensors are joined along, None to stack them, or the question for it.
        steps: Source of its increments: None, node types to count, or a question.
    """

    kind: str
    leaf: Leaf
    parts: Any = None
    dim: Any = None
    steps: Any = None


class _Group(NamedTuple):
    """Rows of the graphs in tables that have them at equal places.

    Attributes:
        begins: First row of each graph, int64 `[G]`; None if graphs follow each other.
        sizes: Rows of each graph, int64 `[G]`.
        is_read: A table has these rows; otherwise they are only counted, and may begin anywhere.
    """

    begins: Tensor | None
    sizes: Tensor
    is_read: bool


class _Reader:
    """Reader of the attributes of a source into columns.

    Args:
        order: See `read_stores`.
    """

    def __init__(self, source: Source, order: Any) -> None:
        self._source, self._kind = source, type(source.example)
        self._is_typed = isinstance(source.example, HeteroData)
        self._example = source.make_graph(source.used[0])
        base: Any = HeteroData if self._is_typed else Data
        # PyG's own rules give equal results for all graphs.
        self._knows_dims = self._kind.__cat_dim__ is base.__cat_dim__
        self._knows_steps = self._kind.__inc__ is base.__inc__ and (
            self._is_typed or self._kind.num_nodes is Data.num_nodes
        )
        self.questions: list[_Question] = []
        self._groups: list[_Group] = []
        self._counts: dict[Any, Any] = {}
        leaves: dict[Any, list[Leaf]] = {}
        for key, names in order:
            if "num_nodes" in names and source.count_nodes(key) is None:
                raise OneByOneError("its num_nodes are tensors")
            leaves[key] = list(source.leaves(key, [name for name in names if name not in SPECIAL]))
        check_memory(leaf for own in leaves.values() for leaf in own)
        self._plans = {key: [self._plan(leaf) for leaf in own] for key, own in leaves.items()}
        self._with_batch = {key for key, _ in order if self._has_batch(key)}
        for key in self._with_batch:
            self._plan_count(key)

    # Plans.

    def _plan(self, leaf: Leaf) -> _Plan:
        try:
            return self._plan_values(leaf)
        except ForeignError:
            return _Plan("foreign", leaf)

    def _plan_values(self, leaf: Leaf) -> _Plan:
        if leaf.values is None:
            return self._plan_joined(leaf)
        kinds = {kind_of(value) for value in leaf.values}
        if len(kinds) > 1:
            check_kinds(leaf)
            raise ForeignError
        kind = kinds.pop()
        if kind == "foreign" or (kind == "numbers" and not isinstance(leaf.key, str)):
            raise ForeignError
        if kind in ("mapping", "sequence"):
            return _Plan("nested", leaf, self._plan_parts(leaf, kind))
        if kind == "numbers":
            return _Plan(kind, leaf, steps=self._plan_steps(leaf, is_tensor=False))
        if kind == "objects":
            return _Plan(kind, leaf)
        if kind == "matrices":
            return _Plan(kind, leaf, None, self._plan_dim(leaf))
        check_alike(leaf)
        return self._plan_rows(leaf)

    def _plan_joined(self, leaf: Leaf) -> _Plan:
        value, slices = leaf.table, leaf.slices
        if isinstance(value, Tensor):
            if kind_of(value) != "rows" or value.dim() == 0 or not isinstance(slices, Tensor):
                raise ForeignError
            return self._plan_rows(leaf)
        if isinstance(value, Mapping) and isinstance(slices, Mapping):
            parts = {key: self._plan_values(Leaf(leaf.store, key, (*leaf.path, key), None, part, slices[key]))
                     for key, part in value.items()}  # fmt: skip
            return _Plan("nested", leaf, parts)
        is_listed = isinstance(value, Sequence) and not isinstance(value, str)
        if is_listed and isinstance(slices, Sequence) and value and all(type(part) is Tensor for part in value):
            listed = [self._plan_values(Leaf(leaf.store, leaf.key, (*leaf.path, place), None, part, slices[place]))
                      for place, part in enumerate(value)]  # fmt: skip
            return _Plan("nested", leaf, listed)
        if is_listed and isinstance(slices, Tensor):
            if len(value) != self._source.count:
                raise ArgumentError(f"dataset must hold one {leaf.name} for each of its {self._source.count} graphs, "
                                    f"got {len(value)}")  # fmt: skip
            return self._plan_values(leaf._replace(values=value, table=None, slices=None))
        raise ForeignError

    def _plan_rows(self, leaf: Leaf) -> _Plan:
        return _Plan("rows", leaf, None, self._plan_dim(leaf), self._plan_steps(leaf, is_tensor=True))

    def _plan_parts(self, leaf: Leaf, kind: str) -> Any:
        assert leaf.values is not None
        first = leaf.values[0]
        keys: Any = list(first) if kind == "mapping" else range(len(first))
        for number, value in enumerate(leaf.values):
            if len(value) != len(first) or (kind == "mapping" and set(value) != set(first)):
                own = f"{list(first)} as graph 0, got {list(value)}" if kind == "mapping" else (
                    f"{len(first)} items as graph 0, got {len(value)}")  # fmt: skip
                raise ArgumentError(
                    f"dataset must hold graphs with equal parts in {leaf.name}, {own} of graph {number}"
                )
        if kind == "mapping" and any(list(value) != keys for value in leaf.values):
            # A batch has the order of its first graph.
            raise ForeignError
        is_mapping = kind == "mapping"
        parts = {key: self._plan_values(Leaf(leaf.store, key if is_mapping else leaf.key, (*leaf.path, key),
                                             [value[key] for value in leaf.values])) for key in keys}  # fmt: skip
        return parts if is_mapping else list(parts.values())

    def _ask(self, what: str, ask: Callable[[Any], Any]) -> _Question:
        self.questions.append(_Question(what, ask))
        return self.questions[-1]

    def _plan_dim(self, leaf: Leaf) -> Any:
        def ask(graph: Any) -> Any:
            return graph.__cat_dim__(str(leaf.key), leaf.value_of(graph), find_store(graph, leaf.store))

        return ask(self._example) if self._knows_dims else self._ask(f"__cat_dim__ of {leaf.name}", ask)

    def _plan_steps(self, leaf: Leaf, *, is_tensor: bool) -> Any:
        key = str(leaf.key) if is_tensor else leaf.key
        if self._knows_steps and not (is_tensor and "batch" in key):
            is_index = "index" in key
            ends: tuple[Any, ...] | None
            if self._is_typed:
                ends = (leaf.store[0], leaf.store[-1]) if is_index and isinstance(leaf.store, tuple) else None
            else:
                ends = (None,) if is_index or key == "face" else None
            if ends is None:
                return None
            if all(end is None or end in self._example._node_store_dict for end in ends):
                for end in ends:
                    self._plan_count(end)
                return ends

        def ask(graph: Any) -> Any:
            return graph.__inc__(key, leaf.value_of(graph), find_store(graph, leaf.store))

        return self._ask(f"__inc__ of {leaf.name}", ask)

    def _has_batch(self, key: Any) -> bool:
        store = find_store(self._example, key)
        return isinstance(store, NodeStorage) and store.can_infer_num_nodes

    def _plan_count(self, key: Any) -> None:
        """Count the nodes of a storage by its `num_nodes`, by the attribute that PyG counts, or by a call on each
        graph.
        """
        if key in self._counts:
            return
        counts: Any = self._source.count_nodes(key)
        if counts is None:
            counts = self._count_by_rows(key)
        if counts is None:
            where = "" if key is None else f" of {key!r}"
            counts = self._ask(f"num_nodes{where}", lambda graph: find_store(graph, key).num_nodes)
        self._counts[key] = counts

    def _count_by_rows(self, key: Any) -> Any:
        store = find_store(self._example, key)
        if not self._knows_dims or not self._source.has_one_order or "num_nodes" in store._mapping:
            return None
        known = [name for name in store._mapping if name in N_KEYS] or \
            [name for name in store._mapping if "node" in name]  # fmt: skip
        if not known:
            return None
        (leaf,) = self._source.leaves(key, known[:1])
        dim = self._example.__cat_dim__(known[0], store._mapping[known[0]], store)
        if isinstance(dim, bool) or not isinstance(dim, int):
            return None
        if leaf.values is None:
            return read_slices(leaf, dim).diff() if type(leaf.table) is Tensor else None
        if not all(type(value) is Tensor and value.dim() > 0 for value in leaf.values):
            return None
        return count_rows(leaf.values, dim)

    # Columns.

    def make_store(self, key: Any) -> GraphStore:
        """Make a storage, after all questions are answered."""
        # Lists of values are dropped one by one.
        columns = {plan.leaf.path[0]: self._make_outer(plan) for plan in self._plans.pop(key)}
        nodes = None
        if key in self._with_batch:
            nodes = self._find_group(self._list_counts(key, is_needed=False), is_read=False)
        return GraphStore(columns, self._source.count_nodes(key), nodes)

    def _list_counts(self, key: Any, *, is_needed: bool) -> Tensor:
        """List the nodes of each graph in a storage, int64 `[G]`; 0 for unused graphs."""
        counts = self._counts[key]
        if isinstance(counts, Tensor):
            return counts
        if not isinstance(counts, _Question):
            return _to_tensor(counts)
        listed = [0] * self._source.count
        for number, count in counts.answers.items():
            if count is None and is_needed:
                raise ArgumentError(f"dataset must hold graphs that know their num_nodes, got graph {number}, which "
                                    "does not: set num_nodes")  # fmt: skip
            listed[number] = int(count or 0)
        return _to_tensor(listed)

    def join_spans(self) -> Tensor:
        """Join the first row of each graph in each group, then its number of rows in each, int64 `[G, 2 * K]`."""
        spans = torch.empty(self._source.count, 2 * len(self._groups), dtype=torch.int64, device="cpu")
        for place, group in enumerate(self._groups):
            spans[:, place] = _find_begins(group.sizes) if group.begins is None else group.begins
            spans[:, len(self._groups) + place] = group.sizes
        return spans

    def _find_group(self, sizes: Tensor, begins: Tensor | None = None, *, is_read: bool = True) -> int:
        """Find the index of the group of tables in which graphs have these rows.

        Args:
            sizes: Rows of each graph, int64 `[G]`.
            begins: First row of each graph, int64 `[G]`; None if graphs follow each other.
            is_read: A table has these rows; otherwise they are only counted.
        """
        for place, group in enumerate(self._groups):
            if not torch.equal(group.sizes, sizes):
                continue
            if not group.is_read and is_read:
                self._groups[place] = _Group(begins, group.sizes, True)
                return place
            if not is_read or ((begins is None) == (group.begins is None) and (
                    begins is None or group.begins is None or torch.equal(group.begins, begins))):  # fmt: skip
                return place
        self._groups.append(_Group(begins, sizes, is_read))
        return len(self._groups) - 1

    def _make_outer(self, plan: _Plan) -> Column:
        try:
            return self._make(plan)
        except ForeignError:
            key, name = plan.leaf.store, plan.leaf.path[0]
            return Foreign(name, lambda graph: find_store(graph, key))

    def _make(self, plan: _Plan) -> Column:
        leaf = plan.leaf
        if plan.kind == "foreign":
            raise ForeignError
        if plan.kind == "objects":
            assert leaf.values is not None
            return Objects(list(leaf.values))
        if plan.kind == "numbers":
            assert leaf.values is not None
            steps = self._make_steps(plan)
            if isinstance(steps, Tensor) and steps.dim() > 1:
                raise ForeignError
            return Numbers(list(leaf.values), steps)
        if plan.kind == "nested":
            if isinstance(plan.parts, Mapping):
                return Nested({key: self._make(part) for key, part in plan.parts.items()})
            return Nested([self._make(part) for part in plan.parts])
        return self._make_matrices(plan) if plan.kind == "matrices" else self._make_rows(plan)

    @staticmethod
    def _find_dim(plan: _Plan) -> Any:
        """Find the dimension that all graphs return."""
        if not isinstance(plan.dim, _Question):
            return plan.dim
        answers = set(plan.dim.answers.values())
        if len(answers) > 1:
            raise ForeignError
        return answers.pop()

    def _make_matrices(self, plan: _Plan) -> Column:
        values = plan.leaf.values
        assert values is not None
        first = values[0]
        if self._find_dim(plan) != (0, 1) or first.crow_indices().dtype != torch.int64 or any(
            (value.dtype, value.device, value.shape[2:]) != (first.dtype, first.device, first.shape[2:])
            or value.crow_indices().dim() != 1 or value.crow_indices().dtype != torch.int64 for value in values
        ):  # fmt: skip
            raise ForeignError
        sizes = [count_rows(values, 0), _to_tensor([value.col_indices().numel() for value in values])]
        rows, items = map(self._find_group, sizes)
        columns = self._find_group(count_rows(values, 1), is_read=False)
        return Matrices(torch.cat([value.crow_indices().diff() for value in values]),
                        torch.cat([value.col_indices() for value in values]),
                        torch.cat([value.values() for value in values]), (rows, columns, items))  # fmt: skip

    def _make_rows(self, plan: _Plan) -> Column:
        leaf, dim = plan.leaf, self._find_dim(plan)
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
            raise ForeignError
        if leaf.values is None:
            table, slices = leaf.table, read_slices(leaf, dim)
            dim = 0 if dim is None else dim % table.dim()
            sizes = slices.diff()
            begins = None if torch.equal(slices[:-1], _find_begins(sizes)) else slices[:-1]
        else:
            table, dim, begins, sizes = _join_values(leaf, dim)
        steps = self._make_steps(plan)
        if not is_addable(table, dim, steps):
            raise ForeignError
        if begins is None and bool((sizes == 1).all()):
            return Rows(table, dim, None, steps)
        return Rows(table, dim, self._find_group(sizes, begins), steps)

    def _make_steps(self, plan: _Plan) -> Steps:
        if plan.steps is None:
            return None
        if isinstance(plan.steps, _Question):
            return _join_answers(plan.steps, self._source.count)
        groups = [self._find_group(self._list_counts(end, is_needed=True), is_read=False) for end in plan.steps]
        if len(groups) > 1 and plan.kind != "rows":
            raise ForeignError
        return groups


def read_slices(leaf: Leaf, dim: int | None) -> Tensor:
    """Read the slices of an attribute in a data set, int64 `[G + 1]`."""
    table, slices = leaf.table, leaf.slices.cpu().long()
    if dim is not None and not -table.dim() <= dim < table.dim():
        raise ForeignError
    size = table.size(0 if dim is None else dim)
    if int(slices[-1]) > size:
        number = int((slices[1:] > size).nonzero()[0])
        raise ArgumentError(f"slices of {leaf.name} must stay within its {size} rows, got "
                            f"[{int(slices[number])}, {int(slices[number + 1])}) for graph {number}")  # fmt: skip
    if dim is None and not bool((slices.diff() == 1).all()):
        raise ForeignError
    return slices  # type: ignore[no-any-return]


def check_shapes(leaf: Leaf, dim: int | None) -> None:
    """Check that tensors have the width of the first one, in all dimensions but one."""
    assert leaf.values is not None
    own = leaf.values[0].shape[:dim], () if dim is None else leaf.values[0].shape[dim + 1 :]
    number = next((number for number, value in enumerate(leaf.values)
                   if (value.shape[:dim], () if dim is None else value.shape[dim + 1 :]) != own), None)  # fmt: skip
    if number is not None:
        raise ArgumentError(f"dataset must hold graphs with {leaf.name} of one width, shape "
                            f"{tuple(leaf.values[0].shape)} as graph 0, got {tuple(leaf.values[number].shape)} of "
                            f"graph {number}")  # fmt: skip


def _join_values(leaf: Leaf, dim: int | None) -> tuple[Tensor, int, Tensor | None, Tensor]:
    """Join the values of all graphs.

    Returns:
        (table, its dimension of rows, first row of each graph, rows of each, int64 `[G]`); the first rows are None if
        graphs follow each other.
    """
    assert leaf.values is not None
    first = leaf.values[0]
    if dim is None or first.dim() == 0:
        if dim not in (None, 0, -1) or any(value.shape != first.shape for value in leaf.values):
            check_shapes(leaf, None)
            raise ForeignError
        return stack_values(leaf.values), 0, None, _to_tensor([1]).expand(len(leaf.values))
    if not -first.dim() <= dim < first.dim():
        raise ForeignError
    dim %= first.dim()
    check_shapes(leaf, dim)
    sizes = count_rows(leaf.values, dim)
    table, begins = join_rows(leaf.values, dim, sizes)
    is_whole = begins is not None and torch.equal(begins, _find_begins(sizes))
    return table, dim, None if is_whole else begins, sizes


def _to_tensor(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor([int(number) for number in numbers], dtype=torch.int64, device="cpu")


def _find_begins(sizes: Tensor) -> Tensor:
    """Find the first row of each graph, if they follow each other."""
    return sizes.cumsum(0).sub_(sizes)


def _join_answers(question: _Question, count: int) -> Tensor | None:
    """Join the increments of all graphs, int64 `[G, ...]`; None if all are the number 0."""
    answers = question.answers
    kinds = {type(answer) for answer in answers.values()}
    if kinds == {int}:
        steps = torch.zeros(count, dtype=torch.int64, device="cpu")
        steps[list(answers)] = torch.tensor(list(answers.values()), device="cpu")
        return steps if bool(steps.any()) else None
    values = list(answers.values())
    if kinds != {Tensor} or any(value.dtype != torch.int64 or value.shape != values[0].shape or value.is_cuda
                                for value in values):  # fmt: skip
        raise ForeignError
    steps = torch.zeros(count, *values[0].shape, dtype=torch.int64, device="cpu")
    steps[list(answers)] = torch.stack(values)
    return steps


def kind_of(value: Any) -> str:
    """Find how PyG joins values like this one."""
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout is torch.sparse_csr and not value.requires_grad:
            return "matrices"
        is_plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        return "rows" if is_plain and not value.is_nested else "foreign"
    if isinstance(value, (SparseTensor, TensorFrame)):
        return "foreign"
    if isinstance(value, (int, float)):
        return "numbers"
    if isinstance(value, Mapping):
        return "mapping"
    is_listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if is_listed and isinstance(value[0], (Tensor, SparseTensor)):
        return "sequence"
    return "objects"


def check_kinds(leaf: Leaf) -> None:
    """Refuse a mixture of tensors, numbers and other values."""
    assert leaf.values is not None
    kinds = ["tensor" if isinstance(value, Tensor) else "number" if isinstance(value, (int, float)) else ""
             for value in leaf.values]  # fmt: skip
    number = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    if number is not None:
        raise ArgumentTypeError(f"dataset must hold graphs with {leaf.name} of one kind, "
                                f"{type(leaf.values[0]).__name__} as graph 0, got {type(leaf.values[number]).__name__} "
                                f"of graph {number}")  # fmt: skip


def check_alike(leaf: Leaf) -> None:
    """Check the dtype, device and number of dimensions of tensors that will be joined."""
    assert leaf.values is not None
    first = leaf.values[0]
    like = (first.dtype, first.device, first.dim())
    for number, value in enumerate(leaf.values):
        if (value.dtype, value.device, value.dim()) == like:
            continue
        if value.dtype != first.dtype:
            raise ArgumentTypeError(f"dataset must hold graphs with {leaf.name} of one dtype, {first.dtype} as graph "
                                    f"0, got {value.dtype} of graph {number}")  # fmt: skip
        if value.device != first.device:
            raise ArgumentError(f"dataset must hold graphs with {leaf.name} on one device, {first.device} as graph 0, "
                                f"got {value.device} of graph {number}")  # fmt: skip
        if (0,) in (tuple(value.shape), tuple(first.shape)) and 0 not in (value.dim(), first.dim()):
            # torch joins an empty vector with any tensor.
            raise ForeignError
        raise ArgumentError(f"dataset must hold graphs with {leaf.name} of {first.dim()} dimensions as graph 0, got "
                            f"shape {tuple(value.shape)} of graph {number}")  # fmt: skip


def check_memory(leaves: Iterable[Leaf]) -> None:
    """Check that host memory can hold values that are not joined yet."""
    needed = sum(value.nbytes for value in _list_tensors(leaves))
    free = available_bytes()
    if needed > HOST_SHARE * free:
        raise OneByOneError(f"joined, its graphs take {show_bytes(needed)}, and {show_bytes(free)} of memory are free")


def _list_tensors(leaves: Iterable[Leaf]) -> Iterator[Tensor]:
    for leaf in leaves:
        for value in leaf.values or ():
            if type(value) is Tensor and value.layout is torch.strided:
                yield value

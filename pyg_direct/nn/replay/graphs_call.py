"""Arguments of a model's call for a batch of many small graphs, as `DataLoader` makes it.

A model is given the batch itself, or its tensors, such as `model(batch.x, batch.edge_index, batch.batch)`. The batch
vector, which the loader registers, tells such a call.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_direct.nn.replay.guards import CONTAINERS, SETTINGS, State
from pyg_direct.nn.replay.padded_graphs import GraphSizes
from pyg_direct.nn.sorted_edges import find_graphs

# Stand in a nest for a tensor, and for the number of graphs.
_TENSOR, _GRAPHS = "tensor", "graphs"
# Roles of tensors.
EDGES, VECTOR, BEGINS, NODE, EDGE = "edge_index", "batch", "ptr", "node", "edge"
# Arguments that hold the number of graphs if they are equal to it.
_COUNTS = frozenset(("batch_size", "num_graphs", "size", "dim_size"))


class GraphsCall(NamedTuple):
    """Arguments of a model's call for a batch of graphs.

    Attributes:
        kind: Key that must be equal for passes that are recorded once.
        sizes: Nodes, edges and graphs of the batch.
        nest: Arguments without their tensors; see `_Reader`.
        tensors: Tensors of the batch, in the order of the nest.
        roles: Of each tensor, what it has rows of.
        begins: First node of each graph, and the end.
    """

    kind: tuple[Any, ...]
    sizes: GraphSizes
    nest: Any
    tensors: list[Tensor]
    roles: tuple[str, ...]
    begins: Tensor

    def pack(self) -> tuple[Any, list[Tensor]]:
        """Return the call without its tensors, and these."""
        return (self.kind, self.sizes, self.nest, self.roles), [*self.tensors, self.begins]

    @staticmethod
    def unpack(packed: Any, tensors: Sequence[Tensor] | None) -> GraphsCall:
        """Return the call of `pack`; without tensors it has the sizes alone."""
        kind, sizes, nest, roles = packed
        if tensors is None:
            return GraphsCall(kind, sizes, None, [], (), _NOTHING)
        return GraphsCall(kind, sizes, nest, list(tensors[:-1]), roles, tensors[-1])

    def join(self) -> Batch:
        """Return a batch with the tensors, those with rows of nodes and edges by their position."""
        batch = Batch(_base_cls=Data)
        mapping = batch._store._mapping
        for place, (role, tensor) in enumerate(zip(self.roles, self.tensors, strict=True)):
            mapping[f"rows_{place}" if role in (NODE, EDGE) else role] = tensor
        mapping["ptr"] = self.begins
        mapping["num_nodes"] = self.sizes.nodes
        batch._store.__dict__["_num_graphs"] = self.sizes.graphs
        return batch


_NOTHING = torch.empty(0)


class _Reader:
    """Reader of arguments: tensors go to a list, and are described by what they have rows of.

    A batch loses attributes that have no row for each node or edge, such as the labels of graphs.
    """

    def __init__(self, sizes: GraphSizes, begins: Tensor, device: torch.device) -> None:
        self._sizes, self._begins, self._device = sizes, begins, device
        self.tensors: list[Tensor] = []
        self.roles: list[str] = []
        self.forms: list[Any] = []

    def read(self, value: Any, name: str | None = None) -> Any:
        """Return a hashable description of a value; None if a pass is not determined by it."""
        kind = type(value)
        if kind is Tensor:
            return (_TENSOR,) if self._take(value) else None
        if kind is int and name in _COUNTS and value == self._sizes.graphs:
            return (_GRAPHS,)
        if kind in SETTINGS:
            return kind, value
        if isinstance(value, Batch):
            return self._read_batch(value)
        if kind not in CONTAINERS:
            return None
        items = value.values() if kind is dict else value
        parts = tuple([self.read(item) for item in items])
        return None if None in parts else (kind, parts, tuple(value) if kind is dict else ())

    def _read_batch(self, batch: Batch) -> Any:
        names = [name for name, value in batch._store._mapping.items() if type(value) is Tensor and self._take(value)]
        return Batch, tuple(names)

    def _take(self, tensor: Tensor) -> bool:
        """Add a tensor of the batch; False if it is none of its rows, edges or begins."""
        if (tensor.layout is not torch.strided or tensor.requires_grad or tensor.device != self._device
                or tensor.dim() == 0 or tensor.is_inference()):  # fmt: skip
            return False
        sizes, is_ids = self._sizes, tensor.dtype == torch.int64
        if tensor is self._begins:
            role = BEGINS
        elif find_graphs(tensor) is self._begins:
            role = VECTOR
        elif is_ids and tensor.shape == (2, sizes.edges):
            role = EDGES
        elif tensor.shape[0] == sizes.nodes:
            role = NODE
        elif tensor.shape[0] == sizes.edges:
            role = EDGE
        else:
            return False
        # Edges and batch vector have one place.
        if role not in (NODE, EDGE) and role in self.roles and self.tensors[self.roles.index(role)] is not tensor:
            return False
        self.tensors.append(tensor)
        self.roles.append(role)
        self.forms.append((role, tensor.dtype, tensor.shape[1:] if role in (NODE, EDGE) else None))
        return True


def read_graphs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> GraphsCall | None:
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
    reader = _Reader(sizes, begins, vector.device)
    names = _list_names(type(model))
    parts = [reader.read(value, name) for value, name in zip(args, [*names, *[None] * len(args)], strict=False)]
    named = [reader.read(value, name) for name, value in kwargs.items()]
    if None in parts or None in named or EDGES not in reader.roles or VECTOR not in reader.roles:
        return None
    found = state.read(model, vector.device)
    if found is None:
        return None
    nest = tuple, ((tuple, tuple(parts), ()), (dict, tuple(named), tuple(kwargs))), ()
    return GraphsCall((nest, *reader.forms, graphs, found), sizes, nest, reader.tensors, tuple(reader.roles), begins)


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


def fill_in_graphs(nest: Any, tensors: Iterator[Tensor], graphs: int) -> Any:
    """Return what `_Reader` was given, with these tensors, for so many graphs."""
    kind, *rest = nest
    if kind is _TENSOR:
        return next(tensors)
    if kind is _GRAPHS:
        return graphs
    if kind is Batch:
        batch = Batch(_base_cls=Data)
        for name in rest[0]:
            batch[name] = next(tensors)
        batch._store.__dict__["_num_graphs"] = graphs
        return batch
    if kind not in CONTAINERS:
        return rest[0]
    parts = [fill_in_graphs(part, tensors, graphs) for part in rest[0]]
    return dict(zip(rest[1], parts, strict=True)) if kind is dict else kind(parts)

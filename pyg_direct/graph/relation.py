"""One relation of a graph: its rows, with times and weights in row order, sorted by time if the relation has times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.ops.argument_checks import check_edge_list, check_ids, check_integers
from pyg_direct.ops.local_ids.build_csr import compress

EdgeType = tuple[str, str, str]
# Names of the only node type and relation of a graph without types.
NODES = "nodes"
LINKS = (NODES, "to", NODES)
# Dtypes whose every number float32 holds.
_WITHIN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
                   torch.uint16)  # fmt: skip


def tell_apart(names: Mapping[Any, str]) -> dict[Any, str]:
    """Return names of attributes by (kind, key) for reports; if two names would be equal, the keys themselves."""
    return dict(names) if len(set(names.values())) == len(names) else {key: repr(key) for key in names}


def name_part(part: str, kind: str | EdgeType) -> str:
    """Return the words for a type or a relation in messages; a graph without types has one of each."""
    return part if kind in (NODES, LINKS) else f"{part}[{kind!r}]"


@dataclass
class Relation:
    """Rows of a relation, with ids local to their types.

    Attributes:
        edge_type: Its name.
        indptr, indices: int64 `[rows + 1]`, int32 or int64 `[E]`.
        edge_ids: `[E]`, or None if the position of an edge is its id.
        weight, time: By position, float32 or float64, and int64 `[E]`; or None.
        is_timed: True if rows are sorted by time, either the edges' or the neighbors'.
        is_given: True if its neighbors are an array of the program's, which may write to it.
    """

    edge_type: EdgeType
    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    weight: Tensor | None = None
    time: Tensor | None = None
    is_timed: bool = False
    is_given: bool = False

    def attach(self, weight: Tensor | None, edge_time: Tensor | None, source_time: Tensor | None,
               is_sorted: bool) -> None:  # fmt: skip
        """Take over times and weights, which come by edge id or by neighbor, and sort rows by time."""
        if edge_time is not None:
            time = self._by_position("edge_time", edge_time)
            check_integers(self._name("edge_time"), time)
            self.time = time.long()
        times = self.time
        if times is None and source_time is not None:
            times = source_time.to(self.indices.device).long()[self.indices.long()]
        self.is_timed = times is not None
        if times is not None:
            self._sort(times, is_sorted)
        if weight is not None:
            # Sampling returns no gradient to times or weights.
            self.weight = self._check_weight(self._by_position("edge_weight", weight.detach()))

    def _name(self, part: str) -> str:
        return name_part(part, self.edge_type)

    def _by_position(self, name: str, values: Tensor) -> Tensor:
        if values.dim() == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.shape != self.indices.shape:
            raise ArgumentError(
                f"{self._name(name)} must have shape {tuple(self.indices.shape)}, got {tuple(values.shape)}"
            )
        values = values.to(self.indices.device)
        return values if self.edge_ids is None else values[self.edge_ids.long()]

    def _check_weight(self, weight: Tensor) -> Tensor:
        if weight.is_complex():
            raise ArgumentTypeError(f"{self._name('edge_weight')} must hold real numbers, got {weight.dtype}")
        weight = as_weights(weight)
        wrong = ~((weight >= 0) & (weight < float("inf")))
        if bool(wrong.any()):
            value = float(weight[wrong][0])
            raise ArgumentError(f"{self._name('edge_weight')} must be finite and not negative, got {value}")
        return weight

    def _sort(self, times: Tensor, is_sorted: bool) -> None:
        rows = torch.arange(self.indptr.numel() - 1, device=times.device).repeat_interleave(self.indptr.diff())
        wrong = (times[1:] < times[:-1]) & (rows[1:] == rows[:-1])
        if not bool(wrong.any()):
            return
        if is_sorted:
            row = int(rows[1:][wrong][0])
            name = self._name("edges")
            raise ArgumentError(f"is_sorted=True needs rows sorted by time, but row {row} of {name} is not")
        # Stable twice: by row, then by time, then in the order given.
        order = times.sort(stable=True).indices
        order = order[rows[order].sort(stable=True).indices]
        self.indices, self.is_given = self.indices[order], False
        self.edge_ids = order if self.edge_ids is None else self.edge_ids[order]
        self.time = None if self.time is None else self.time[order]

    def list_ids(self) -> Tensor:
        """Return edge ids by position."""
        return (
            torch.arange(self.indices.numel(), device=self.indices.device) if self.edge_ids is None else self.edge_ids
        )

    def list_times(self) -> Tensor:
        """Return times by position; zeros if the relation has none."""
        return self.indices.new_zeros(self.indices.numel(), dtype=torch.int64) if self.time is None else self.time

    def list_weights(self) -> Tensor:
        """Return weights by position; ones if the relation has none."""
        return self.indices.new_ones(self.indices.numel(), dtype=torch.float32) if self.weight is None else self.weight


def as_weights(weight: Tensor) -> Tensor:
    """Return weights of edges, real numbers `[E]`, as float32 if that holds each exactly; otherwise as float64."""
    narrow = weight.to(torch.float32)
    if weight.dtype in _WITHIN_FLOAT32:
        return narrow
    wide = weight.to(torch.float64)
    # NaN, which is refused, is not equal to any number.
    return narrow if bool((narrow.double() == wide).all()) else wide


def read_relation(edge_type: EdgeType, edges: Any, num_rows: int, num_columns: int, direction: str) -> Relation:
    """Read the rows of a relation from an edge list, a `CSRTopo`, or (indptr, indices, edge ids)."""
    name = name_part("edges", edge_type)
    if isinstance(edges, Tensor):
        check_edge_list(name, edges)
        rows, columns = (edges[1], edges[0]) if direction == "in" else (edges[0], edges[1])
        target, source = (2, 0) if direction == "in" else (0, 2)
        _check_range(name, rows, num_rows, edge_type[target])
        _check_range(name, columns, num_columns, edge_type[source])
        indptr, indices, edge_ids = compress(rows.contiguous(), columns.contiguous(), max(num_rows, num_columns))
        return Relation(edge_type, indptr[: num_rows + 1], indices, edge_ids)
    is_given = not isinstance(edges, CSRTopo) or edges.is_given
    if isinstance(edges, CSRTopo):
        edges = (edges.indptr, edges.indices, edges.eid)
    if not isinstance(edges, tuple) or len(edges) != 3:
        raise ArgumentTypeError(f"{name} must be an edge list, a CSRTopo or (indptr, indices, edge ids), got {edges!r}")
    indptr, indices, edge_ids = edges
    if indptr.shape != (num_rows + 1,) or int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel():
        raise ArgumentError(f"{name} must have {num_rows} rows of together {indices.numel()} edges, got indptr of "
                            f"shape {tuple(indptr.shape)}")  # fmt: skip
    if bool((indptr.diff() < 0).any()):
        raise ArgumentError(f"{name} must have an indptr that does not decrease")
    _check_range(name, indices, num_columns, edge_type[0 if direction == "in" else 2])
    return Relation(edge_type, indptr.long(), indices, edge_ids, is_given=is_given)


def _check_range(name: str, ids: Tensor, size: int, kind: str) -> None:
    check_ids(name, ids)
    if ids.numel() > 0:
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= size:
            count = name_part("num_nodes", kind)
            raise IdError(f"{name} must lie in [0, {size}) ({count}), got {low if low < 0 else high}")

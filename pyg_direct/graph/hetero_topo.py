"""`HeteroTopo`: all node types of a graph in one id space, all relations as rows over it.

`Relation` is one relation: its rows, with times and weights in row order, sorted by time if the relation has times.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph.csr_topo import CSRTopo, FiledLists
from pyg_direct.graph.placed_topology import (
    check_place,
    choose_placement,
    place_array,
    prefer_gpu,
    restore_state,
    sendable_state,
)
from pyg_direct.object_text import one_line, show_count, show_place
from pyg_direct.ops.argument_checks import check_below, check_choice, check_edge_list, check_ids, check_integers
from pyg_direct.ops.local_ids.build_csr import compress
from pyg_direct.ops.sampling.sample_hetero import Rows, sum_weights
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.memory import Block
from pyg_direct.runtime.host.host_memory import use_large_pages
from pyg_direct.typing import Device

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
        indptr, indices: int64 `[rows + 1]`, int32 or int64 `[E]`.
        edge_ids: `[E]`, or None if the position of an edge is its id.
        weight, time: By position, float32 or float64, and int64 `[E]`; or None.
        is_timed: True if rows are sorted by time, either the edges' or the neighbors'.
        is_given: True if its neighbors are an array of the program's, which may write to it.
        lists: Its lists if they stay in files, of which `indices` is a map.
    """

    edge_type: EdgeType
    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None
    weight: Tensor | None = None
    time: Tensor | None = None
    is_timed: bool = False
    is_given: bool = False
    lists: FiledLists | None = None

    def attach(self, weight: Tensor | None, edge_time: Tensor | None, source_time: Tensor | None,
               is_sorted: bool) -> None:  # fmt: skip
        """Take over times and weights, which come by edge id or by neighbor, and sort rows by time."""
        if self.lists is not None and not (weight is edge_time is source_time is None):
            what = "edge_time" if edge_time is not None else "node_time" if source_time is not None else "edge_weight"
            raise ArgumentError(f"{self._name(what)} must be None where neighbor lists lie in a file, as all lists "
                                "would be read: give lists in memory")  # fmt: skip
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
    is_given, lists = not isinstance(edges, CSRTopo) or edges.is_given, None
    if isinstance(edges, CSRTopo):
        lists, edges = edges.lists, (edges.indptr, edges.indices, None if edges.lists else edges.eid)
    if not isinstance(edges, tuple) or len(edges) != 3:
        raise ArgumentTypeError(f"{name} must be an edge list, a CSRTopo or (indptr, indices, edge ids), got {edges!r}")
    indptr, indices, edge_ids = edges
    if indptr.shape != (num_rows + 1,) or int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel():
        raise ArgumentError(f"{name} must have {num_rows} rows of together {indices.numel()} edges, got indptr of "
                            f"shape {tuple(indptr.shape)}")  # fmt: skip
    if bool((indptr.diff() < 0).any()):
        raise ArgumentError(f"{name} must have an indptr that does not decrease")
    if lists is None:
        _check_range(name, indices, num_columns, edge_type[0 if direction == "in" else 2])
    return Relation(edge_type, indptr.long(), indices, edge_ids, is_given=is_given, lists=lists)


def _check_range(name: str, ids: Tensor, size: int, kind: str) -> None:
    check_ids(name, ids)
    if ids.numel() > 0:
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= size:
            count = name_part("num_nodes", kind)
            raise IdError(f"{name} must lie in [0, {size}) ({count}), got {low if low < 0 else high}")


# Ids of a type start at a multiple of this, so that no word or group of a bitmap holds two types.
ALIGNMENT = 1024
# Edges up to which each holds the time of its neighbor, in 8 bytes.
_MOST_COPIED_TIMES = 1 << 28


@dataclass(eq=False)
class PlacedHetero:
    """A `HeteroTopo` on the way to a sampler: its arrays, readable by `device`.

    `scratch` keeps buffers whose size is the number of nodes, for samplers, while no batch uses them.
    """

    topo: HeteroTopo
    rows: Rows
    device: torch.device
    placement: str
    blocks: list[Block] = field(default_factory=list)
    scratch: list[Any] = field(default_factory=list)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self.topo)
        yield show_place(self.placement, self.device)

    def check_process(self) -> None:
        """Refuse use in a forked child of the process that placed the arrays."""
        for block in self.blocks:
            block.check_process()

    def check_neighbors(self, ids: Tensor) -> None:
        """Check neighbors that are read from the program's own array, which it may have written to since.

        Args:
            ids: The edges that were picked, int64 `[n]`; not read on a GPU.
        """
        if self.topo.bound is not None and not ids.is_cuda:
            check_below("neighbors of the graph", self.rows.indices.numpy()[ids.numpy()], self.topo.bound)

    def with_running_weights(self) -> Rows:
        """Return the rows with `weight_before`, for sampling with replacement by weight; made at the first request."""
        if self.rows.edge_weight.numel() and not self.rows.weight_before.numel():
            before = sum_weights(self.topo.indptr, self.topo.edge_weight)
            self.rows = self.rows._replace(weight_before=before.to(self.device))
        return self.rows


class NodeTypes:
    """Node types of a graph, in consecutive ranges of one id space.

    Attributes:
        num_nodes: Nodes of each type.
        node_types: The types in their order.
        type_numbers: Number of each type in this order.
        type_sizes: Nodes of each type, uint64 `[T]`.
        type_starts: First id of each type in the id space, and the end of the last type, int64 `[T + 1]`.
    """

    def __init__(self, num_nodes: Mapping[str, int]) -> None:
        self.num_nodes = dict(num_nodes)
        self.node_types = tuple(self.num_nodes)
        self.type_numbers = {kind: number for number, kind in enumerate(self.node_types)}
        self.type_sizes = np.array([*self.num_nodes.values()], np.uint64)
        sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in self.num_nodes.values()]
        self.type_starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self.id_bits = max(self.num_nodes.values(), default=0).bit_length()


class HeteroTopo(NodeTypes):
    """The topology of a graph with several node types and relations, or with one of each.

    Node types occupy consecutive ranges of one id space, in the order given. A relation's rows are the nodes that are
    expanded: its targets, or its sources with `direction="out"`. Rows of relations with times are sorted by time;
    edges of equal time keep their order.

    Args:
        num_nodes: Nodes of each type; an integer for a graph of one type.
        edges: For each relation (source type, name, target type): int64 or int32 `[2, E]`, sources first; a
            `CSRTopo`; or (indptr, indices, edge ids or None), rows as they are to be expanded. One of these alone for
            a graph of one type and one relation.
        node_time: Times of the nodes of each type, integers `[N]`; types may be missing: their nodes are always
            allowed. A tensor for a graph of one type.
        edge_time: Times of the edges of each relation by edge id, integers `[E]`; relations may be missing. Not
            together with `node_time`.
        edge_weight: Weights of the edges of each relation by edge id, `[E]`, finite and not negative, of any dtype of
            real numbers; relations may be missing: their edges are equally likely.
        direction: Expand nodes to their in-neighbors (`in`) or out-neighbors (`out`).
        is_sorted: Rows are sorted by time already, which is checked.
    """

    def __init__(self, num_nodes: int | Mapping[str, int], edges: Any, *,
                 node_time: Tensor | Mapping[str, Tensor] | None = None,
                 edge_time: Tensor | Mapping[EdgeType, Tensor] | None = None,
                 edge_weight: Tensor | Mapping[EdgeType, Tensor] | None = None, direction: str = "in",
                 is_sorted: bool = False) -> None:  # fmt: skip
        if direction not in ("in", "out"):
            raise ArgumentError(f"direction must be 'in' or 'out', got {direction!r}")
        if node_time is not None and edge_time is not None:
            raise ArgumentError("give either node_time or edge_time, not both")
        self.direction = direction
        self.is_homogeneous = not isinstance(num_nodes, Mapping)
        if not isinstance(num_nodes, Mapping):
            num_nodes, edges = {NODES: num_nodes}, {LINKS: edges}
            node_time = _by_name(NODES, node_time)
            edge_time = _by_name(LINKS, edge_time)
            edge_weight = _by_name(LINKS, edge_weight)
        super().__init__({kind: _check_size(kind, size) for kind, size in num_nodes.items()})
        self.edge_types: tuple[EdgeType, ...] = tuple(edges)
        times = self._check_parts("node_time", node_time, self.node_types)
        edge_times = self._check_parts("edge_time", edge_time, self.edge_types)
        weights = self._check_parts("edge_weight", edge_weight, self.edge_types)
        for kind, time in times.items():
            _check_time(name_part("node_time", kind), time, self.num_nodes[kind])
        relations = []
        for edge_type, value in edges.items():
            for end in (0, 2):
                if edge_type[end] not in self.num_nodes:
                    raise ArgumentError(f"edges must join known node types, got {edge_type} of {self.node_types}")
            target, source = (2, 0) if direction == "in" else (0, 2)
            relation = read_relation(edge_type, value, self.num_nodes[edge_type[target]],
                                     self.num_nodes[edge_type[source]], direction)  # fmt: skip
            relation.attach(weights.get(edge_type), edge_times.get(edge_type), times.get(edge_type[source]), is_sorted)
            relations.append(relation)
        self.timed = np.array([r.is_timed for r in relations], dtype=bool)
        self.weighted = np.array([r.weight is not None for r in relations], dtype=bool)
        index = {kind: number for number, kind in enumerate(self.node_types)}
        ends = [
            (index[t[2]], index[t[0]]) if direction == "in" else (index[t[0]], index[t[2]]) for t in self.edge_types
        ]
        # Numbers of the types that each relation expands, and of those it leads to, int64 `[R]`.
        self.expanded, self.reached = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        self._join(relations, times)
        self._placed: dict[tuple[str, torch.device], PlacedHetero] = {}
        self._lock = threading.Lock()

    def _check_parts(self, name: str, parts: Any, known: tuple[Any, ...]) -> dict[Any, Tensor]:
        if parts is None:
            return {}
        if not isinstance(parts, Mapping):
            raise ArgumentTypeError(f"{name} must map types to tensors, got {type(parts).__name__}")
        for kind, part in parts.items():
            if kind not in known:
                raise ArgumentError(f"{name} must name known types, got {kind!r} of {known}")
            if not isinstance(part, Tensor):
                raise ArgumentTypeError(f"{name_part(name, kind)} must be a tensor, got {type(part).__name__}")
        return dict(parts)

    def _join(self, relations: list[Relation], times: dict[str, Tensor]) -> None:
        """Concatenate the relations' arrays over the one id space."""
        edge_counts, row_counts = [r.indices.numel() for r in relations], [r.indptr.numel() - 1 for r in relations]
        # First edge and first row of each relation, and their totals, int64 `[R + 1]`.
        self.edge_starts = np.concatenate([[0], np.cumsum(edge_counts)]).astype(np.int64)
        self.row_starts = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int64)
        num_ids = int(self.type_starts[-1])
        id_dtype = torch.int32 if num_ids < 2**31 else torch.int64
        # Lists that stay in files; None if all are in memory.
        self.lists = relations[0].lists if len(relations) == 1 else None
        is_alone = self.lists is not None and len(self.num_nodes) == 1
        if any(relation.lists is not None for relation in relations) and not is_alone:
            raise ArgumentError("neighbor lists in files must be of a graph with one type of nodes and one relation, "
                                f"got {len(self.num_nodes)} types and {len(relations)} relations")  # fmt: skip
        if self.lists is not None:
            # No copy: neighbors are checked as they are read.
            id_dtype = relations[0].indices.dtype
        edge_dtype = _choose_dtype(relations)
        firsts = self.type_starts[self.reached].tolist()
        self.indptr = _concatenate([r.indptr[:-1] + int(s) for r, s in zip(relations, self.edge_starts, strict=False)]
                                   + [torch.tensor([self.edge_starts[-1]], device="cpu")], torch.int64)  # fmt: skip
        self.indices = _concatenate([_move(r.indices, first, id_dtype)
                                     for r, first in zip(relations, firsts, strict=True)], id_dtype)  # fmt: skip
        given = [(r, self.num_nodes[self.node_types[reached]]) for r, reached in
                 zip(relations, self.reached.tolist(), strict=True)
                 if r.is_given and r.indices.numel() and r.indices.data_ptr() == self.indices.data_ptr()]  # fmt: skip
        # Number of nodes of the neighbors' type, if the only relation with edges reads neighbors from the program's
        # array.
        self._bound = given[0][1] if given else None
        if given and (times or given[0][0].edge_ids is not None):
            # Times of neighbors are looked up, or their positions are unknown: make a copy, which no program writes to.
            self.indices, self._bound = self.indices.clone(), None
        all_in_place = all(r.edge_ids is None for r in relations)
        self.edge_ids = _concatenate([] if all_in_place else [r.list_ids().to(edge_dtype) for r in relations],
                                     edge_dtype)  # fmt: skip
        self.node_time = torch.empty(0, dtype=torch.int64, device="cpu")
        if times:
            self.node_time = use_large_pages(torch.empty(num_ids, dtype=torch.int64, device="cpu")).zero_()
            for kind, start in zip(self.node_types, self.type_starts, strict=False):
                if kind in times:
                    self.node_time[start : start + self.num_nodes[kind]] = times[kind].cpu()
        # Types whose nodes have times.
        self.timed_types = frozenset(times)
        # True if nodes or edges have times.
        self.is_temporal = bool(self.timed.any()) or bool(self.timed_types)
        has_edge_time = any(r.time is not None for r in relations)
        if times and self.edge_starts[-1] <= _MOST_COPIED_TIMES:
            # One access a step of a search instead of two that wait for each other.
            for relation, start in zip(relations, self.type_starts[self.reached].tolist(), strict=True):
                relation.time = self.node_time.to(relation.indices.device)[relation.indices.long() + start]
            has_edge_time = True
        self.edge_time = _concatenate([r.list_times() for r in relations] if has_edge_time else [], torch.int64)
        # torch.cat makes all arrays float64 if one of them is.
        self.edge_weight = _concatenate([r.list_weights() for r in relations] if self.weighted.any() else [],
                                        torch.float32)  # fmt: skip

    @property
    def bound(self) -> int | None:
        """Upper bound of the neighbor ids, if they are read from the program's own array; None if from a copy."""
        return self._bound

    @property
    def num_edges(self) -> dict[EdgeType, int]:
        """Edges of each relation."""
        return dict(zip(self.edge_types, np.diff(self.edge_starts).tolist(), strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.numel() * a.element_size() for a in self._arrays().values())

    def _arrays(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in Rows._fields if name != "weight_before"}

    def place(self, placement: str = "auto", device: Device = None) -> PlacedHetero:
        """Place the arrays in memory that a device can read, once for each device and placement.

        Args:
            placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`. `auto` takes GPU memory if the arrays fit and leave
                a quarter of the free memory, at least 8 GiB or half of it; otherwise `unified` or `pinned` host memory,
                whichever is faster. If the neighbors are on the host, another array still goes to GPU memory if it
                takes at most an eighth of the free memory. Lists in a file are sampled on the CPU: `auto` or `cpu`.
        """
        target = resolve_device(device)
        if self.lists is not None:
            check_choice("placement", placement, ("auto", "cpu"))
            placement, target = "cpu", torch.device("cpu")
        if placement == "auto":
            placement = "cuda" if ("cuda", target) in self._placed else choose_placement(self.num_bytes, target)
        check_place("placement", placement, target)
        with self._lock:
            if (placement, target) not in self._placed:
                self._placed[placement, target] = self._place(placement, target)
            return self._placed[placement, target]

    def _place(self, placement: str, device: torch.device) -> PlacedHetero:
        placed, blocks = {}, []
        for name, array in self._arrays().items():
            where = placement if name == "indices" and array.numel() else prefer_gpu(array, placement, device)
            placed[name], kept, block = place_array(array, where, device, name)
            setattr(self, name, kept)
            blocks += [] if block is None else [block]
        if any(block.placement == "cpu" for block in blocks) and device.type == "cuda":
            raise ArgumentError(f"placement={placement!r} fell back to 'cpu', which a GPU cannot sample")
        rows = Rows(**placed, weight_before=torch.empty(0, dtype=torch.float64, device=device))
        return PlacedHetero(self, rows, device, placement, blocks)

    def __getstate__(self) -> dict[str, Any]:
        if self.lists is not None:
            raise ArgumentError("lists in files cannot be sent: call CSRTopo.from_file in each process")
        return sendable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_state(self, state)

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(len(self.node_types), "type")
        yield show_count(sum(self.num_nodes.values()), "node")
        yield show_count(len(self.edge_types), "relation")
        yield show_count(int(self.edge_starts[-1]), "edge")


def _by_name(name: Any, part: Any) -> Any:
    """Return the part of a graph without types under the name of its one type or relation."""
    return part if part is None or isinstance(part, Mapping) else {name: part}


def _check_size(kind: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ArgumentError(f"num_nodes must hold integers of at least 0, got {size!r} for {kind!r}")
    return size


def _check_time(name: str, time: Tensor, size: int) -> None:
    check_integers(name, time)
    if time.shape != (size,):
        raise ArgumentError(f"{name} must have shape ({size},), got {tuple(time.shape)}")


def _choose_dtype(relations: list[Relation]) -> torch.dtype:
    """Choose the dtype of edge ids, which need not be positions."""
    given = [r.edge_ids for r in relations if r.edge_ids is not None and r.edge_ids.numel()]
    # Times and ids of the smaller dtype need no check.
    most = [int(ids.max()) for ids in given if ids.dtype == torch.int64]
    most += [relation.indices.numel() for relation in relations]
    return torch.int32 if max(most, default=0) < 2**31 else torch.int64


def _move(indices: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    return indices.to(dtype) + first if first else indices.to(dtype)


def _concatenate(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.empty(0, dtype=dtype, device="cpu")
    if len(parts) == 1:
        return parts[0].contiguous()
    out = torch.empty(sum(part.numel() for part in parts), device=parts[0].device,
                      dtype=functools.reduce(torch.promote_types, [part.dtype for part in parts]))  # fmt: skip
    return torch.cat([part.to(out.device) for part in parts], out=use_large_pages(out))

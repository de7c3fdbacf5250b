"""`GraphPart`: one part of a partitioned graph in memory, with the description of the whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.partitioning.files import read_array
from pyg_direct.distributed.partitioning.manifest import Book, Manifest, part_folder
from pyg_direct.errors import ArgumentError, IdError, PartitionError
from pyg_direct.graph.hetero_topo import ALIGNMENT, EdgeType, NodeTypes
from pyg_direct.object_text import one_line, show_sizes
from pyg_direct.ops.local_ids.build_csr import order_rows
from pyg_direct.ops.local_ids.relabel_nodes import locate_ids
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.ops.sampling.sample_hetero import Rows, sum_weights
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.negative_links import EdgeSet


@dataclass
class Table:
    """Rows of a part: of the nodes of a type, or of the edges of a relation.

    Attributes:
        ids: Ids of the rows, int64 `[n]`, ascending.
        rows: Their rows by attribute, `[n, ...]`.
    """

    ids: Tensor
    rows: dict[str, Tensor]

    def find(self, ids: Tensor) -> Tensor:
        """Find the positions of the rows of ids, int64, without a wait for a GPU; -1 for an id that is not here."""
        if not self.ids.numel() or not ids.numel():
            return torch.full_like(ids, -1)
        return locate_ids(ids, self._directory, self._num_ids)

    def find_directory(self) -> tuple[Directory, int]:
        """Return (the look-up of ids, the ids that it covers), for kernels that find positions."""
        return (self._directory, self._num_ids) if self.ids.numel() else (Directory.empty(self.ids.device), 0)

    @property
    def index(self) -> tuple[Tensor, ...]:
        """The tensors of the look-up of ids, empty before its first use."""
        return self.__dict__.get("_directory", ())

    @cached_property
    def _num_ids(self) -> int:
        return int(self.ids[-1]) + 1

    @cached_property
    def _directory(self) -> Directory:
        return Directory.of(self.ids, self._num_ids)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Find (positions of the rows of these ids, int64; int64 `[1]`, below 0 if an id is not held here).

        On a GPU there is no wait, and the position of an id that is not held is 0; it must not be used.
        """
        places = self.find(ids)
        if not ids.numel():
            return places, places.new_zeros(1)
        status = places.amin().view(1)
        if not self.ids.numel() or (not ids.is_cuda and int(status) < 0):
            raise IdError(f"ids must be held by this part, got {int(ids[places < 0][0])}")
        return (places.clamp_(min=0), status.clamp_(max=0)) if ids.is_cuda else (places, places.new_zeros(1))


def word_dtype(manifest: Manifest) -> torch.dtype:
    """Return the dtype of node ids in the id space of all types, and of edge ids, in messages."""
    most = max([sum(entry.num_nodes + ALIGNMENT for entry in manifest.nodes), *(e.num_edges for e in manifest.edges)])
    return torch.int32 if most < 2**31 else torch.int64


class PartTopo(NodeTypes):
    """Description of a partitioned graph for sampling: names and sizes of the whole, and starts of the part's rows.

    It has the attributes of `HeteroTopo` that plans read; `row_starts` and `edge_starts` refer to the part.
    """

    # No neighbor lists in files.
    lists = None

    def __init__(self, manifest: Manifest, timed: bool, weighted: bool) -> None:
        self.direction, self.is_homogeneous = manifest.direction, manifest.is_homogeneous
        super().__init__({entry.name: entry.num_nodes for entry in manifest.nodes})
        self.edge_types: tuple[EdgeType, ...] = tuple(entry.name for entry in manifest.edges)
        self.timed = np.array([timed and entry.time is not None for entry in manifest.edges], dtype=bool)
        self.weighted = np.array([weighted and entry.weighted for entry in manifest.edges], dtype=bool)
        self.timed_types = frozenset(entry.name for entry in manifest.nodes if timed and entry.time is not None)
        index = {kind: number for number, kind in enumerate(self.node_types)}
        target, source = (2, 0) if self.direction == "in" else (0, 2)
        self.expanded = np.array([index[kind[target]] for kind in self.edge_types], dtype=np.int64)
        self.reached = np.array([index[kind[source]] for kind in self.edge_types], dtype=np.int64)
        self.row_starts = self.edge_starts = np.zeros(len(self.edge_types) + 1, np.int64)
        self.is_temporal = bool(self.timed.any()) or bool(self.timed_types)
        self.word_dtype = word_dtype(manifest)
        self._starts: dict[torch.device, Tensor] = {}

    def __repr__(self) -> str:
        return f"the rows of a part, of {sum(self.num_nodes.values())} nodes in all"

    def ids_within(self, ids: Tensor) -> Tensor:
        """Convert ids in the id space of all types to ids within their types, int64."""
        if len(self.node_types) < 2:
            return ids
        if ids.device not in self._starts:
            self._starts[ids.device] = torch.from_numpy(self.type_starts).to(ids.device)
        starts = self._starts[ids.device]
        return ids - starts[torch.bucketize(ids, starts[1:-1], right=True)]


@dataclass(eq=False)
class PlacedPart:
    """Rows of a part in memory that its device reads, for a plan; as `PlacedHetero` of a whole graph."""

    topo: PartTopo
    rows: Rows
    device: torch.device
    scratch: list[Any] = field(default_factory=list)

    def check_process(self) -> None:
        """Do nothing: every process that has it may use it."""

    def check_neighbors(self, ids: Tensor) -> None:
        """Do nothing: only this package writes to the neighbors. `ids`: See `PlacedHetero.check_neighbors`."""

    def with_running_weights(self) -> Rows:
        """Return the rows with `weight_before`."""
        if self.rows.edge_weight.numel() and not self.rows.weight_before.numel():
            before = sum_weights(self.rows.indptr, self.rows.edge_weight)
            self.rows = self.rows._replace(weight_before=before.to(self.device))
        return self.rows


class GraphPart:
    """One part of a partitioned graph.

    Args:
        check: `"full"`: compare checksums of the files; `"size"`: their sizes; None: no check.
        map_rows: Leave rows in their files, which are read on demand.
    """

    def __init__(self, folder: str | PathLike[str], part: int, *, device: torch.device, check: str | None = "size",
                 map_rows: bool = False) -> None:  # fmt: skip
        if check not in ("full", "size", None):
            raise ArgumentError(f"check must be 'full', 'size' or None, got {check!r}")
        self.manifest = Manifest.read(folder)
        self.part, self.device = self.manifest.check_part(part), resolve_device(device)
        if check is not None:
            self.manifest.check(folder, part, full=check == "full")
        self._folder, self._map_rows = Path(folder), map_rows
        self.books: dict[str, Book] = {}
        # By node type and relation.
        self.tables: dict[Any, Table] = {}
        for number, node in enumerate(self.manifest.nodes):
            self.books[node.name] = self.manifest.read_book(folder, number)
            rows = {name: self._read(file, rows=True) for name, file in node.rows.items()}
            self.tables[node.name] = Table(self._read_nodes(number, node.num_nodes), rows)
        # Times of the part's nodes by type.
        self.times = {node.name: self._read(node.time) for node in self.manifest.nodes if node.time is not None}
        for number, edge in enumerate(self.manifest.edges):
            if edge.rows:
                rows = {name: self._read(file, rows=True) for name, file in edge.rows.items()}
                self.tables[edge.name] = Table(self._read(f"edge-{number}.sorted.npy"), rows)
        self._placed: dict[tuple[bool, bool], PlacedPart] = {}

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield f"part {self.part} of {self.manifest.num_parts}"
        sizes = {entry.name: entry.num_nodes for entry in self.manifest.nodes}
        yield show_sizes(sizes if len(sizes) > 1 else sum(sizes.values()))
        yield str(self.device)

    @property
    def num_parts(self) -> int:
        """Number of parts P."""
        return self.manifest.num_parts

    @property
    def num_bytes(self) -> int:
        """Bytes of the part's ids, rows and neighbors, and of its look-up tables."""
        tables = [t for table in self.tables.values() for t in (table.ids, *table.rows.values(), *table.index)]
        edges = [array for placed in self._placed.values() for array in placed.rows]
        return sum(t.numel() * t.element_size() for t in [*tables, *edges])

    def _read(self, name: str, *, rows: bool = False) -> Tensor:
        path = self._folder / part_folder(self.part) / name
        tensor = torch.from_numpy(read_array(path, mapped=rows and self._map_rows))
        # Rows are placed later, by their user.
        return tensor if rows else tensor.to(self.device)

    def _read_nodes(self, number: int, size: int) -> Tensor:
        """Read ids of the part's nodes of a type with `size` nodes."""
        ids = self._read(f"node-{number}.ids.npy")
        if ids.dim() != 1 or not _are_within(ids, size) or bool((ids[1:] <= ids[:-1]).any()):
            raise PartitionError(self._tell(f"node-{number}.ids.npy", f"ascending ids in [0, {size})"))
        return ids

    def _read_edges(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Read and check (offsets, neighbors, ids of edges) of a relation."""
        indptr, indices, ids = (self._read(f"edge-{number}.{name}.npy") for name in ("indptr", "indices", "ids"))
        kind, end = self.manifest.edges[number].name, 2 if self.manifest.direction == "in" else 0
        num_rows, size = self.tables[kind[end]].ids.numel(), self.books[kind[2 - end]].num_nodes
        if (indptr.shape != (num_rows + 1,) or int(indptr[0]) != 0 or int(indptr[-1]) != ids.numel()
                or bool((indptr[1:] < indptr[:-1]).any())):  # fmt: skip
            rule = f"{num_rows + 1} offsets that ascend from 0 to {ids.numel()}"
            raise PartitionError(self._tell(f"edge-{number}.indptr.npy", rule))
        if indices.shape != ids.shape or not _are_within(indices, size):
            raise PartitionError(self._tell(f"edge-{number}.indices.npy", f"{ids.numel()} ids in [0, {size})"))
        return indptr, indices, ids

    def _tell(self, name: str, rule: str) -> str:
        path = self._folder / part_folder(self.part) / name
        return f"{path} must hold {rule}, and holds something else: it is damaged"

    def owners(self, kind: str, ids: Tensor) -> Tensor:
        """Return the part of each node of a type, int64."""
        return self.books[kind].owners(ids)

    @property
    def word_dtype(self) -> torch.dtype:
        """Dtype of ids in messages."""
        return word_dtype(self.manifest)

    @cached_property
    def own_starts(self) -> np.ndarray:
        """Nodes of this part in the types before each type, int64 `[T]`."""
        sizes = [self.tables[entry.name].ids.numel() for entry in self.manifest.nodes]
        return np.cumsum([0, *sizes], dtype=np.int64)[:-1]

    @cached_property
    def _all_nodes(self) -> Table:
        """The part's nodes in the id space of all types."""
        starts = PartTopo(self.manifest, False, False).type_starts.tolist()
        own = [self.tables[entry.name].ids for entry in self.manifest.nodes]
        if len(own) == 1:
            return self.tables[self.manifest.nodes[0].name]
        return Table(torch.cat([ids + start for ids, start in zip(own, starts, strict=False)]), {})

    def find_places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Locate ids of the id space of all types, as `Table.locate`: positions among the part's nodes, by type."""
        return self._all_nodes.locate(ids)

    def find_directory(self) -> tuple[Directory, int]:
        """Return (the look-up of `find_places`, ids that it covers)."""
        return self._all_nodes.find_directory()

    def edge_set(self, edge_type: EdgeType) -> EdgeSet:
        """Make the set of this part's edges of a relation, for queries of pairs; 8 bytes per edge."""
        number = [entry.name for entry in self.manifest.edges].index(edge_type)
        indptr, indices, _ = self._read_edges(number)
        is_in = self.manifest.direction == "in"
        rows = self.tables[edge_type[2 if is_in else 0]].ids.repeat_interleave(indptr.diff())
        sources, targets = (indices, rows) if is_in else (rows, indices)
        return EdgeSet(sources, targets, *(self.books[edge_type[end]].num_nodes for end in (0, 2)))

    def place(self, *, timed: bool = False, weighted: bool = False) -> PlacedPart:
        """Place the rows for sampling, with or without times and weights; each kind is made once."""
        key = (timed, weighted)
        if key not in self._placed:
            self._placed[key] = self.build_rows(PartTopo(self.manifest, *key))
        return self._placed[key]

    def build_rows(self, topo: PartTopo) -> PlacedPart:
        """Build the rows for sampling; sets `row_starts` and `edge_starts` of `topo`."""
        parts: dict[str, list[Tensor]] = {name: [] for name in ("indptr", "indices", "ids", "time", "weight")}
        id_dtype = torch.int32 if topo.type_starts[-1] < 2**31 else torch.int64
        starts, edge_starts = [0], [0]
        for number, entry in enumerate(self.manifest.edges):
            indptr, indices, ids = self._read_edges(number)
            first = int(topo.type_starts[topo.reached[number]])
            own = {"indices": indices.to(id_dtype) + first, "ids": ids}
            has_time, has_weight = bool(topo.timed[number]), bool(topo.weighted[number])
            if topo.timed.any():
                own["time"] = self._read(f"edge-{number}.time.npy") if has_time else ids.new_zeros(
                    ids.shape, dtype=torch.int64)  # fmt: skip
            if topo.weighted.any():
                own["weight"] = self._read(f"edge-{number}.weight.npy") if has_weight else ids.new_ones(
                    ids.shape, dtype=torch.float32)  # fmt: skip
            if entry.time is not None and not has_time:
                order = _order_by_id(indptr, ids)
                own = {name: value[order] for name, value in own.items()}
            parts["indptr"].append(indptr[:-1] + edge_starts[-1])
            for name, value in own.items():
                parts[name].append(value)
            starts.append(starts[-1] + indptr.numel() - 1)
            edge_starts.append(edge_starts[-1] + ids.numel())
        topo.row_starts, topo.edge_starts = np.array(starts, np.int64), np.array(edge_starts, np.int64)
        parts["indptr"].append(torch.tensor([edge_starts[-1]], device=self.device))
        edge_dtype = torch.int64 if any(t.dtype == torch.int64 for t in parts["ids"]) else torch.int32
        is_wide = any(t.dtype == torch.float64 for t in parts["weight"])
        dtypes = {"indptr": torch.int64, "indices": id_dtype, "ids": edge_dtype, "time": torch.int64,
                  "weight": torch.float64 if is_wide else torch.float32}  # fmt: skip
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        joined = {name: torch.cat([t.to(dtypes[name]) for t in given] or [none.cpu().to(dtypes[name])])
                  for name, given in parts.items()}  # fmt: skip
        rows = Rows(joined["indptr"], joined["indices"].to(self.device), joined["ids"].to(self.device), none,
                    joined["time"].to(self.device), joined["weight"].to(self.device), none.double())  # fmt: skip
        return PlacedPart(topo, rows, self.device)


def _are_within(ids: Tensor, size: int) -> bool:
    """Check if all ids lie in [0, size)."""
    if not ids.numel():
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < size


def _order_by_id(indptr: Tensor, ids: Tensor) -> Tensor:
    """Find the order of the edges of each row by their ids, for rows sorted by time."""
    by_id = ids.cpu().long().argsort(stable=True)
    rows = torch.arange(indptr.numel() - 1, device="cpu").repeat_interleave(indptr.cpu().diff())[by_id]
    return by_id[order_rows(rows, indptr.numel() - 1)[1].long()].to(ids.device)

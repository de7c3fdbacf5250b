"""`WholeGraph`: a graph in parts in one memory, read in place by the processes of a host or the GPUs of a clique.

Each process writes the rows of its own part and has an equal share of the memory. Nodes, edges and their order equal
the graph on one machine, so the samplers of one machine sample it.

`place_on_gpus` and `move_arrays` move the graph to the memory of one GPU, or of several joined by NVLink. They are
collective. `find_obstacle` finds the reason why processes cannot keep a graph in one memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_direct.distributed.graph_part import GraphPart, PartTopo, PlacedPart
from pyg_direct.distributed.row_exchange import TIME, Wanted, name_features
from pyg_direct.errors import PartitionError
from pyg_direct.features.feature import Feature
from pyg_direct.features.process_sharing import PARTS
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.graph.placed_topology import PlacedTopology, interleave, spread_over_peers
from pyg_direct.ops.sampling.sample_hetero import Rows, sum_weights
from pyg_direct.runtime.comm.communicator import Communicator, gather_json
from pyg_direct.runtime.comm.host_group import identify_host
from pyg_direct.runtime.cuda.peer_memory import GRANULE, p2pCliqueTopo
from pyg_direct.runtime.host.host_memory import available_bytes, parse_size
from pyg_direct.runtime.host.shared_memory import SharedMemory, open_shared
from pyg_direct.sampling.negative_links import EdgeSet


def move_arrays(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Spread arrays in shared memory over the GPUs of all processes."""
    filled = [array for array in arrays if array.numel()]
    # Collectives of objects use the current GPU of each process, which may not be the sampling GPU.
    with torch.cuda.device(device):
        views = iter(spread_over_peers(filled, device) if filled else [])
    return [next(views) if array.numel() else array.to(device) for array in arrays]


def place_on_gpus(rows: Rows, device: torch.device, rank: int, size: int) -> PlacedTopology:
    """Place the rows of a graph without types: each GPU has all offsets, and they share the neighbors.

    Args:
        rows: In shared memory, or in the memory of the only process.
        rank, size: Rank of this process, and number of processes.
    """
    indptr, (indices, edge_ids) = rows.indptr.to(device), rows[1:3]
    where = "cuda" if size == 1 else "peer"
    if not indices.numel() or not indices.dtype == edge_ids.dtype == torch.int32:
        both = move_arrays([indices, edge_ids], device) if size > 1 else [indices.to(device), edge_ids.to(device)]
        return PlacedTopology(indptr, both[0], both[1], where)
    if size == 1:
        pairs, neighbors, ids = interleave(indices, edge_ids, device)
        return PlacedTopology(indptr, neighbors, ids, where, pairs=pairs)
    # Only the sizes are read on ranks other than 0.
    halves = torch.stack([indices, edge_ids], 1) if rank == 0 else indices[:1, None].expand(indices.numel(), 2)
    (halves,) = move_arrays([halves], device)
    return PlacedTopology(indptr, halves[:, 0], halves[:, 1], where, pairs=halves.view(torch.int64).view(-1))


def make_feature(rows: Tensor, device: torch.device, size: int, device_cache_size: int | str, placement: str
                 ) -> Feature:  # fmt: skip
    """Make a feature of rows in shared memory, with hot rows spread over the GPUs; a single process keeps its
    placement.

    Args:
        device_cache_size: GPU memory of each process; a share refers to the rows of its part.
    """
    if size == 1:
        feature = Feature(device=device, device_cache_size=device_cache_size, placement=placement)
        return feature.from_cpu_tensor(rows)
    budget = fit_cache(rows.numel() * rows.element_size(), size, device_cache_size)
    shared: dict[str, Any] = {"device_list": "group", "cache_policy": "p2p_clique_replicate", "cold_policy": "pinned"}
    with torch.cuda.device(device):
        return Feature(device=device, device_cache_size=f"{budget}B", **shared).from_cpu_tensor(rows)


def fit_cache(num_bytes: int, size: int, device_cache_size: int | str) -> int:
    """Return the GPU memory in bytes that each of `size` processes gives to `num_bytes` of rows.

    If all budgets together cover the rows, each is rounded up to hold whole chunks.
    """
    own = -(-num_bytes // size)
    budget = parse_size(device_cache_size, own)
    # Every process allocates whole chunks.
    return budget if budget < own else min(size * own, own + PARTS * GRANULE)


# Rows, or edges, copied at a time.
_ROWS_AT_ONCE = 1 << 20


class WholeGraph:
    """Graph of all parts, in one memory. The constructor, and the first use of each kind of rows, are collective.

    Args:
        part: This process's part, on the CPU unless there is only one process.
        device_cache_size: GPU memory of this process for hot rows; see `DistGraph`.
        placement: Host memory of the other rows for a single process; several processes have them in host memory once.
    """

    def __init__(self, part: GraphPart, communicator: Communicator, device: torch.device,
                 device_cache_size: int | str, placement: str) -> None:  # fmt: skip
        self._part, self._communicator, self._device = part, communicator, device
        self._placed: dict[tuple[bool, bool, bool], PlacedPart] = {}
        self._plain: PlacedTopology | None = None
        self._edges: dict[EdgeType, EdgeSet] = {}
        self._num_bytes = 0
        self.rows = WholeRows(part, self._open_rows(device_cache_size, placement))

    @property
    def num_bytes(self) -> int:
        """Bytes of the graph in one process, an equal share."""
        return self._num_bytes // self._communicator.size

    def place(self, *, timed: bool = False, weighted: bool = False, summed: bool = False) -> PlacedPart:
        """Place the rows of all nodes for sampling; each kind of rows is made once, by all processes.

        Args:
            summed: Add sums of the weights, for draws with replacement.
        """
        key = timed, weighted, summed and weighted
        if key not in self._placed:
            self._placed[key] = self._open_topology(*key)
        return self._placed[key]

    def place_plain(self) -> PlacedTopology:
        """Place rows for plans of a graph without types, times and weights; made once, by all processes."""
        if self._plain is None:
            self._plain = self._open_plain()
        return self._plain

    def edge_set(self, edge_type: EdgeType) -> EdgeSet:
        """Make the set of edges of a relation, for queries of pairs; made once, by all processes."""
        if edge_type not in self._edges:
            own = self._part.edge_set(edge_type)
            self._edges[edge_type] = own if self._communicator.size == 1 else self._open_edges(edge_type, own)
        return self._edges[edge_type]

    def _share(self, shapes: Sequence[Shape]) -> list[Tensor]:
        self._num_bytes += sum(shape.num_bytes for shape in shapes)
        return share_arrays(self._communicator, shapes)

    def _open_topology(self, timed: bool, weighted: bool, summed: bool) -> PlacedPart:
        if self._communicator.size == 1:
            placed = self._part.place(timed=timed, weighted=weighted)
            self._num_bytes += sum(array.numel() * array.element_size() for array in placed.rows)
            return placed
        placed = self._communicator.run(self._join_rows, PartTopo(self._part.manifest, timed, weighted), summed)
        placed.rows = Rows(*self._move(placed.rows))
        placed.device = self._device
        return placed

    def _open_plain(self) -> PlacedTopology:
        if self._device.type == "cpu":
            return PlacedTopology(*self.place().rows[:3], "cpu")
        topo, size = PartTopo(self._part.manifest, False, False), self._communicator.size
        if size == 1:
            placed = self._part.build_rows(topo)
            self._num_bytes += sum(array.numel() * array.element_size() for array in placed.rows)
        else:
            placed = self._communicator.run(self._join_rows, topo, False)
            # Each GPU has all offsets.
            self._num_bytes += (size - 1) * placed.rows.indptr.numel() * 8
        return place_on_gpus(placed.rows, self._device, self._communicator.rank, size)

    def _move(self, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Move arrays to memory that the device reads."""
        return list(arrays) if self._device.type == "cpu" else move_arrays(arrays, self._device)

    def _join_rows(self, topo: PartTopo, summed: bool) -> PlacedPart:
        own, comm = self._part.build_rows(topo).rows, self._communicator
        if summed:
            own = own._replace(weight_before=sum_weights(own.indptr, own.edge_weight))
        kinds = [topo.node_types[number] for number in topo.expanded.tolist()]
        topo.row_starts = _list_starts([topo.num_nodes[kind] for kind in kinds])
        topo.edge_starts = _list_starts([entry.num_edges for entry in self._part.manifest.edges])
        num_edges = int(topo.edge_starts[-1])
        rows = Rows(*self._share(_list_shapes(topo, num_edges, own.edge_weight.dtype, summed)))
        places = torch.cat([own.indptr[:0], *(self._part.tables[kind].ids + int(start) for kind, start in
                                              zip(kinds, topo.row_starts, strict=False))])  # fmt: skip
        rows.indptr[places + 1] = own.indptr.diff()
        comm.agree(0)
        if comm.rank == 0:
            rows.indptr.copy_(rows.indptr.cumsum(0))
        comm.agree(0)
        if int(rows.indptr[-1]) != num_edges:
            raise PartitionError(f"the parts must hold {num_edges} edges, got {int(rows.indptr[-1])}")
        _scatter_edges(own, rows, places)
        comm.agree(0)
        return PlacedPart(topo, rows, torch.device("cpu"))

    def _open_edges(self, edge_type: EdgeType, own: EdgeSet) -> EdgeSet:
        def share() -> list[Tensor]:
            (keys,) = own.parts
            sizes = self._communicator.agree(keys.numel())
            parts = self._share([Shape(torch.int64, (size,)) for size in sizes])
            parts[self._communicator.rank].copy_(keys)
            self._communicator.agree(0)
            return parts

        return own.with_parts(self._move(self._communicator.run(share)))

    def _open_rows(self, device_cache_size: int | str, placement: str) -> dict[Any, dict[str, Feature]]:
        tables, size = self._list_rows(), self._communicator.size
        if size > 1:
            tables = self._communicator.run(self._join_tables, tables)
        features: dict[Any, dict[str, Feature]] = {kind: {} for kind in tables}
        for kind, name, rows in [(kind, *item) for kind, own in tables.items() for item in own.items()]:
            self._num_bytes += rows.numel() * rows.element_size() if size == 1 else 0
            features[kind][name] = (
                Feature(device=self._device).from_cpu_tensor(rows) if self._device.type == "cpu"
                else make_feature(rows, self._device, size, device_cache_size, placement))  # fmt: skip
        return features

    def _list_rows(self) -> dict[Any, dict[str, Tensor]]:
        """List the part's rows by kind and attribute, including times."""
        tables = {kind: dict(table.rows) for kind, table in self._part.tables.items()}
        for kind, times in self._part.times.items():
            tables[kind][TIME] = times
        return tables

    def _join_tables(self, own: dict[Any, dict[str, Tensor]]) -> dict[Any, dict[str, Tensor]]:
        """Join the rows of all parts by id."""
        manifest = self._part.manifest
        sizes: dict[Any, int] = {entry.name: entry.num_nodes for entry in manifest.nodes}
        sizes |= {entry.name: entry.num_edges for entry in manifest.edges}
        names = [(kind, name) for kind, rows in own.items() for name in rows]
        shapes = [Shape(own[kind][name].dtype, (sizes[kind], *own[kind][name].shape[1:])) for kind, name in names]
        whole: dict[Any, dict[str, Tensor]] = {kind: {} for kind in own}
        for (kind, name), rows in zip(names, self._share(shapes), strict=True):
            whole[kind][name] = rows
            ids = self._part.tables[kind].ids
            for some, given in zip(ids.split(_ROWS_AT_ONCE), own[kind][name].split(_ROWS_AT_ONCE), strict=True):
                rows[some] = given
        self._communicator.agree(0)
        return whole


class WholeRows:
    """Rows of nodes and edges by id; as `RowExchange`, without an exchange.

    Args:
        part: The part, which lists kinds and attributes.

    Attributes:
        num_remote, num_kept, kept_bytes: 0, as no rows are fetched and no copies kept.
    """

    num_remote = num_kept = kept_bytes = 0

    def __init__(self, part: GraphPart, features: dict[Any, dict[str, Feature]]) -> None:
        self._is_homogeneous, self.features = part.manifest.is_homogeneous, features

    def describe(self) -> dict[str, Feature]:
        """Return the rows, by kind and attribute."""
        return name_features(self.features, self._is_homogeneous)

    def fetch(self, wanted: Sequence[Wanted]) -> list[dict[str, Tensor]]:
        """Fetch rows by attribute, in the order of the ids."""
        found = []
        for one in wanted:
            features = self.features[one.kind]
            names = [name for name in features if name != TIME] if one.names is None else one.names
            found.append({name: features[name].read(one.ids) for name in names})
        return found


def _list_starts(sizes: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _list_shapes(topo: PartTopo, num_edges: int, weight_dtype: torch.dtype, summed: bool) -> list[Shape]:
    """List the shapes of the arrays of `Rows`."""
    most_edges = int(np.diff(topo.edge_starts).max(initial=0))
    is_weighted = bool(topo.weighted.any())
    arrays = [
        (torch.int64, int(topo.row_starts[-1]) + 1),
        (torch.int32 if topo.type_starts[-1] < 2**31 else torch.int64, num_edges),
        (torch.int32 if most_edges < 2**31 else torch.int64, num_edges),
        (torch.int64, 0),
        (torch.int64, num_edges if topo.timed.any() else 0),
        (weight_dtype, num_edges if is_weighted else 0),
        (torch.float64, num_edges if is_weighted and summed else 0),
    ]
    return [Shape(dtype, (size,)) for dtype, size in arrays]


def _scatter_edges(own: Rows, rows: Rows, places: Tensor) -> None:
    """Scatter the edges of a part's rows into the rows of all nodes; `places` int64 has the row of each own row."""
    begins = rows.indptr[places] - own.indptr[:-1]
    for first in range(0, len(places), _ROWS_AT_ONCE):
        end = min(first + _ROWS_AT_ONCE, len(places))
        low, high = int(own.indptr[first]), int(own.indptr[end])
        starts = begins[first:end].repeat_interleave(own.indptr[first : end + 1].diff())
        targets = starts + torch.arange(low, high, device="cpu")
        for given, whole in zip(own[1:], rows[1:], strict=True):
            if whole.numel():
                whole[targets] = given[low:high].to(whole.dtype)


# Share of the free host memory that a graph may take.
_SHARE = 0.8


class Shape(NamedTuple):
    """Dtype and sizes of an array."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def share_arrays(communicator: Communicator, shapes: Sequence[Shape]) -> list[Tensor]:
    """Allocate arrays of zeros in shared memory, made by rank 0. Collective, in the communicator's turn."""
    own = [SharedMemory(shape.num_bytes) for shape in shapes] if communicator.rank == 0 else []
    process, descriptors = gather_json(communicator, [os.getpid(), [memory.descriptor for memory in own]])[0]
    if communicator.rank > 0:
        own = [open_shared(process, descriptor, shape.num_bytes)
               for descriptor, shape in zip(descriptors, shapes, strict=True)]  # fmt: skip
    # Rank 0 keeps them alive until all processes have opened them.
    communicator.agree(0)
    return [memory.view(*shape) for memory, shape in zip(own, shapes, strict=True)]


def find_obstacle(communicator: Communicator, num_bytes: int = 0) -> str | None:
    """Find the reason why the processes cannot keep a graph in one memory; None if they can.

    The result is equal in all processes. Collective, in the communicator's turn.
    """
    device = communicator.device
    name = "" if device.type == "cpu" else _name_gpu(device.index or 0)
    told = gather_json(communicator, [identify_host(), device.type, device.index or 0, name])
    obstacle = _compare(told) or (_compare_gpus(told) if device.type == "cuda" else None)
    # Other processes may number the GPUs differently.
    obstacle = next((words for words in gather_json(communicator, obstacle) if words is not None), None)
    return _try_memory(communicator, num_bytes) if obstacle is None else obstacle


def _compare(told: list[list[Any]]) -> str | None:
    host, kind = told[0][:2]
    for rank, (other, other_kind, *_) in enumerate(told):
        if other != host:
            return f"rank {rank} is on another host than rank 0"
        if other_kind != kind:
            return f"rank {rank} is on a {other_kind} device, rank 0 on {kind}"
    return None


def _compare_gpus(told: list[list[Any]]) -> str | None:
    indices = [index for *_, index, _ in told]
    if len(told) != dist.get_world_size():
        return "the group is not that of all processes, which memory of GPUs is given out in"
    for rank, (*_, index, name) in enumerate(told):
        if index >= torch.cuda.device_count() or _name_gpu(index) != name:
            return f"GPU {index} of rank {rank} has another number in other processes"
        if index in indices[:rank]:
            return f"ranks {indices.index(index)} and {rank} are on the same GPU"
    cliques = list(p2pCliqueTopo(indices).p2p_clique.values())
    return None if len(cliques) == 1 else f"GPUs {cliques[0][0]} and {cliques[1][0]} are not joined by NVLink"


def _name_gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _try_memory(communicator: Communicator, num_bytes: int) -> str | None:
    """Try to open a small piece of shared memory, and check for enough free memory."""
    own = SharedMemory(1)
    process, descriptor, room = gather_json(
        communicator, [os.getpid(), own.descriptor, int(_SHARE * available_bytes())]
    )[0]
    if num_bytes > room:
        return f"it takes {num_bytes} bytes of host memory to put the graph together, which has {room} to give"
    words = None
    try:
        open_shared(process, descriptor, 1)
    except OSError as error:
        words = f"rank {communicator.rank} cannot open the memory of rank 0: {error}"
    return next((found for found in gather_json(communicator, words) if found is not None), None)

"""`CSRTopo`: a graph's edges as compressed rows; the rows are the nodes that are sampled from.

`cache_rows` copies the neighbor lists of hot rows to GPU memory, while all lists lie on the host. `FiledLists` are
lists that memory cannot hold.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, ArgumentTypeError, PlacementWarning, warn
from pyg_direct.features.paged_array import PagedArray, open_integers, read_whole
from pyg_direct.graph.placed_topology import (
    PLACES,
    PlacedTopology,
    check_place,
    choose_placement,
    interleave,
    place_array,
    prefer_gpu,
    restore_state,
    sendable_state,
    spread_over_peers,
)
from pyg_direct.graph.pyg_edges import Rows, read_array, read_edges
from pyg_direct.object_text import one_line, show_count
from pyg_direct.ops.argument_checks import check_count, check_offsets, check_topology
from pyg_direct.ops.local_ids.build_csr import compress
from pyg_direct.runtime.cuda.device import free_bytes, resolve_device
from pyg_direct.runtime.cuda.memory import choose_host_memory
from pyg_direct.runtime.host.host_memory import check_size, has_room, parse_size
from pyg_direct.runtime.host.shared_memory import SharedMemory, share
from pyg_direct.typing import Device

_STEP = 1 << 26
# A read over the link fetches a sector whole.
_SECTOR_BYTES = 32
# Pick a row, and visits per batch in units of the mean at which a node is met in nearly every batch. Typical values,
# which only decide which rows are cached.
_PICKS = 8
_ALWAYS = 20.0


def cache_rows(topology: PlacedTopology, num_bytes: int) -> PlacedTopology:
    """Return the topology with `num_bytes` of its rows copied to GPU memory, which kernels then read instead.

    A row of the result begins at `lists[starts[r]]` in either memory. The offsets of one array reach into the other,
    because the GPU can address both. Only the copies and `starts` (8 bytes a node) take new memory.
    """
    indptr, indices = topology.indptr, topology.indices
    hot_rows = choose_rows(indptr, indices, num_bytes // indices.element_size())
    if hot_rows.numel() == 0:
        return topology
    hot, offsets = copy_rows(indptr, indices, hot_rows)
    distance = (indices.data_ptr() - hot.data_ptr()) // indices.element_size()
    starts = indptr[:-1].clone()
    # Offsets from the array that comes first in memory, so that none is negative.
    if distance > 0:
        starts += distance
        starts[hot_rows] = offsets
    else:
        starts[hot_rows] = offsets - distance
    return PlacedTopology(indptr, indices, topology.edge_ids, topology.placement, topology.blocks, starts=starts,
                          lists=hot if distance > 0 else indices, cached=hot)  # fmt: skip


def choose_rows(indptr: Tensor, indices: Tensor, num_edges: int) -> Tensor:
    """Return rows to cache, ascending, int64: those that save the most reads over the link for their size.

    A row is read as often as it is listed, but at most once a batch. Each read fetches the sectors that its picks fall
    into, so long rows of hubs are not the best ones.
    """
    degree = indptr.diff()
    listed = torch.zeros(degree.numel(), device=indptr.device)
    for begin in range(0, indices.numel(), _STEP):
        listed += torch.bincount(indices[begin : begin + _STEP], minlength=degree.numel())
    rate = -torch.expm1(-listed / (_ALWAYS * listed.mean()))
    sectors = (degree * indices.element_size() / _SECTOR_BYTES).ceil().clamp(min=1)
    reads = sectors * (1 - (1 - 1 / sectors) ** degree.clamp(max=_PICKS))
    score = rate * reads / degree.clamp(min=1)
    order = score.sort(descending=True, stable=True).indices
    order = order[degree[order] > 0]
    fitting = int(torch.searchsorted(degree[order].cumsum(0), num_edges, right=True))
    return order[:fitting].sort().values


def copy_rows(indptr: Tensor, indices: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (neighbors of `rows` one after the other, first position of each row int64), both in GPU memory."""
    lengths = indptr[rows + 1] - indptr[rows]
    ends = lengths.cumsum(0)
    offsets = ends - lengths
    out = torch.empty(int(ends[-1]), dtype=indices.dtype, device=indptr.device)
    for begin in range(0, out.numel(), _STEP):
        items = torch.arange(begin, min(begin + _STEP, out.numel()), device=indptr.device)
        row = torch.searchsorted(ends, items, right=True)
        out[begin : begin + items.numel()] = indices[indptr[rows[row]] + items - offsets[row]]
    return out, offsets


class FiledLists(NamedTuple):
    """Neighbor lists in files, read page by page.

    Attributes:
        indices: Neighbors, `[E]`.
        edge_ids: Edge ids, `[E]`; None if the position of an edge is its id.
        source: Arguments of `CSRTopo.from_file`.
    """

    indices: PagedArray
    edge_ids: PagedArray | None
    source: dict[str, Any]

    @property
    def arrays(self) -> list[PagedArray]:
        """The arrays."""
        return [self.indices] if self.edge_ids is None else [self.indices, self.edge_ids]

    def is_cached(self) -> bool:
        """Report whether the system has cached all of some pages of each file."""
        return all(array.is_cached() for array in self.arrays)


class CSRTopo:
    """A graph's topology, after Quiver's class of that name.

    By default a row lists the in-neighbors of its node, which PyG samples; `direction="out"` gives Quiver's reading.
    Parallel edges, self loops, isolated and trailing nodes and edge ids are all kept. Arrays may be NumPy's.

    Args:
        edge_index: int64 or int32 `[2, E]`, PyG's `EdgeIndex` or `Data`, `torch_sparse.SparseTensor` (rows as in
            `adj_t`), or a torch sparse CSR / CSC tensor. The compressed dimension of a sparse tensor becomes the rows.
        indptr: Row offsets, int64 `[N + 1]`, instead of `edge_index`; taken as they are.
        indices: Columns, int32 or int64 `[E]`, with `indptr`.
        eid: Edge ids, int32 or int64 `[E]`, with `indptr`; the position of an edge when None.
        num_nodes: N; by default one more than the largest id.
        direction: `in` or `out`, for a list of edges.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.

    Example:
        >>> topo = CSRTopo(torch.tensor([[0, 1, 2], [2, 2, 0]]), num_nodes=4)  # 0 -> 2, 1 -> 2, 2 -> 0
        >>> topo.indptr, topo.indices
        (tensor([0, 1, 1, 3, 3]), tensor([2, 0, 1], dtype=torch.int32))
        >>> topo.node_count, topo.edge_count, topo.degree.tolist()
        (4, 3, [1, 0, 2, 0])
    """

    # True if, in the process that sent the topology here, the host had room for one copy per GPU.
    _has_room = True
    # Neighbors that a row lists, if the input says so: `in` for sources of a target, `out` for targets of a source.
    _listed: str | None = None
    # True if the arrays are the user's own, which a program may write to.
    _is_given = False
    # Neighbor lists that stay in files; the arrays are maps of these.
    _lists: FiledLists | None = None

    def __init__(
        self,
        edge_index: Any = None,
        indptr: Any = None,
        indices: Any = None,
        eid: Any = None,
        *,
        num_nodes: int | None = None,
        direction: str = "in",
    ) -> None:
        if direction not in ("in", "out"):
            raise ArgumentError(f"direction must be 'in' or 'out', got {direction!r}")
        if (edge_index is None) == (indptr is None) or (indptr is None) != (indices is None):
            raise ArgumentError("give either edge_index, or indptr and indices together")
        if eid is not None and indptr is None:
            raise ArgumentError("eid needs indptr and indices: edges of edge_index have their position for an id")
        num_nodes = None if num_nodes is None else check_count("num_nodes", num_nodes, 0)
        self._feature_order: Tensor | None = None
        self._placed: dict[tuple[str, torch.device, int | str | None], PlacedTopology] = {}
        self._lock = threading.Lock()
        self._sent: dict[str, Any] = {}
        if edge_index is not None:
            edges = read_edges(edge_index)
            if isinstance(edges, Rows):
                indptr, indices, eid = edges
                self._listed = "in"
            else:
                self._compress(edges.edge_index, edges.num_nodes if num_nodes is None else num_nodes, direction)
                return
        indptr, indices, eid = read_array(indptr), read_array(indices), read_array(eid)
        assert indptr is not None and indices is not None
        check_topology(indptr, indices)
        if num_nodes is not None and num_nodes != indptr.numel() - 1:
            raise ArgumentError(f"num_nodes must equal len(indptr) - 1 = {indptr.numel() - 1}, got {num_nodes}")
        if eid is not None and not isinstance(eid, Tensor):
            raise ArgumentTypeError(f"eid must be a tensor, got {type(eid).__name__}")
        if eid is not None and (eid.shape != indices.shape or eid.dtype not in (torch.int32, torch.int64)):
            raise ArgumentError(
                f"eid must be int32 or int64 of shape {tuple(indices.shape)}, got {eid.dtype} of {tuple(eid.shape)}"
            )
        self._is_given = True
        self._indptr = indptr.contiguous()
        self._indices = self._narrow(indices).contiguous()
        self._eid = None if eid is None else eid.contiguous()

    @classmethod
    def from_file(cls, indptr: str | os.PathLike[str], indices: str | os.PathLike[str],
                  eid: str | os.PathLike[str] | None = None, *, host_cache_size: int | str | None = None,
                  direction: str = "in") -> CSRTopo:  # fmt: skip
        """Open a topology whose neighbor lists stay in files, such as lists larger than host memory.

        A loader over it (`GraphStore`) samples many batches together, hop by hop on the CPU. It reads each page that a
        hop needs once for all of them, in the order of the file. Pages that are read most stay in host memory. Batches
        are as with lists in memory. Neighbors are checked as they are read.

        Args:
            indptr: `.npy` or `.safetensors` with the row offsets, int64 `[N + 1]`; they are read into memory.
            indices: File with the columns, int32 or int64 `[E]`. It must stay as it is.
            eid: File with the edge ids, int32 or int64 `[E]`; the position of an edge when None.
            host_cache_size: Host memory for pages of each file: bytes, `"4G"` or a share such as `"20%"`; None takes an
                eighth of the free memory, which processes of a loader with `ranks` divide.
            direction: `in` if a row lists the sources of a node's edges, as PyG samples; `out` for the targets.

        Raises:
            FileError: a file cannot be read, or holds another kind of array.
            ArgumentError, ArgumentTypeError: named argument, rule and value.

        Example:
            >>> topo = CSRTopo(torch.tensor([[1, 2, 3], [0, 0, 1]]), num_nodes=4)
            >>> files = [save_rows(f"{name}.npy", getattr(topo, name)) for name in ("indptr", "indices")]
            >>> CSRTopo.from_file(*files)
            CSRTopo(4 nodes, 3 edges, lists in indices.npy)
        """
        if direction not in ("in", "out"):
            raise ArgumentError(f"direction must be 'in' or 'out', got {direction!r}")
        check_size(0 if host_cache_size is None else host_cache_size, "host_cache_size")
        both = torch.int32, torch.int64
        offsets = read_whole(open_integers(indptr, "indptr", (torch.int64,)))
        files = [open_integers(path, name, both) for path, name in ((indices, "indices"), (eid, "eid"))
                 if path is not None]  # fmt: skip
        for file, name in zip(files, ("indices", "eid"), strict=False):
            check_offsets(offsets, file.layout.shape[0], f"numbers in {name}={str(file.path)!r}")
        sizes = [None if host_cache_size is None else
                 min(file.layout.num_bytes, parse_size(host_cache_size, file.layout.num_bytes, "host_cache_size"))
                 for file in files]  # fmt: skip
        arrays = [PagedArray(file, size) for file, size in zip(files, sizes, strict=True)]
        source = {"indptr": os.path.abspath(indptr), "indices": os.path.abspath(indices),
                  "eid": None if eid is None else os.path.abspath(eid), "host_cache_size": host_cache_size,
                  "direction": direction}  # fmt: skip
        topology = cls.__new__(cls)
        restore_state(topology, {"_indptr": offsets, "_indices": files[0].rows, "_feature_order": None,
                                 "_eid": files[1].rows if eid is not None else None, "_listed": direction})  # fmt: skip
        topology._sent, topology._is_given = {}, False
        topology._lists = FiledLists(arrays[0], arrays[1] if eid is not None else None, source)
        return topology

    def _compress(self, edge_index: Tensor, num_nodes: int | None, direction: str) -> None:
        if num_nodes is None:
            num_nodes = max(0, int(edge_index.max()) + 1) if edge_index.numel() else 0
        if num_nodes >= 2**62:
            raise ArgumentError(f"num_nodes must be below 2**62, got {num_nodes}")
        self._listed, source, target = direction, edge_index[0], edge_index[1]
        rows, columns = (target, source) if direction == "in" else (source, target)
        self._indptr, self._indices, self._eid = compress(rows, columns, num_nodes, name="edge_index")

    def _narrow(self, indices: Tensor) -> Tensor:
        return indices.to(torch.int32) if self._indptr.numel() - 1 < 2**31 else indices

    @property
    def listed(self) -> str | None:
        """Direction of rows: `in` lists the sources of a target's edges, `out` the reverse; None for given offsets."""
        return self._listed

    @property
    def lists(self) -> FiledLists | None:
        """Neighbor lists that stay in files; None for lists in memory."""
        return self._lists

    @property
    def is_given(self) -> bool:
        """Report whether the arrays may be the ones it was made of, which a program may write to."""
        return self._is_given

    @property
    def indptr(self) -> Tensor:
        """Row offsets, int64 `[N + 1]`."""
        return self._indptr

    @property
    def indices(self) -> Tensor:
        """Columns of the rows, int32 `[E]` (int64 from 2**31 nodes)."""
        return self._indices

    @property
    def eid(self) -> Tensor | None:
        """Edge ids by position, int32 or int64 `[E]`; None when the position of an edge is its id."""
        return self._eid

    @property
    def degree(self) -> Tensor:
        """Edges of each row, int64 `[N]`."""
        return self._indptr.diff()

    @property
    def node_count(self) -> int:
        """N."""
        return self._indptr.numel() - 1

    @property
    def edge_count(self) -> int:
        """E."""
        return self._indices.numel()

    @property
    def feature_order(self) -> Tensor | None:
        """Row of each node in a re-ordered feature table, int64 `[N]`, if a `Feature` has set one (Quiver)."""
        return self._feature_order

    @feature_order.setter
    def feature_order(self, order: Tensor) -> None:
        self._feature_order = order

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self._indptr, self._indices] + ([] if self._eid is None else [self._eid])
        return sum(a.numel() * a.element_size() for a in arrays)

    def share_memory_(self) -> CSRTopo:
        """Move arrays on the CPU to shared memory, for other processes; returns self."""
        for name in ("_indptr", "_indices", "_eid"):
            array = getattr(self, name)
            if array is not None and not array.is_cuda and not array.is_shared():
                setattr(self, name, array.clone().share_memory_())
        return self

    def adopt(self, other: CSRTopo) -> bool:
        """Replace the arrays by the arrays of an equal topology and free the old ones; return True if they were equal.

        A topology that is already placed, or lies in GPU memory, also keeps its own arrays.

        Args:
            other: The topology to compare with; it holds the arrays.
        """
        names = ("_indptr", "_indices", "_eid")
        pairs = [(getattr(self, name), getattr(other, name)) for name in names]
        if self._placed or any(a is not None and a.is_cuda for pair in pairs for a in pair):
            return False
        if not all(a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
            return False
        for name, (_, array) in zip(names, pairs, strict=True):
            setattr(self, name, array)
        self._sent = {}
        return True

    def to_cpu(self) -> CSRTopo:
        """Return the topology in ordinary memory, which any process reads; itself if it is there."""
        if not self._indices.is_cuda and not any(p.blocks for p in self._placed.values()):
            return self
        arrays = [None if a is None else a.cpu().clone() for a in (self._indptr, self._indices, self._eid)]
        copy = CSRTopo.__new__(CSRTopo)
        copy.__setstate__({"_indptr": arrays[0], "_indices": arrays[1], "_eid": arrays[2],
                           "_feature_order": self._feature_order, "_listed": self._listed})  # fmt: skip
        return copy

    def choose_placement(self, device: Device = None) -> str:
        """Return the placement that `auto` chooses for a device. `cpu` on a CPU; `cuda` if the topology fits and leaves
        a quarter of the free memory, at least 8 GiB or half of it. Otherwise it is host memory: `unified` or `pinned`,
        whichever the GPU reads faster.

        Args:
            device: The device that samples; None is the current GPU, or the CPU if there is no GPU.

        Raises:
            ArgumentError, ArgumentTypeError: `device` names no CPU and no GPU.
            DeviceError: the GPU is not there.
        """
        target = resolve_device(device)
        if target.type == "cuda" and (self._indices.is_cuda or ("cuda", target, None) in self._placed):
            return "cuda"
        place = choose_placement(self.num_bytes, target)
        # All processes that received it must choose alike; shared arrays are page-locked in place.
        return "pinned" if place == "unified" and not self._has_room else place

    def place(self, placement: str = "auto", device: Device = None, *, topology_cache: int | str | None = None
              ) -> PlacedTopology:  # fmt: skip
        """Place the arrays in memory that a device can read, once for each device, placement and cache.

        Args:
            placement: `auto`, `cuda`, `unified`, `pinned`, `cpu` or `peer`. If the neighbors are on the host, offsets
                and edge ids still go to GPU memory if each takes at most an eighth of it. `peer` distributes neighbors
                and edge ids over the GPUs that NVLink joins with `device`, for a topology that one GPU cannot hold. All
                processes of a `torch.distributed` group must then call this.
            device: The device that samples; None is the current GPU, or the CPU if there is no GPU.
            topology_cache: GPU memory for the rows that save the most reads, if the neighbors are on the host. It is a
                number of bytes, a text such as `"2G"`, or a share of all edges such as `"20%"`. `"auto"` takes up to a
                quarter of the free memory. If it does not fit it shrinks, with a warning.

        Raises:
            ArgumentError: an unknown placement, or one that the device cannot read, or a wrong `topology_cache`.
            ArgumentTypeError: `device` or `topology_cache` has the wrong type.
            DeviceError: the GPU is not there.
        """
        if topology_cache is None and type(device) is torch.device and isinstance(placement, str):
            # Without questions to the driver, which would take longer than a launch.
            known = self._placed.get((device.type if placement == "auto" else placement, device, None))
            if known is not None:
                return known
        target = resolve_device(device)
        if placement == "auto":
            try:
                return self.place(self.choose_placement(target), target, topology_cache=topology_cache)
            except torch.OutOfMemoryError as error:
                reason = str(error).split(".")[0]
            torch.cuda.empty_cache()
            placement = choose_host_memory(target.index)
            warn(f"the topology goes to {placement} memory, as GPU memory ran out: {reason}", PlacementWarning)
        check_place("placement", placement, target, PLACES)
        if topology_cache != "auto":
            check_size(0 if topology_cache is None else topology_cache, "topology_cache")
        with self._lock:
            if (placement, target, None) not in self._placed:
                self._placed[placement, target, None] = self._place(placement, target)
            placed = self._placed[placement, target, None]
            if topology_cache is None or placed.placement not in ("unified", "pinned"):
                return placed
            if (placement, target, topology_cache) not in self._placed:
                self._placed[placement, target, topology_cache] = self._cache(placed, topology_cache)
            return self._placed[placement, target, topology_cache]

    def _cache(self, placed: PlacedTopology, size: int | str) -> PlacedTopology:
        free, whole = free_bytes(placed.device.index), placed.num_edges * placed.indices.element_size()
        wanted = min(whole, free // 4) if size == "auto" else min(whole, parse_size(size, whole, "topology_cache"))
        # Choosing rows takes some words a node, and their offsets stay.
        most = max(0, int(0.9 * free) - 64 * placed.num_nodes)
        if wanted > most:
            warn(
                f"topology_cache={size!r} is more than the free memory of {placed.device}; {most} bytes are "
                "used instead",
                PlacementWarning,
            )
        return cache_rows(placed, min(wanted, most))

    def _place(self, placement: str, device: torch.device) -> PlacedTopology:
        indptr, self._indptr, block_0 = place_array(
            self._indptr, prefer_gpu(self._indptr, placement, device), device, "offsets")  # fmt: skip
        if placement == "peer":
            return self._place_on_peers(indptr, device)
        if self._can_interleave(placement, device):
            return self._place_interleaved(indptr, device)
        indices, self._indices, block_1 = place_array(self._indices, placement, device, "neighbors")
        blocks = [b for b in (block_0, block_1) if b is not None]
        if self._eid is None:
            edge_dtype = torch.int32 if self.edge_count < 2**31 else torch.int64
            edge_ids = torch.empty(0, dtype=edge_dtype, device=device)
        else:
            edge_ids, self._eid, block_2 = place_array(
                self._eid, prefer_gpu(self._eid, placement, device), device, "edge ids")  # fmt: skip
            blocks += [] if block_2 is None else [block_2]
        obtained = blocks[0].placement if blocks else placement
        if obtained == "cpu" and device.type == "cuda":
            # Neither unified nor page-locked memory could be had: no kernel can read host memory here.
            raise ArgumentError("placement='unified' fell back to 'cpu', which a GPU cannot sample; use device='cpu'")
        return PlacedTopology(indptr, indices, edge_ids, obtained, blocks, is_given=self._is_given)

    def _place_on_peers(self, indptr: Tensor, device: torch.device) -> PlacedTopology:
        lists = [a for a in (self._indices, self._eid) if a is not None and a.numel() > 0]
        views = spread_over_peers(lists, device)
        indices = views[0] if views else self._indices.to(device)
        if self._indices.is_cuda and views:
            # Not held twice.
            self._indices, self._eid = indices, views[1] if len(views) > 1 else self._eid
        edge_dtype = torch.int32 if self.edge_count < 2**31 else torch.int64
        none = torch.empty(0, dtype=edge_dtype, device=device)
        return PlacedTopology(indptr, indices, views[1] if len(views) > 1 else none, "peer")

    def _can_interleave(self, placement: str, device: torch.device) -> bool:
        """Check whether neighbors and edge ids fit one word, and GPU memory holds both forms during the copy."""
        return (
            placement == "cuda"
            and self._eid is not None
            and self._eid.dtype == self._indices.dtype == torch.int32
            and 10 * self.edge_count < free_bytes(device.index)
        )

    def _place_interleaved(self, indptr: Tensor, device: torch.device) -> PlacedTopology:
        assert self._eid is not None
        pairs, indices, edge_ids = interleave(self._indices, self._eid, device)
        if self._indices.device == device:
            self._indices = indices
        if self._eid.device == device:
            self._eid = edge_ids
        return PlacedTopology(indptr, indices, edge_ids, "cuda", pairs=pairs)

    def __reduce__(self) -> Any:
        if self._lists is not None:
            # Each process opens the files itself.
            return _reopen, (type(self), self._lists.source)
        return super().__reduce__()

    def __getstate__(self) -> dict[str, Any]:
        return sendable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore_state(self, state)
        self._sent = {}

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield show_count(self.node_count, "node")
        yield show_count(self.edge_count, "edge")
        if self._lists is not None:
            yield f"lists in {self._lists.indices.file.path.name}"


def _reopen(kind: type[CSRTopo], source: dict[str, Any]) -> CSRTopo:
    return kind.from_file(**source)


def _send(topology: CSRTopo) -> Any:
    """Send a topology through `multiprocessing`: its arrays move to memory that all processes see, once."""
    if topology.lists is not None:
        return topology.__reduce__()
    arrays: list[tuple[SharedMemory, torch.dtype, torch.Size] | None] = []
    for name in ("_indptr", "_indices", "_eid"):
        array = getattr(topology, name)
        if array is None:
            arrays.append(None)
            continue
        known = topology._sent.get(name)
        if known is None or known[0] is not array:
            # Not the caller's own tensor, which other arrays may view.
            copy = array.cpu().detach().contiguous().view(array.shape)
            known = topology._sent[name] = array, share(copy)
            if not array.is_cuda and not any(placed.blocks for placed in topology._placed.values()):
                # Not the copy: torch regards it as a view, which keeps its base alive.
                view = known[1].view(array.dtype, array.shape)
                setattr(topology, name, view)
                topology._sent[name] = view, known[1]
        arrays.append((known[1], array.dtype, array.shape))
    if "room" not in topology._sent:
        topology._sent["room"] = has_room(topology.num_bytes, torch.cuda.device_count())
    return _receive, (type(topology), arrays, topology._feature_order, topology._sent["room"], topology._listed)


def _receive(kind: type[CSRTopo], arrays: list[Any], feature_order: Tensor | None, has_room: bool, listed: str | None
             ) -> CSRTopo:  # fmt: skip
    names = ("_indptr", "_indices", "_eid")
    state: dict[str, Any] = {n: None if a is None else a[0].view(*a[1:]) for n, a in zip(names, arrays, strict=True)}
    topology = kind.__new__(kind)
    topology.__setstate__({**state, "_feature_order": feature_order, "_listed": listed})
    topology._has_room = has_room
    return topology


ForkingPickler.register(CSRTopo, _send)

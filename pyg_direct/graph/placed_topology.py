"""Topology as kernels read it: three arrays that the sampling device can read, and the memory of each.

If one GPU cannot hold the arrays, `spread_over_peers` distributes them over the memories of a clique. `check_place`
checks the names of memory places for attributes and topologies, and which of them a device can read.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, CudaError
from pyg_direct.object_text import one_line, show_count, show_place
from pyg_direct.ops.argument_checks import check_choice, check_topology
from pyg_direct.progress import show_wait
from pyg_direct.runtime.comm.host_group import give_to_host, has_group
from pyg_direct.runtime.cuda.device import budget_of, free_bytes
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back, check_filled, choose_host_memory, move
from pyg_direct.runtime.cuda.peer_memory import GRANULE, Spread, p2pCliqueTopo
from pyg_direct.runtime.host.shared_memory import find_shared, pin

# Memory places for attributes, and for topologies.
AUTO_PLACEMENTS = ("auto", "cuda", "unified", "pinned", "cpu")
PLACES = (*AUTO_PLACEMENTS, "peer")
# Largest share of the free memory that an array beside the neighbors may take to go to GPU memory, even if the
# neighbors do not.
SMALL_SHARE = 0.125


class ListReads(NamedTuple):
    """Number of bytes that uniform sampling reads from lists in host memory.

    Attributes:
        row_bytes: Bytes of a row that is expanded: its two offsets.
        edge_bytes: Bytes of a drawn edge: its neighbor, and its id unless that is its position.
        is_most: The counts are upper bounds: some lists are cached in GPU memory, and draws from these are counted too.
    """

    row_bytes: int
    edge_bytes: int
    is_most: bool

    def sum_bytes(self, num_rows: int, num_edges: int) -> int:
        """Return bytes for so many rows that were expanded and edges that were drawn."""
        return num_rows * self.row_bytes + num_edges * self.edge_bytes


@dataclass(eq=False)
class PlacedTopology:
    """Compressed rows on the way to a sampler.

    Attributes:
        indptr: int64 `[N + 1]`.
        indices: int32 or int64 `[E]`.
        edge_ids: int32 or int64 `[E]`, or `[0]` when the position of an edge is its id.
        placement: Memory place of `indices`: `cuda`, `unified`, `pinned` or `cpu`.
        lists, starts: Neighbors as kernels read them, and the first position of each row in them, int64 `[N]` or
            longer. They are `indices` and `indptr` unless a part of the rows is cached.
        cached: Copies of hot rows in GPU memory; None without.
        pairs: `indices` and `edge_ids` interleaved in one word an edge, int64 `[E]`, the neighbor in the lower half
            (both are then views of it); `[0]` if the two are separate.
        is_given: True if the arrays may belong to a program, which may write to them.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    placement: str
    blocks: list[Block] = field(default_factory=list)
    lists: Tensor = None  # type: ignore[assignment]
    starts: Tensor = None  # type: ignore[assignment]
    cached: Tensor | None = None
    pairs: Tensor = None  # type: ignore[assignment]
    is_given: bool = False

    def __post_init__(self) -> None:
        if self.lists is None:
            self.lists, self.starts = self.indices, self.indptr
        if self.pairs is None:
            self.pairs = self.indptr.new_empty(0)
        # Tensors of `torch.inference_mode` count no writes.
        self._counting = [array for array in (self.indptr, self.indices) if not array.is_inference()]
        self._versions = [array._version for array in self._counting]

    @one_line
    def __repr__(self) -> Iterator[str]:
        # Not the arrays, whose text would wait for the GPU.
        yield show_count(self.num_nodes, "node")
        yield show_count(self.num_edges, "edge")
        yield show_place(self.placement, self.device)

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """The device that samples."""
        return self.indptr.device

    def list_reads(self) -> ListReads | None:
        """Return reads of sampling over the link to host memory; None if all lists are in GPU memory, and on a CPU."""
        host = [block for block in self.blocks if block.placement in ("unified", "pinned")]

        def bytes_of(array: Tensor) -> int:
            place, inside = array.data_ptr(), array.numel() > 0
            is_there = inside and any(b.address <= place < b.address + b.num_bytes for b in host)
            return array.element_size() if is_there else 0

        row_bytes = 2 * bytes_of(self.indptr)
        edge_bytes = bytes_of(self.indices) + bytes_of(self.edge_ids)
        return ListReads(row_bytes, edge_bytes, self.cached is not None) if row_bytes or edge_bytes else None

    def check_process(self) -> None:
        """Refuse use in a forked child of the process that placed the arrays."""
        for block in self.blocks:
            block.check_process()

    def check_unchanged(self) -> None:
        """Check offsets and neighbors again if a program has written to the arrays that it gave."""
        versions = [array._version for array in self._counting]
        if versions != self._versions:
            check_topology(self.indptr, self.indices)
            self._versions = versions

    def check_rows(self, nodes: np.ndarray) -> None:
        """Check the offsets of nodes before a loop reads them: writes through NumPy are counted nowhere.

        Args:
            nodes: int32 or int64 `[n]`, of this graph.
        """
        if self.is_given and not self.indptr.is_cuda:
            indptr = self.indptr.numpy()
            begins, ends = indptr[nodes], indptr[1:][nodes]
            is_wrong = (begins < 0) | (begins > ends) | (ends > self.num_edges)
            if is_wrong.any():
                at = int(is_wrong.argmax())
                raise ArgumentError(
                    f"indptr must not decrease from 0 to the number of edges {self.num_edges}, got {int(begins[at])} "
                    f"before {int(ends[at])} for node {int(nodes[at])}: do not write to it while batches are sampled"
                )


def choose_placement(num_bytes: int, device: torch.device) -> str:
    """Return the placement that `auto` chooses for a topology. `cpu` on a CPU; `cuda` if the topology fits and leaves a
    quarter of the free memory, at least 8 GiB or half of it. Otherwise it is host memory: `unified` or `pinned`,
    whichever the GPU reads faster.
    """
    if device.type == "cpu":
        return "cpu"
    return "cuda" if num_bytes <= budget_of(free_bytes(device.index)) else choose_host_memory(device.index)


def prefer_gpu(array: Tensor, placement: str, device: torch.device) -> str:
    """Choose the placement of an array beside the neighbors: GPU memory if it is small."""
    if placement in ("cpu", "cuda"):
        return placement
    if placement == "peer":
        return "cuda"
    return "cuda" if array.numel() * array.element_size() <= SMALL_SHARE * free_bytes(device.index) else placement


def place_array(source: Tensor, placement: str, device: torch.device, what: str) -> tuple[Tensor, Tensor, Block | None]:
    """Put an array into `placement`; return (view for the device, tensor to keep on the host side, block).

    The host-side tensor is the CPU view of the placed bytes if there is one, so that they are not held twice.
    """
    if placement == "cpu":
        return source.cpu(), source, None
    if placement == "cuda":
        with show_wait(f"copying {what} to GPU memory", items=source.numel()):
            return source.to(device), source, None
    shared = find_shared(source) if placement == "pinned" and source.numel() > 0 else None
    if shared is not None:
        # One copy for all processes that see it; less may be locked than held.
        with contextlib.suppress(CudaError):
            block = pin(shared, device)
            return block.view_on_gpu(source.dtype, source.shape, device), source, block
    if source.is_cuda:
        block = allocate_or_fall_back(source.numel() * source.element_size(), placement, device)
        on_cpu = block.view_on_cpu(source.dtype, source.shape)
        on_cpu.copy_(source)
    else:
        block, on_cpu = move(source, placement, device, what=what), source
    if block.placement == "cpu":
        return on_cpu, on_cpu, block
    check_filled(block, what)
    return block.view_on_gpu(source.dtype, source.shape, device), on_cpu, block


def interleave(indices: Tensor, edge_ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pairs int64 `[E]`, view of the indices, view of the edge ids) on a GPU, from int32 `[E]` arrays on any
    device.

    A sampler that picks an edge reads both at one place: half as many random accesses as to two arrays.
    """
    halves = torch.empty(indices.numel(), 2, dtype=torch.int32, device=device)
    # One after the other: each may need a temporary copy.
    halves[:, 0] = indices.to(device)
    halves[:, 1] = edge_ids.to(device)
    return halves.view(torch.int64).view(-1), halves[:, 0], halves[:, 1]


# Attributes of a topology that belong to this process alone.
_OWN_TO_PROCESS = ("_placed", "_lock", "_sent", "_has_room")


def sendable_state(topology: Any) -> dict[str, Any]:
    """Return the state of a topology for another process, without the arrays that are placed here.

    Views of GPU-visible memory cannot be sent; their bytes can.
    """
    state = {name: value for name, value in topology.__dict__.items() if name not in _OWN_TO_PROCESS}
    if any(placed.blocks for placed in topology._placed.values()):
        state |= {
            name: value.clone() for name, value in state.items() if isinstance(value, Tensor) and not value.is_cuda
        }
    return state


def restore_state(topology: Any, state: dict[str, Any]) -> None:
    """Restore a topology in another process from `sendable_state`."""
    topology.__dict__.update(state)
    topology._placed, topology._lock = {}, threading.Lock()


# Chunks of an array on each GPU.
_PARTS = 16


def spread_over_peers(arrays: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Share arrays out over the GPUs of a clique, and return them as `device` reads them.

    In a `torch.distributed` group the clique is among the GPUs of its processes on this host, which must all call this.
    The arrays then come from the first process. Without a group the clique is among all GPUs of the host.
    """

    def make(devices: list[int]) -> list[tuple[list[int], list[Spread]]]:
        cliques = p2pCliqueTopo(devices).p2p_clique.values()
        return [(clique, [_spread(array, clique) for array in arrays]) for clique in cliques]

    if has_group():
        made = give_to_host(make, device.index)
    else:
        everyone = list(range(torch.cuda.device_count()))
        clique = next(c for c in p2pCliqueTopo(everyone).p2p_clique.values() if device.index in c)
        made = make(clique)
    spreads = next(spreads for clique, spreads in made if device.index in clique)
    return [spread.view(device.index).view(array.dtype).view(array.shape)
            for spread, array in zip(spreads, arrays, strict=True)]  # fmt: skip


def _spread(array: Tensor, clique: Sequence[int]) -> Spread:
    num_bytes = array.numel() * array.element_size()
    chunk_bytes = math.ceil(num_bytes / (_PARTS * len(clique) * GRANULE)) * GRANULE
    owners = [clique[number % len(clique)] for number in range(math.ceil(num_bytes / chunk_bytes))]
    spread = Spread.allocate(num_bytes, chunk_bytes, owners)
    # A copy between GPUs runs on the first GPU, which must be the one that this memory is mapped for.
    index = array.device.index if array.is_cuda and array.device.index in clique else clique[0]
    array = array if array.device.index == index else array.cpu()
    spread.view(index).view(array.dtype).copy_(array.view(-1))
    torch.cuda.synchronize(index)
    return spread


def check_place(name: str, place: str, device: torch.device, known: Sequence[str] = AUTO_PLACEMENTS) -> None:
    """Refuse an unknown placement, or one that the device cannot read."""
    check_choice(name, place, known)
    if (place == "cpu") != (device.type == "cpu") and place != "auto":
        allowed = [other for other in known if other == "auto" or (other == "cpu") == (device.type == "cpu")]
        raise ArgumentError(f"{name} must be one that device={device} can read, got {place!r}: take "
                            f"{' or '.join(map(repr, allowed))}")  # fmt: skip

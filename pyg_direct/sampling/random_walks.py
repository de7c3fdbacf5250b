"""Random walks over a topology that is placed once: `random_walk`, and walks along relations (`MetapathWalks`)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentTypeError, IdError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.graph.hetero_topo import EdgeType
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.ops.argument_checks import as_ids, check_ids, check_topology
from pyg_direct.ops.compute_content_hash import glance_only, has_content, read_content
from pyg_direct.ops.sampling.draw_walks import walk, walk_along
from pyg_direct.ops.sampling.find_induced import NeighborLists
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.sampling.induced_plan import list_neighbors
from pyg_direct.sampling.random_key import check_seed, draw_seed
from pyg_direct.typing import Device


def random_walk(topology: CSRTopo | tuple[Tensor, Tensor], start: Any, walk_length: int, p: float = 1.0,
                q: float = 1.0, *, seed: int | None = None, device: Device = None,
                placement: str = "auto") -> Tensor:  # fmt: skip
    """Walk at random from each start, uniformly or as node2vec does (Grover and Leskovec, KDD 2016).

    A step leads from a node to one of the nodes in its row: a `CSRTopo` with `direction="out"` is walked along its
    edges. A neighbor is taken in proportion to 1 / p if the walk would go back; to 1 if the row of the node before has
    it too; otherwise to 1 / q. Each of parallel edges counts. A node without neighbors keeps its walk. Equal seeds give
    equal walks on every device.

    Args:
        topology: A `CSRTopo`, or row offsets int64 `[N + 1]` and neighbors int32 or int64 `[E]`, which are checked and
            placed in each call.
        start: First nodes, int32 or int64 `[W]` or a list, in [0, N).
        walk_length: Steps, at least 0.
        p, q: Finite and above 0. If one is not 1, the rows are sorted once.
        seed: Of the draws; None draws one from torch's generator.
        device: The device that walks; None is the current GPU if there is one, otherwise the CPU.
        placement: `auto`, `cuda`, `unified`, `pinned` or `cpu`: the memory of the rows.

    Returns:
        The nodes of each walk, int64 `[W, walk_length + 1]`, on the device.

    Raises:
        ArgumentError, ArgumentTypeError, IdError, DeviceError: named argument, rule and value.

    Example:
        >>> ring = CSRTopo(torch.tensor([[0, 1, 2], [1, 2, 0]]), direction="out")
        >>> random_walk(ring, [0, 2], 4, device="cpu")
        tensor([[0, 1, 2, 0, 1],
                [2, 0, 1, 2, 0]])
    """
    if isinstance(topology, (tuple, list)) and len(topology) == 2:
        topology = CSRTopo(indptr=topology[0], indices=topology[1])
    if not isinstance(topology, CSRTopo):
        raise ArgumentTypeError("topology must be a CSRTopo or a pair (row offsets, neighbors), got "
                                f"{type(topology).__name__}")  # fmt: skip
    target = resolve_device(device)
    placed, start = topology.place(placement, target), as_ids("start", start)
    check_nodes("start", start, placed.num_nodes)
    seed = check_seed(seed)
    key = draw_seed() if seed is None else seed
    return find_rows(placed).walk(start.to(target), walk_length, p, q, key=key)


def check_nodes(name: str, nodes: Tensor, num_nodes: int) -> Tensor:
    """Ids of nodes as `check_ids`, but those on a GPU are looked at too, which is waited for."""
    nodes = check_ids(name, nodes, num_nodes)
    if nodes.is_cuda and nodes.numel() > 0:
        low, high = torch.stack(torch.aminmax(nodes)).tolist()
        if low < 0 or high >= num_nodes:
            raise IdError(f"{name} must lie in [0, {num_nodes}), got {low if low < 0 else high}")
    return nodes


class WalkRows:
    """The rows of a placed topology, on the way to walks.

    Arrays of a program are compared with their content before, because a write through NumPy is counted nowhere. A walk
    compares samples; `renew` compares all that `has_content` looks at. Offsets are copied, so that no such write, seen
    or not, leads a walk beyond them.
    """

    def __init__(self, topology: PlacedTopology) -> None:
        # Not held: these rows are kept as long as it is (see `find_rows`).
        self._topology = weakref.ref(topology)
        self._is_given = topology.is_given and not topology.indptr.is_cuda
        self._read(topology)

    def _read(self, topology: PlacedTopology) -> None:
        self.__dict__.pop("_sorted", None)
        self._lists = list_neighbors(topology)
        arrays = topology.indptr, topology.indices
        self._writes = self._count_writes(topology)
        self._contents = [read_content(array) for array in arrays] if self._is_given else []
        if self._is_given:
            self._lists = self._lists._replace(indptr=topology.indptr.clone())

    @staticmethod
    def _count_writes(topology: PlacedTopology) -> list[int]:
        """How often the arrays were written to, which a program may have given."""
        return [0 if array.is_inference() else array._version for array in (topology.indptr, topology.indices)]

    def renew(self) -> None:
        """Have the rows as a program's arrays are now.

        Raises:
            ArgumentError, IdError: they are no rows any more.
        """
        topology = self._topology()
        assert topology is not None
        topology.check_process()
        topology.check_unchanged()
        is_same = self._count_writes(topology) == self._writes
        if is_same and self._is_given:
            is_same = all(map(has_content, (topology.indptr, topology.indices), self._contents))
            if not is_same:
                check_topology(topology.indptr, topology.indices)
        if not is_same:
            self._read(topology)

    def walk(self, start: Tensor, walk_length: int, p: float, q: float, *, key: int) -> Tensor:
        """Draw the walks from `start`, on the device of the rows; see `ops.sampling.draw_walks.walk`."""
        with glance_only():
            self.renew()
        is_biased = not (p == 1 and q == 1)
        lists = self._sorted if is_biased else self._lists
        walks = walk(lists, start, walk_length, p, q, key=key, is_sorted=is_biased)
        if self._is_given:
            check_ids("neighbors of the topology", walks.view(-1), lists.num_nodes)
        return walks

    @cached_property
    def _sorted(self) -> NeighborLists:
        """Return the rows with ascending neighbors, for which a look for one of them is short."""
        lists = self._lists
        neighbors = lists.neighbors[:: lists.step]
        rows = torch.arange(lists.num_nodes, device=neighbors.device).repeat_interleave(
            lists.indptr.diff(), output_size=neighbors.numel())  # fmt: skip
        goes_on = rows[1:] == rows[:-1]
        if bool((goes_on & (neighbors[1:] < neighbors[:-1])).any()):
            order = neighbors.sort(stable=True).indices
            order = order[rows[order].sort(stable=True).indices]
            neighbors = neighbors[order]
        return NeighborLists(lists.indptr, neighbors.contiguous(), lists.ids[:0])


_ROWS: weakref.WeakKeyDictionary[PlacedTopology, WalkRows] = weakref.WeakKeyDictionary()


def find_rows(topology: PlacedTopology) -> WalkRows:
    """Find the rows of a placed topology, sorted at most once for all who walk on it."""
    rows = _ROWS.get(topology)
    if rows is None:
        rows = _ROWS[topology] = WalkRows(topology)
    return rows


class MetapathWalks:
    """Walks along a sequence of relations (metapath2vec, Dong et al., KDD 2017), on one device.

    Args:
        rows: Row offsets and neighbors of each relation, which the caller has checked.
        metapath: The relations that steps follow, one after the other and again from the first.
        num_nodes: Nodes of the type that walks begin at.
    """

    def __init__(self, rows: Mapping[EdgeType, tuple[Tensor, Tensor]], metapath: Sequence[EdgeType],
                 walk_length: int, num_nodes: int, device: torch.device) -> None:  # fmt: skip
        used = list(dict.fromkeys(metapath))
        begins, offsets, neighbors, num_rows, num_edges = {}, [], [], 0, 0
        for kind in used:
            indptr, indices = rows[kind]
            begins[kind] = num_rows
            offsets.append(indptr[:-1] + num_edges)
            neighbors.append(indices)
            num_rows, num_edges = num_rows + indptr.numel() - 1, num_edges + indices.numel()
        indptr = torch.cat([*offsets, torch.tensor([num_edges], device="cpu")])
        indices = torch.cat(neighbors)
        if max(num_rows, num_nodes) < 2**31:
            indices = indices.int()
        indptr, indices = indptr.to(device), indices.to(device)
        self._lists = NeighborLists(indptr, indices, indices[:0])
        steps = [begins[metapath[step % len(metapath)]] for step in range(walk_length)]
        self._rows = torch.tensor(steps, dtype=torch.int64, device=device)
        self._num_nodes = num_nodes

    def walk(self, start: Tensor, *, key: int) -> Tensor:
        """Draw the walks from `start`, nodes of the first type on the device; see
        `ops.sampling.draw_walks.walk_along`.
        """
        return walk_along(self._lists, start, self._rows, self._num_nodes, key=key)

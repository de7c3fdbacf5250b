"""Plan of induced subgraphs: a set of nodes, and the edges of the graph among them, with one wait for a GPU.

On a GPU the sets of several batches take one wait and the launches of one set. `list_neighbors` gives the rows of a
placed topology to kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.object_text import one_line
from pyg_direct.ops.argument_checks import check_below
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.find_induced import (
    Candidates,
    NeighborLists,
    Sets,
    count_inside,
    enter_ranges,
    enter_set,
    enter_sets,
)
from pyg_direct.runtime.host.threads import one_thread
from pyg_direct.sampling.sampling_options import Sample


def list_neighbors(topology: PlacedTopology) -> NeighborLists:
    """Return the rows of a placed topology as kernels read them."""
    if topology.pairs.numel() > 0:
        words = topology.pairs.view(torch.int32)
        return NeighborLists(topology.indptr, words, words, 2)
    return NeighborLists(topology.indptr, topology.indices, topology.edge_ids)


class _Table:
    """Local ids of the nodes of a batch, int32 `[N]`, all of them -1 between batches."""

    def __init__(self, num_nodes: int, device: torch.device) -> None:
        self.local_of_node = torch.full((num_nodes,), -1, dtype=torch.int32, device=device)
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def wait(self) -> None:
        """Come after the batch before, which may be of another stream."""
        if self._last is not None and self._last[0] != torch.cuda.current_stream(self.local_of_node.device):
            self._last[1].wait()

    def note(self) -> None:
        """Remember the batch that was enqueued."""
        if self.local_of_node.is_cuda:
            event = torch.cuda.Event() if self._last is None else self._last[1]
            event.record()
            self._last = torch.cuda.current_stream(self.local_of_node.device), event


class PendingInduced:
    """An induced subgraph on its way: enqueued, its sizes not yet read."""

    def __init__(self, plan: InducedPlan, table: _Table, candidates: Candidates, num_nodes: Tensor | None) -> None:
        self._plan, self._table, self._candidates = plan, table, candidates
        # A GPU copies some kilobytes in the time of a sum.
        self._sums, self._num_nodes = candidates.sums, num_nodes
        self._is_read: torch.cuda.Event | None = None
        if self._sums.is_cuda:
            self._sums = _copy_to_host(self._sums)
            self._num_nodes = None if num_nodes is None else _copy_to_host(num_nodes)
            self._is_read = torch.cuda.Event()
            self._is_read.record()

    def finish(self) -> Sample:
        """Wait for the sizes and write the subgraph, on torch's current stream.

        Returns:
            Its nodes in the order given, or ascending if `is_set` is False; edges in the order of the rows.
        """
        if self._is_read is not None:
            self._is_read.synchronize()
        num_edges = int(self._sums.numpy().sum())
        nodes = self._candidates.nodes if self._num_nodes is None else self._candidates.nodes[: int(self._num_nodes)]
        ends, edges = self._candidates.emit(num_edges, rows_first=self._plan.direction == "out")
        self._plan.put_back(self._table, nodes)
        return Sample(nodes, ends, edges, [nodes.numel()] * 2, [0, num_edges])


class InducedGroup(list[Sample]):
    """Subgraphs of several sets, in order; they share memory.

    Attributes:
        n_id, e_id: Nodes and edge ids of all of them, one after the other, int64 `[M]` and `[E']`.
        node_counts, edge_counts: Nodes and edges of each.
    """

    def __init__(self, n_id: Tensor, ends: Tensor, e_id: Tensor, node_counts: list[int], edge_counts: list[int]
                 ) -> None:  # fmt: skip
        self.n_id, self.e_id, self.node_counts, self.edge_counts = n_id, e_id, node_counts, edge_counts
        memory = n_id, ends, e_id
        # Not views: writes to the edges of one batch do not count for another.
        parts = zip(torch.unsafe_split_with_sizes(n_id, node_counts),
                    torch.unsafe_split_with_sizes(ends, [2 * count for count in edge_counts]),
                    torch.unsafe_split_with_sizes(e_id, edge_counts), strict=True)  # fmt: skip
        super().__init__(Sample(nodes, pairs.view(2, -1), edges, [nodes.numel()] * 2, [0, edges.numel()], memory)
                         for nodes, pairs, edges in parts)  # fmt: skip

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark the subgraphs as used on `stream` for torch's allocator."""
        for sample in self[:1]:
            sample.record_stream(stream)


class PendingInducedGroup:
    """Subgraphs of several sets on their way: enqueued, their sizes not yet read."""

    def __init__(self, plan: InducedPlan, sets: Sets, begins: np.ndarray | None) -> None:
        self._plan, self._sets, self._begins, self._sums = plan, sets, begins, sets.count_edges()
        told = self._sums if begins is not None else torch.cat([self._sums, sets.begins])
        self._told, self._is_read = told, None
        if told.is_cuda:
            self._told = _copy_to_host(told)
            self._is_read = torch.cuda.Event()
            self._is_read.record()

    def finish(self) -> InducedGroup:
        """Wait for the sizes and write the subgraphs, on torch's current stream.

        Returns:
            Those that `PendingInduced.finish` returns for each set.
        """
        if self._is_read is not None:
            self._is_read.synchronize()
        sets, told = self._sets, self._told.numpy()
        begins = told[self._sums.numel() :] if self._begins is None else self._begins
        edge_counts = told[: self._sums.numel()].reshape(sets.num_sets, -1).sum(1).tolist()
        ends, edges = sets.emit(self._sums, sum(edge_counts), rows_first=self._plan.direction == "out")
        return InducedGroup(sets.nodes[: int(begins[-1])], ends, edges, np.diff(begins).tolist(), edge_counts)


class InducedPlan:
    """Plan that finds the edges among sets of nodes.

    Args:
        direction: `in` for rows that list the sources of a target's edges; edges are then sorted by target. `out` for
            rows that list targets, with edges sorted by source.
    """

    def __init__(self, topology: PlacedTopology, direction: str = "in") -> None:
        self.topology, self.direction = topology, direction
        self.lists = list_neighbors(topology)
        self._idle: list[_Table] = []

    @one_line
    def __repr__(self) -> Iterator[str]:
        yield repr(self.topology)

    def sample(self, nodes: Tensor, *, is_set: bool = True) -> Sample:
        """Find the subgraph of nodes; see `submit`."""
        return self.submit(nodes, is_set=is_set).finish()

    def submit(self, nodes: Tensor, *, is_set: bool = True) -> PendingInduced:
        """Start to find the subgraph of nodes, on torch's current stream.

        Args:
            nodes: int64 `[M]`, for draws also int32, on the CPU or the plan's device; on the CPU they must lie in
                [0, N). If one repeats, edges join its first place, and each place has its row.
            is_set: False for draws that repeat: they become one node each, ascending.

        Raises:
            ArgumentError, IdError: a node outside the graph; rows that a program has written to are none any more.
        """
        self._check()
        if not nodes.is_cuda:
            check_below("nodes", nodes.numpy(), self.topology.num_nodes)
        if self.topology.device.type == "cpu":
            # Torch's other threads would go on waiting awake beside loops of ours.
            with one_thread():
                return self._submit_on_cpu(nodes if is_set else _sort_out(nodes))
        nodes = upload(nodes, self.topology.device)
        table = self._take()
        if not is_set and self.topology.num_nodes < 2**31:
            # Sorted in half the time.
            nodes = nodes.int()
        nodes, num_nodes = (nodes, None) if is_set else _gather_first(nodes)
        offsets = enter_set(self.lists, nodes, table.local_of_node, num_nodes)
        return PendingInduced(self, table, count_inside(self.lists, nodes, table.local_of_node, offsets), num_nodes)

    def _submit_on_cpu(self, nodes: Tensor) -> PendingInduced:
        ids = nodes.numpy()
        self.topology.check_rows(ids)
        table = self._take()
        # The first place of a node that repeats is written last.
        table.local_of_node.numpy()[ids[::-1]] = np.arange(len(ids) - 1, -1, -1, dtype=np.int32)
        return PendingInduced(self, table, count_inside(self.lists, nodes, table.local_of_node), None)

    def submit_ranges(self, bounds: np.ndarray, owners: Tensor, chosen: Sequence[np.ndarray]) -> PendingInducedGroup:
        """Start to find, on a GPU, the subgraphs of several unions of ranges of ids, on torch's current stream.

        Args:
            bounds: First node of each of W ranges, and the end of the last, N, int64 `[W + 1]` on the host.
            owners: Range of each node, int32 `[N]`, on the GPU.
            chosen: Ranges of each union within [0, W), which is not checked, int64; at least one union. If a range
                repeats, edges join its first place, and each place has its rows.

        Raises:
            ArgumentError: rows that a program has written to are none any more.
        """
        self._check()
        counts = np.array([len(own) for own in chosen])
        ranges = np.concatenate(chosen)
        sizes = np.concatenate([[0], np.cumsum(bounds[ranges + 1] - bounds[ranges])])
        begins = sizes[np.concatenate([[0], np.cumsum(counts)])]
        return PendingInducedGroup(self, enter_ranges(self.lists, bounds, owners, ranges, counts), begins)

    def submit_sets(self, sets: Sequence[Tensor]) -> PendingInducedGroup:
        """Start to find, on a GPU, the subgraphs of several sets of nodes, on torch's current stream.

        Args:
            sets: Each as `submit` takes it, on the CPU; at least one.

        Raises:
            ArgumentError, IdError: see `submit`.
        """
        self._check()
        nodes = np.concatenate([own.numpy() for own in sets])
        check_below("nodes", nodes, self.topology.num_nodes)
        begins = np.cumsum([0, *map(len, sets)])
        words = upload(np.concatenate([begins, nodes]), self.topology.device)
        parts = torch.unsafe_split_with_sizes(words, [len(begins), len(nodes)])
        return PendingInducedGroup(self, enter_sets(self.lists, parts[1], parts[0]), begins)

    def submit_draws(self, draws: Tensor) -> PendingInducedGroup:
        """Start to find, on a GPU, the subgraphs of draws that repeat, on torch's current stream.

        Args:
            draws: Draws of each subgraph, which become one node each, ascending, int64 or int32 `[G, D]` within [0, N),
                on the GPU; G > 0.

        Raises:
            ArgumentError: rows that a program has written to are none any more.
        """
        self._check()
        nodes, begins = _gather_first_of_each(draws, self.topology.num_nodes)
        return PendingInducedGroup(self, enter_sets(self.lists, nodes, begins), None)

    def _check(self) -> None:
        self.topology.check_process()
        self.topology.check_unchanged()

    def _take(self) -> _Table:
        try:
            table = self._idle.pop()
        except IndexError:
            return _Table(self.topology.num_nodes, self.topology.device)
        table.wait()
        return table

    def put_back(self, table: _Table, nodes: Tensor) -> None:
        """Empty a table of the nodes of a batch for another one."""
        if nodes.is_cuda:
            table.local_of_node.index_fill_(0, nodes, -1)
            table.note()
        else:
            table.local_of_node.numpy()[nodes.numpy()] = -1
        self._idle.append(table)


def _sort_out(draws: Tensor) -> Tensor:
    """Draws once each, ascending."""
    # By sorting, in a tenth of the time of NumPy's `unique`, which hashes.
    ordered = np.sort(draws.numpy())
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return torch.from_numpy(ordered[is_new].astype(np.int64, copy=False))


def _gather_first(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the nodes of draws, each once and ascending, without a wait.

    Args:
        draws: int64 or int32, on a GPU.

    Returns:
        (int64, as many as there are draws, of which the first count; how many, int64 `[1]`)
    """
    if draws.numel() == 0:
        return draws.long(), torch.zeros(1, dtype=torch.int64, device=draws.device)
    ordered = draws.sort().values
    is_new = torch.ones(draws.numel(), dtype=torch.bool, device=draws.device)
    torch.ne(ordered[1:], ordered[:-1], out=is_new[1:])
    ends = is_new.cumsum(0)
    # All places of a repeated node write the same.
    nodes = torch.zeros_like(ends).scatter_(0, ends - 1, ordered.long())
    return nodes, ends[-1:]


def _gather_first_of_each(draws: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Gather the nodes of several rows of draws, each once and ascending, without a wait.

    Args:
        draws: int64 or int32 `[G, D]` within [0, num_nodes), G > 0.

    Returns:
        (nodes row after row, int64 `[G * D]`, with others behind; first of each row and the end, int64 `[G + 1]`)
    """
    (num_rows, width), device = draws.shape, draws.device
    begins = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    if draws.numel() == 0:
        return draws.long().view(-1), begins
    # Short ids are sorted in half the time.
    dtype = torch.int32 if num_rows * num_nodes < 2**31 else torch.int64
    shifts = torch.arange(num_rows, dtype=dtype, device=device).mul_(num_nodes).view(-1, 1)
    ordered = draws.to(dtype).add(shifts).view(-1).sort().values
    is_new = torch.ones(draws.numel(), dtype=torch.bool, device=device)
    torch.ne(ordered[1:], ordered[:-1], out=is_new[1:])
    ends = is_new.cumsum(0)
    begins[1:] = ends[width - 1 :: width]
    # All places of a repeated node write the same.
    ids = ordered.view(num_rows, width).sub_(shifts).view(-1).long()
    return torch.zeros_like(ends).scatter_(0, ends - 1, ids), begins


def _copy_to_host(values: Tensor) -> Tensor:
    """Copy a tensor to pinned memory; the copy is complete after the work that a GPU has been given."""
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(values, non_blocking=True)

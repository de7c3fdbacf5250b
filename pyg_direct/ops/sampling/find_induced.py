"""Edges among the nodes of a set, or of several sets on a GPU (see `kernels/sampling/induced.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.sampling import induced as kernels
from pyg_direct.ops.argument_checks import check_below
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu, threads_for

# Edges that a CPU compares with a set in the time in which it samples one.
_LIGHT = 4


class NeighborLists(NamedTuple):
    """Rows of neighbors as kernels read them, on one device.

    Attributes:
        indptr: Row offsets, int64 `[N + 1]`.
        neighbors: int32 or int64; the neighbor of edge e is at e * step.
        ids: Edge ids, int32 or int64; the id of edge e is at e * step + step - 1. Empty if the position is the id.
        step: 1; 2 if neighbors and ids alternate in one array.
    """

    indptr: Tensor
    neighbors: Tensor
    ids: Tensor
    step: int = 1

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.numel() - 1


class Candidates(NamedTuple):
    """Edges of the rows of a set of nodes; those inside the set are counted.

    Attributes:
        nodes: int64 `[M]`.
        offsets: First edge of each node among all, int64 `[M + 1]`.
        local_of_node: Local ids, int32 `[N]`, below 0 for nodes outside.
        sums: Edges inside by chunk or block, int64.
        found: On a CPU, of the edges inside: local ids of the neighbors and rows, int32, and positions, int64, each
            with room for all C edges; empty on a GPU.
    """

    lists: NeighborLists
    nodes: Tensor
    offsets: Tensor
    local_of_node: Tensor
    sums: Tensor
    found: tuple[Tensor, ...] = ()

    def emit(self, count: int, *, rows_first: bool = False) -> tuple[Tensor, Tensor]:
        """Write the edges inside, node after node, in the order of the rows.

        Args:
            count: Their number, which is the total of `sums`.
            rows_first: Return nodes whose rows are read before their neighbors.

        Returns:
            (local ids of neighbors, then positions of the nodes whose rows list them, int64 `[2, E']`; edge ids, int64
            `[E']`)
        """
        ends = torch.empty(2, count, dtype=torch.int64, device=self.nodes.device)
        edges = torch.empty(count, dtype=torch.int64, device=self.nodes.device)
        if count == 0:
            return ends, edges
        lists, out = self.lists, (ends[int(rows_first)], ends[1 - int(rows_first)], edges)
        if runs_on_gpu(self.nodes):
            run_gpu(kernels.emit_inside_gpu, self.sums.numel(), lists.indptr, lists.neighbors, lists.ids, lists.step,
                    self.nodes, self.offsets, self.local_of_node, self.sums, *out)  # fmt: skip
        else:
            with threads_for(count):
                run_cpu(kernels.emit_inside_cpu, lists.ids, lists.step, int(self.offsets[-1]), *self.found, self.sums,
                        *out)  # fmt: skip
        return ends, edges


def enter_set(lists: NeighborLists, nodes: Tensor, local_of_node: Tensor, num_nodes: Tensor | None = None) -> Tensor:
    """Write the places of a set of nodes to a table on a GPU, in one launch and without a wait.

    Args:
        nodes: int64 `[M]` within [0, N), which is not checked; a node that repeats has its first place.
        local_of_node: int32 `[N]`, all -1.
        num_nodes: How many of `nodes` count, the first ones, int64 `[1]`; None for all.

    Returns:
        The first edge of each node among the edges of their rows, int64 `[M + 1]`, for `count_inside`.
    """
    offsets = torch.empty(nodes.numel() + 1, dtype=torch.int64, device=nodes.device)
    if nodes.numel() == 0:
        return offsets.zero_()
    run_gpu(kernels.enter_set_gpu, grid_for(nodes.numel(), nodes), lists.indptr, nodes,
            nodes[:0] if num_nodes is None else num_nodes, local_of_node.view(torch.uint32), offsets)  # fmt: skip
    return offsets.cumsum_(0)


def count_inside(lists: NeighborLists, nodes: Tensor, local_of_node: Tensor, offsets: Tensor | None = None
                 ) -> Candidates:  # fmt: skip
    """Count the edges of rows that lead to nodes of a set, without a wait for a GPU.

    Args:
        nodes: The nodes whose rows are read, int64 `[M]` within [0, N), which a CPU checks.
        local_of_node: int32 `[N]`: the local id of each node of the set, below 0 for others.
        offsets: On a GPU, the result of `enter_set`, if it was called.
    """
    if not runs_on_gpu(nodes):
        check_below("nodes", nodes.numpy(), lists.num_nodes)
        return _count_on_cpu(lists, nodes, local_of_node)
    if offsets is None:
        degrees = lists.indptr[1:].index_select(0, nodes).sub_(lists.indptr.index_select(0, nodes))
        offsets = torch.zeros(nodes.numel() + 1, dtype=torch.int64, device=nodes.device)
        torch.cumsum(degrees, 0, out=offsets[1:])
    sums = torch.empty(full_grid(nodes), dtype=torch.int64, device=nodes.device)
    if nodes.numel() == 0:
        return Candidates(lists, nodes, offsets, local_of_node, sums.zero_())
    run_gpu(kernels.count_inside_gpu, sums.numel(), lists.indptr, lists.neighbors, lists.step, nodes, offsets,
            local_of_node, sums)  # fmt: skip
    return Candidates(lists, nodes, offsets, local_of_node, sums)


def _count_on_cpu(lists: NeighborLists, nodes: Tensor, local_of_node: Tensor) -> Candidates:
    # By NumPy: torch would wake its own threads, which go on spinning beside the package's loops.
    indptr, ids = lists.indptr.numpy(), nodes.numpy()
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(indptr[1:][ids] - indptr[ids], out=offsets[1:])
    total, sums = int(offsets[-1]), np.zeros(cpu_chunks(), np.int64)
    found = [torch.empty(total, dtype=dtype, device="cpu") for dtype in (torch.int32, torch.int32, torch.int64)]
    if total > 0:
        with threads_for(total // _LIGHT):
            run_cpu(kernels.find_inside_cpu, indptr, lists.neighbors, lists.step, ids, offsets, local_of_node, *found,
                    sums)  # fmt: skip
    return Candidates(lists, nodes, torch.from_numpy(offsets), local_of_node, torch.from_numpy(sums), tuple(found))


# Blocks of a set, at least.
_FEWEST_BLOCKS = 2


class Sets(NamedTuple):
    """Nodes of several sets, entered in their tables.

    Attributes:
        lists: The rows of all nodes.
        nodes: Nodes of all sets, one after the other, int64 `[M]`.
        begins: First place of each set, and the end of the last, int64 `[G + 1]`, on the GPU.
        offsets: First edge of each place among all, int64 `[M + 1]`.
        owners: Owner of each node, int32 `[N]`; empty if each node owns itself.
        table: Entries of the owners in each set, int32 `[G * W]`.
    """

    lists: NeighborLists
    nodes: Tensor
    begins: Tensor
    offsets: Tensor
    owners: Tensor
    table: Tensor

    @property
    def num_sets(self) -> int:
        """G."""
        return self.begins.numel() - 1

    def count_edges(self) -> Tensor:
        """Count the edges inside of each set by blocks, int64 `[G * blocks]`, without a wait."""
        blocks = max(_FEWEST_BLOCKS, full_grid(self.begins) // self.num_sets)
        sums = torch.empty(self.num_sets * blocks, dtype=torch.int64, device=self.begins.device)
        lists = self.lists
        run_gpu(kernels.count_in_sets_gpu, sums.numel(), lists.indptr, lists.neighbors, lists.step, self.nodes,
                self.begins, self.offsets, self.owners, self.table, self.table.numel() // self.num_sets,
                sums)  # fmt: skip
        return sums

    def emit(self, sums: Tensor, count: int, *, rows_first: bool = False) -> tuple[Tensor, Tensor]:
        """Write the edges inside, set after set, in the order of the rows.

        Args:
            sums: Result of `count_edges`.
            count: Its total.
            rows_first: Write nodes whose rows are read before their neighbors.

        Returns:
            (local ids, 2 E' for a set with E' edges: of the neighbors, then of the rows, int64 `[2 * count]`; edge ids,
            int64 `[count]`)
        """
        ends = torch.empty(2 * count, dtype=torch.int64, device=sums.device)
        edges = torch.empty(count, dtype=torch.int64, device=sums.device)
        if count > 0:
            lists = self.lists
            run_gpu(kernels.emit_in_sets_gpu, sums.numel(), lists.indptr, lists.neighbors, lists.ids, lists.step,
                    self.nodes, self.begins, self.offsets, self.owners, self.table, self.table.numel() // self.num_sets,
                    sums, int(rows_first), ends, edges)  # fmt: skip
        return ends, edges


def enter_ranges(lists: NeighborLists, bounds: np.ndarray, owners: Tensor, chosen: np.ndarray, counts: np.ndarray
                 ) -> Sets:  # fmt: skip
    """Enter sets that are unions of ranges of ids, by one copy to the GPU and without a wait.

    Args:
        bounds: First node of each of W ranges, and the end of the last, int64 `[W + 1]` on the host.
        owners: Range of each node, int32 `[N]`, on the GPU.
        chosen: Ranges of all sets, one after the other, int64 `[R]` within [0, W), which is not checked; if one
            repeats within a set, its edges join its first place.
        counts: Ranges of each set, int64 `[G]`, G > 0.
    """
    num_sets, width, device = len(counts), len(bounds) - 1, lists.indptr.device
    of_set = np.zeros(num_sets + 1, np.int64)
    np.cumsum(counts, out=of_set[1:])
    firsts = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(bounds[chosen + 1] - bounds[chosen], out=firsts[1:])
    begins = firsts[of_set]
    entries = np.repeat(np.arange(num_sets) * width, counts) + chosen
    values = firsts[:-1] - np.repeat(begins[:-1], counts) - bounds[chosen]
    # All places of a range that repeats get the value of its first.
    _, first, again = np.unique(entries, return_index=True, return_inverse=True)
    words = [firsts, begins, bounds[chosen] - firsts[:-1], entries, values[first[again]]]
    parts = torch.unsafe_split_with_sizes(upload(np.concatenate(words), device), list(map(len, words)))
    table = torch.full((num_sets * width,), kernels.OUTSIDE, dtype=torch.int32, device=device)
    nodes = torch.empty(int(firsts[-1]), dtype=torch.int64, device=device)
    degrees = torch.empty(nodes.numel() + 1, dtype=torch.int64, device=device)
    if nodes.numel() == 0:
        return Sets(lists, nodes, parts[1], degrees.zero_(), owners, table)
    run_gpu(kernels.enter_ranges_gpu, grid_for(nodes.numel(), nodes), lists.indptr, parts[0], *parts[2:], nodes,
            degrees, table)  # fmt: skip
    return Sets(lists, nodes, parts[1], degrees.cumsum_(0), owners, table)


def enter_sets(lists: NeighborLists, nodes: Tensor, begins: Tensor) -> Sets:
    """Enter sets of nodes, without a wait.

    Args:
        nodes: Nodes of all sets, one after the other, int64 `[M]` within [0, N), which is not checked. If one repeats
            within a set, its edges join its first place. Those behind the last set do not count.
        begins: First place of each set, and the end of the last, int64 `[G + 1]`, G > 0, on the GPU.
    """
    num_sets, device = begins.numel() - 1, lists.indptr.device
    table = torch.full((num_sets * lists.num_nodes,), -1, dtype=torch.int32, device=device)
    degrees = torch.empty(nodes.numel() + 1, dtype=torch.int64, device=device)
    owners = table[:0]
    if nodes.numel() == 0:
        return Sets(lists, nodes, begins, degrees.zero_(), owners, table)
    run_gpu(kernels.enter_sets_gpu, grid_for(nodes.numel(), nodes), lists.indptr, nodes, begins, lists.num_nodes,
            table.view(torch.uint32), degrees)  # fmt: skip
    return Sets(lists, nodes, begins, degrees.cumsum_(0), owners, table)

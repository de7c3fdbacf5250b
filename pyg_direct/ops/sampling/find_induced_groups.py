"""Edges among the nodes of several sets on a GPU (see `kernels/sampling/induced_groups.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.sampling import induced_groups as kernels
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import full_grid, grid_for, run_gpu
from pyg_direct.ops.sampling.find_induced import NeighborLists

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

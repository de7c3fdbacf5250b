"""Edges among the nodes of a set (see `kernels/sampling/induced.py`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.sampling import induced as kernels
from pyg_direct.ops.argument_checks import check_below
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
        found: On a CPU, local ids of the neighbors, int32 `[C]`; empty on a GPU.
    """

    lists: NeighborLists
    nodes: Tensor
    offsets: Tensor
    local_of_node: Tensor
    sums: Tensor
    found: Tensor

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
            with threads_for(self.found.numel() // _LIGHT):
                run_cpu(kernels.emit_inside_cpu, lists.indptr, lists.ids, lists.step, self.nodes, self.offsets,
                        self.found, self.sums, *out)  # fmt: skip
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
        return Candidates(lists, nodes, offsets, local_of_node, sums.zero_(), nodes[:0].int())
    run_gpu(kernels.count_inside_gpu, sums.numel(), lists.indptr, lists.neighbors, lists.step, nodes, offsets,
            local_of_node, sums)  # fmt: skip
    return Candidates(lists, nodes, offsets, local_of_node, sums, nodes[:0].int())


def _count_on_cpu(lists: NeighborLists, nodes: Tensor, local_of_node: Tensor) -> Candidates:
    # By NumPy: torch would wake its own threads, which go on spinning beside the package's loops.
    indptr, ids = lists.indptr.numpy(), nodes.numpy()
    offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(indptr[1:][ids] - indptr[ids], out=offsets[1:])
    found, sums = np.empty(offsets[-1], np.int32), np.zeros(cpu_chunks(), np.int64)
    if len(found) > 0:
        with threads_for(len(found) // _LIGHT):
            run_cpu(kernels.find_inside_cpu, indptr, lists.neighbors, lists.step, ids, offsets, local_of_node, found,
                    sums)  # fmt: skip
    return Candidates(lists, nodes, torch.from_numpy(offsets), local_of_node, torch.from_numpy(sums),
                      torch.from_numpy(found))  # fmt: skip

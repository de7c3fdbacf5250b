"""Latest neighbors of each node, kept on one device (see `kernels/temporal/last_neighbors.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels.local_ids.bitmap import rank_words_gpu, sum_words_gpu
from pyg_direct.kernels.temporal import last_neighbors as kernels
from pyg_direct.ops.argument_checks import check_ids, check_same_device
from pyg_direct.ops.local_ids.relabel import num_words
from pyg_direct.ops.run_kernel import full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu, threads_for


class LastNeighbors(NamedTuple):
    """Latest neighbors of N nodes, at most `size` of each, the latest first.

    Attributes:
        neighbors: The other nodes of the events, int64 `[N, size]`; undefined where `e_id` is -1.
        e_id: Numbers of the events, int64 `[N, size]`; -1 after the last one.
        state: int64 `[4]` on their device, which reports bad ids of a GPU at the next read.
    """

    neighbors: Tensor
    e_id: Tensor
    state: Tensor

    @classmethod
    def open(cls, num_nodes: int, size: int, device: torch.device) -> LastNeighbors:
        """Allocate rows without events.

        Args:
            num_nodes, size: N, and slots of a node.
            device: Device of the rows, which writes and reads them.
        """
        neighbors = torch.empty(num_nodes, size, dtype=torch.int64, device=device)
        return cls(neighbors, torch.full_like(neighbors, -1), neighbors.new_zeros(kernels.STATE))


def check_events(num_nodes: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Check both ends of events, and return them as int64.

    Args:
        num_nodes: N.
        src, dst: int64 or int32 `[B]` on one device; on a CPU within [0, N).

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    src, dst = (check_ids(name, ids, num_nodes).long() for name, ids in (("src", src), ("dst", dst)))
    if src.numel() != dst.numel():
        raise ArgumentError(f"dst must have an end for each of the {src.numel()} events of src, got {dst.numel()}")
    check_same_device("dst", dst, "src", src)
    return src, dst


def insert_events(rows: LastNeighbors, src: Tensor, dst: Tensor, first_event: int) -> None:
    """Add events to the rows of both ends; the last `size` events of a node stay.

    Args:
        rows: The latest neighbors; written in place.
        src, dst: Ends of the events, int64 or int32 `[B]`, on the device of the rows. An id outside [0, N) is refused
            on a CPU; a GPU skips it, and the next `read_rows` reports it.
        first_event: Number of the first event, above the numbers of all earlier ones.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value.
    """
    num_nodes, size = rows.e_id.shape
    src, dst = check_events(num_nodes, src, dst)
    check_same_device("src", src, "e_id", rows.e_id)
    if src.numel() == 0:
        return
    nodes, order = torch.stack([dst, src], 1).view(-1).sort(stable=True)
    tables = rows.neighbors.view(-1), rows.e_id.view(-1)
    if runs_on_gpu(src):
        run_gpu(kernels.insert_events_gpu, grid_for(nodes.numel(), nodes), nodes, order, src, dst, first_event,
                num_nodes, size, *tables, rows.state)  # fmt: skip
    else:
        with threads_for(nodes.numel() * size):
            run_cpu(kernels.insert_events_cpu, nodes, order, src, dst, first_event, size, *tables)


def read_rows(rows: LastNeighbors, n_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes with their latest neighbors; waits for a GPU once.

    Args:
        rows: The latest neighbors.
        n_id: Nodes, int64 or int32 `[n]`, on the device of the rows.

    Returns:
        The nodes and their neighbors, ascending, int64 `[U]`; edges from neighbors to nodes, as places in the former,
        int64 `[2, E]`, node after node, the latest first; the numbers of their events, int64 `[E]`.

    Raises:
        ArgumentError, ArgumentTypeError, IdError: named argument, rule and value; also of earlier events.
    """
    num_nodes, size = rows.e_id.shape
    n_id = check_ids("n_id", n_id, num_nodes).long()
    check_same_device("n_id", n_id, "e_id", rows.e_id)
    num_slots = n_id.numel() * size
    if num_slots == 0:
        return n_id, n_id.new_empty(2, 0), n_id.new_empty(0)
    bits = torch.zeros(num_words(num_nodes), dtype=torch.int32, device=n_id.device).view(torch.uint32)
    ranks = torch.empty(bits.numel(), dtype=torch.int32, device=n_id.device)
    nodes = n_id.new_empty(min(num_nodes, n_id.numel() + num_slots))
    edge_index, e_id = n_id.new_empty(2, num_slots), n_id.new_empty(num_slots)
    tables = rows.neighbors.view(-1), rows.e_id.view(-1)
    if runs_on_gpu(n_id):
        counts, sums = torch.empty_like(n_id), n_id.new_empty(full_grid(n_id))
        run_gpu(kernels.mark_rows_gpu, grid_for(num_slots, n_id), n_id, num_nodes, size, *tables, bits, counts,
                rows.state)  # fmt: skip
        run_gpu(sum_words_gpu, sums.numel(), bits, sums)
        run_gpu(rank_words_gpu, sums.numel(), bits, sums, ranks)
        run_gpu(kernels.emit_rows_gpu, grid_for(max(num_slots, bits.numel()), n_id), n_id, num_nodes, size, *tables,
                bits, ranks, counts, counts.cumsum(0), nodes, edge_index.view(-1), e_id, rows.state)  # fmt: skip
        num_edges, num_found = _read_state(rows.state, num_nodes)
    else:
        num_found, num_edges = run_cpu(kernels.read_rows_cpu, n_id, size, *tables, bits, ranks, nodes, edge_index, e_id)
    return nodes[:num_found], edge_index[:, :num_edges], e_id[:num_edges]


def _read_state(state: Tensor, num_nodes: int) -> tuple[int, int]:
    """Wait for a read, and return (its edges, its nodes).

    Raises:
        IdError: an id was outside [0, N).
    """
    num_edges, num_found, event, node = state.tolist()
    if event or node:
        state.zero_()
        name, value = ("src and dst", event) if event else ("n_id", node)
        raise IdError(f"{name} must lie in [0, {num_nodes}), got {value}")
    return num_edges, num_found

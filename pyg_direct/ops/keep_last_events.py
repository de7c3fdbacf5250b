"""Last events of each node, kept on one device (see `kernels/last_events.py`): neighbors, and a log of messages.

The log has the events of each node in the batch in which it came last, as source and as destination. Rows that no node
needs any more are dropped when the log is full.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.kernels import last_events as kernels
from pyg_direct.kernels.local_ids.bitmap import rank_words_gpu, sum_words_gpu
from pyg_direct.ops.argument_checks import check_ids, check_same_device
from pyg_direct.ops.local_ids.relabel_nodes import num_words
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
        src, dst: int64 or int32 `[B]` on one device; on a CPU within [0, N).
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
        n_id: Nodes, int64 or int32 `[n]`, on the device of the rows.

    Returns:
        The nodes and their neighbors, ascending, int64 `[U]`; edges from neighbors to nodes, as places in the former,
        int64 `[2, E]`, node after node, the latest first; the numbers of their events, int64 `[E]`.
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
    """Wait for a read, and return (its edges, its nodes)."""
    num_edges, num_found, event, node = state.tolist()
    if event or node:
        state.zero_()
        name, value = ("src and dst", event) if event else ("n_id", node)
        raise IdError(f"{name} must lie in [0, {num_nodes}), got {value}")
    return num_edges, num_found


_LEAST_ROWS = 1024


class Role(NamedTuple):
    """Rows of the log for the events of each node in one role, as source or destination.

    Attributes:
        rows: Rows of the log, int64 `[C]`.
        begins, ends: A node's share of `rows`, int64 `[N]`.
        latest: The row of a node's latest event, int64 `[N]`; -1 without events.
    """

    rows: Tensor
    begins: Tensor
    ends: Tensor
    latest: Tensor


class Events(NamedTuple):
    """Events in rows: their ends, int64 `[C]`, their times, int64 `[C]`, and their messages, `[C, F]`."""

    src: Tensor
    dst: Tensor
    t: Tensor
    msg: Tensor


class Chosen(NamedTuple):
    """The latest event of each of n nodes.

    Attributes:
        nodes: The nodes, their own nodes in the events, which differ for stand-ins, and the other nodes, int64
            `[3, n]`.
        rows: Rows of the log, int64 `[n]`; -1 without events.
        elapsed: Times of the events since the last update of their own nodes, int64 `[n]`; 0 without events.
        t: Times of the nodes' latest events, int64 `[n]`; 0 without events.
    """

    nodes: Tensor
    rows: Tensor
    elapsed: Tensor
    t: Tensor


class MessageLog:
    """Events of N nodes on one device; see the head of the file. `width`: F, values of a message."""

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_nodes, self.device = num_nodes, device
        self.used = 0
        self.events = self._allocate(_LEAST_ROWS, width, dtype)
        self.as_src, self.as_dst = (self._open_role(_LEAST_ROWS) for _ in range(2))
        # An id outside [0, N) that a GPU was asked for; 0 stands for none.
        self.errors = torch.zeros(1, dtype=torch.int64, device=device)

    def _allocate(self, size: int, width: int, dtype: torch.dtype) -> Events:
        src, dst, t = torch.zeros(3, size, dtype=torch.int64, device=self.device)
        return Events(src, dst, t, torch.zeros(size, width, dtype=dtype, device=self.device))

    def _open_role(self, size: int) -> Role:
        ids = torch.zeros(3, self.num_nodes, dtype=torch.int64, device=self.device)
        ids[2].fill_(-1)
        return Role(torch.zeros(size, dtype=torch.int64, device=self.device), *ids)

    def clear(self) -> None:
        """Drop all events."""
        self.used = 0
        self.errors.zero_()
        for role in (self.as_src, self.as_dst):
            role.begins.zero_()
            role.ends.zero_()
            role.latest.fill_(-1)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the log to a device, and its messages to a dtype."""
        self.device, self.errors = device, self.errors.to(device)
        src, dst, t, msg = self.events
        self.events = Events(src.to(device), dst.to(device), t.to(device), msg.to(device, dtype))
        self.as_src, self.as_dst = (Role(*(ids.to(device) for ids in role)) for role in (self.as_src, self.as_dst))

    def insert(self, src: Tensor, dst: Tensor, t: Tensor, msg: Tensor) -> None:
        """Add a batch of events; they replace the earlier events of their nodes, in either role.

        Args:
            src, dst: int64 `[B]` within [0, N), which is not checked, on the device of the log.
            t: Times, int64 `[B]`.
            msg: Messages, `[B, F]`.
        """
        count = src.numel()
        if count == 0:
            return
        if self.used + count > self.events.t.numel():
            self._make_room(count)
        for table, values in zip(self.events, (src, dst, t, msg), strict=True):
            table[self.used : self.used + count] = values
        for role, nodes in ((self.as_src, src), (self.as_dst, dst)):
            # On a CPU as PyG, so that a node's messages are in the order in which PyG adds them up.
            ordered, order = nodes.sort(stable=runs_on_gpu(nodes))
            arguments = ordered, order, t, self.used, *role
            if runs_on_gpu(ordered):
                run_gpu(kernels.note_events_gpu, grid_for(count, ordered), *arguments)
            else:
                with threads_for(count):
                    run_cpu(kernels.note_events_cpu, *arguments)
        self.used += count

    def check(self, n_id: Tensor) -> Tensor:
        """Return nodes with 0 in place of those outside [0, N), of which a GPU leaves one in `errors`.

        Args:
            n_id: int64 `[n]`, on the device of the log; on a CPU within [0, N), which is not checked.
        """
        if not runs_on_gpu(n_id) or n_id.numel() == 0:
            return n_id
        nodes = torch.empty_like(n_id)
        self._count(n_id, nodes)
        return nodes

    def _count(self, n_id: Tensor, nodes: Tensor) -> Tensor:
        """Write checked nodes, and return the running sums of their numbers of events, as sources and destinations."""
        counts = n_id.new_empty(2 * n_id.numel())
        bounds = self.as_src.begins, self.as_src.ends, self.as_dst.begins, self.as_dst.ends
        if runs_on_gpu(n_id):
            run_gpu(kernels.count_events_gpu, grid_for(n_id.numel(), n_id), n_id, *bounds, nodes, counts, self.errors)
        else:
            with threads_for(n_id.numel()):
                run_cpu(kernels.count_events_cpu, n_id, *bounds, nodes, counts)
        return counts.cumsum(0)

    def choose(self, n_id: Tensor, last_update: Tensor, stand_in: int = -1) -> Chosen:
        """Return the latest event of each node in both roles; of equal times the last one, and rather as destination.

        Args:
            n_id: int64 `[n]`, on the device of the log; see `check`.
            last_update: Times of the last updates of all nodes, int64 `[N]`.
            stand_in: Number of an event among all events of the nodes, as sources, then as destinations. A node without
                events takes this event, if there are as many; -1 takes none.
        """
        nodes, found = n_id.new_empty(3, n_id.numel()), n_id.new_empty(3, n_id.numel())
        if n_id.numel() == 0:
            return Chosen(nodes, *found)
        ends = self._count(n_id, nodes[0])
        arguments = (stand_in, ends, nodes[0], last_update, *self.events[:3], *self.as_src[:2], self.as_src.latest,
                     *self.as_dst[:2], self.as_dst.latest, *nodes[1:], *found)  # fmt: skip
        if runs_on_gpu(n_id):
            run_gpu(kernels.choose_events_gpu, grid_for(n_id.numel(), n_id), *arguments)
        else:
            with threads_for(n_id.numel()):
                run_cpu(kernels.choose_events_cpu, *arguments)
        return Chosen(nodes, *found)

    def list_events(self, role: Role, n_id: Tensor) -> Tensor:
        """Return the rows of all events of nodes in a role, node after node, int64 `[M]`; waits for a GPU once.

        Args:
            role: `as_src` or `as_dst`.
            n_id: int64 `[n]` within [0, N), on the device of the log.
        """
        begins = role.begins[n_id]
        counts = role.ends[n_id] - begins
        ends = counts.cumsum(0)
        total = int(ends[-1]) if n_id.numel() else 0
        shift = torch.repeat_interleave(begins - (ends - counts), counts, output_size=total)
        return role.rows[shift + torch.arange(total, device=self.device)]

    def _make_room(self, count: int) -> None:
        """Drop rows that no node needs, in memory of twice the rows that remain, at least."""
        everyone = torch.arange(self.num_nodes, device=self.device)
        listed = [(role, self.list_events(role, everyone)) for role in (self.as_src, self.as_dst)]
        is_used = torch.zeros(self.events.t.numel(), dtype=torch.bool, device=self.device)
        for _, rows in listed:
            is_used[rows] = True
        kept = is_used.nonzero().view(-1)
        number = is_used.cumsum(0) - 1
        size = max(self.events.t.numel(), 2 * (kept.numel() + count))
        events = self._allocate(size, self.events.msg.shape[1], self.events.msg.dtype)
        for table, values in zip(events, self.events, strict=True):
            table[: kept.numel()] = values[kept]
        self.events = events
        made = []
        for role, rows in listed:
            counts = role.ends - role.begins
            ends = counts.cumsum(0)
            fresh = self._open_role(size)
            fresh.rows[: rows.numel()] = number[rows]
            fresh.begins.copy_(ends - counts)
            fresh.ends.copy_(ends)
            fresh.latest.copy_(torch.where(role.latest < 0, -1, number[role.latest.clamp(min=0)]))
            made.append(fresh)
        self.as_src, self.as_dst = made
        # A role lists each row once at most, so its rows end before this one too.
        self.used = kept.numel()

"""`FrontierExchange`: the pick of a hop of a graph in parts, with each node's edges picked by its owner.

The host exchanges nodes and edges. `Picker` is the owner's side: it picks the edges of the requested nodes and packs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.graph_part import GraphPart, PlacedPart
from pyg_direct.distributed.row_exchange import Unpacker, pack
from pyg_direct.kernels.sampling.worklist import BATCH, BY_PLACE, COLUMNS, FIRST, RELATION, ROWS, TIMED
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.sampling.join_remote_edges import Asked, Layout, Wire, group_keys, join_edges, make_keys, pack_edges
from pyg_direct.ops.sampling.sample_hetero import Frontier, Picked, Rows, Rules, find_edges, pick_edges, sort_pairs
from pyg_direct.runtime.comm.communicator import Communicator
from pyg_direct.runtime.host.tensor_views import as_bytes
from pyg_direct.sampling.hetero_plan import GeneralPlan, list_works
from pyg_direct.sampling.seeds import Excluded, Seeds, list_pairs

_SMALL = 255


class Words(NamedTuple):
    """Encoding of a requested node: its id in the id space of all types, and its tree and time if used.

    Attributes:
        dtype: int32, or int64 if ids or edges need it.
        has_trees: True if a node has a tree.
        num_times: Times of a node; two for a window.
    """

    dtype: torch.dtype
    has_trees: bool
    num_times: int

    @property
    def num_bytes(self) -> int:
        """Bytes per node."""
        return self.dtype.itemsize * (1 + self.has_trees) + 8 * self.num_times

    def pack(self, ids: Tensor, trees: Tensor, times: Tensor) -> Tensor:
        """Pack nodes into bytes, one after the other."""
        if not ids.numel():
            return ids.new_empty(0, dtype=torch.uint8)
        if not self.has_trees:
            return as_bytes(ids.to(self.dtype))
        columns = [ids.to(self.dtype).view(-1, 1), trees.to(self.dtype).view(-1, 1)]
        if self.num_times:
            columns.append(as_bytes(times.contiguous()).view(self.dtype).view(ids.numel(), -1))
        return as_bytes(torch.cat(columns, 1))

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unpack (ids, trees, times), int64 `[F]`, two times of a window side by side; unused ones are empty."""
        words = message.view(self.dtype)
        if not self.has_trees:
            ids = words.long()
            return ids, ids[:0], ids[:0]
        table = words.view(-1, self.num_bytes // self.dtype.itemsize)
        ids, trees = table[:, :2].t().long().contiguous().unbind()
        times = table[:, 2:].contiguous().view(-1).view(torch.int64) if self.num_times else ids[:0]
        return ids, trees, times


class Found(NamedTuple):
    """Edges picked for several requesters (ranks or clients).

    Attributes:
        trees: Trees of the requested nodes, or empty.
        bounds: First item of each requester, and the end, int64 `[S + 1]`.
        status: int64 `[1]`, below 0 if a node does not belong to this part.
        has_entry_each: True if each requester has one entry of the work list.
    """

    picked: Picked
    trees: Tensor
    bounds: np.ndarray
    status: Tensor
    has_entry_each: bool = False

    def count_edges(self) -> Tensor:
        """Count the edges for each requester, int64 `[S]`."""
        assert self.picked.offsets is not None
        if self.has_entry_each:
            return self.picked.ends.diff()
        return self.picked.offsets[torch.from_numpy(self.bounds).to(self.trees.device, non_blocking=True)].diff()


class Picker:
    """Picker of the edges of a part's nodes, equal to the picks of one machine.

    Args:
        plan: The plan with the rows, flags and rules to use.
    """

    def __init__(self, part: GraphPart, placed: PlacedPart, plan: GeneralPlan, num_batches: int = 1) -> None:
        self._part, self._topo, self._device, self._num_batches = part, placed.topo, placed.device, num_batches
        self._rows: Rows = plan.rows
        self._rules: Rules = plan.rules
        self._fanouts = plan.fanouts
        # Times come with the nodes.
        self._flags = plan.flags | np.where(plan.flags & TIMED, BY_PLACE, 0)
        num_times = 0 if not placed.topo.is_temporal else 2 if plan.recipe.seed_windows else 1
        self.words = Words(placed.topo.word_dtype, plan.disjoint, num_times)
        self._shifts = part.own_starts[placed.topo.expanded]

    def _find_fanouts(self, hop: int) -> np.ndarray:
        """Find the fanouts of a hop by relation, int64 `[R]`; behind the last hop all edges are picked."""
        found: np.ndarray = self._fanouts[hop] if hop < len(self._fanouts) else np.full(len(self._topo.edge_types), -1)
        return found

    def wire(self, hop: int) -> Wire:
        """Return the dtypes of the answers of a hop."""
        fanouts = self._find_fanouts(hop)
        is_small = len(fanouts) > 0 and fanouts.min() >= 0 and fanouts.max() <= _SMALL
        return Wire(torch.uint8 if is_small else torch.int32, self.words.dtype)

    def find_excluded(self, messages: Sequence[Tensor]) -> Tensor:
        """Find the edges that the batches of several requesters exclude, for `pick`.

        Args:
            messages: Pairs of each requester, int64 `[4, P]` in bytes: numbers of relations, expanded nodes, neighbors
                in the id space of all types, and numbers of batches.
        """
        topo = self._topo
        sizes = [message.numel() // 32 for message in messages]
        tables = [Unpacker(message).take(torch.int64, 4, size) for message, size in zip(messages, sizes, strict=True)]
        relations, expanded, neighbors, own = torch.cat(tables, 1).unbind()
        batches = upload(np.repeat(np.arange(len(sizes)) * self._num_batches, sizes), self._device) + own
        begins = np.stack([topo.type_starts[topo.expanded], topo.row_starts[:-1] - self._shifts])
        firsts, rows = upload(begins, self._device)[:, relations]
        places, _ = self._part.find_places(expanded + firsts)
        return find_edges(self._rows, sort_pairs(self._rows, rows + places, neighbors, batches))

    def pick(self, message: Tensor, counts: np.ndarray, keys: np.ndarray, hop: int, excluded: Tensor | None = None
             ) -> Found:  # fmt: skip
        """Pick the requested edges.

        Args:
            message: `Words` of the nodes, by requester, batch and type.
            counts: Numbers of nodes of each batch of each requester, int64 `[S * G, T]`.
            keys: Keys of these batches, uint64 `[S * G]`.
            hop: Number of the hop; the number of hops for all edges of the nodes, as for induced subgraphs.
            excluded: Edges to exclude (`find_excluded`); None for none.
        """
        topo = self._topo
        ids, trees, times = self.words.unpack(message)
        begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
        # Targets are positions in the message; neighbors are in the id space of all types.
        found, work = list_works(topo, self._flags, self._find_fanouts(hop), counts, begins, topo.type_starts, keys)
        table = work.reshape(-1, COLUMNS)
        table[:-1, ROWS] -= self._shifts[table[:-1, RELATION]]
        ends = np.searchsorted(found, np.arange(0, len(counts) + 1, self._num_batches) * len(topo.edge_types))
        bounds = table[ends, FIRST]
        places, status = self._part.find_places(ids)
        frontier = Frontier(topo.ids_within(ids), trees, times, 0, places)
        if table[-1, FIRST] == 0:
            none = ids[:0]
            return Found(Picked(none, none, none, none, none.new_zeros(1)), trees, bounds, status)
        picked = pick_edges(self._rows, work, frontier, self._rules, hop=hop, excluded=excluded)
        return Found(picked, trees, bounds, status, bool((np.diff(ends) == 1).all()))

    def pack(self, found: Found, num_edges: np.ndarray, wire: Wire, out: Tensor | None = None) -> tuple[Tensor, Layout]:
        """Pack edges: (answers in bytes, by requester, and their layout).

        Args:
            num_edges: Edges of each requester, int64 `[S]`.
            out: Memory for these bytes; None allocates it.
        """
        layout = Layout.of(np.diff(found.bounds), num_edges, wire)
        out = torch.empty(int(layout.sizes.sum()), dtype=torch.uint8, device=self._device) if out is None else out
        pack_edges(found.picked, found.trees, layout, wire, out)
        return out, layout


# Batches of a group that are sampled by one exchange; equal on all ranks. Beyond these, an exchange costs little more
# than the bytes that it moves.
MOST_BATCHES = 8


class FrontierExchange:
    """Exchange of frontiers, by which a `GeneralPlan` picks the edges of nodes that other parts own. It is collective.

    A hop is one exchange of nodes and one of edges, for all batches of a group. On a GPU each exchange waits once.

    Args:
        plan: The plan with the rows, flags and rules to use.
        communicator: Communicator of the owners of the other parts; rank r owns part r.
    """

    most_batches = MOST_BATCHES

    def __init__(self, part: GraphPart, placed: PlacedPart, plan: GeneralPlan, communicator: Communicator) -> None:
        self._part, self._placed, self._communicator = part, placed, communicator
        self.picker = Picker(part, placed, plan, self.most_batches)
        # The status of the process; the key and the nodes by type of each batch.
        communicator.widen(1 + self.most_batches * (1 + len(placed.topo.node_types)))

    def find_excluded(self, excluded: Sequence[Excluded]) -> Any:
        """Find the edges that batches leave out, for `pick`: those of this part by the others, and by this rank last.

        Args:
            excluded: Pairs of each batch, whose owners are told.
        """
        others = self._communicator.exchange(self.list_excluded(excluded), "excluded")
        own = others.pop(self._communicator.rank)
        return self.picker.find_excluded([*others, own])

    def list_excluded(self, excluded: Sequence[Excluded]) -> list[Tensor]:
        """List excluded pairs in bytes, by owner of their edges."""
        topo: Any = self._placed.topo
        relations, expanded, neighbors, batches = list_pairs(self._placed, excluded)  # type: ignore[arg-type]
        owners = torch.empty_like(relations)
        for number, kind in enumerate(topo.expanded.tolist()):
            own = relations == number
            owners[own] = self._part.owners(topo.node_types[kind], expanded[own])
        pairs = torch.stack([relations, expanded, neighbors, batches])
        return [pack([pairs[:, owners == rank]]) for rank in range(self._part.num_parts)]

    def pick(self, work: np.ndarray, front: Any, start: Seeds, keys: np.ndarray, hop: int) -> Picked:
        """Pick the edges of a frontier.

        Args:
            work: Its work list on the host.
            front: Its nodes, see `GeneralPlan`.
            start: Seeds of the batches, with the result of `find_excluded` if they leave out edges.
            keys: Keys of the batches, uint64 `[G]`.
            hop: See `Picker.pick`.
        """
        topo = self._placed.topo
        order, bounds = self._group(front)
        ids = self._in_all_types(front)[order] if order.numel() else front.rows
        trees = front.trees[order] if front.trees.numel() else front.trees
        times = start.times[:0]
        if trees.numel() and start.times.numel():
            # Trees are numbered anew in each batch.
            times = start.times[trees] if len(keys) == 1 else front.times[order]
        message = self.picker.words.pack(ids, trees, times)
        entries = work.reshape(-1, COLUMNS)[:-1]
        types = topo.expanded[entries[:, RELATION]] + entries[:, BATCH] * len(topo.node_types)
        asked = Asked(work, types, np.zeros((self._part.num_parts, 0), np.int64), order, front.trees, start.tree_shift)
        return self._ask(asked, message, bounds, keys, hop, start.excluded)

    def _ask(self, asked: Asked, message: Tensor, bounds: Tensor, keys: np.ndarray, hop: int, excluded: Any) -> Picked:
        """Exchange the nodes of a hop, answer the received requests, and return the picked edges.

        Args:
            asked: The request, without the numbers of nodes.
            message: Nodes in bytes, by owner.
            bounds: First node of each type of each batch of each owner, and the end, int64 `[P * G * T + 1]`.
            keys: Keys of the batches, uint64 `[G]`.
            excluded: Result of `find_excluded`; None if no edge is excluded.
        """
        comm, picker = self._communicator, self.picker
        wire, node_bytes = picker.wire(hop), picker.words.num_bytes
        num_types = len(self._placed.topo.node_types)
        rows = self._begin_rows(keys)
        by_batch = rows[: comm.size, 1 : 1 + len(keys) * (1 + num_types)].unflatten(1, (len(keys), -1))
        by_batch[:, :, 1:] = bounds.diff().view(comm.size, len(keys), num_types)
        num_words = 1 + self.most_batches * (1 + num_types)
        sent, found = (table[:, 1:num_words].reshape(-1, 1 + num_types) for table in comm.meet(rows))
        counts, others = (table[:, 1:].reshape(comm.size, -1) for table in (sent, found))
        sizes, sizes_back = ((n.sum(1) * node_bytes).tolist() for n in (counts, others))
        received = comm.swap(message, sizes, sizes_back, "nodes")
        picks = picker.pick(received, found[:, 1:], found[:, 0].astype(np.uint64), hop, excluded)
        rows = comm.make_rows(message.device)
        rows[: comm.size, 1] = picks.count_edges()
        rows[: comm.size, 0] = picks.status
        own_edges, edges = (table[:, 1] for table in comm.meet(rows))
        packed, given = picker.pack(picks, own_edges, wire)
        asked = asked._replace(counts=counts[:, : len(keys) * num_types])
        layout = Layout.of(asked.num_items, edges, wire)
        answers = comm.swap(packed, given.sizes.tolist(), layout.sizes.tolist(), "edges")
        return join_edges(asked, layout, wire, answers)

    def _begin_rows(self, keys: np.ndarray) -> Tensor:
        """Make rows of words for all ranks, with the keys in them."""
        size, step = self._communicator.size, 1 + len(self._placed.topo.node_types)
        rows = np.zeros((2 * size - 1, self._communicator.width), np.int64)
        rows[:size, 1 : 1 + len(keys) * step : step] = keys.astype(np.int64)
        return upload(rows, self._placed.device)

    def _group(self, front: Any) -> tuple[Tensor, Tensor]:
        """Group the frontier: (its positions by owner, batch and type; first position of each group, and the end)."""
        topo, num_parts, num_kinds = self._placed.topo, self._part.num_parts, len(front.counts)
        keys, at = make_keys(front.rows.numel(), num_parts * num_kinds, front.rows.device), 0
        for number, (kind, count) in enumerate(zip(cycle(topo.node_types), front.counts.tolist(), strict=False)):
            self._part.books[kind].find_buckets(front.rows[at : at + count], self._part.part, num_kinds, number,
                                               keys[at : at + count])  # fmt: skip
            at += count
        return group_keys(keys, num_parts * num_kinds)

    def _in_all_types(self, front: Any) -> Tensor:
        """Return ids of the frontier in the id space of all types."""
        topo = self._placed.topo
        if len(topo.node_types) < 2:
            rows: Tensor = front.rows
            return rows
        starts = np.tile(topo.type_starts[:-1], len(front.counts) // len(topo.node_types))
        table = upload(np.stack([starts, front.counts]), front.rows.device)
        return front.rows + table[0].repeat_interleave(table[1], output_size=front.rows.numel())

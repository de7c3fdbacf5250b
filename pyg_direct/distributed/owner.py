"""What the owner of nodes does for a hop of others: pick the edges of their rows, and answer in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.message import Unpacker
from pyg_direct.distributed.part import GraphPart, PlacedPart
from pyg_direct.kernels.worklist import BY_PLACE, COLUMNS, FIRST, RELATION, ROWS, TIMED
from pyg_direct.ops.answer import Layout, Wire, pack_edges
from pyg_direct.ops.general import Frontier, Picked, Rows, Rules, find_edges, pick_edges
from pyg_direct.ops.upload import upload
from pyg_direct.runtime.raw import as_bytes
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.worklist import list_works

_SMALL = 255


class Words(NamedTuple):
    """How a node is asked for: its id in the id space of all types, its tree and its time, as far as there are such.

    Attributes:
        dtype: int32, or int64 where ids or edges are many.
        has_trees, has_times: What is told of a node.
    """

    dtype: torch.dtype
    has_trees: bool
    has_times: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of a node."""
        return self.dtype.itemsize * (1 + self.has_trees) + 8 * self.has_times

    def pack(self, ids: Tensor, trees: Tensor, times: Tensor) -> Tensor:
        """Nodes in bytes, one after the other."""
        if not ids.numel():
            return ids.new_empty(0, dtype=torch.uint8)
        if not self.has_trees:
            return as_bytes(ids.to(self.dtype))
        columns = [ids.to(self.dtype).view(-1, 1), trees.to(self.dtype).view(-1, 1)]
        if self.has_times:
            columns.append(as_bytes(times.contiguous()).view(self.dtype).view(ids.numel(), -1))
        return as_bytes(torch.cat(columns, 1))

    def unpack(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, trees, times), int64 `[F]`; trees and times are empty where there are none."""
        words = message.view(self.dtype)
        if not self.has_trees:
            ids = words.long()
            return ids, ids[:0], ids[:0]
        table = words.view(-1, self.num_bytes // self.dtype.itemsize)
        ids, trees = table[:, :2].t().long().contiguous().unbind()
        times = table[:, 2:].contiguous().view(-1).view(torch.int64) if self.has_times else ids[:0]
        return ids, trees, times


class Found(NamedTuple):
    """Edges picked for several askers.

    Attributes:
        picked: Them.
        trees: Of the nodes asked for, or empty.
        bounds: Items of each asker, int64 `[S + 1]`: where they begin, and the end.
        status: int64 `[1]`, below 0 where a node is not of this part.
        has_entry_each: Whether each asker has one entry of the work list.
    """

    picked: Picked
    trees: Tensor
    bounds: np.ndarray
    status: Tensor
    has_entry_each: bool = False

    def count_edges(self) -> Tensor:
        """Edges for each asker, int64 `[S]`."""
        assert self.picked.offsets is not None
        if self.has_entry_each:
            return self.picked.ends.diff()
        return self.picked.offsets[torch.from_numpy(self.bounds).to(self.trees.device, non_blocking=True)].diff()


class Picker:
    """Picks the edges of the nodes of a part, as one machine would.

    Args:
        part: The part.
        placed: Its rows for the recipe.
        plan: Whose rows, flags and rules are followed.
    """

    def __init__(self, part: GraphPart, placed: PlacedPart, plan: GeneralPlan) -> None:
        self._part, self._topo, self._device = part, placed.topo, placed.device
        self._rows: Rows = plan.rows
        self._rules: Rules = plan.rules
        # Times come with the nodes.
        self._flags = plan.flags | np.where(plan.flags & TIMED, BY_PLACE, 0)
        self.words = Words(placed.topo.word_dtype, plan.disjoint, placed.topo.is_temporal)
        self._shifts = part.own_starts[placed.topo.expanded]

    def wire(self, fanouts: np.ndarray) -> Wire:
        """Dtypes of the answers of a hop."""
        is_small = len(fanouts) > 0 and fanouts.min() >= 0 and fanouts.max() <= _SMALL
        return Wire(torch.uint8 if is_small else torch.int32, self.words.dtype)

    def find_excluded(self, messages: Sequence[Tensor]) -> Tensor:
        """Find the edges that the batches of several askers are sampled without, for `pick`.

        Args:
            messages: Numbers of relations, nodes that these expand and neighbors in the id space of all types, int64
                `[3, P]` in bytes, of each asker.
        """
        topo = self._topo
        sizes = [message.numel() // 24 for message in messages]
        tables = [Unpacker(message).take(torch.int64, 3, size) for message, size in zip(messages, sizes, strict=True)]
        relations, expanded, neighbors = torch.cat(tables, 1).unbind()
        batches = upload(np.repeat(np.arange(len(sizes)), sizes), self._device)
        begins = np.stack([topo.type_starts[topo.expanded], topo.row_starts[:-1] - self._shifts])
        firsts, rows = upload(begins, self._device)[:, relations]
        places, _ = self._part.find_places(expanded + firsts)
        return find_edges(self._rows, rows + places, neighbors, batches)

    def pick(self, message: Tensor, counts: np.ndarray, keys: np.ndarray, fanouts: np.ndarray, hop: int,
             excluded: Tensor | None = None) -> Found:  # fmt: skip
        """The edges that are asked for.

        Args:
            message: `Words` of the nodes, asker after asker and type after type within each.
            counts: Their numbers, int64 `[S, T]`.
            keys: Of the askers' batches, uint64 `[S]`.
            fanouts: By relation, int64 `[R]`.
            hop: Number of the hop.
            excluded: Edges that are not picked (`find_excluded`); None for none.
        """
        topo = self._topo
        ids, trees, times = self.words.unpack(message)
        begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
        # Targets are places in the message, neighbors stand in the id space of all types.
        found, work = list_works(topo, self._flags, fanouts, counts, begins, topo.type_starts, keys)
        table = work.reshape(-1, COLUMNS)
        table[:-1, ROWS] -= self._shifts[table[:-1, RELATION]]
        ends = np.searchsorted(found, np.arange(len(counts) + 1) * len(topo.edge_types))
        bounds = table[ends, FIRST]
        places, status = self._part.find_places(ids)
        frontier = Frontier(topo.ids_within(ids), trees, times, 0, places)
        if table[-1, FIRST] == 0:
            none = ids[:0]
            return Found(Picked(none, none, none, none, none.new_zeros(1)), trees, bounds, status)
        picked = pick_edges(self._rows, work, frontier, self._rules, hop=hop, excluded=excluded)
        return Found(picked, trees, bounds, status, bool((np.diff(ends) == 1).all()))

    def pack(self, found: Found, num_edges: np.ndarray, wire: Wire, out: Tensor | None = None) -> tuple[Tensor, Layout]:
        """(answers in bytes, asker after asker, how they lie).

        Args:
            found: The edges.
            num_edges: Of each asker, int64 `[S]`.
            wire: Dtypes.
            out: Memory for as many bytes; made when None.
        """
        layout = Layout.of(np.diff(found.bounds), num_edges, wire)
        out = torch.empty(int(layout.sizes.sum()), dtype=torch.uint8, device=self._device) if out is None else out
        pack_edges(found.picked, found.trees, layout, wire, out)
        return out, layout

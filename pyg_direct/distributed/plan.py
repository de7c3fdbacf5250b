"""`DistPlan`: samples batches of a graph in parts, hop after hop, each node's edges picked by its owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.message import pack
from pyg_direct.distributed.owner import Picker
from pyg_direct.distributed.part import GraphPart
from pyg_direct.kernels.worklist import COLUMNS, RELATION
from pyg_direct.ops.answer import Asked, Layout, join_edges
from pyg_direct.ops.general import Picked
from pyg_direct.ops.owner import group_keys, make_keys
from pyg_direct.ops.upload import upload
from pyg_direct.runtime.communicator import Communicator
from pyg_direct.sampling.excluded import Excluded, list_pairs
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.options import GeneralRecipe
from pyg_direct.sampling.seeds import Request, Seeds
from pyg_direct.sampling.subgraph import GeneralSample

# Words of a row of requests before the numbers of nodes by type: how the process does, and the key.
_HEAD = 2


class DistPlan(GeneralPlan):
    """Samples batches of a graph in parts; the same batches as `GeneralPlan` on the whole graph under the same key.

    A call to `sample` is collective: all processes make it, those without a batch with no seeds. A hop is one exchange
    of nodes and one of edges, and waits for a GPU once in each, and once for its new nodes.

    Args:
        part: This process's part.
        recipe: What is sampled around seeds, equal in all processes.
        communicator: The way to the owners of the other parts; rank r owns part r.
        timed, weighted: Whether times and weights of the partition decide.
    """

    # It tells the owners of edges.
    _keeps_sampled = True

    def __init__(self, part: GraphPart, recipe: GeneralRecipe, communicator: Communicator, *, timed: bool,
                 weighted: bool) -> None:  # fmt: skip
        placed: Any = part.place(timed=timed, weighted=weighted)
        super().__init__(placed, recipe)
        self.part, self._placed, self._communicator = part, placed, communicator
        self._picker = Picker(part, placed, self)
        # Whether all edges of the nodes are wanted, as for induced subgraphs.
        self._wants_all = False
        communicator.widen(_HEAD + len(placed.topo.node_types))

    def sample_together(self, requests: Sequence[Request], keys: Sequence[int],
                        excluded: Sequence[Excluded] | None = None) -> list[GeneralSample]:  # fmt: skip
        """One after the other: a row of requests to an owner has room for one batch."""
        each = [None] * len(keys) if excluded is None else excluded
        return [self.sample(seeds, key, seed_time=seed_time, excluded=own)
                for (seeds, seed_time), key, own in zip(requests, keys, each, strict=True)]  # fmt: skip

    def _find_excluded(self, excluded: Sequence[Excluded]) -> Any:
        if self.part.is_whole:
            return super()._find_excluded(excluded)
        topo = self._placed.topo
        relations, expanded, neighbors, _ = list_pairs(self.topology, excluded)
        owners = torch.empty_like(relations)
        for number, kind in enumerate(topo.expanded.tolist()):
            own = relations == number
            owners[own] = self.part.owners(topo.node_types[kind], expanded[own])
        pairs = torch.stack([relations, expanded, neighbors])
        return self._tell_excluded([pack([pairs[:, owners == rank]]) for rank in range(self.part.num_parts)])

    def _tell_excluded(self, messages: list[Tensor]) -> Any:
        """Send the pairs of a batch to the owners of their edges; what `_ask` needs of it. Here: the edges of this part
        that the others, and this process last, sample without."""
        others = self._communicator.exchange(messages, "excluded")
        own = others.pop(self._communicator.rank)
        return self._picker.find_excluded([*others, own])

    def _induce(self, *args: Any) -> GeneralSample:
        self._wants_all = True
        try:
            return super()._induce(*args)
        finally:
            self._wants_all = False

    def _pick(self, listed: Any, front: Any, start: Seeds, keys: np.ndarray, hop: int) -> Picked:
        if self.part.is_whole:
            return super()._pick(listed, front, start, keys, hop)
        topo, work = self._placed.topo, listed.work
        order, bounds = self._group(front)
        ids = self._in_all_types(front)[order] if order.numel() else front.rows
        trees = front.trees[order] if front.trees.numel() else front.trees
        times = start.times[trees] if trees.numel() and start.times.numel() else start.times[:0]
        message = self._picker.words.pack(ids, trees, times)
        types = topo.expanded[work.reshape(-1, COLUMNS)[:-1, RELATION]]
        asked = Asked(work, types, np.zeros((self.part.num_parts, 0), np.int64), order, front.trees, start.tree_shift)
        return self._ask(asked, message, bounds, int(keys[0]), hop, start.excluded)

    def _ask(self, asked: Asked, message: Tensor, bounds: Tensor, key: int, hop: int, excluded: Any) -> Picked:
        """What the owners answer; others are answered meanwhile.

        Args:
            asked: What is asked, without the numbers of nodes.
            message: Nodes in bytes, owner after owner.
            bounds: Where each type of each owner begins among them, and the end, int64 `[P * T + 1]`.
            key, hop: Of the draws.
            excluded: Of `_tell_excluded`; None where all edges may be picked.
        """
        comm, picker, fanouts = self._communicator, self._picker, self._fanouts_of(hop)
        wire, node_bytes = picker.wire(fanouts), picker.words.num_bytes
        num_words = _HEAD + len(self._placed.topo.node_types)
        rows = self._begin_rows(key)
        rows[: comm.size, _HEAD:num_words] = bounds.diff().view(comm.size, -1)
        sent, found = (table[:, :num_words] for table in comm.meet(rows))
        counts, others = sent[:, _HEAD:], found[:, _HEAD:]
        sizes, sizes_back = ((n.sum(1) * node_bytes).tolist() for n in (counts, others))
        received = comm.swap(message, sizes, sizes_back, "nodes")
        picks = picker.pick(received, others, np.ascontiguousarray(found[:, 1]).view(np.uint64), fanouts, hop, excluded)
        rows = comm.make_rows(message.device)
        rows[: comm.size, 1] = picks.count_edges()
        rows[: comm.size, 0] = picks.status
        own_edges, edges = (table[:, 1] for table in comm.meet(rows))
        packed, given = picker.pack(picks, own_edges, wire)
        asked = asked._replace(counts=counts)
        layout = Layout.of(asked.num_items, edges, wire)
        answers = comm.swap(packed, given.sizes.tolist(), layout.sizes.tolist(), "edges")
        return join_edges(asked, layout, wire, answers)

    def _begin_rows(self, key: int) -> Tensor:
        """Rows of words for all partners, with the key in them."""
        size = self._communicator.size
        rows = np.zeros((2 * size - 1, self._communicator.width), np.int64)
        rows[:size, 1] = np.uint64(key).astype(np.int64)
        return upload(rows, self._placed.device)

    def _fanouts_of(self, hop: int) -> np.ndarray:
        fanouts: np.ndarray = self._fanouts[hop] if not self._wants_all else np.full(
            len(self._placed.topo.edge_types), -1)  # fmt: skip
        return fanouts

    def _group(self, front: Any) -> tuple[Tensor, Tensor]:
        """(places of the frontier, owner after owner and type after type; where each begins, and the end)."""
        topo, num_parts = self._placed.topo, self.part.num_parts
        num_types = len(topo.node_types)
        keys, at = make_keys(front.rows.numel(), num_parts * num_types, front.rows.device), 0
        for number, (kind, count) in enumerate(zip(topo.node_types, front.counts.tolist(), strict=True)):
            self.part.books[kind].find_buckets(front.rows[at : at + count], self.part.part, num_types, number,
                                               keys[at : at + count])  # fmt: skip
            at += count
        return group_keys(keys, num_parts * num_types)

    def _in_all_types(self, front: Any) -> Tensor:
        """Ids of the frontier in the id space of all types."""
        topo = self._placed.topo
        if len(topo.node_types) < 2:
            rows: Tensor = front.rows
            return rows
        table = upload(np.stack([topo.type_starts[:-1], front.counts]), front.rows.device)
        return front.rows + table[0].repeat_interleave(table[1], output_size=front.rows.numel())

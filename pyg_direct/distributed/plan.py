"""`DistPlan`: samples batches of a graph in parts, hop after hop, each node's edges picked by its owner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.communicator import Communicator
from pyg_direct.distributed.owner import Answer, Picker, Request
from pyg_direct.distributed.part import GraphPart
from pyg_direct.kernels.worklist import COLUMNS, FANOUT, FIRST, FRONT, LOCAL, RELATION, SOURCE_BASE, SOURCE_START
from pyg_direct.ops.general import Picked
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.options import GeneralRecipe
from pyg_direct.sampling.seeds import Seeds

_SMALL = 255


class DistPlan(GeneralPlan):
    """Samples batches of a graph in parts; the same batches as `GeneralPlan` on the whole graph under the same key.

    A call to `sample` is collective: all processes make it, those without a batch with no seeds. A hop is one exchange
    of nodes and one of edges.

    Args:
        part: This process's part.
        recipe: What is sampled around seeds, equal in all processes.
        communicator: The way to the owners of the other parts; rank r owns part r.
        timed, weighted: Whether times and weights of the partition decide.
    """

    def __init__(self, part: GraphPart, recipe: GeneralRecipe, communicator: Communicator, *, timed: bool,
                 weighted: bool) -> None:  # fmt: skip
        placed: Any = part.place(timed=timed, weighted=weighted)
        super().__init__(placed, recipe)
        self.part, self._placed, self._communicator = part, placed, communicator
        self._picker = Picker.of(part, placed, self)
        small = placed.topo.type_starts[-1] < 2**31
        self._id_dtype = torch.int32 if small else torch.int64
        most = max((entry.num_edges for entry in part.manifest.edges), default=0)
        self._edge_dtype = torch.int32 if most < 2**31 else torch.int64

    def _pick(self, work: np.ndarray, front: Any, start: Seeds, key: int, hop: int) -> Picked:
        topo = self._placed.topo
        entries = work.reshape(-1, COLUMNS)[:-1]
        fanouts = np.zeros(len(topo.edge_types), np.int64)
        fanouts[entries[:, RELATION]] = entries[:, FANOUT]
        owners = self._find_owners(front)
        requests, places = self._ask(front, start, owners, fanouts, key, hop)
        items = [_list_items(entries, topo.expanded, request.counts, own, front.counts)
                 for request, own in zip(requests, places, strict=True)]  # fmt: skip
        return self._join(work, entries, front, start, items, self._fetch(requests, items, fanouts))

    def _fetch(self, requests: list[Request], items: list[Tensor], fanouts: np.ndarray) -> list[Answer]:
        """What each owner answers; others are answered meanwhile."""
        topo, own_rank = self._placed.topo, self.part.part
        none = torch.empty(0, dtype=torch.uint8, device=self._placed.device)
        messages = [none if rank == own_rank else request.pack(self._id_dtype) for rank, request in enumerate(requests)]
        asked = self._communicator.exchange(messages, "nodes")
        packed = []
        for message in asked:
            request = Request.unpack(message, len(topo.edge_types), len(topo.node_types), self._id_dtype)
            packed.append(none if request is None else
                          self._picker.answer(request).pack(self._dtypes(request.fanouts)))  # fmt: skip
        own = self._picker.answer(requests[own_rank])
        received = self._communicator.exchange(packed, "edges")
        return [own if rank == own_rank else Answer.unpack(message, items[rank].numel(), self._dtypes(fanouts))
                for rank, message in enumerate(received)]  # fmt: skip

    def _dtypes(self, fanouts: np.ndarray) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Of counts, neighbors and edge ids on the wire."""
        is_small = len(fanouts) > 0 and fanouts.min() >= 0 and fanouts.max() <= _SMALL
        return torch.uint8 if is_small else torch.int32, self._id_dtype, self._edge_dtype

    def _find_owners(self, front: Any) -> Tensor:
        parts = [self.part.owners(kind, rows) for kind, rows in
                 zip(self._placed.topo.node_types, front.rows.split(front.counts.tolist()), strict=True)]  # fmt: skip
        return torch.cat(parts) if parts else front.rows

    def _ask(self, front: Any, start: Seeds, owners: Tensor, fanouts: np.ndarray, key: int, hop: int
             ) -> tuple[list[Request], list[Tensor]]:  # fmt: skip
        """(what to ask each owner, where its nodes stand in the frontier)."""
        requests, places = [], []
        ends = torch.from_numpy(np.concatenate([[0], np.cumsum(front.counts)])).to(owners.device)
        for rank in range(self.part.num_parts):
            chosen = (owners == rank).nonzero().view(-1)
            counts = np.diff(torch.searchsorted(chosen, ends).cpu().numpy())
            trees = front.trees[chosen] if front.trees.numel() else front.trees
            times = start.times[trees] if start.times.numel() and trees.numel() else start.times[:0]
            requests.append(Request(key, hop, fanouts, counts, front.rows[chosen], trees, times))
            places.append(chosen)
        return requests, places

    def _join(self, work: np.ndarray, entries: np.ndarray, front: Any, start: Seeds, items: list[Tensor],
              found: list[Answer]) -> Picked:  # fmt: skip
        """The edges of all owners in the order of the work list."""
        num_items, device = int(work[-COLUMNS + FIRST]), front.rows.device
        counts = torch.zeros(num_items, dtype=torch.int64, device=device)
        for own, part in zip(items, found, strict=True):
            counts[own] = part.counts
        offsets = torch.zeros(num_items + 1, dtype=torch.int64, device=device)
        torch.cumsum(counts, 0, out=offsets[1:])
        total = int(offsets[-1])
        sources, ids = torch.empty(2, total, dtype=torch.int64, device=device).unbind()
        for own, part in zip(items, found, strict=True):
            # Where the edges of its items begin, less where they begin in the answer.
            shifts = offsets[own] - (part.counts.cumsum(0) - part.counts)
            at = shifts.repeat_interleave(part.counts) + torch.arange(part.sources.numel(), device=device)
            sources[at], ids[at] = part.sources, part.ids
        # Of each item: the local id of its node, and what leads from the id of a neighbor to its identity.
        sizes = torch.from_numpy(np.diff(work.reshape(-1, COLUMNS)[:, FIRST])).to(device)
        columns = [entries[:, FIRST], entries[:, LOCAL], entries[:, FRONT],
                   entries[:, SOURCE_BASE] - entries[:, SOURCE_START]]  # fmt: skip
        table = torch.from_numpy(np.stack(columns)).to(device)
        first, local, begin, base = table.repeat_interleave(sizes, dim=1)
        place = torch.arange(num_items, device=device) - first
        if front.trees.numel():
            base = base + (front.trees[begin + place] << start.tree_shift)
        targets = (local + place).repeat_interleave(counts)
        sources += base.repeat_interleave(counts)
        ends = offsets[torch.from_numpy(work.reshape(-1, COLUMNS)[:, FIRST].copy()).to(device)]
        return Picked(sources, ids, targets, ends, offsets)


def _list_items(entries: np.ndarray, expanded: np.ndarray, counts: np.ndarray, places: Tensor, fronts: np.ndarray
                ) -> Tensor:  # fmt: skip
    """Items of an owner's answer, relation after relation, as places in the work list.

    Args:
        entries: The work list's entries.
        expanded: Node type that each relation expands.
        counts: Nodes asked of the owner by type.
        places: Where they stand in the frontier, type after type.
        fronts: Nodes of the frontier by type.
    """
    begins, own_ends = np.cumsum(fronts) - fronts, np.cumsum(counts)
    items = []
    for entry in entries:
        kind = int(expanded[entry[RELATION]])
        own = places[int(own_ends[kind] - counts[kind]) : int(own_ends[kind])]
        items.append(own - int(begins[kind]) + int(entry[FIRST]))
    return torch.cat(items) if items else places[:0]

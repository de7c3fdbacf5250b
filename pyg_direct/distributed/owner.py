"""What the owner of nodes does for a hop of another process: pick the edges of their rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.distributed.message import Unpacker, pack
from pyg_direct.distributed.part import GraphPart, PlacedPart
from pyg_direct.kernels.worklist import COLUMNS, FIRST
from pyg_direct.ops.general import Frontier, Rows, Rules, pick_edges
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.worklist import list_work

# Words of a request before the fanouts of the relations and the counts of the types.
_HEADER = 4
_HAS_TREES, _HAS_TIMES = 1, 2


class Request(NamedTuple):
    """Nodes whose edges are asked for, type after type.

    Attributes:
        key, hop: Of the draws.
        fanouts: By relation, int64 `[R]`.
        counts: Nodes of each type, int64 `[T]`.
        rows: Ids within their types, int64 `[F]`.
        trees: Trees they belong to, int64 `[F]`; empty where trees are not told apart.
        times: Times of these trees, int64 `[F]`; empty without times.
    """

    key: int
    hop: int
    fanouts: np.ndarray
    counts: np.ndarray
    rows: Tensor
    trees: Tensor
    times: Tensor

    def pack(self, id_dtype: torch.dtype) -> Tensor:
        """As bytes; nothing where nothing is asked for."""
        if not self.counts.any():
            return torch.empty(0, dtype=torch.uint8, device=self.rows.device)
        flags = _HAS_TREES * (self.trees.numel() > 0) + _HAS_TIMES * (self.times.numel() > 0)
        # The key as two words, since tensors know signed ones only.
        words = [self.key >> 32, self.key & 0xFFFFFFFF, self.hop, flags, *self.fanouts.tolist(), *self.counts.tolist()]
        header = torch.tensor(words, dtype=torch.int64, device=self.rows.device)
        return pack([header, self.times, self.rows.to(id_dtype), self.trees.to(torch.int32)])

    @classmethod
    def unpack(cls, message: Tensor, num_relations: int, num_types: int, id_dtype: torch.dtype) -> Request | None:
        """What the bytes say; None where nothing is asked for."""
        if not message.numel():
            return None
        unpacker = Unpacker(message)
        words = unpacker.take(torch.int64, _HEADER + num_relations + num_types).tolist()
        high, low, hop, flags = words[:_HEADER]
        fanouts, counts = np.array(words[_HEADER : _HEADER + num_relations]), np.array(words[_HEADER + num_relations :])
        total = int(counts.sum())
        times = unpacker.take(torch.int64, total if flags & _HAS_TIMES else 0)
        rows = unpacker.take(id_dtype, total).long()
        trees = unpacker.take(torch.int32, total if flags & _HAS_TREES else 0).long()
        return cls((high << 32) | low, hop, fanouts.astype(np.int64), counts.astype(np.int64), rows, trees, times)


class Answer(NamedTuple):
    """Edges of a request, relation after relation, node after node.

    Attributes:
        counts: Edges of each (relation, node) that has a fanout, int64 `[I]`.
        sources: Neighbors in the id space of all types, int64 `[E']`.
        ids: Edge ids within the relation, int64 `[E']`.
    """

    counts: Tensor
    sources: Tensor
    ids: Tensor

    def pack(self, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> Tensor:
        """As bytes."""
        return pack([array.to(dtype) for array, dtype in zip(self, dtypes, strict=True)])

    @classmethod
    def unpack(cls, message: Tensor, num_items: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> Answer:
        """What the bytes say of so many items."""
        unpacker = Unpacker(message)
        counts = unpacker.take(dtypes[0], num_items).long()
        total = int(counts.sum())
        return cls(counts, unpacker.take(dtypes[1], total).long(), unpacker.take(dtypes[2], total).long())


class Picker:
    """Picks the edges of the nodes of a part, as one machine would.

    Args:
        part: The part.
        placed: Its rows for the recipe.
        rows: The arrays that are read of them.
        flags: TIMED and WEIGHTED of each relation, int64 `[R]`.
        rules: How edges are chosen.
    """

    def __init__(self, part: GraphPart, placed: PlacedPart, rows: Rows, flags: np.ndarray, rules: Rules) -> None:
        self._part, self._placed, self._rows, self._flags, self._rules = part, placed, rows, flags, rules

    @classmethod
    def of(cls, part: GraphPart, placed: PlacedPart, plan: GeneralPlan) -> Picker:
        """One that picks as a plan does."""
        return cls(part, placed, plan.rows, plan.flags, plan.rules)

    def answer(self, request: Request) -> Answer:
        """The edges that a request asks for.

        Raises:
            IdError: a node is not of this part.
        """
        topo, device = self._placed.topo, self._placed.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        begins = np.cumsum(request.counts) - request.counts
        # Targets come back as places in the request, neighbors in the id space of all types.
        _, work = list_work(topo, self._flags, request.fanouts, request.counts, begins, topo.type_starts)
        if work[-COLUMNS + FIRST] == 0:
            return Answer(none, none, none)
        rows = request.rows.split(request.counts.tolist())
        places = torch.cat([self._part.tables[kind].locate(own) for kind, own in
                            zip(topo.node_types, rows, strict=True)])  # fmt: skip
        times = none
        if request.times.numel():
            times = request.times.new_zeros(int(request.trees.max()) + 1)
            times[request.trees] = request.times
        frontier = Frontier(request.rows, request.trees, times, 0, places)
        picked = pick_edges(self._rows, work, frontier, self._rules, key=request.key, hop=request.hop)
        assert picked.offsets is not None
        total = int(picked.offsets[-1])
        sources = picked.sources[:total]
        if request.trees.numel():
            # Identities carry the number of the tree, which the one who asks knows.
            sources = sources - request.trees[picked.targets[:total]]
        return Answer(picked.offsets.diff(), sources, picked.ids[:total])

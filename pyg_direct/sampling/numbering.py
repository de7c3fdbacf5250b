"""Local ids of the nodes of a batch: within each type, seeds first, then hop after hop, ascending within a hop.

Nodes come as identities (`kernels/worklist.py`). A hop enters its sources, learns how many are new of each type, and
then settles them. Two ways to find the new ones stand in `hashed.py` and `tabled.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import identity as kernels
from pyg_direct.kernels.state import FAR
from pyg_direct.ops.launch import cpu_chunks, grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.upload import upload


class Space(NamedTuple):
    """The identities of a batch: type, tree and node in bits of their own; or ids, where trees are not told apart.

    Attributes:
        bases: Where each type begins, and the end of the last, int64 `[T + 1]`.
        tree_shift: Place of the tree among the bits of an identity.
        tree_bits: Bits of a tree; 0 where trees are not told apart.
    """

    bases: Tensor
    tree_shift: int
    tree_bits: int


class Settled(NamedTuple):
    """New nodes of a hop, type after type, and local ids of all its sources.

    Attributes:
        rows, trees: Ids within the types, and trees (empty where not told apart), int64 `[M]`.
        locals: Local ids of the sources, int64 `[E']`.
    """

    rows: Tensor
    trees: Tensor
    locals: Tensor


class Numbering:
    """What both ways of numbering share: slots that hold local ids."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._known = np.zeros(space.bases.numel() - 1, np.int64)
        self._table = space.bases[:0]
        self._region = 0
        # Of the sources of a hop; the new ones among them, ascending on a CPU, and where these lie.
        self._slots, self._new, self._new_slots = self._table, self._table, self._table
        self._local_of_slot: Tensor

    def _start(self, seeds: Tensor, slots: Tensor, counts: np.ndarray) -> None:
        """Local ids of seeds: places among those of their type; of a repeated one, the first."""
        if seeds.numel() > 0:
            places = [np.arange(count, dtype=np.int32) for count in counts.tolist() if count > 0]
            self._local_of_slot.index_fill_(0, slots, FAR)
            self._local_of_slot.scatter_reduce_(0, slots, upload(np.concatenate(places), seeds.device), "amin")
        self._known = counts.copy()

    def list_places(self, counts: np.ndarray) -> np.ndarray:
        """What `settle` needs on the device for so many new nodes of each type, int64 `[2 T]`: where those of each type
        begin among them, and its local ids so far."""
        return np.concatenate([np.cumsum(counts) - counts, self._known])

    def settle(self, num_sources: int, counts: np.ndarray, places: Tensor | None = None) -> Settled:
        """Give the new nodes their local ids, `counts` of each type; `places` of `list_places` may be there already."""
        new = self._sort_new(int(counts.sum()))
        if places is None:
            places = upload(self.list_places(counts), new.device)
        rows, trees = self._assign(new, places)
        self._known = self._known + counts
        return Settled(rows, trees, self._local_of_slot.index_select(0, self._slots[:num_sources]).long())

    def _assign(self, new: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """(ids within their types, trees) of identities, type after type, which get local ids in that order."""
        rows = torch.empty_like(new)
        trees = torch.empty_like(new) if self._space.tree_bits > 0 else new[:0]
        if new.numel() > 0:
            half = table.numel() // 2
            places, out = (table[:half], table[half:]), (rows, trees, self._local_of_slot)
            if runs_on_gpu(new):
                run_gpu(kernels.settle_gpu, grid_for(new.numel(), new), new, *places, *self._space, self._table,
                        self._region, *out)  # fmt: skip
            else:
                run_cpu(kernels.settle_cpu, new, self._new_slots, *places, *self._space[:2], cpu_chunks(), *out)
        return rows, trees

    def _sort_new(self, count: int) -> Tensor:
        """The new identities of this hop, ascending."""
        raise NotImplementedError

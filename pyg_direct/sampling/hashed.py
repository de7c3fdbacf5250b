"""Numbering through a hash table of the identities of a batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import identity as kernels
from pyg_direct.kernels.jit import THREADS
from pyg_direct.kernels.state import FAR
from pyg_direct.ops.launch import cpu_chunks, grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.upload import upload
from pyg_direct.sampling.numbering import Numbering, Space

SMALLEST_TABLE = 1 << 10
# Slots of a region up to which a hash table is one region.
_SMALL_REGION = 1 << 9


class HashNumbering(Numbering):
    """Numbers identities through a hash table; its memory depends on the batch alone."""

    def __init__(self, space: Space, num_slots: int = SMALLEST_TABLE) -> None:
        super().__init__(space)
        self._most_regions = 1 if runs_on_gpu(space.bases) else 1 << (cpu_chunks() - 1).bit_length()
        self._num_entries = 0
        self._allocate(num_slots)

    @property
    def num_slots(self) -> int:
        """Size of the table, which a later batch may begin with."""
        return self._table.numel()

    def _allocate(self, size: int) -> None:
        device = self._space.bases.device
        self._table = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._local_of_slot = torch.full((size,), FAR, dtype=torch.int32, device=device)
        self._region = size // self._most_regions if size >= _SMALL_REGION * self._most_regions else size

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """Number the seeds, type after type; `places` of `list_places` may be on the device already."""
        if seeds.numel() > 0:
            self.enter(seeds, seeds.new_full((1,), seeds.numel()))
            if self._space.tree_bits > 0 and runs_on_gpu(seeds):
                # None repeats in a tree of its own.
                places = upload(self.list_places(counts), seeds.device) if places is None else places
                self._assign(seeds, places)
            else:
                self._start(seeds, self._slots[: seeds.numel()], counts)
        self._known = counts.copy()

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """Enter the first sources, as many as the last of `ends` says, and note their slots.

        Returns:
            How many are new, and how many of each type, int64 `[1 + T]`.
        """
        self._make_room(sources.numel())
        self._slots, self._new = sources.new_empty(2, sources.numel()).unbind()
        # A bound, until the hop is settled.
        self._num_entries += sources.numel()
        return self._enter_on_gpu(sources, ends) if runs_on_gpu(sources) else self._enter_on_cpu(sources)

    def _enter_on_gpu(self, sources: Tensor, ends: Tensor) -> Tensor:
        bases = self._space.bases
        new_counts = torch.zeros(bases.numel(), dtype=torch.int64, device=sources.device)
        run_gpu(kernels.insert_gpu, grid_for(sources.numel(), sources), ends, sources, *self._space,
                self._table, self._slots, self._new, new_counts)  # fmt: skip
        if bases.numel() - 1 > THREADS:
            found = torch.searchsorted(self._sort_new(int(new_counts[0])), bases)
            new_counts[1:] = found.diff()
        return new_counts

    def _enter_on_cpu(self, sources: Tensor) -> Tensor:
        regions = self._table.numel() // self._region
        new, new_slots = np.empty((2, regions, sources.numel()), np.int64)
        counts = np.empty(regions, np.int64)
        run_cpu(kernels.insert_cpu, sources, *self._space[1:], self._table, self._region, self._slots, new, new_slots,
                counts)  # fmt: skip
        if counts.min() < 0:
            # Too many identities begin their search in one region: one region holds them all.
            self._most_regions = 1
            self._rebuild(self._table.numel())
            return self.enter(sources, sources)
        found, places = (np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
                         for rows in (new, new_slots))  # fmt: skip
        spare, spare_places = np.empty((2, len(found)), np.int64)
        bits = int(self._space.bases[-1]).bit_length()
        if run_cpu(kernels.sort_cpu, found, places, spare, spare_places, bits):
            found, places = spare, spare_places
        self._new, self._new_slots = torch.from_numpy(found), torch.from_numpy(places)
        bounds = np.searchsorted(found, self._space.bases.numpy())
        return torch.from_numpy(np.concatenate([[len(found)], np.diff(bounds)]).astype(np.int64))

    def _sort_new(self, count: int) -> Tensor:
        if runs_on_gpu(self._new):
            return self._new[:count].sort().values
        return self._new

    def _make_room(self, more: int) -> None:
        if 2 * (self._num_entries + more) <= self._table.numel():
            return
        self._rebuild(1 << (4 * (self._num_entries + more)).bit_length())

    def _rebuild(self, size: int) -> None:
        """Move the settled identities to a table of another size."""
        is_settled = (self._table >= 0) & (self._local_of_slot != FAR)
        items, local_ids = self._table[is_settled], self._local_of_slot[is_settled]
        self._num_entries = 0
        self._allocate(size)
        if items.numel() > 0:
            self.enter(items, items.new_full((1,), items.numel()))
            self._local_of_slot[self._slots] = local_ids

    def find(self, sources: Tensor) -> Tensor:
        """Local id of every source, -1 for one that is not in the batch."""
        slots = torch.empty_like(sources)
        if sources.numel() > 0:
            arguments = sources, *self._space[1:], self._table, self._region, slots
            if runs_on_gpu(sources):
                run_gpu(kernels.find_slots_gpu, grid_for(sources.numel(), sources), *arguments)
            else:
                run_cpu(kernels.find_slots_cpu, *arguments)
        return torch.where(slots >= 0, self._local_of_slot[slots.clamp_(min=0)].long(), -1)

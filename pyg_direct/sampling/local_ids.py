"""Local ids of the nodes of a batch: within each type, seeds first, then hop after hop, ascending within a hop.

Nodes come as identities (`kernels/sampling/worklist.py`). A hop enters its sources, learns how many are new of each
type, and then settles them. On a CPU `TableNumbering` finds the new ones by bitmaps and a table over all nodes of a
graph; if these would be too large, or trees are told apart, `SortedNumbering` sorts the sources. Captured plans on a
GPU number nodes in their kernels; for graphs in parts `TorchNumbering` sorts there.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels.batch_counters import FAR
from pyg_direct.kernels.local_ids import new_nodes, sorted_sources
from pyg_direct.ops.local_ids.relabel_nodes import num_words
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu

# Above all identities.
_LAST = 2**63 - 1


class Space(NamedTuple):
    """The identities of a batch: type, tree and node in bits of their own; or ids, if trees are not told apart.

    Attributes:
        bases: Start of each type, and the end of the last, int64 `[T + 1]`.
        tree_shift: Place of the tree among the bits of an identity.
        tree_bits: Bits of a tree; 0 if trees are not told apart.
    """

    bases: Tensor
    tree_shift: int
    tree_bits: int


class Settled(NamedTuple):
    """New nodes of a hop, type after type, and local ids of all its sources.

    Attributes:
        rows, trees: Ids within the types, and trees (empty if not told apart), int64 `[M]`.
        locals: Local ids of the sources, int64 `[E']`.
    """

    rows: Tensor
    trees: Tensor
    locals: Tensor


class SortedNumbering:
    """Numbering of identities by sorting the sources of each hop, on a CPU."""

    def __init__(self, space: Space) -> None:
        self._space, self._bases = space, space.bases.numpy()
        self._bits = max(1, int(self._bases[-1] - 1).bit_length())
        self._of_type = np.zeros(len(self._bases) - 1, np.int64)
        none = self._bases[:0]
        # Known identities, ascending, and their local ids; and the same of the last hop.
        self._known, self._new = (none, none), (none, none)
        self._settled = Settled(space.bases[:0], space.bases[:0], space.bases[:0])

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """Number the seeds, type after type; `places` of `list_places` may be on the device already."""
        items = seeds.numpy()
        numbers = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
        if len(items) > 0 and not (items[1:] > items[:-1]).all():
            items, first = np.unique(items, return_index=True)
            numbers = numbers[first]
        self._known, self._of_type = (items, numbers), counts.copy()

    def list_places(self, counts: np.ndarray) -> np.ndarray:
        """Nothing, as nodes are settled when they are entered."""
        return counts[:0]

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """Give all sources their local ids.

        Returns:
            How many are new, and how many of each type, int64 `[1 + T]`.
        """
        self._merge()
        size = sources.numel()
        keys, spare_keys, new, new_locals, rows, locals_ = np.empty((6, size), np.int64)
        order, spare_order = np.empty((2, size), np.int32 if size < 2**31 else np.int64)
        trees = np.empty(size if self._space.tree_bits > 0 else 0, np.int64)
        counts = np.empty(len(self._bases), np.int64)
        run_cpu(sorted_sources.number_sources_cpu, sources, self._bases, self._space.tree_shift, self._bits,
                *self._known, self._of_type, cpu_chunks(), keys, order, spare_keys, spare_order, new, new_locals, rows,
                trees, locals_, counts)  # fmt: skip
        number = int(counts[0])
        self._new = new[:number], new_locals[:number]
        self._settled = Settled(*(torch.from_numpy(part) for part in (rows[:number], trees[:number], locals_)))
        return torch.from_numpy(counts)

    def settle(self, num_sources: int, counts: np.ndarray, places: Tensor | None = None) -> Settled:
        """Return the new nodes of the hop that was entered, `counts` of each type, and the local ids of its sources."""
        self._of_type = self._of_type + counts
        return self._settled

    def find(self, sources: Tensor) -> Tensor:
        """Local id of every source, -1 for one that is not in the batch."""
        self._merge()
        locals_ = torch.empty_like(sources)
        run_cpu(sorted_sources.find_known_cpu, sources, *self._known, locals_)
        return locals_

    def _merge(self) -> None:
        """Make the nodes of the last hop known."""
        if len(self._new[0]) > 0:
            out = np.empty((2, len(self._known[0]) + len(self._new[0])), np.int64)
            run_cpu(sorted_sources.merge_known_cpu, *self._known, *self._new, *out)
            self._known, self._new = (out[0], out[1]), (out[0, :0], out[1, :0])


class TorchNumbering:
    """Numbering of identities by sorting the sources of each hop with torch, on a GPU, without a wait."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._of_type = np.zeros(space.bases.numel() - 1, np.int64)
        none = space.bases[:0]
        # As of `SortedNumbering`; a repeated seed stands here as often, the first place before the others.
        self._known, self._new = (none, none), (none, none)
        self._settled = Settled(none, none, none)

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """As `SortedNumbering.start`."""
        numbers = np.arange(seeds.numel()) - np.repeat(np.cumsum(counts) - counts, counts)
        items, order = seeds.sort(stable=True)
        self._known, self._of_type = (items, upload(numbers, seeds.device)[order]), counts.copy()

    def list_places(self, counts: np.ndarray) -> np.ndarray:
        """As `SortedNumbering.list_places`."""
        return counts[:0]

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """As `SortedNumbering.enter`, of the first sources, as many as the last of `ends` says."""
        self._merge()
        bases, size = self._space.bases, sources.numel()
        if size == 0:
            self._settled = Settled(sources, sources, sources)
            return torch.zeros_like(bases)
        places = torch.arange(size, device=sources.device)
        items, order = torch.where(places < ends[-1], sources, _LAST).sort()
        local_ids = self._look_up(items)
        is_new = (local_ids < 0) & (items != _LAST)
        is_new[1:] &= items[1:] != items[:-1]
        numbers = is_new.cumsum(0) - 1
        # Sources that are not new go behind the end.
        new = torch.full((size + 1,), _LAST, device=sources.device).scatter_(
            0, torch.where(is_new, numbers, size), items)[:size]  # fmt: skip
        begins = torch.searchsorted(new, bases)
        kinds = (torch.searchsorted(bases, new, right=True) - 1).clamp_(max=bases.numel() - 2)
        nodes = new - bases[kinds]
        trees = nodes >> self._space.tree_shift
        new_locals = (upload(self._of_type, sources.device) - begins[:-1])[kinds] + places
        local_ids = torch.where(local_ids < 0, new_locals[numbers.clamp(min=0)], local_ids)
        self._settled = Settled(nodes - (trees << self._space.tree_shift), trees if self._space.tree_bits else new[:0],
                                torch.empty_like(local_ids).scatter_(0, order, local_ids))  # fmt: skip
        self._new = new, new_locals
        return torch.cat([numbers[-1:] + 1, begins.diff()])

    def settle(self, num_sources: int, counts: np.ndarray, places: Tensor | None = None) -> Settled:
        """As `SortedNumbering.settle`, of so many sources."""
        self._of_type = self._of_type + counts
        count, (new, new_locals) = int(counts.sum()), self._new
        self._new = new[:count], new_locals[:count]
        return Settled(self._settled.rows[:count], self._settled.trees[:count], self._settled.locals[:num_sources])

    def find(self, sources: Tensor) -> Tensor:
        """As `SortedNumbering.find`."""
        self._merge()
        return self._look_up(sources)

    def _look_up(self, items: Tensor) -> Tensor:
        """Local ids of known identities, -1 of others."""
        known, local_ids = self._known
        if known.numel() == 0:
            return torch.full_like(items, -1)
        at = torch.searchsorted(known, items).clamp_(max=known.numel() - 1)
        return torch.where(known[at] == items, local_ids[at], -1)

    def _merge(self) -> None:
        """Make the nodes of the last hop known."""
        if self._new[0].numel() > 0:
            items, order = torch.cat([self._known[0], self._new[0]]).sort(stable=True)
            self._known = items, torch.cat([self._known[1], self._new[1]])[order]
            self._new = items[:0], items[:0]


# Share of memory that a table of local ids by node may take on a GPU, and its bytes on a CPU.
TABLE_SHARE = 1 / 32
_TABLE_BYTES = 1 << 30


class Scratch:
    """Memory by the number of nodes, empty between batches: bitmaps, uint32 `[W]`, and local ids, int32 `[N]`."""

    def __init__(self, num_ids: int) -> None:
        words = num_words(num_ids)
        self.seen, self.fresh = torch.zeros(2, words, dtype=torch.int32, device="cpu").view(torch.uint32).unbind()
        self.local_of_id = torch.full((num_ids,), -1, dtype=torch.int32, device="cpu")

    def cut(self, num_ids: int) -> Scratch:
        """Return the memory of the first ids; this object if it has no more."""
        if num_ids == self.local_of_id.numel():
            return self
        part, words = copy(self), num_words(num_ids)
        part.seen, part.fresh = self.seen[:words], self.fresh[:words]
        part.local_of_id = self.local_of_id[:num_ids]
        return part


class TableNumbering:
    """Numbering of nodes through bitmaps and a table over the id space, on a CPU; for trees that are not told apart."""

    def __init__(self, space: Space, scratch: Scratch) -> None:
        self._space, self._scratch = space, scratch
        self._known = np.zeros(space.bases.numel() - 1, np.int64)
        self._sources = self._new = space.bases[:0]
        self._entered: list[Tensor] = []

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """As `SortedNumbering.start`: the local id of a seed is its place among the seeds of its type, of a repeated
        seed the first."""
        self._entered.append(seeds)
        run_cpu(new_nodes.mark_fresh_cpu, seeds, self._scratch.seen[None], cpu_chunks())
        if seeds.numel() > 0:
            own = [np.arange(count, dtype=np.int32) for count in counts.tolist() if count > 0]
            self._scratch.local_of_id.index_fill_(0, seeds, FAR)
            self._scratch.local_of_id.scatter_reduce_(0, seeds, torch.from_numpy(np.concatenate(own)), "amin")
        self._known = counts.copy()

    def list_places(self, counts: np.ndarray) -> np.ndarray:
        """List the input of `settle` for so many new nodes of each type, int64 `[2 T]`.

        The starts of the types among the new nodes come first, then their numbers of local ids so far.
        """
        return np.concatenate([np.cumsum(counts) - counts, self._known])

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """Note the sources.

        Returns:
            How many are new, and how many of each type, int64 `[1 + T]`.
        """
        self._sources, scratch, bases = sources, self._scratch, self._space.bases
        sums = np.zeros(cpu_chunks(), np.int64)
        run_cpu(new_nodes.mark_fresh_cpu, sources, scratch.fresh[None], len(sums))
        new = np.empty(min(sources.numel(), scratch.local_of_id.numel()), np.int64)
        run_cpu(new_nodes.emit_fresh_cpu, scratch.fresh[None], scratch.seen, sums, new, 0)
        found = new[: sums.sum()]
        self._new = torch.from_numpy(found)
        bounds = np.searchsorted(found, bases.numpy())
        return torch.from_numpy(np.concatenate([[len(found)], np.diff(bounds)]).astype(np.int64))

    def settle(self, num_sources: int, counts: np.ndarray, places: Tensor | None = None) -> Settled:
        """Give the new nodes their local ids, `counts` of each type; `places` of `list_places` may be there already."""
        table, new = torch.from_numpy(self.list_places(counts)) if places is None else places, self._new
        self._entered.append(new)
        rows, half = torch.empty_like(new), table.numel() // 2
        if new.numel() > 0:
            run_cpu(new_nodes.settle_nodes_cpu, new, table[:half], table[half:], self._space.bases, cpu_chunks(), rows,
                    self._scratch.local_of_id)  # fmt: skip
        self._known = self._known + counts
        return Settled(rows, new[:0], self._scratch.local_of_id.index_select(0, self._sources[:num_sources]).long())

    def find(self, sources: Tensor) -> Tensor:
        """As `SortedNumbering.find`."""
        return self._scratch.local_of_id[sources].long()

    def close(self) -> None:
        """Empty the scratch for the next batch."""
        for items in self._entered:
            self._scratch.seen.numpy()[items.numpy() >> 5] = 0
            self._scratch.local_of_id[items] = -1


def fits_table(num_ids: int, device: torch.device) -> bool:
    """Report whether a table of local ids over the id space is worth its memory."""
    if device.type == "cpu":
        return 4 * num_ids <= _TABLE_BYTES
    return 4 * num_ids <= TABLE_SHARE * torch.cuda.get_device_properties(device).total_memory

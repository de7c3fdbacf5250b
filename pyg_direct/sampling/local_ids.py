"""Local ids of the nodes of a batch: within each type, seeds first, then hop after hop, ascending within a hop.

Nodes come as identities (`kernels/sampling/worklist.py`). A hop enters its sources, learns how many are new of each
type, and then settles them. The new nodes are found in three ways. `TableNumbering` uses bitmaps and a table over all
nodes of a graph. Where these would be too large, or trees are told apart, `HashNumbering` uses a hash table of the
identities of a batch on a GPU, and `SortedNumbering` sorts them on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.compiler.jit import THREADS
from pyg_direct.kernels.batch_counters import FAR, NODES
from pyg_direct.kernels.local_ids import hash_table as kernels, new_nodes, sorted_sources
from pyg_direct.ops.local_ids.relabel import num_words
from pyg_direct.ops.rows.upload import upload
from pyg_direct.ops.run_kernel import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu


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
    """What numberings through a table share: slots that hold local ids."""

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


SMALLEST_TABLE = 1 << 10


class HashNumbering(Numbering):
    """Numbers identities through a hash table, on a GPU; its memory depends on the batch alone."""

    def __init__(self, space: Space, num_slots: int = SMALLEST_TABLE) -> None:
        super().__init__(space)
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
        self._region = size

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """Number the seeds, type after type; `places` of `list_places` may be on the device already."""
        if seeds.numel() > 0:
            self.enter(seeds, seeds.new_full((1,), seeds.numel()))
            if self._space.tree_bits > 0:
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
        bases = self._space.bases
        new_counts = torch.zeros(bases.numel(), dtype=torch.int64, device=sources.device)
        run_gpu(kernels.insert_gpu, grid_for(sources.numel(), sources), ends, sources, *self._space,
                self._table, self._slots, self._new, new_counts)  # fmt: skip
        if bases.numel() - 1 > THREADS:
            found = torch.searchsorted(self._sort_new(int(new_counts[0])), bases)
            new_counts[1:] = found.diff()
        return new_counts

    def _sort_new(self, count: int) -> Tensor:
        return self._new[:count].sort().values

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
            run_gpu(kernels.find_slots_gpu, grid_for(sources.numel(), sources), sources, *self._space[1:], self._table,
                    self._region, slots)  # fmt: skip
        return torch.where(slots >= 0, self._local_of_slot[slots.clamp_(min=0)].long(), -1)


class SortedNumbering:
    """Numbers identities by sorting the sources of each hop, on a CPU."""

    def __init__(self, space: Space) -> None:
        self._space, self._bases = space, space.bases.numpy()
        self._bits = max(1, int(self._bases[-1] - 1).bit_length())
        self._of_type = np.zeros(len(self._bases) - 1, np.int64)
        none = self._bases[:0]
        # Known identities, ascending, and their local ids; and those of the last hop.
        self._known, self._new = (none, none), (none, none)
        self._settled = Settled(space.bases[:0], space.bases[:0], space.bases[:0])

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """As `HashNumbering.start`."""
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
        """The new nodes of the hop that was entered, `counts` of each type, and the local ids of its sources."""
        self._of_type = self._of_type + counts
        return self._settled

    def find(self, sources: Tensor) -> Tensor:
        """As `HashNumbering.find`."""
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


# Share of memory that a table of local ids by node may take on a GPU, and its bytes on a CPU.
TABLE_SHARE = 1 / 32
_TABLE_BYTES = 1 << 30


class Scratch:
    """Memory by the number of nodes, empty between batches: bitmaps, uint32 `[W]`, and local ids, int32 `[N]`."""

    def __init__(self, num_ids: int, device: torch.device) -> None:
        words = num_words(num_ids)
        self.seen = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.fresh = torch.zeros(words, dtype=torch.int32, device=device).view(torch.uint32)
        self.local_of_id = torch.full((num_ids,), -1, dtype=torch.int32, device=device)
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def wait(self) -> None:
        """Come after the batch before, which may be of another stream."""
        if self._last is not None and self._last[0] != torch.cuda.current_stream(self.seen.device):
            self._last[1].wait()

    def note(self) -> None:
        """Remember the batch that was enqueued."""
        if self.seen.is_cuda:
            event = torch.cuda.Event() if self._last is None else self._last[1]
            event.record()
            self._last = torch.cuda.current_stream(self.seen.device), event


class TableNumbering(Numbering):
    """Numbers nodes through bitmaps and a table over the whole id space; for trees that are not told apart."""

    def __init__(self, space: Space, scratch: Scratch) -> None:
        super().__init__(space)
        scratch.wait()
        self._scratch = scratch
        self._local_of_slot = scratch.local_of_id
        self._entered: list[Tensor] = []

    def start(self, seeds: Tensor, counts: np.ndarray, places: Tensor | None = None) -> None:
        """As `HashNumbering.start`."""
        self._entered.append(seeds)
        if runs_on_gpu(seeds):
            if seeds.numel() > 0:
                end = seeds.new_full((1,), seeds.numel())
                run_gpu(kernels.mark_identities_gpu, grid_for(seeds.numel(), seeds), end, seeds, self._scratch.seen)
        else:
            run_cpu(new_nodes.mark_fresh_cpu, seeds, self._scratch.seen[None], cpu_chunks())
        self._start(seeds, seeds, counts)

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """As `HashNumbering.enter`."""
        self._slots = sources
        scratch, bases = self._scratch, self._space.bases
        most = min(sources.numel(), scratch.local_of_id.numel())
        if not runs_on_gpu(sources):
            sums = np.zeros(cpu_chunks(), np.int64)
            run_cpu(new_nodes.mark_fresh_cpu, sources, scratch.fresh[None], len(sums))
            new = np.empty(most, np.int64)
            run_cpu(new_nodes.emit_fresh_cpu, scratch.fresh[None], scratch.seen, sums, new, 0)
            found = new[: sums.sum()]
            self._new = self._new_slots = torch.from_numpy(found)
            bounds = np.searchsorted(found, bases.numpy())
            return torch.from_numpy(np.concatenate([[len(found)], np.diff(bounds)]).astype(np.int64))
        new_counts = torch.empty(bases.numel(), dtype=torch.int64, device=sources.device)
        state = torch.zeros(NODES + 2, dtype=torch.int64, device=sources.device)
        self._new = torch.empty(most, dtype=torch.int64, device=sources.device)
        no_flags, no_table = sources[:0].to(torch.uint8), scratch.local_of_id[:0]
        grid = max(1, min(full_grid(sources), -(-scratch.fresh.numel() // THREADS)))
        block_sums = torch.empty(grid, dtype=torch.int64, device=sources.device)
        run_gpu(kernels.mark_identities_gpu, grid_for(sources.numel(), sources), ends, sources, scratch.fresh)
        run_gpu(new_nodes.count_fresh_gpu, grid, scratch.fresh, scratch.seen, no_flags, block_sums)
        run_gpu(new_nodes.emit_fresh_gpu, grid, state, 0, 0, scratch.fresh, scratch.seen, no_flags, block_sums,
                no_table, self._new)  # fmt: skip
        run_gpu(kernels.count_types_gpu, 1, state, self._new, bases, new_counts)
        return new_counts

    def _sort_new(self, count: int) -> Tensor:
        new = self._new[:count]
        self._entered.append(new)
        return new

    def find(self, sources: Tensor) -> Tensor:
        """As `HashNumbering.find`."""
        return self._local_of_slot[sources].long()

    def close(self) -> None:
        """Empty the scratch for the next batch."""
        scratch = self._scratch
        for items in self._entered:
            if items.numel() == 0:
                continue
            if runs_on_gpu(items):
                run_gpu(kernels.forget_gpu, grid_for(items.numel(), items), items, scratch.seen, scratch.local_of_id)
            else:
                scratch.seen.numpy()[items.numpy() >> 5] = 0
                scratch.local_of_id[items] = -1
        scratch.note()


def fits_table(num_ids: int, device: torch.device) -> bool:
    """Whether a table of local ids over the id space is worth its memory."""
    if device.type == "cpu":
        return 4 * num_ids <= _TABLE_BYTES
    return 4 * num_ids <= TABLE_SHARE * torch.cuda.get_device_properties(device).total_memory

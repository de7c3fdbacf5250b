"""Numbering through bitmaps and a table over all nodes of a graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyg_direct.kernels import fresh, identity as kernels
from pyg_direct.kernels.jit import THREADS
from pyg_direct.kernels.state import NODES
from pyg_direct.ops.launch import cpu_chunks, full_grid, grid_for, run_cpu, run_gpu, runs_on_gpu
from pyg_direct.ops.relabel import num_words
from pyg_direct.sampling.numbering import Numbering, Space

# Share of memory that a table of local ids by node may take on a GPU, and its bytes on a CPU.
_TABLE_SHARE = 1 / 32
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
            run_cpu(fresh.mark_fresh_cpu, seeds, self._scratch.seen[None], cpu_chunks())
        self._start(seeds, seeds, counts)

    def enter(self, sources: Tensor, ends: Tensor) -> Tensor:
        """As `HashNumbering.enter`."""
        self._slots = sources
        scratch, bases = self._scratch, self._space.bases
        most = min(sources.numel(), scratch.local_of_id.numel())
        if not runs_on_gpu(sources):
            sums = np.zeros(cpu_chunks(), np.int64)
            run_cpu(fresh.mark_fresh_cpu, sources, scratch.fresh[None], len(sums))
            new = np.empty(most, np.int64)
            run_cpu(fresh.emit_fresh_cpu, scratch.fresh[None], scratch.seen, sums, new, 0)
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
        run_gpu(fresh.count_fresh_gpu, grid, scratch.fresh, scratch.seen, no_flags, block_sums)
        run_gpu(fresh.emit_fresh_gpu, grid, state, 0, 0, scratch.fresh, scratch.seen, no_flags, block_sums, no_table,
                self._new)  # fmt: skip
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
    return 4 * num_ids <= _TABLE_SHARE * torch.cuda.get_device_properties(device).total_memory

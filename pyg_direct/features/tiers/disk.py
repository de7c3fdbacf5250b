"""Rows on disk, read by threads, or from a mapped file once they are cached; to a GPU through page-locked memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import wait
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import ArgumentError, FileError, IdError
from pyg_direct.features.disk_rates import read_timeout
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tiers.base import Tier
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.rows.gather_rows import prepare_read, rows_in_units
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back
from pyg_direct.runtime.host.threads import Pool

# Each thread waits for one missing row at a time: as many threads as a disk serves requests at once.
_MOST_THREADS = 32
# If the gap between rows is at most this many bytes, the system's read-ahead continues from row to row. Then a few
# threads get the full rate of the disk, and more threads disturb each other.
_LEAST_GAP, _FEW_THREADS = 16 << 10, 8
# Fewer rows take a disk as long as it takes to wake a thread.
_LEAST_SHARE = 4
# Rows between two signs of life of a thread.
_AT_ONCE = 256
# Rows that are looked up in the page cache before a read.
_PROBES = 32
_SLOT_BYTES = 16 << 20
_SLOTS = 3


@functools.cache
def _pool(process: int) -> Pool:
    """Return the threads of this process; threads of its parent do not live in a fork."""
    return Pool(_MOST_THREADS, "pyg_direct_disk", functools.partial(set_cpu_threads, 1))


class DiskTier(Tier):
    """Rows of a file. A loop over the cores reads rows in place if the system's page cache holds them. Otherwise
    threads ask the disk for many rows at once. Each thread takes a share of them in the order of the file, which the
    system reads ahead.

    Args:
        file: The table. It is checked before every read that it has not changed.
        num_threads: Reads under way at once.
    """

    title, refusal = "file", "the file is read-only"

    def __init__(self, file: RowFile, num_threads: int = _MOST_THREADS) -> None:
        super().__init__("mmap", file.rows.shape, file.rows.dtype, torch.device("cpu"))
        self.file = file
        self._num_threads = min(num_threads, _MOST_THREADS)

    def check_sending(self) -> None:
        """Refuse to send the tier: a process opens the file itself."""
        raise ArgumentError(f"a Feature over {self.file.path} cannot be sent: call from_file in each process")

    def _read(self, ids: Tensor, out: Tensor) -> None:
        self._read_to(ids, out)

    def place(self, ids: Tensor, out: Tensor, positions: Tensor) -> None:
        """Write row `ids[i]` to `out[positions[i]]`, without temporary memory; otherwise as `read`."""
        ids, positions = check_ids("ids", ids, self.shape[0]), check_ids("positions", positions, out.shape[0])
        if out.shape[1:] != self.shape[1:] or out.dtype != self.dtype or not out.is_contiguous():
            raise ArgumentError(f"out must be contiguous rows {tuple(self.shape[1:])} of {self.dtype}, got "
                                f"{tuple(out.shape)} of {out.dtype}")  # fmt: skip
        if ids.shape != positions.shape:
            raise ArgumentError(f"positions must be as many as the {ids.numel()} ids, got {positions.numel()}")
        if ids.numel() > 0 and out.numel() > 0:
            self._read_to(ids.long(), out, positions.long())

    def _read_to(self, ids: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        self.file.check()
        if self.file.is_cached(ids[:: max(1, ids.numel() // _PROBES)].tolist()):
            # There is no wait, and no thread needs Python's lock.
            prepare_read(self.file.rows, ids, out, positions)(0, ids.numel())
            return
        ids, count = ids.long(), ids.numel()
        if bool((ids[1:] < ids[:-1]).any()):
            ids, order = ids.sort()
            positions = order if positions is None else positions[order]
        read, progress = self._prepare(ids, out, positions)
        # Compiled before many threads need it at once.
        read(0, 0)
        rows_between, row_bytes = int(ids[-1]) - int(ids[0]) - count, out[0].numel() * out.element_size()
        most = _FEW_THREADS if rows_between * row_bytes < count * _LEAST_GAP else self._num_threads
        share = -(-count // max(1, min(most, self._num_threads, count // _LEAST_SHARE)))
        pool = _pool(os.getpid())
        parts = {pool.submit(read, start, min(start + share, count)) for start in range(0, count, share)}
        while parts:
            before = dict(progress)
            done, parts = wait(parts, read_timeout(), "FIRST_COMPLETED")
            for part in done:
                part.result()
            if not done and progress == before:
                first = int(ids[min(list(progress.values()), default=0)])
                raise FileError(f"{self.file.path} gave no bytes for {read_timeout():g} seconds, at byte "
                                f"{self.file.layout.offset + first * row_bytes}: check the disk, or set "
                                "PYG_DIRECT_DISK_TIMEOUT to more seconds")  # fmt: skip

    def _prepare(self, ids: Tensor, out: Tensor, positions: Tensor | None
                 ) -> tuple[Callable[[int, int], None], dict[int, int]]:  # fmt: skip
        """Prepare a read from the file itself: a page fault of a map would wait under locks of the system.

        Returns:
            The read, and the number of the id that each call of it has come to, by its first.
        """
        progress: dict[int, int] = {}
        if not hasattr(os, "preadv"):
            return prepare_read(self.file.rows, ids, out, positions), progress
        numbers, target = ids.numpy(), rows_in_units(out, torch.uint8).numpy()
        places = (torch.arange(len(ids), device="cpu") if positions is None else positions).numpy()

        def read(begin: int, end: int) -> None:
            for first in range(begin, max(end, begin + 1), _AT_ONCE):
                progress[begin] = first
                part = slice(first, min(first + _AT_ONCE, end))
                self.file.read_rows(numbers[part], places[part], target)
            del progress[begin]

        return read, progress


class _Slot(NamedTuple):
    """Page-locked memory that rows pass through, and the event after which it may be written again."""

    block: Block
    free: torch.cuda.Event


class StagedTier(Tier):
    """Rows that the CPU reads, for a GPU, through slots of page-locked memory. One slot is copied to the GPU while the
    next is filled. The host waits for the ids and for the rows.
    """

    def __init__(self, source: Tier, device: torch.device) -> None:
        super().__init__(source.placement, source.shape, source.dtype, device)
        self.title, self.refusal, self.check_sending = source.title, source.refusal, source.check_sending  # type: ignore[method-assign]
        self.source = source
        self._row_bytes = source.shape[1:].numel() * source.dtype.itemsize
        self._slots: list[_Slot] = []

    def _read(self, ids: Tensor, out: Tensor) -> None:
        ids = ids.cpu()
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= self.shape[0]:
            out.zero_()
            raise IdError(f"ids must lie in [0, {self.shape[0]}), got {low if low < 0 else high}")
        stream = torch.cuda.current_stream(self.device)
        step = max(1, _SLOT_BYTES // max(1, self._row_bytes))
        for number, (part, target) in enumerate(zip(ids.split(step), out.split(step), strict=True)):
            slot = self._slot(number % _SLOTS)
            slot.free.synchronize()
            rows = slot.block.view_on_cpu(self.dtype, target.shape)
            try:
                self.source.read(part, rows)
            except BaseException:
                # Threads of a read that failed may still write to its slot.
                self._slots.clear()
                raise
            target.copy_(rows, non_blocking=True)
            slot.free.record(stream)

    def _slot(self, number: int) -> _Slot:
        if number == len(self._slots):
            size = max(_SLOT_BYTES, self._row_bytes)
            self._slots.append(_Slot(allocate_or_fall_back(size, "pinned", self.device), torch.cuda.Event()))
        return self._slots[number]


def file_of(tier: Tier) -> RowFile | None:
    """Return the file in which the rows of a tier lie; None for rows elsewhere."""
    source = tier.source if isinstance(tier, StagedTier) else tier
    return source.file if isinstance(source, DiskTier) else None

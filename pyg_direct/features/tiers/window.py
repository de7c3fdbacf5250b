"""Rows of a file that planned batches read: in memory before the batches ask for them, read once for all of them.

A loader knows the ids of its next batches. It claims their rows for a window of batches, and reads all of them that are
not in memory in the order of the file. A part of them is read as soon as batches of the window before give up as many
rows. So nearly all of the memory holds one window. Rows that a later batch claims too stay in memory. This is Belady's
rule (IBM Systems Journal 5(2), 1966) for all batches that are known; among the others the rows claimed last stay.

If the memory holds all rows, none is given up. Once batches have asked for half of them, the others are read too, in
order. Batches wait for these only if they lie between rows of the window. Kernels then read the table as one in memory,
and batches need no plan.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import CudaError
from pyg_direct.features.disk_rates import MOST_RATIO, find_rates, measure_disk
from pyg_direct.features.gpu_direct_reader import GpuDirectReader, wants_gpu_direct
from pyg_direct.features.range_reader import DiskReads, RangeReader, find_whole_rows, outgrows_cache
from pyg_direct.features.spilled_rows import SERVED
from pyg_direct.features.staged_reader import StagedReader
from pyg_direct.features.tiers.base import TableTier, Tier
from pyg_direct.features.tiers.disk import DiskTier, StagedTier, file_of
from pyg_direct.features.tiers.host_window import open_host_window
from pyg_direct.kernels.rows.file_ranges import PAGE
from pyg_direct.kernels.rows.fresh_rows import list_fresh_rows_cpu
from pyg_direct.ops.argument_checks import check_ids
from pyg_direct.ops.rows.gather_rows import (
    DEFAULT_BLOCKS,
    blocks_for_rows,
    gather_rows,
    prepare_read,
    rows_in_units,
    scatter_rows,
)
from pyg_direct.runtime.cuda.memory import Block, allocate_or_fall_back

# Bytes of the tables for each row of the file, and for each row in memory, with the lists of a window's rows; and of
# lists for a row if all stay in memory.
_TABLE_BYTES, _SLOT_BYTES, _KEPT_BYTES = 8, 40, 16
# Parts of the memory. A window leaves one, so that its last rows need not wait for the last batch before it.
_PARTS = 16
# Rows that are looked up in the page cache to learn if a file is in it.
_PROBES = 256
# Rows of the table for each row to be found in order, at most, up to which a look at all takes less than a sort.
_SCANNED = 16
# Bytes of a run of rows, on average, by which the disk reads runs as it reads a file in order.
_LONG_RUN = 256 << 10
# Bytes of rows that are read at a time if all rows stay in memory: lists of rows stay short.
_AT_ONCE = 512 << 20


class Claim(NamedTuple):
    """Rows that a batch reads from a file: their ids, int64 `[n]`, and those that no batch of its window claimed."""

    ids: np.ndarray
    fresh: np.ndarray


class RowWindow(Tier):
    """Rows of planned batches in memory, over the tier of their file. Rows that were not planned come from the file.

    One thread claims and reads; any number of threads take rows of batches whose window was read and that were not
    released. A row in memory stays there until all batches that claimed it are released. Batches, and windows, are
    numbered in the order in which they claim.

    Args:
        num_bytes: Memory for rows; page-locked if a GPU reads them, or of the GPU with GPUDirect Storage.
        device_bytes: Memory of the device for rows. If it holds no fewer of them, rows lie there, and pass through
            page-locked memory.
        is_shared: True if other processes of this host read the file too. They share its pages by the page cache of the
            system. If the cache has no use, rows that one of them has in its window are copied (`HostWindow`).

    Attributes:
        lock: Held by the loader that uses the window.
    """

    title = "file"

    def __init__(self, source: DiskTier | StagedTier, num_bytes: int, *, device_bytes: int = 0, is_shared: bool = False
                 ) -> None:  # fmt: skip
        is_direct = wants_gpu_direct(source.device)
        memory, is_staged = self._choose_memory(source, num_bytes, device_bytes, is_shared=is_shared)
        num_rows, count = source.shape[0], self._settle(source, memory)
        file, shape = self.file, (count, *self.shape[1:])
        self._on_gpu: Tensor | None = None
        self._max_blocks: int | None = None
        # The page cache is shared as well.
        is_hosted = is_shared and not is_direct and outgrows_cache(file)
        self._host = open_host_window(file, count) if is_hosted else None
        self._is_on_device = is_direct or is_staged
        if self._is_on_device:
            self._rows = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._on_gpu = self._rows if self._rows.is_cuda else None
            if self.device.type == "cuda":
                # Rows are written on another stream, and kernels of this one may still use memory that the allocator
                # gives.
                torch.cuda.current_stream(self.device).synchronize()
        elif self.device.type == "cuda":
            # It is unlocked with the block.
            self._block = block = self._lock_pages(count * self._row_bytes)
            self._rows = block.view_on_cpu(self.dtype, shape)
            if block.placement != "cpu":
                self._on_gpu = block.view_on_gpu(self.dtype, shape)
                self._max_blocks = blocks_for_rows(DEFAULT_BLOCKS, self._row_bytes, self._row_bytes)
        elif self._host is not None:
            self._rows = self._host.view(self.dtype, shape)
        else:
            self._rows = torch.empty(shape, dtype=self.dtype, device="cpu")
        rows = rows_in_units(self._rows, torch.uint8)
        self._bytes: Any = rows if self._is_on_device else rows.numpy()
        if self._host is not None:
            self._slots = self._host.slots
        self._reader = self._open_reader(is_direct, keeps_all=count == num_rows,
                                         is_shared=is_shared and self._host is None)  # fmt: skip
        self._events: deque[torch.cuda.Event] = deque()

    @staticmethod
    def _choose_memory(source: Tier, num_bytes: int, device_bytes: int, *, is_shared: bool = False) -> tuple[int, bool]:
        """Return the bytes for rows, and whether they lie on the device after they passed through the host."""
        is_staged = device_bytes >= max(1, num_bytes) and not is_shared and not wants_gpu_direct(source.device)
        return device_bytes if is_staged else num_bytes, is_staged

    def _open_reader(self, is_direct: bool, **options: bool) -> GpuDirectReader | RangeReader:
        if is_direct:
            return GpuDirectReader(self.file)
        if self._is_on_device:
            return StagedReader(self.file, self.device, **options)
        return RangeReader(self.file, **options)

    def _settle(self, source: DiskTier | StagedTier, num_bytes: int) -> int:
        """Make the tables of the rows; returns the number of rows that fit the memory."""
        super().__init__(source.placement, source.shape, source.dtype, source.device)
        self.source, self.lock = source, threading.Lock()
        file = file_of(source)
        assert file is not None
        self.file = file
        num_rows, self._row_bytes = self.shape[0], self.shape[1:].numel() * self.dtype.itemsize
        count = max(1, min(num_rows, num_bytes // self._row_bytes))
        # Nothing is given up if all rows fit.
        self.most_rows = count if count == num_rows else count - count // _PARTS
        self._least_part = max(1, count // _PARTS)
        # By row: its slot, and the last batch that claimed it. By slot: its row.
        self._slots, self._claims = np.full(num_rows, -1, np.int32), np.full(num_rows, -1, np.int32)
        self._keeps_all, self._has_rest, self._num_held = count == num_rows, False, 0
        # If all rows stay, the slot of a row has its number.
        self._held = np.full(0 if self._keeps_all else count, -1, np.int64)
        self._whole: TableTier | None = None
        self._number, self._num_in_window, self._first_batch, self._batch = -1, 0, 0, -1
        # Rows of the window, and those of them that are still to be read.
        self._wanted: list[np.ndarray] = []
        self._missing: np.ndarray | None = None
        # Slots for them: empty ones, and then those of rows that only batches of earlier windows claimed, with the last
        # of these batches.
        self._given = np.empty(0, np.int32), np.empty(0, np.int32)
        self.num_asked = self._num_claimed = self._num_read = self._num_copied = self._num_alone = 0
        self._counting = threading.Lock()
        self._rates: tuple[float, float] | None = None
        return count

    def _lock_pages(self, num_bytes: int) -> Block:
        """Return page-locked memory for rows; of the host's processes if that can be locked."""
        if self._host is not None:
            try:
                return self._host.pin(self.device)
            except CudaError:
                self._host = None
        return allocate_or_fall_back(num_bytes, "pinned", self.device)

    @staticmethod
    def fit_rows(source: Tier, num_bytes: int) -> int:
        """Return the bytes for rows of a tier whose window, with the tables that find its rows, takes so many bytes.

        All rows are kept if they fit alone.
        """
        row_bytes = source.shape[1:].numel() * source.dtype.itemsize
        whole = source.shape[0] * row_bytes
        if whole <= num_bytes:
            return whole
        left = num_bytes - source.shape[0] * _TABLE_BYTES - whole // PAGE
        return max(1, left // (row_bytes + _SLOT_BYTES)) * row_bytes

    @staticmethod
    def fit_device_rows(source: Tier, num_bytes: int, device_bytes: int) -> int:
        """Return the bytes of a device for rows of a tier; 0 if host memory cannot hold their tables and what rows pass
        through.

        Args:
            num_bytes: Bytes of the host for a window.
            device_bytes: Bytes of the device.
        """
        row_bytes = source.shape[1:].numel() * source.dtype.itemsize
        whole = source.shape[0] * row_bytes
        left = num_bytes - source.shape[0] * _TABLE_BYTES - whole // PAGE - StagedReader.count_staging(row_bytes)
        if whole <= device_bytes and source.shape[0] * _KEPT_BYTES <= left:
            return whole
        return max(0, min(left // _SLOT_BYTES, device_bytes // row_bytes)) * row_bytes

    @property
    def last_number(self) -> int:
        """Number of the last window that claimed rows; -1 before the first."""
        return self._number

    @property
    def last_batch(self) -> int:
        """Number of the last batch that claimed rows; -1 before the first."""
        return self._batch

    @property
    def is_whole(self) -> bool:
        """True once memory holds all rows: batches then need not claim any."""
        return self._whole is not None

    @property
    def is_broken(self) -> bool:
        """True after a read of the disk that did not end: its memory may still be written."""
        return self._reader.is_broken

    @property
    def num_bytes(self) -> int:
        """Bytes of memory: rows, and tables that find them."""
        tables = self._slots.nbytes + self._claims.nbytes + self._held.nbytes
        return self._rows.numel() * self.dtype.itemsize + tables

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes for rows on the host, and on the device after they passed through the host."""
        num_bytes = len(self._rows) * self._row_bytes
        return (0, num_bytes) if isinstance(self._reader, StagedReader) else (num_bytes, 0)

    def leave(self, is_left: bool = True) -> None:
        """Let a read that is under way end early; or read again."""
        self._reader.leave(is_left)
        if self._host is not None:
            self._host.leave(is_left)

    def find_fresh(self, number: int, ids: np.ndarray) -> Claim:
        """Find the rows that a batch would claim.

        Args:
            number: Number of the window, ascending.
            ids: int64 `[n]` in any order; ids out of range are left to the read of the batch.
        """
        if self.is_whole:
            return Claim(ids, ids[:0])
        ids = ids[(ids >= 0) & (ids < self.shape[0])]
        # In a new window no row is claimed.
        first_batch = self._first_batch if number == self._number else np.iinfo(np.int32).max
        fresh = np.empty(len(ids), np.int64)
        table = np.full(1 << (2 * len(ids)).bit_length(), -1, np.int64)
        return Claim(ids, fresh[: list_fresh_rows_cpu(ids, self._claims, first_batch, table, fresh)])

    def has_room(self, number: int, claim: Claim) -> bool:
        """Report whether the rows of a batch fit the window beside those claimed for it."""
        return len(claim.fresh) + (self._num_in_window if number == self._number else 0) <= self.most_rows

    def claim(self, number: int, batch: int, claim: Claim) -> None:
        """Claim the rows that a batch reads from the file, for a window of batches. Of those that do not fit the window
        as many are claimed as do; the batch reads the others from the file.

        Args:
            number: Number of the window, ascending.
            batch: Number of the batch, ascending.
        """
        if number != self._number:
            self._number, self._num_in_window, self._first_batch = number, 0, batch
            self._wanted, self._missing = [], None
        if self.is_whole:
            self._batch = batch
            self.note_asked(len(claim.ids))
            return
        fresh, room = claim.fresh, self.most_rows - self._num_in_window
        is_whole = len(fresh) <= room
        if not is_whole:
            # Side by side in the file.
            fresh = np.sort(fresh)[:room]
        self._batch = batch
        self.num_asked += len(claim.ids)
        self._claims[claim.ids if is_whole else fresh] = batch
        self._num_in_window += len(fresh)
        self._num_claimed += len(fresh)
        self._wanted.append(fresh)

    def read_ahead(self, number: int, released: int) -> bool:
        """Read rows of a window that are not in memory, as far as released batches make room for them.

        Args:
            released: The last batch whose rows are not read any more, as those of the batches before.

        Returns:
            False if rows are left, for which more batches must be released.

        Raises:
            FileError: see `RangeReader.read`.
        """
        if number != self._number or self.is_whole:
            return True
        if self._keeps_all:
            self._read_kept()
            return True
        if self._missing is None:
            self._missing = self._begin_reads()
            self._reader.most_ratio = self._find_ratio(len(self._missing))
        places, claims = self._given
        count = min(len(self._missing), int(np.searchsorted(claims, released, "right")))
        if count < min(len(self._missing), self._least_part):
            return False
        part, slots = self._missing[:count], np.sort(places[:count]).astype(np.int64)
        self._given = places[count:], claims[count:]
        old = self._held[slots]
        self._give_up(old[old >= 0])
        self._held[slots] = -1
        while self._events:
            # Kernels that read rows of released batches.
            self._events.popleft().synchronize()
        is_read = self._fill(part, slots)
        if is_read is None:
            return True
        self._held[slots] = part
        self._count_read(part, is_read)
        self._missing = self._missing[count:]
        return len(self._missing) == 0

    def _read_kept(self) -> None:
        """Read the rows of a window that are not in memory; each row has a slot of its number."""
        missing = self._find_wanted()
        missing = self._add_passed(missing, self.shape[0] - self._num_held - len(missing))
        self._has_rest = 2 * (self._num_held + len(missing)) >= self.shape[0]
        if not self._has_rest or self._can_wait(missing):
            self._read_parts(missing)
        else:
            # In order all take about as long as those of the next windows.
            self._has_rest = False
            self._read_parts(None)

    def _can_wait(self, missing: np.ndarray) -> bool:
        """Report whether rows outside of memory and of a list lie in long runs, which take no longer if read later."""
        is_left = self._slots < 0
        is_left[missing] = False
        num_runs = 1 + int(np.count_nonzero(is_left[1:] & ~is_left[:-1]))
        return int(np.count_nonzero(is_left)) * self._row_bytes >= _LONG_RUN * num_runs

    def read_rest(self) -> None:
        """Read all rows that are not in memory, if memory holds the table and batches have asked for half of it.

        Raises:
            FileError: see `RangeReader.read`.
        """
        if self._has_rest:
            self._has_rest = False
            self._read_parts(None)

    def _read_parts(self, missing: np.ndarray | None) -> None:
        """Read rows, ascending, each to the slot of its number; None for all that are not in memory."""
        step = max(1, _AT_ONCE // self._row_bytes)
        for first in range(0, self.shape[0], step):
            if missing is None:
                part = first + np.flatnonzero(self._slots[first : first + step] < 0)
            else:
                part = missing[slice(*np.searchsorted(missing, [first, first + step]))]
            is_read = self._fill(part, part)
            if is_read is None:
                return
            self._num_held += len(part)
            self._count_read(part, is_read)
        if self._num_held == self.shape[0]:
            table = self._rows if self._on_gpu is None else self._on_gpu
            if table.device == self.device:
                self._whole = TableTier(table, self.placement, max_blocks=self._max_blocks)

    def _count_read(self, rows: np.ndarray, is_read: np.ndarray) -> None:
        """Count rows that came from the file, or from other processes, without those that came along in their pages."""
        is_claimed = self._claims[rows] >= self._first_batch
        self._num_read += int(np.count_nonzero(is_claimed & is_read))
        self._num_copied += int(np.count_nonzero(is_claimed & ~is_read))

    def note_asked(self, count: int) -> None:
        """Count rows that a batch asks for while all rows are in memory; the batch is a window of its own then."""
        self.num_asked += count
        self._num_claimed += count

    def _give_up(self, rows: np.ndarray) -> None:
        """Take rows out of the window, before others take their slots."""
        if self._host is None:
            self._slots[rows] = -1
        else:
            self._host.give_up(rows)

    def _fill(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """Bring rows into slots; returns which were read from the file, or None if the read was left early."""
        if self._host is not None:
            return self._host.fill(rows, slots, lambda some, places: self._reader.read(some, places, self._bytes))
        if not self._reader.read(rows, slots, self._bytes):
            return None
        self._slots[rows] = slots
        return np.ones(len(rows), bool)

    def _begin_reads(self) -> np.ndarray:
        """Return the rows of the window that are not in memory, ascending, and list the slots that they may take."""
        missing = self._find_wanted()
        is_empty = self._held < 0
        empty, used = np.flatnonzero(is_empty).astype(np.int32), np.flatnonzero(~is_empty).astype(np.int32)
        claims = self._claims[self._held[used]]
        is_old = claims < self._first_batch
        # The rows that were claimed longest ago come first. Older ones than 16 bits count are equal, as NumPy sorts
        # these in linear time.
        least = max(-1, self._first_batch - np.iinfo(np.uint16).max)
        used, claims = used[is_old], np.maximum(claims[is_old], least)
        order = np.argsort((claims - least).astype(np.uint16), kind="stable")
        self._given = (np.concatenate([empty, used[order]]),
                       np.concatenate([np.full(len(empty), -1, np.int32), claims[order]]))  # fmt: skip
        return missing

    def _find_ratio(self, num_missing: int) -> float:
        """Return the bytes that may be read over the bytes of the missing rows.

        All windows may have so many times the bytes of their rows, in memory or not. Earlier reads took a part.
        """
        read = self._reader.num_pages * self._reader.unit / self._row_bytes
        return (MOST_RATIO * self._num_claimed - read) / max(1, num_missing)

    def _find_wanted(self) -> np.ndarray:
        """Return the rows that the window has claimed and that are not in memory, ascending."""
        wanted = np.concatenate(self._wanted) if self._wanted else np.empty(0, np.int64)
        self._wanted = []
        missing = wanted[self._slots[wanted] < 0]
        if _SCANNED * len(missing) > self.shape[0]:
            return np.flatnonzero((self._claims >= self._first_batch) & (self._slots < 0))
        missing.sort()
        return missing

    def _add_passed(self, rows: np.ndarray, room: int) -> np.ndarray:
        """Return the same rows with others in the pages that are read for them, as many as there is room for."""
        if room <= 0 or len(rows) == 0:
            return rows
        # As the read will choose its requests: what is read along would be read again later.
        first, end = find_whole_rows(rows, self.file.layout, self._row_bytes, find_rates(self.file))
        # The first requests fill the room, so that lists of rows stay as short as a window.
        needed = int(np.searchsorted(np.cumsum(end - first), room + len(rows))) + 1
        first, end = first[:needed], end[:needed]
        counts = end - first
        passed = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        # Rows that the window has claimed are in the list, or in memory.
        is_new = (self._slots[passed] < 0) & (self._claims[passed] < self._first_batch)
        return np.sort(np.concatenate([rows, passed[is_new][:room]]))

    def raise_earlier_error(self) -> None:
        """Raise the error of an earlier read of a whole table on a GPU."""
        if self._whole is not None:
            self._whole.raise_earlier_error()

    def _read(self, ids: Tensor, out: Tensor) -> None:
        self._read_to(ids, out)

    def place(self, ids: Tensor, out: Tensor, positions: Tensor) -> None:
        """Write row `ids[i]` to `out[positions[i]]`; otherwise as `read`."""
        if ids.numel() > 0 and out.numel() > 0:
            self._read_to(ids, out, positions)

    def _read_to(self, ids: Tensor, out: Tensor, positions: Tensor | None = None) -> None:
        self.file.check()
        if self._whole is not None:
            if positions is None:
                self._whole.read(ids, out)
            else:
                self._whole.place(ids, out, positions)
            self._note_stream()
            return
        on_host = check_ids("ids", ids.cpu(), self.shape[0]).long()
        numbers = on_host.numpy()
        # A row that only earlier batches claimed may be overwritten now.
        is_here = (self._claims[numbers] >= SERVED.number) & (self._slots[numbers] >= 0)
        if is_here.all():
            self._take_slots(self._slots[numbers], out, positions)
            return
        places = torch.arange(ids.numel(), device=ids.device) if positions is None else positions.long()
        with self._counting:
            self._num_alone += int(np.count_nonzero(~is_here))
        here, missing = (torch.from_numpy(np.flatnonzero(part)).to(ids.device) for part in (is_here, ~is_here))
        if here.numel() > 0:
            self._take_slots(self._slots[numbers[is_here]], out, places[here])
        self.source.place(ids[missing], out, places[missing])

    def _take_slots(self, slots: np.ndarray, out: Tensor, positions: Tensor | None) -> None:
        chosen = torch.from_numpy(slots.astype(np.int64))
        if not out.is_cuda:
            prepare_read(self._rows, chosen, out, None if positions is None else positions.long())(0, len(slots))
            return
        if self._on_gpu is None:
            rows = gather_rows(self._rows, chosen).to(self.device)
        else:
            rows = gather_rows(self._on_gpu, chosen.to(self.device), max_blocks=self._max_blocks)
            self._note_stream()
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
        if positions is None:
            out.copy_(rows)
        else:
            scatter_rows(out, positions, rows, is_unique=True)

    def _note_stream(self) -> None:
        """Let torch's allocator keep rows for the kernels of this stream, if the window ends before them."""
        if self._is_on_device and self._rows.is_cuda:
            self._rows.record_stream(torch.cuda.current_stream(self.device))

    def tell(self, *, measures_disk: bool = True) -> DiskReads:
        """Return the reads so far, beside the rates of the disk, which are measured once.

        Args:
            measures_disk: False leaves the rates out.
        """
        reader = self._reader
        if measures_disk and self._rates is None and self.shape.numel() > 0:
            self._rates = find_rates(self.file) or measure_disk(self.file)
        in_order, at_random = self._rates or (None, None)
        return DiskReads(str(self.file.path), self.num_asked, self._num_read + self._num_alone, self._row_bytes,
                         reader.num_requests, reader.num_pages, reader.unit, reader.num_again, reader.seconds,
                         self._num_claimed, in_order, at_random, num_copied=self._num_copied)  # fmt: skip


def is_cached(tier: DiskTier | StagedTier) -> bool:
    """Report whether the system has cached all of some rows, spread over the file of a tier."""
    file, count = file_of(tier), tier.shape[0]
    return file is not None and file.is_cached(range(0, count, max(1, count // _PROBES)))


def can_plan(tier: Tier) -> bool:
    """Report whether rows of a tier can be read through a window: they lie in a file, and the system reads ranges."""
    return file_of(tier) is not None and hasattr(os, "preadv") and tier.shape.numel() > 0

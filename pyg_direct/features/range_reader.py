"""Reads of many rows of a file, each page once and in ascending order, by large requests of several threads.

`RangeReader` reads rows into memory and counts its requests. `DiskReads` reports them beside the rate of the disk.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import time
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import FileError
from pyg_direct.features.disk_rates import DiskRates, choose_gap, find_block, find_rates, read_timeout
from pyg_direct.features.row_files import Layout, RowFile
from pyg_direct.kernels.rows.file_ranges import PAGE, read_file_ranges_cpu
from pyg_direct.object_text import show_count
from pyg_direct.profiling import show_bytes
from pyg_direct.runtime.host.host_memory import available_bytes
from pyg_direct.runtime.host.threads import Pool

# Gaps that are read along if the rates of the disk are not known. A request costs a disk as long as 14 KB of a large
# one (10 us at 1.4 GB/s). Gaps of 4 pages would read a third more bytes of sparse rows in the same time.
_GAP_PAGES = 2
_REQUEST_PAGES = 256
# Requests in flight: many of few pages, or few of many pages, which would disturb each other. Requests of 64 KB came
# at 1.5 times the rate by 32 threads instead of 8, on the machine of an H200 and on one of two cores; those of 1 MB, of
# which each takes as much memory, gained on the former alone.
MOST_IN_FLIGHT, FEW_IN_FLIGHT, _FEW_PAGES = 32, 8, 64
# Requests of a task of a thread, at most; a read that is left early ends with its tasks.
_MOST_OF_TASK = 64
# Rows that are looked up in the page cache before a read.
_LOOKED_UP = 32
# Seconds between two looks at the threads, and those for which a read that was left may still write.
_LOOK, _LEAVE = 0.2, 2.0


def split_requests(rows: np.ndarray, offset: int, row_bytes: int, unit: int = PAGE,
                   rates: DiskRates | None = None, most_ratio: float = math.inf) -> np.ndarray:  # fmt: skip
    """Return the bounds of requests, int64 `[R + 1]`: request j reads rows `bounds[j]` to `bounds[j + 1] - 1`.

    Rows of one unit, and of units with a small gap between, are read together, up to a length.

    Args:
        rows: Positions in the file, int64 `[n]`, ascending and unique.
        offset: Byte of the first row of the file.
        row_bytes: Bytes of a row.
        unit: Bytes of a unit, which divide a page.
        rates: Rates of the disk, which choose the gap; None for a gap of two pages.
        most_ratio: Bytes that are left over the bytes of the rows; see `choose_gap`.
    """
    if len(rows) == 0:
        return np.zeros(1, np.int64)
    if int(rows[-1] - rows[0]) == len(rows) - 1:
        return _split_range(int(rows[0]), len(rows), offset, row_bytes, unit)
    begins = (offset + rows * row_bytes) // unit
    ends = -(-(offset + (rows + 1) * row_bytes) // unit)
    gap = _GAP_PAGES * PAGE // unit
    if rates is not None:
        num_bytes = len(rows) * row_bytes
        gap = choose_gap(begins, ends, unit, num_bytes, rates, most_ratio * num_bytes)
    is_first = np.ones(len(rows), bool)
    is_first[1:] = begins[1:] > ends[:-1] + gap
    starts = np.maximum.accumulate(np.where(is_first, begins, 0))
    pieces = (begins - starts) // (_REQUEST_PAGES * PAGE // unit)
    is_first[1:] |= pieces[1:] != pieces[:-1]
    return np.append(np.flatnonzero(is_first), len(rows)).astype(np.int64)


def _split_range(first: int, count: int, offset: int, row_bytes: int, unit: int) -> np.ndarray:
    """Return the bounds of requests for consecutive rows, without lists of all of them."""
    begin, length = (offset + first * row_bytes) // unit, _REQUEST_PAGES * PAGE // unit
    num_pieces = ((offset + (first + count - 1) * row_bytes) // unit - begin) // length
    # The first row that begins in each piece; large rows pass over some pieces.
    starts = (begin + np.arange(1, num_pieces + 1, dtype=np.int64) * length) * unit
    bounds = -(-(starts - offset) // max(1, row_bytes)) - first
    return np.unique(np.concatenate([[0], bounds, [count]])).astype(np.int64)


def find_whole_rows(rows: np.ndarray, layout: Layout, row_bytes: int, rates: DiskRates | None = None
                    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the first row, and the row after the last, that lie whole in the pages of each request for `rows`.

    Args:
        rows: As in `split_requests`, at least one.
        layout: Position of the table in its file.
        row_bytes, rates: As in `split_requests`.
    """
    bounds = split_requests(rows, layout.offset, row_bytes, PAGE, rates)
    begins = (layout.offset + rows[bounds[:-1]] * row_bytes) // PAGE * PAGE
    ends = -(-(layout.offset + (rows[bounds[1:] - 1] + 1) * row_bytes) // PAGE) * PAGE
    first = np.maximum(-(-(begins - layout.offset) // row_bytes), 0)
    end = np.minimum((ends - layout.offset) // row_bytes, layout.shape[0])
    # Requests may share a page, whose rows belong to the first of them.
    first[1:] = np.maximum(first[1:], end[:-1])
    return first, np.maximum(end, first)


def outgrows_cache(file: RowFile) -> bool:
    """Report whether a table is larger than half of the free memory: the page cache of the system then has no use."""
    return file.layout.num_bytes > available_bytes() // 2


class DiskReads(NamedTuple):
    """Reads of a file that batches were planned for; `print` shows a line.

    Attributes:
        num_asked: Rows of the file that batches asked for, each as often as a batch did.
        num_rows: Rows that were read from the file for them, alone or for a window.
        row_bytes: Bytes of a row.
        num_requests, num_pages, page_bytes: Requests, the pages that they read, and the bytes of a page. A block of the
            disk counts as a page if reads are as fine.
        num_again: Pages that had been read before.
        num_claimed: Rows that windows of batches held, each once in a window. If all rows of the file are in memory, a
            batch is a window of its own.
        disk_rate: Bytes per second that the disk gives in order, measured; None if it was not measured.
        random_rate: Pages of 4 KiB per second that it gives at random; likewise.
        unit: Name of what batches ask for: a row, or a neighbor of a list.
        num_copied: Rows that other processes of this host had read, and that were copied from their windows.
    """

    path: str
    num_asked: int
    num_rows: int
    row_bytes: int
    num_requests: int
    num_pages: int
    page_bytes: int
    num_again: int
    seconds: float
    num_claimed: int
    disk_rate: float | None = None
    random_rate: float | None = None
    unit: str = "row"
    num_copied: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second that were read."""
        return self.num_pages * self.page_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def num_saved(self) -> int:
        """Reads of rows that foresight saved: several batches shared them, they were still in memory, or another
        process of this host had read them.
        """
        return self.num_asked - self.num_rows

    @property
    def read_ratio(self) -> float:
        """Bytes read, over the bytes of the rows that windows held."""
        held = self.num_claimed * self.row_bytes
        return self.num_pages * self.page_bytes / held if held > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for loggers of metrics."""
        numbers = {name: value for name, value in self._asdict().items() if name not in ("path", "unit")}
        own = {name: value for name, value in numbers.items() if value is not None}
        return {**own, "rate": self.rate, "num_saved": self.num_saved, "read_ratio": self.read_ratio}

    def __str__(self) -> str:
        copied = f", {self.num_copied:,} copied from other processes" if self.num_copied > 0 else ""
        shown = (f"{self.path}: {show_count(self.num_rows, self.unit)} read for {self.num_asked:,} that batches asked "
                 f"for, {self.num_saved / max(1, self.num_asked):.0%} saved{copied}; "
                 f"{show_count(self.num_pages, 'page')} of {show_bytes(self.page_bytes)}, "
                 f"{show_bytes(self.num_pages * self.page_bytes)} in {show_count(self.num_requests, 'request')}, "
                 f"{self.num_again / max(1, self.num_pages):.0%} of them again, {self.read_ratio:.1f} x the distinct "
                 f"{self.unit}s of windows; {self.rate / 1e9:.2f} GB/s")  # fmt: skip
        if self.disk_rate is None or self.random_rate is None:
            return shown
        return (f"{shown} beside the disk's {self.disk_rate / 1e9:.2f} GB/s in order and "
                f"{self.random_rate * PAGE / 1e9:.2f} at random")  # fmt: skip


class RangeReader:
    """Reader of rows of a file by large requests.

    It reads past the page cache of the system if the cache has no use. This is so for a table that the caller keeps in
    memory, and for a table larger than half of the free memory. Rows that are cached are read from there.

    Which gaps between rows are read along depends on the rates of the disk. Past the page cache, blocks of the disk are
    read, which are smaller than pages, unless the caller keeps all rows of the pages.

    Args:
        keeps_all: True if each row is read at most once, by this process alone.
        is_shared: True if other processes of this host read the file at about the same time, and the page cache is all
            that they share. It then holds the pages that they read meanwhile, whatever the size of the file.

    Attributes:
        num_requests, num_pages, num_again, seconds: See `DiskReads`.
        unit: Bytes that a request reads, at least: of a page, or of a block of the disk.
        most_ratio: Bytes that reads have left over the bytes of their rows; more only where it saves much time.
        is_broken: True after a read that did not end; its threads may still write.
    """

    def __init__(self, file: RowFile, *, keeps_all: bool = False, is_shared: bool = False) -> None:
        self.file = file
        self.num_requests = self.num_pages = self.num_again = 0
        self.seconds, self.most_ratio = 0.0, math.inf
        self.is_broken = False
        self._row_bytes = file.layout.num_bytes // max(1, file.layout.shape[0])
        size = file.layout.offset + file.layout.num_bytes
        self._seen = np.zeros(-(-size // PAGE) + 1, np.uint8)
        self._room = self.count_room(self._row_bytes)
        self._is_direct = not is_shared and (keeps_all or outgrows_cache(file))
        self.unit = find_block(file) if self._is_direct and not keeps_all else PAGE
        self._pool = Pool(MOST_IN_FLIGHT, "pyg_direct_file", functools.partial(set_cpu_threads, 1))
        # Memory of whole pages that requests pass through. The last one that was given back is taken first, so that
        # few are touched whole.
        self._staging: list[np.ndarray] = []
        self._running: list[np.ndarray] = []
        self._is_left = False

    @staticmethod
    def count_room(row_bytes: int) -> int:
        """Return the most bytes of a request for rows of so many bytes."""
        return (_REQUEST_PAGES + 2) * PAGE + -(-row_bytes // PAGE) * PAGE

    def leave(self, is_left: bool = True) -> None:
        """Let a read that is under way end early, without its rows; or read again."""
        self._is_left = is_left

    def read(self, rows: np.ndarray, slots: np.ndarray, out: Any) -> bool:
        """Read row `rows[i]` to `out[slots[i]]`; returns False if the read was left early.

        Args:
            rows: Positions in the file, int64 `[n]`, ascending and unique.
            slots: int64 `[n]`.
            out: Bytes, uint8 `[m, row_bytes]`, contiguous.

        Raises:
            FileError: the file changed, was cut short, or the disk fails or gives no bytes; the byte is named.
        """
        self.file.check()
        if len(rows) == 0:
            return True
        is_cached = self.file.is_cached(rows[:: max(1, len(rows) // _LOOKED_UP)].tolist())
        # Where there are no gaps, no rate is needed.
        has_gaps = int(rows[-1] - rows[0]) >= len(rows)
        rates = find_rates(self.file) if has_gaps and not is_cached else None
        bounds = split_requests(rows, self.file.layout.offset, self._row_bytes, self.unit, rates, self.most_ratio)
        count = len(bounds) - 1
        handle = self.file.open_handle(is_direct=self._is_direct and not is_cached)
        begin = time.perf_counter()
        try:
            # Of a request on average: pages of the file, and pages of its rows.
            pages = min(int(rows[-1] - rows[0]), len(rows)) * self._row_bytes // PAGE // count
            most = MOST_IN_FLIGHT if pages < _FEW_PAGES else FEW_IN_FLIGHT
            served, waiting = 0, self._divide(bounds, most)[::-1]
            tasks: set[Future[None]] = set()
            last, since = (-1, -1), time.monotonic()
            while (waiting and not self._is_left) or tasks:
                while waiting and len(tasks) < most and not self._is_left and self._can_start(bounds, *waiting[-1]):
                    first, end = waiting.pop()
                    tasks.add(self._start(handle, rows, slots, bounds[first : end + 1], out))
                done, tasks = wait(tasks, _LOOK, "FIRST_COMPLETED")
                served += len(done)
                for task in done:
                    self._end(task)
                now = served, sum(int(progress[1]) for progress in list(self._running))
                if now != last:
                    last, since = now, time.monotonic()
                self._check_pace(time.monotonic() - since)
            self.file.check()
        except BaseException:
            self._is_left = True
            self.is_broken |= len(wait(tasks, _LEAVE)[1]) > 0
            self._is_left = self.is_broken
            raise
        finally:
            if not self.is_broken:
                os.close(handle)
            self.seconds += time.perf_counter() - begin
        # Threads that were at work may have left rows of their requests unread.
        return not (waiting or self._is_left)

    def _divide(self, bounds: np.ndarray, most: int) -> list[tuple[int, int]]:
        """Divide requests into tasks of threads: the first request of each, and the one after its last."""
        count, parts, first = len(bounds) - 1, [], 0
        share, limit = max(1, min(_MOST_OF_TASK, -(-count // (2 * most)))), self._limit_rows(most)
        while first < count:
            end = min(first + share, count)
            if limit is not None:
                fits = int(np.searchsorted(bounds, bounds[first] + limit, "right")) - 1
                end = min(end, max(first + 1, fits))
            parts.append((first, end))
            first = end
        return parts

    def _limit_rows(self, most: int) -> int | None:
        """Return the rows of a task of several requests, at most, of which `most` are under way; None for any."""
        return None

    def _can_start(self, bounds: np.ndarray, first: int, end: int) -> bool:
        """Report whether there is memory for a task."""
        return True

    def _start(self, handle: int, rows: np.ndarray, slots: np.ndarray, bounds: np.ndarray, out: Any) -> Future[None]:
        """Let a thread serve some requests."""
        return self._pool.submit(self._read_some, handle, rows, slots, bounds, out)

    def _end(self, task: Future[None]) -> None:
        """Raise the error of a task that has ended, if there is one."""
        task.result()

    def _check_pace(self, seconds: float) -> None:
        """Refuse to wait longer for a disk that gives nothing."""
        if self._is_left and seconds > _LEAVE:
            self.is_broken = True
            raise FileError(f"{self.file.path} is read no longer, and still has reads under way")
        limit = read_timeout()
        if seconds > limit:
            self.is_broken = True
            place = min((int(progress[0]) for progress in list(self._running)), default=0)
            raise FileError(f"{self.file.path} gave no bytes for {limit:g} seconds, at byte {place}: check the disk, "
                            "or set PYG_DIRECT_DISK_TIMEOUT to more seconds")  # fmt: skip

    def _read_some(self, handle: int, rows: np.ndarray, slots: np.ndarray, bounds: np.ndarray, out: np.ndarray) -> None:
        """Serve some requests, in a thread."""
        try:
            staging = self._staging.pop()
        except IndexError:
            # Direct reads need whole pages.
            staging = np.frombuffer(mmap.mmap(-1, self._room), np.uint8)
        progress, done = np.zeros(4, np.int64), 0
        self._running.append(progress)
        try:
            while not self._is_left:
                done += read_file_ranges_cpu(handle, self.file.layout.offset, rows, slots, bounds[done:], staging, out,
                                             self._seen, progress, self.unit)  # fmt: skip
                if done == len(bounds) - 1:
                    break
                self._read_pieces(handle, rows, slots, bounds[done : done + 2], staging, out, progress)
                done += 1
        finally:
            # By identity: arrays have no equality of their own.
            self._running[:] = [other for other in self._running if other is not progress]
            self.num_requests += int(progress[1])
            self.num_pages += int(progress[2])
            self.num_again += int(progress[3])
            self._staging.append(staging)

    def _read_pieces(self, handle: int, rows: np.ndarray, slots: np.ndarray, bounds: np.ndarray, staging: np.ndarray,
                     out: np.ndarray, progress: np.ndarray) -> None:  # fmt: skip
        """Serve a request that did not come in one piece."""
        own, offset = rows[bounds[0] : bounds[1]], self.file.layout.offset
        begin = (offset + int(own[0]) * self._row_bytes) // self.unit * self.unit
        needed = offset + (int(own[-1]) + 1) * self._row_bytes - begin
        try:
            got = self.file.read_bytes(begin, staging.data[:needed])
        except FileError:
            # A file that changed is named as such, at whatever byte a read notices it.
            self.file.check()
            raise
        progress[1] += 1
        progress[2] += -(-got // self.unit)
        places = offset - begin + own[:, None] * self._row_bytes + np.arange(self._row_bytes)
        out[slots[bounds[0] : bounds[1]]] = staging[places]

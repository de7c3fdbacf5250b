"""`PagedArray`: numbers of an array in a file, read by position, each page once for all of a call.

Pages that many calls read stay in memory. The neighbor lists of a graph that memory cannot hold are such an array.
Several batches read the pages of a hop together, by large requests in the order of the file.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import FileError, IdError
from pyg_direct.features.disk_rates import find_rates, measure_disk
from pyg_direct.features.range_reader import DiskReads, RangeReader
from pyg_direct.features.row_files import RowFile
from pyg_direct.kernels.rows.file_rows import PAGE, list_pages_cpu, take_numbers_cpu
from pyg_direct.ops.run_kernel import run_cpu
from pyg_direct.runtime.host.host_memory import available_bytes

# Share of the free host memory for pages.
_SHARE = 0.125
# Reads of a page are counted up to here; then all counts are halved, so that recent ones weigh more.
_MOST_COUNTED = 255
# One of so many parts of the memory takes new pages of a call that needs more than fit.
_PARTS = 4
# Pages that are looked up in the page cache to learn if the system has the file, and for one call.
_PROBES, _FEW_PROBES = 256, 16


class PagedArray:
    """Array of a file; any number of threads may read it, one after the other.

    A forked process reads with memory of its own.

    Args:
        file: The array, `[E]`, with a number of bytes a number that divides a page.
        num_bytes: Host memory for pages; None takes an eighth of the free memory, of all processes together.

    Attributes:
        num_processes: Processes of this host that read the file, as known before the first read.
    """

    num_processes = 1

    def __init__(self, file: RowFile, num_bytes: int | None = None) -> None:
        item, offset = file.layout.dtype.itemsize, file.layout.offset
        if offset % item:
            raise FileError(f"{file.path} must begin its numbers at a multiple of {item} bytes, got byte {offset}: "
                            "save it again with pyg_direct.save_rows")  # fmt: skip
        self.file, self._wanted_bytes = file, num_bytes
        self._first_byte = offset // PAGE * PAGE
        self._lead, self._per_page = (offset - self._first_byte) // item, PAGE // item
        end = offset + file.layout.num_bytes
        # The last page may be short, and stays in memory.
        self._num_whole = (end - self._first_byte) // PAGE
        self._num_pages = -(-(end - self._first_byte) // PAGE)
        self._pages: RowFile | None = None
        self._process = -1

    def __reduce__(self) -> Any:
        return _reopen, (str(self.file.path), self.file.layout, self._wanted_bytes)

    @property
    def num_numbers(self) -> int:
        """Numbers of the array, E."""
        return int(self.file.layout.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory: pages, and tables that find them; 0 before the first read."""
        if self._process != os.getpid():
            return 0
        tables = self._slots.nbytes + self._ticks.nbytes + self._counts.nbytes + self._held.nbytes
        return self._memory.nbytes + tables

    def is_cached(self) -> bool:
        """Report whether the system has cached all of some pages, spread over the file."""
        count = self.num_numbers
        return self.file.is_cached(range(0, count, max(1, count // _PROBES)))

    def _open(self) -> None:
        """Allocate the memory of this process."""
        self.file.check()
        if self._pages is None and self._num_whole > 0:
            self._pages = RowFile(self.file.path, dtype=torch.uint8, shape=(self._num_whole, PAGE),
                                  offset=self._first_byte, is_bare=True)  # fmt: skip
            # The same file still.
            self.file.check()
        wanted = self._wanted_bytes
        if wanted is None:
            wanted = int(_SHARE * available_bytes()) // self.num_processes
        count = max(1, min(self._num_whole, wanted // PAGE))
        # One more for the last page.
        self._bytes = np.empty((count + 1, PAGE), np.uint8)
        self._memory = self._bytes.reshape(-1).view(_dtype_of(self.file))
        self._slots, self._ticks = np.full(self._num_pages, -1, np.int32), np.zeros(self._num_pages, np.int32)
        # By page, how often calls read it; by slot, its page.
        self._counts, self._held = np.zeros(self._num_pages, np.uint8), np.full(count, -1, np.int64)
        if self._num_pages > self._num_whole:
            begin = self._first_byte + self._num_whole * PAGE
            size = self.file.layout.offset + self.file.layout.num_bytes - begin
            self.file.read_bytes(begin, self._bytes[count].data[:size])
            self._slots[-1] = count
        self._reader = None if self._pages is None else RangeReader(
            self._pages, keeps_all=count == self._num_whole, is_shared=self.num_processes > 1)  # fmt: skip
        self._tick = self._num_asked = self._num_missed = 0
        self._rates: tuple[float, float] | None = None
        self._process = os.getpid()

    def take(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at positions, `[n]` of the dtype of the file. `positions`: int64 `[n]`, in any order."""
        if len(positions) == 0:
            return np.empty(0, _dtype_of(self.file))
        if self._process != os.getpid():
            with _OPENING:
                if self._process != os.getpid():
                    self._lock = threading.Lock()
                    self._open()
        with self._lock:
            if self._reader is not None and self._reader.is_broken:
                # Its threads may still write to the memory.
                self._open()
            return self._take(positions)

    def _take(self, positions: np.ndarray) -> np.ndarray:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= self.num_numbers:
            raise IdError(f"positions must lie in [0, {self.num_numbers}), got {low if low < 0 else high}")
        self._tick += 1
        pages = np.empty(min(len(positions), self._num_pages), np.int64)
        pages = pages[: run_cpu(list_pages_cpu, positions, self._lead, self._per_page, self._tick, self._ticks, pages)]
        missing = np.sort(pages[self._slots[pages] < 0])
        if len(missing) > 0 and self.file.is_cached(positions[:: max(1, len(positions) // _FEW_PROBES)].tolist()):
            self.file.check()
            return self.file.rows.numpy()[positions]
        self._num_asked += len(positions)
        self._num_missed += len(missing)
        self._count(pages)
        out = np.empty(len(positions), self._memory.dtype)
        left = np.arange(len(positions))
        left = self._take_present(positions, left, out)
        while len(left) > 0:
            # Pages in memory were served, so that their slots may take others; most keep the pages read most.
            room = max(1, len(self._held) // _PARTS, int(np.count_nonzero(self._held < 0)))
            now, missing = missing[:room], missing[room:]
            self._load(now)
            left = self._take_present(positions, left, out)
        return out

    def _take_present(self, positions: np.ndarray, left: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read the numbers whose pages are in memory; returns which are left."""
        count = run_cpu(take_numbers_cpu, positions, left, self._lead, self._per_page, self._slots, self._memory, out)
        return left[:count]

    def _count(self, pages: np.ndarray) -> None:
        if len(pages) and int(self._counts[pages].max()) == _MOST_COUNTED:
            self._counts >>= 1
        self._counts[pages] += 1

    def _load(self, pages: np.ndarray) -> None:
        """Read pages, ascending, to empty slots and then to the slots of the pages that were read least."""
        slots = np.flatnonzero(self._held < 0)[: len(pages)]
        needed = len(pages) - len(slots)
        if needed > 0:
            used = np.flatnonzero(self._held >= 0)
            least = np.argpartition(self._counts[self._held[used]], needed - 1)[:needed]
            slots = np.concatenate([slots, used[least]])
            old = self._held[used[least]]
            self._slots[old] = -1
            self._held[used[least]] = -1
        slots = np.sort(slots)
        assert self._reader is not None
        self._reader.read(pages, slots, self._bytes)
        self._held[slots] = pages
        self._slots[pages] = slots

    def tell(self, *, measures_disk: bool = True) -> DiskReads:
        """Return the reads so far, beside the rates of the disk, which are measured once. Its rows are the numbers, and
        a number is read from the file if its page is.

        Args:
            measures_disk: False leaves the rates out.
        """
        path, item = str(self.file.path), self.file.layout.dtype.itemsize
        reader = self._reader if self._process == os.getpid() else None
        if reader is None:
            return DiskReads(path, 0, 0, item, 0, 0, PAGE, 0, 0.0, 0, unit="neighbor")
        if measures_disk and self._rates is None:
            self._rates = find_rates(self.file) or measure_disk(self.file)
        in_order, at_random = self._rates or (None, None)
        return DiskReads(path, self._num_asked, self._num_missed, item, reader.num_requests, reader.num_pages,
                         reader.unit, reader.num_again, reader.seconds, self._num_asked, in_order, at_random,
                         unit="neighbor")  # fmt: skip


_OPENING = threading.Lock()
if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold it.
    os.register_at_fork(after_in_child=lambda: globals().update(_OPENING=threading.Lock()))


def _dtype_of(file: RowFile) -> np.dtype[Any]:
    return torch.empty(0, dtype=file.layout.dtype).numpy().dtype


def _reopen(path: str, layout: Any, num_bytes: int | None) -> PagedArray:
    file = RowFile(path, dtype=layout.dtype, shape=layout.shape, offset=layout.offset, is_bare=True)
    return PagedArray(file, num_bytes)


def open_integers(path: str | os.PathLike[str], name: str, dtypes: tuple[torch.dtype, ...]) -> RowFile:
    """Open an array `[n]` of integers in a file; `name` is the argument that names it."""
    file = RowFile(path)
    if len(file.layout.shape) != 1 or file.layout.dtype not in dtypes or file.order is not None:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        kind = "packed rows" if file.order is not None else f"{list(file.layout.shape)} of {file.layout.dtype}"
        raise FileError(f"{name} must name a file with an array [n] of {known}, got {kind} in {file.path}")
    return file


def read_whole(file: RowFile) -> Tensor:
    """Return the array of a file in memory."""
    return file.stream().clone() if file.layout.num_bytes > 0 else file.rows.clone()

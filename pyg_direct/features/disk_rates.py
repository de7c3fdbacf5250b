"""Rates of the disk under a file: bytes in order, requests at random, and the block that a direct read may have.

`measure_disk` measures the rates, and `find_rates` keeps them for each file system. `choose_gap` chooses by them which
gaps between rows are read along: a request takes a disk as long as some bytes do.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import threading
import time
from typing import NamedTuple

import numpy as np

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.errors import ArgumentError, FileError
from pyg_direct.features.row_files import RowFile
from pyg_direct.kernels.rows.file_ranges import LEAST_BLOCK, PAGE, read_file_ranges_cpu

# Of a measurement: reads at random, how often, bytes in order, bytes of a request in order, threads that read at random
# and in order, and requests between two looks at the clock.
_PROBES, _REPEATS, _STREAM, _PIECE, _MANY, _FEW, _AT_ONCE = 1024, 3, 32 << 20, 1 << 20, 32, 8, 8
# Bytes of a file by which the rates of a disk are known well enough.
_LEAST_BYTES = 16 << 20
# Seconds after which each half of a measurement ends, on disks that give few bytes.
_MOST_SECONDS = 0.25
_TIMEOUT = 300.0
# Gaps that are read along, at most, and the time that fewer bytes may take, over the shortest time.
_MOST_GAP, _SLACK = 128 << 10, 1.1
# Bytes that are read over the bytes of the rows, at most, where this takes so much of the shortest time at most: other
# programs may need the disk, and measured rates vary. And the time that the most bytes of all reads may take.
MOST_RATIO, _MOST_SLACK, _LAST_SLACK = 2.5, 1.3, 1.5

_LOCK = threading.Lock()
_KNOWN: dict[int, DiskRates] = {}
if hasattr(os, "register_at_fork"):
    # A thread of the parent may hold it.
    os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.Lock()))


class DiskRates(NamedTuple):
    """Rates of a disk.

    Attributes:
        in_order: Bytes per second in order, by large requests.
        at_random: Pages per second at random.
    """

    in_order: float
    at_random: float

    @property
    def request_bytes(self) -> float:
        """Bytes that the disk gives in order in the time of a request, without the bytes of the request."""
        page = self.in_order / self.at_random
        # Where a page costs little more than its bytes, a request still costs something.
        return max(page - PAGE, page / 2)


def read_timeout() -> float:
    """Return the seconds after which a disk that gives no bytes is an error: `PYG_DIRECT_DISK_TIMEOUT`.

    Raises:
        ArgumentError: it is set to something else than a number above 0.
    """
    given = os.environ.get("PYG_DIRECT_DISK_TIMEOUT", "").strip()
    if not given:
        return _TIMEOUT
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ArgumentError(f"PYG_DIRECT_DISK_TIMEOUT must be a number of seconds above 0, got {given!r}")
    return seconds


def find_rates(file: RowFile, known_elsewhere: DiskRates | None = None) -> DiskRates | None:
    """Return the rates of the disk of a file, measured once for each file system; None for a file that is too short
    to measure them.

    Args:
        known_elsewhere: Rates that another process of this host has measured.

    Raises:
        FileError: see `measure_disk`.
    """
    if file.layout.offset + file.layout.num_bytes < _LEAST_BYTES:
        return None
    device = os.fstat(file.handle).st_dev
    with _LOCK:
        known = _KNOWN.get(device)
        if known is None:
            known = known_elsewhere or measure_disk(file)
            if min(known) <= 0:
                # A disk that fails is named by the read of the rows.
                return None
            _KNOWN[device] = known
        return known


def find_block(file: RowFile) -> int:
    """Return the bytes of the smallest direct read of a file: `LEAST_BLOCK` if the file system takes it, or `PAGE`."""
    if not hasattr(os, "O_DIRECT") or file.layout.offset + file.layout.num_bytes < 2 * LEAST_BLOCK:
        return PAGE
    handle = file.open_handle(is_direct=True)
    try:
        target = memoryview(mmap.mmap(-1, PAGE))[:LEAST_BLOCK]
        return LEAST_BLOCK if os.preadv(handle, [target], LEAST_BLOCK) == LEAST_BLOCK else PAGE
    except OSError:
        # Blocks of the file system, or of the disk, are larger.
        return PAGE
    finally:
        os.close(handle)


def choose_gap(begins: np.ndarray, ends: np.ndarray, unit: int, num_bytes: int, rates: DiskRates,
               most_bytes: float = math.inf) -> int:  # fmt: skip
    """Return the largest gap between rows that is read along, in units.

    It is the smallest one by which the rows take the disk about as short as they can. If it reads more than 2.5 times
    the bytes of the rows, a smaller one is taken. That one reads no more, or as few as little more time allows. If this
    is more than `most_bytes`, it may take half as long again.

    Args:
        begins, ends: First unit of each row, and the unit after its last, int64 `[n]`, ascending.
        unit: Bytes of a unit.
        num_bytes: Bytes of the rows.
        most_bytes: Bytes that are left for the gaps and the rows.
    """
    gaps = np.minimum(np.maximum(begins[1:] - ends[:-1], 0), _MOST_GAP // unit + 1)
    counts = np.bincount(gaps, minlength=_MOST_GAP // unit + 2)[:-1]
    # For each gap: how many more units are read along with it, and how many requests remain.
    along = np.cumsum(counts * np.arange(len(counts)))
    requests = 1 + len(gaps) - np.cumsum(counts)
    own = int((ends - begins).sum() - np.maximum(ends[:-1] - begins[1:], 0).sum())
    read = (own + along) * unit
    costs = requests * rates.request_bytes + read
    gap = int(np.flatnonzero(costs <= _SLACK * costs.min())[0])
    for most, slack in ((MOST_RATIO * num_bytes, _MOST_SLACK), (most_bytes, _LAST_SLACK)):
        if read[gap] > most:
            short = np.flatnonzero(costs <= slack * costs.min())
            lean = short[read[short] <= most]
            gap = int(lean[-1] if len(lean) > 0 else short[0])
    return gap


def measure_disk(file: RowFile) -> DiskRates:
    """Measure the rates of the disk of a file, past the page cache, by the best of some short reads; 0 if it cannot be
    read.

    It takes a fraction of a second. If the file system has no reads past the cache, cached pages are counted too.

    Raises:
        FileError: the disk gives no bytes; the byte is named.
    """
    size = file.layout.offset + file.layout.num_bytes
    pages, pieces = max(1, size // PAGE), max(1, min(size, _STREAM) // _PIECE)
    numbers = random.Random(0)
    first = numbers.randrange(max(1, size // _PIECE - pieces + 1))
    in_order = at_random = 0.0
    for _ in range(_REPEATS):
        in_order = max(in_order, _time_reads(file, [*range(first, first + pieces)], min(size, _PIECE), _FEW))
        places = sorted(numbers.randrange(pages) for _ in range(_PROBES))
        at_random = max(at_random, _time_reads(file, places, min(size, PAGE), _MANY))
    return DiskRates(in_order, at_random / PAGE)


def _time_reads(file: RowFile, places: list[int], num_bytes: int, num_threads: int) -> float:
    """Measure the bytes per second of reads by several threads, which take turns.

    Args:
        places: Numbers of pieces of `num_bytes` bytes, ascending.
    """
    handle, counts = file.open_handle(is_direct=True), [0] * num_threads
    rows, slots, bounds = np.array(places), np.zeros(len(places), np.int64), np.arange(_AT_ONCE + 1)
    seen = np.zeros((file.layout.offset + file.layout.num_bytes + num_bytes) // PAGE + 2, np.uint8)
    # The loop is compiled before its time counts.
    read_file_ranges_cpu(handle, 0, rows[:0], slots, bounds[:1], seen[:0], np.empty((0, num_bytes), np.uint8), seen,
                         np.zeros(4, np.int64), PAGE)  # fmt: skip
    begin = time.perf_counter()

    def read(number: int) -> None:
        set_cpu_threads(1)
        own, out = rows[number::num_threads], np.empty((1, num_bytes), np.uint8)
        staging, progress = np.frombuffer(mmap.mmap(-1, num_bytes + 2 * PAGE), np.uint8), np.zeros(4, np.int64)
        for first in range(0, len(own), _AT_ONCE):
            part = own[first : first + _AT_ONCE]
            # A read that fails, or is past the end, ends the measurement.
            done = read_file_ranges_cpu(handle, 0, part, slots, bounds[: len(part) + 1], staging, out, seen, progress,
                                        PAGE)  # fmt: skip
            counts[number] += done * num_bytes
            if done < len(part) or time.perf_counter() - begin > _MOST_SECONDS:
                return

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    limit = read_timeout()
    for thread in threads:
        thread.join(max(0.0, begin + limit - time.perf_counter()))
    if any(thread.is_alive() for thread in threads):
        # The handle stays open for the threads that wait.
        raise FileError(f"{file.path} gave no bytes for {limit:g} seconds, at byte {places[0] * num_bytes}: check the "
                        "disk, or set PYG_DIRECT_DISK_TIMEOUT to more seconds")  # fmt: skip
    os.close(handle)
    return sum(counts) / max(1e-9, time.perf_counter() - begin)

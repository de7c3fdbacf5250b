"""Reads of many rows of a file into memory of a GPU.

`StagedReader` reads through a few pieces of page-locked memory, and `GpuDirectReader` by GPUDirect Storage through
kvikio (extra `gds12` or `gds13`). Without GPUDirect Storage kvikio copies through host memory of its own. Rows of files
then take little host memory, and a GPU reads them again at the rate of its own memory.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import DeviceError, FileError, needs_extra
from pyg_direct.features.disk_rates import find_rates, read_timeout
from pyg_direct.features.range_reader import FEW_IN_FLIGHT, MOST_IN_FLIGHT, RangeReader, split_requests
from pyg_direct.features.row_files import RowFile
from pyg_direct.kernels.rows.file_rows import PAGE
from pyg_direct.runtime.cuda.device import budget_of, free_bytes
from pyg_direct.runtime.cuda.memory import allocate_or_fall_back
from pyg_direct.runtime.host.host_memory import parse_size

# Share of the free memory of a GPU that planned rows of files take by default; models need the rest.
_SHARE = "25%"
# Bytes of rows of small requests, which many threads have at once; and large requests of a piece, so that the disk has
# work while Python's GIL is taken.
_SMALL_BYTES, _LARGE_REQUESTS = 256 << 10, 2
# Memory that threads of a read that did not end may still write, for as long as the process lives.
_ABANDONED: list[Any] = []


def find_device_room(device: torch.device, share: str = _SHARE) -> int:
    """Return the bytes of a GPU that rows of files may take: `PYG_DIRECT_AHEAD_GPU`, or a share; 0 for a CPU.

    Args:
        share: Share of the free memory that is not left to a model, if the variable is not set.
    """
    if device.type != "cuda":
        return 0
    free = free_bytes(device.index)  # type: ignore[arg-type]
    given = os.environ.get("PYG_DIRECT_AHEAD_GPU", "").strip()
    if given:
        size: int | str = int(given) if given.isdigit() else given
        return min(parse_size(size, free, "PYG_DIRECT_AHEAD_GPU"), free)
    return parse_size(share, budget_of(free))


class _Piece(NamedTuple):
    """Page-locked memory for the rows of a task, and the event after which it may be written again."""

    rows: Tensor
    free: torch.cuda.Event | None


class _Pieces:
    """Pieces of one size, which are allocated when they are first needed.

    Args:
        num_rows, row_bytes: Rows of a piece, and bytes of a row.
        most: Pieces, at most.
        device: The GPU that copies from them, or the CPU.
    """

    def __init__(self, num_rows: int, row_bytes: int, most: int, device: torch.device) -> None:
        self.num_rows, self._row_bytes, self._num_left, self._device = num_rows, row_bytes, most, device
        self._free: deque[_Piece] = deque()

    @property
    def has_one(self) -> bool:
        """True if a piece can be taken."""
        return self._num_left > 0 or len(self._free) > 0

    def take(self) -> _Piece:
        """Return memory that no task writes and no copy reads."""
        if self._free:
            piece = self._free.popleft()
            if piece.free is not None:
                piece.free.synchronize()
            return piece
        is_on_gpu, size = self._device.type == "cuda", self.num_rows * self._row_bytes
        block = allocate_or_fall_back(size, "pinned" if is_on_gpu else "cpu", self._device if is_on_gpu else None)
        rows = block.view_on_cpu(torch.uint8, (self.num_rows, self._row_bytes))
        # Only now: a piece that could not be allocated may be asked for again.
        self._num_left -= 1
        return _Piece(rows, torch.cuda.Event() if is_on_gpu else None)

    def give_back(self, piece: _Piece) -> None:
        """Let others take a piece, once its event has come."""
        self._free.append(piece)


class StagedReader(RangeReader):
    """Reader of rows of a file by large requests, as `RangeReader`, into memory of a GPU or of the host.

    Threads read rows into pieces of page-locked memory. A piece is copied to the GPU as soon as its rows are there, on
    the current stream, while the disk fills others.

    Args:
        file, keeps_all, is_shared: See `RangeReader`.
    """

    def __init__(self, file: RowFile, device: torch.device, *, keeps_all: bool = False, is_shared: bool = False
                 ) -> None:  # fmt: skip
        super().__init__(file, keeps_all=keeps_all, is_shared=is_shared)
        self._device = device
        width = max(1, self._row_bytes)
        self._small = _Pieces(max(1, _SMALL_BYTES // width), self._row_bytes, MOST_IN_FLIGHT, device)
        # The rows of any request fit a large piece.
        self._large = _Pieces(_LARGE_REQUESTS * self._room // width, self._row_bytes, FEW_IN_FLIGHT, device)
        self._places = np.arange(max(self._large.num_rows, self._small.num_rows))
        self._under_way: dict[Future[None], tuple[_Pieces, _Piece, np.ndarray, Tensor]] = {}

    @staticmethod
    def count_staging(row_bytes: int) -> int:
        """Return the bytes of host memory that reads of such rows take: pieces, and what requests pass through."""
        large = (1 + _LARGE_REQUESTS) * RangeReader.count_room(row_bytes)
        return FEW_IN_FLIGHT * large + MOST_IN_FLIGHT * max(_SMALL_BYTES, row_bytes)

    def read(self, rows: np.ndarray, slots: np.ndarray, out: Tensor) -> bool:
        """Read row `rows[i]` to `out[slots[i]]`, and wait until it is there; returns False if the read was left early.

        Args:
            rows: Positions in the file, int64 `[n]`, ascending and unique.
            slots: int64 `[n]`.
            out: Bytes, uint8 `[m, row_bytes]`, contiguous, on the device.
        """
        try:
            return super().read(rows, slots, out)
        finally:
            left = list(self._under_way.values())
            self._under_way.clear()
            if self.is_broken:
                _ABANDONED.append(left)
            else:
                # Tasks of a read that failed are over.
                for pieces, piece, *_ in left:
                    pieces.give_back(piece)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _limit_rows(self, most: int) -> int:
        return self._small.num_rows if most == MOST_IN_FLIGHT else self._large.num_rows

    def _choose_pieces(self, num_rows: int) -> _Pieces:
        return self._small if num_rows <= self._small.num_rows else self._large

    def _can_start(self, bounds: np.ndarray, first: int, end: int) -> bool:
        return self._choose_pieces(int(bounds[end] - bounds[first])).has_one

    def _start(self, handle: int, rows: np.ndarray, slots: np.ndarray, bounds: np.ndarray, out: Tensor
               ) -> Future[None]:  # fmt: skip
        first, end = int(bounds[0]), int(bounds[-1])
        pieces = self._choose_pieces(end - first)
        piece = pieces.take()
        task = super()._start(handle, rows[first:end], self._places, bounds - first, piece.rows.numpy())
        self._under_way[task] = pieces, piece, slots[first:end], out
        return task

    def _end(self, task: Future[None]) -> None:
        pieces, piece, slots, out = self._under_way[task]
        super()._end(task)
        self._copy(piece.rows[: len(slots)], slots, out)
        if piece.free is not None:
            piece.free.record(torch.cuda.current_stream(self._device))
        del self._under_way[task]
        pieces.give_back(piece)

    def _copy(self, rows: Tensor, slots: np.ndarray, out: Tensor) -> None:
        """Enqueue the copy of rows to their slots."""
        first = int(slots[0])
        if len(slots) == 1 or bool((np.diff(slots) == 1).all()):
            out[first : first + len(slots)].copy_(rows, non_blocking=True)
            return
        targets = torch.from_numpy(slots.astype(np.int64, copy=False)).to(out.device, non_blocking=True)
        out.index_copy_(0, targets, rows.to(out.device, non_blocking=True))


# Memory on the GPU that requests pass through, and seconds between two looks at a request.
_STAGING_BYTES = 64 << 20
_LOOK = 2e-4


def wants_gpu_direct(device: torch.device) -> bool:
    """Report whether planned rows of files go to the memory of a GPU by kvikio: `PYG_DIRECT_GPU_DIRECT` is 1."""
    return device.type == "cuda" and os.environ.get("PYG_DIRECT_GPU_DIRECT", "0") not in ("", "0")


class GpuDirectReader:
    """Reader of rows of a file by large requests of kvikio, as `RangeReader`, into memory of a GPU or of the host.

    Attributes:
        num_requests, num_pages, num_again, seconds, unit, most_ratio, is_broken: See `RangeReader`.
    """

    unit = PAGE

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.num_requests = self.num_pages = self.num_again = 0
        self.seconds, self.most_ratio = 0.0, math.inf
        self.is_broken = self._is_left = False
        self._row_bytes = file.layout.num_bytes // max(1, file.layout.shape[0])
        self._seen = np.zeros(-(-file.stamp[0] // PAGE) + 1, bool)
        self._staging: Tensor | None = None
        try:
            with needs_extra("PYG_DIRECT_GPU_DIRECT=1", "gds12", "gds13"):
                import kvikio
        except ModuleNotFoundError:
            raise
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(f"PYG_DIRECT_GPU_DIRECT must be 0 where kvikio cannot be loaded, got 1: {error}; install "
                              "what is missing, or unset it") from error  # fmt: skip
        # One thread of kvikio, its default, would wait for one request at a time.
        if "KVIKIO_NTHREADS" not in os.environ and kvikio.defaults.get("num_threads") == 1:
            kvikio.defaults.set("num_threads", MOST_IN_FLIGHT)
        try:
            # Not by its path, which may name another file by now.
            self._handle: Any = kvikio.CuFile(f"/proc/self/fd/{file.handle}", "r")
        except (OSError, RuntimeError) as error:
            raise FileError(f"{file.path} could not be opened by kvikio: {error}; unset PYG_DIRECT_GPU_DIRECT to read "
                            "it through host memory") from error  # fmt: skip

    def leave(self, is_left: bool = True) -> None:
        """Let a read that is under way end early, without its rows; or read again."""
        self._is_left = is_left

    def read(self, rows: np.ndarray, slots: np.ndarray, out: Tensor) -> bool:
        """Read row `rows[i]` to `out[slots[i]]`, and wait until it is there; returns False if the read was left early.

        Args:
            rows: Positions in the file, int64 `[n]`, ascending and unique.
            slots: int64 `[n]`.
            out: Bytes, uint8 `[m, row_bytes]`, contiguous, on any device.
        """
        self.file.check()
        if len(rows) == 0:
            return True
        offset, since = self.file.layout.offset, time.perf_counter()
        bounds = split_requests(rows, offset, self._row_bytes, PAGE, find_rates(self.file), self.most_ratio)
        begins = (offset + rows[bounds[:-1]] * self._row_bytes) // PAGE * PAGE
        # The last page of a file may be short.
        ends = np.minimum(
            -(-(offset + (rows[bounds[1:] - 1] + 1) * self._row_bytes) // PAGE) * PAGE, self.file.stamp[0]
        )
        # Each request begins at a page of the memory.
        places = np.concatenate([[0], np.cumsum(-(-(ends - begins) // PAGE) * PAGE)])
        first, count = 0, len(begins)
        try:
            while first < count and not self._is_left:
                end = max(first + 1, int(np.searchsorted(places, places[first] + _STAGING_BYTES, "right")) - 1)
                staging = self._find_staging(int(places[end] - places[first]), out.device)
                own = places[first:end] - places[first]
                self._fill(staging, begins[first:end], ends[first:end], own)
                part = slice(bounds[first], bounds[end])
                starts = np.repeat(own - begins[first:end], np.diff(bounds[first : end + 1]))
                starts += offset + rows[part] * self._row_bytes
                self._copy(staging, starts, slots[part], out)
                first = end
            self.file.check()
        finally:
            self.seconds += time.perf_counter() - since
        return first == count

    def _find_staging(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory for some requests, which nothing writes or reads now."""
        if self._staging is None or len(self._staging) < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            # The allocator may give memory that kernels of this stream still read.
            _synchronize(device)
        return self._staging

    def _fill(self, staging: Tensor, begins: np.ndarray, ends: np.ndarray, places: np.ndarray) -> None:
        """Read ranges of the file, several at a time."""
        pending: list[tuple[Any, int, int]] = []
        for begin, end, place in zip(begins.tolist(), ends.tolist(), places.tolist(), strict=True):
            target = staging[place : place + end - begin]
            try:
                future = self._handle.pread(target if target.is_cuda else target.numpy(), end - begin, begin)
            except RuntimeError as error:
                self._abandon(staging, pending)
                raise FileError(f"{self.file.path} could not be read at byte {begin}: {error}") from error
            pending.append((future, begin, end))
        limit, since = read_timeout(), time.monotonic()
        for future, begin, end in pending:
            while not future.done():
                if time.monotonic() - since > limit:
                    self._abandon(staging, pending)
                    raise FileError(f"{self.file.path} gave no bytes for {limit:g} seconds, at byte {begin}: check the "
                                    "disk, or set PYG_DIRECT_DISK_TIMEOUT to more seconds")  # fmt: skip
                time.sleep(_LOOK)
            since = time.monotonic()
            try:
                got = future.get()
            except RuntimeError as error:
                self._abandon(staging, pending)
                raise FileError(f"{self.file.path} could not be read at byte {begin}: {error}") from error
            if got < end - begin:
                self._abandon(staging, pending)
                raise FileError(f"{self.file.path} was cut short while it was read: it ends before byte {end}")
            seen = self._seen[begin // PAGE : -(-end // PAGE)]
            self.num_requests += 1
            self.num_pages += len(seen)
            self.num_again += int(np.count_nonzero(seen))
            seen[:] = True

    def _abandon(self, staging: Tensor, pending: Sequence[tuple[Any, int, int]]) -> None:
        """Give up a read whose requests may still be under way."""
        self.is_broken = True
        _ABANDONED.append((staging, self._handle, pending))

    def _copy(self, staging: Tensor, starts: np.ndarray, slots: np.ndarray, out: Tensor) -> None:
        """Copy rows that begin at bytes of the staging memory to their slots, and wait for it."""
        # A row may begin at any byte: as many rows as bytes, one byte apart.
        rows = staging.as_strided((len(staging) - self._row_bytes + 1, self._row_bytes), (1, 1))
        chosen, targets = (torch.from_numpy(values).to(out.device) for values in (starts, slots.astype(np.int64)))
        out.index_copy_(0, targets, rows[chosen])
        _synchronize(out.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

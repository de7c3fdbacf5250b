"""Reads of many rows of a file into GPU memory, by GPUDirect Storage through kvikio (extra `gds12` or `gds13`).

If the machine has no GPUDirect Storage, kvikio copies through host memory of its own.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_direct.errors import DeviceError, FileError, needs_extra
from pyg_direct.features.disk_rates import find_rates, read_timeout
from pyg_direct.features.range_reader import MOST_IN_FLIGHT, split_requests
from pyg_direct.features.row_files import RowFile
from pyg_direct.kernels.rows.file_ranges import PAGE

# Memory on the GPU that requests pass through, and seconds between two looks at a request.
_STAGING_BYTES = 64 << 20
_LOOK = 2e-4
# Memory that threads of kvikio may still write to, for as long as the process lives.
_ABANDONED: list[Any] = []


def wants_gpu_direct(device: torch.device) -> bool:
    """Report whether planned rows of files go to the memory of a GPU by kvikio: `PYG_DIRECT_GPU_DIRECT` is 1."""
    return device.type == "cuda" and os.environ.get("PYG_DIRECT_GPU_DIRECT", "0") not in ("", "0")


class GpuDirectReader:
    """Reader of rows of a file by large requests of kvikio, as `RangeReader`, into memory of a GPU or of the host.

    Raises:
        ModuleNotFoundError: kvikio is not installed.
        DeviceError: kvikio, or a library that it needs, cannot be loaded.
        FileError: kvikio cannot open the file.

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
        if "KVIKIO_NTHREADS" not in os.environ and kvikio.defaults.get("num_threads") < MOST_IN_FLIGHT:
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

        Raises:
            FileError: the file changed, was cut short, or the disk fails or gives no bytes; the byte is named.
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

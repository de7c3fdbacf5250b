"""Reads of many rows of a file into memory of a GPU, through a few pieces of page-locked memory.

Rows of files then take little host memory, and a GPU reads them again at the rate of its own memory.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_direct.features.range_reader import FEW_IN_FLIGHT, MOST_IN_FLIGHT, RangeReader
from pyg_direct.features.row_files import RowFile
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

    Raises:
        ArgumentError: the variable is set to something else than bytes or a share.
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
        device: Device of the memory that rows are read to.
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

        Raises:
            FileError: the file changed, was cut short, or the disk fails or gives no bytes; the byte is named.
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

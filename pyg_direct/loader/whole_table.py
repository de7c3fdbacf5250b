"""Rows of a file that a GPU holds whole: they are read once, in order, while the caller prepares its first batch."""

from __future__ import annotations

import contextlib
import functools
import logging
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from pyg_direct.features.device_reader import GpuDirectReader, StagedReader, find_device_room, wants_gpu_direct
from pyg_direct.features.feature import Feature
from pyg_direct.features.range_reader import DiskReads
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.spilled_rows import SpilledRows
from pyg_direct.features.tiers.disk import file_of
from pyg_direct.ops.rows.gather_rows import rows_in_units
from pyg_direct.runtime.host.tensor_views import ordinary_tensors
from pyg_direct.runtime.host.threads import Pool

_LOGGER = logging.getLogger(__name__)

# Share of the memory that graph data may take: rows of the next layer lie beside these.
_SHARE = "50%"
# Bytes of rows that are planned at a time: lists of rows stay short.
_AT_ONCE = 512 << 20


def fits_device(num_bytes: int, device: torch.device) -> bool:
    """Report whether all rows of a layer fit the memory that a GPU has for rows of files; False on a CPU."""
    return 0 < num_bytes <= find_device_room(device, _SHARE)


class WholeTable:
    """Table of a file on its way to the memory of a GPU, by a thread.

    Args:
        file: The table, of N rows.
        slots: Position of each row of the file in the table, int64 `[N]`; None for the order of the file.
        device: Device of the table.
    """

    def __init__(self, file: RowFile, slots: np.ndarray | None, device: torch.device) -> None:
        self._file, self._slots, self._device = file, slots, device
        self._reader = GpuDirectReader(file) if wants_gpu_direct(device) else StagedReader(file, device, keeps_all=True)
        with ordinary_tensors():
            self._rows = torch.empty(file.layout.shape, dtype=file.layout.dtype, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            # The allocator may give memory that kernels of this stream still read.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        pool = Pool(1, "pyg_direct_table")
        self._done: Future[None] = pool.submit(self._read)
        # Ends the read, if it is under way; it does not hold the table.
        self.close = functools.partial(_end_read, self._reader, pool)

    @classmethod
    def open(cls, x: object, device: torch.device) -> WholeTable | None:
        """Begin to read features from their file; None if they lie elsewhere, or if the GPU has no room for them."""
        if not isinstance(x, Feature) or not isinstance(x.stored, SpilledRows) or x.stored.memory is not None:
            return None
        file = file_of(x.stored.tier)
        if file is None or not fits_device(file.layout.num_bytes, device) or x.shape[0] != file.layout.shape[0]:
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            # Free memory of the GPU may lie in pieces.
            return cls._open_file(x, file, device)
        return None

    @classmethod
    def _open_file(cls, x: Feature, file: RowFile, device: torch.device) -> WholeTable | None:
        in_order = np.arange(x.shape[0])
        places = x.find_missing(torch.from_numpy(in_order)).numpy()
        if np.array_equal(places, in_order):
            return cls(file, None, device)
        if places.min() < 0:
            return None
        slots = np.empty(len(places), np.int64)
        slots[places] = in_order
        return cls(file, slots, device)

    def _read(self) -> None:
        if self._stream is None:
            self._read_parts()
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._read_parts()

    def _read_parts(self) -> None:
        out, count = rows_in_units(self._rows, torch.uint8), self._file.layout.shape[0]
        row_bytes = self._file.layout.num_bytes // count
        step = max(1, _AT_ONCE // row_bytes)
        for first in range(0, count, step):
            rows = np.arange(first, min(first + step, count))
            slots = rows if self._slots is None else self._slots[first : first + step]
            if not self._reader.read(rows, slots, out):
                return
        own = self._reader
        reads = DiskReads(str(self._file.path), count, count, row_bytes, own.num_requests, own.num_pages, own.unit,
                          own.num_again, own.seconds, count)  # fmt: skip
        _LOGGER.info("read for a layer: %s", reads)

    def wait(self) -> Tensor:
        """Wait for the rows, in the order of ids, on the device.

        Raises:
            FileError: see `RangeReader.read`.
        """
        self._done.result()
        return self._rows


def _end_read(reader: GpuDirectReader | StagedReader, pool: Pool) -> None:
    reader.leave()
    pool.close()

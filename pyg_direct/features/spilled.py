"""Rows of a file, some of which are also in memory: one read takes each from where it is nearest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pyg_direct.features.tier import Tier
from pyg_direct.ops.scatter import scatter_rows
from pyg_direct.runtime.pages import use_large_pages


class Resident(Protocol):
    """Rows in memory, by place."""

    @property
    def device(self) -> torch.device:
        """Where places come from and rows go to."""

    @property
    def num_hot_rows(self) -> int:
        """Rows in GPU memory."""

    @property
    def placement(self) -> str:
        """Where the others live."""

    def gather(self, ids: Tensor, errors: Tensor | None) -> Tensor:
        """Rows of places; on a GPU those of -1 may hold anything."""


class SpilledRows:
    """All rows on disk over some of them in memory.

    Args:
        disk: All rows `[N, ...]`, as the device of the results reads them.
        locate: Ids `[n]` on that device -> places in memory, int64 `[n]`; -1 for rows on disk alone and bad ids.
        resident: The rows in memory; None where there are none.

    Attributes:
        num_read, num_missed: Rows read so far, and how many of them came from disk.
        refusal: Why they cannot be written.
    """

    refusal = "the file is read-only"

    def __init__(self, disk: Tier, locate: Callable[[Tensor], Tensor] | None = None,
                 resident: Resident | None = None) -> None:  # fmt: skip
        self.disk = disk
        self._locate, self._resident = locate, resident
        self.forget_counts()

    @property
    def placement(self) -> str:
        """Where the rows live that are not in memory."""
        return self.disk.placement

    def forget_counts(self) -> None:
        """Count from zero."""
        self.num_read = self.num_missed = 0

    def list_tiers(self, num_held: int) -> list[tuple[str, int, int, bool]]:
        """(name, rows, rows read, whether they came over the link of the GPU) of what is not in memory.

        Args:
            num_held: Rows that are.
        """
        return [("file", self.disk.shape[0] - num_held, self.num_missed, True)]

    def read(self, ids: Tensor) -> Tensor:
        """Rows of ids on the device, `[n, ...]`; the host waits for them.

        Raises:
            IdError: an id is outside [0, N).
            FileError: the file has changed.
        """
        self.num_read += ids.numel()
        if self._resident is None or self._locate is None:
            self.num_missed += ids.numel()
            return self.read_disk(ids)
        places = self._locate(ids)
        missing = (places < 0).nonzero().view(-1)
        self.num_missed += missing.numel()
        if missing.numel() == ids.numel():
            return self.read_disk(ids)
        # While rows come from disk, the GPU reads those in memory.
        rows = self._read_memory(self._resident, places)
        if missing.numel() > 0:
            self.disk.place(ids[missing], rows, missing)
        return rows

    def read_disk(self, ids: Tensor) -> Tensor:
        """Rows of ids, all of them from disk."""
        rows = self._make_rows(ids.numel())
        self.disk.read(ids, rows)
        return rows

    def _read_memory(self, resident: Resident, places: Tensor) -> Tensor:
        if resident.device.type == "cuda" and resident.placement != "cpu":
            return resident.gather(places, None)
        hits = (places >= 0).nonzero().view(-1)
        rows = self._make_rows(places.numel())
        scatter_rows(rows, hits, resident.gather(places[hits], None), is_unique=True)
        return rows

    def _make_rows(self, count: int) -> Tensor:
        shape = (count, *self.disk.shape[1:])
        return use_large_pages(torch.empty(shape, dtype=self.disk.dtype, device=self.disk.device))

"""Rows of a tier that kernels do not read in place, such as a file; some of the rows are in memory too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyg_direct.features.memory_rows import MemoryRows, Served
from pyg_direct.features.tier_report import TierReport
from pyg_direct.features.tiers.base import Tier

# Windows of planned rows that this thread reads from, and the number of the window of batches.
SERVED: Any = threading.local()


@contextmanager
def serving(windows: Mapping[int, Tier], number: int) -> Iterator[None]:
    """Read rows of tiers from their windows in this thread, in this block.

    Args:
        windows: By the `id` of the tier.
        number: Number of the window of batches whose rows are read.
    """
    before = getattr(SERVED, "windows", {}), getattr(SERVED, "number", -1)
    SERVED.windows, SERVED.number = windows, number
    try:
        yield
    finally:
        SERVED.windows, SERVED.number = before


def find_window(tier: Tier) -> Tier:
    """Return the window that serves the rows of a tier in this thread; the tier itself if there is none."""
    windows: Mapping[int, Tier] = getattr(SERVED, "windows", {})
    return windows.get(id(tier), tier)


class SpilledRows:
    """Rows in memory over a tier that has all of them. An id is located among the rows in memory; any other row is read
    from the tier.

    Args:
        tier: All rows `[N, ...]`, as the device of the results reads them.
        locate: Maps ids `[n]` on that device to positions in memory, int64 `[n]`; -1 for rows that only the tier has,
            and for bad ids.
        memory: The rows in memory; None if there are none.

    Attributes:
        num_read, num_missed: Rows read so far, and how many of them came from the tier.
    """

    # No kernel reads these rows in place.
    errors = whole = None
    num_writes = 0

    def __init__(self, tier: Tier, locate: Callable[[Tensor], Tensor] | None = None,
                 memory: MemoryRows | None = None) -> None:  # fmt: skip
        self.tier, self.locate, self.memory = tier, locate, memory
        self.num_read = self.num_missed = 0

    @property
    def placement(self) -> str:
        """Place of the rows that are not in memory."""
        return self.tier.placement

    @property
    def num_hot_rows(self) -> int:
        """Rows in GPU memory."""
        return 0 if self.memory is None else self.memory.num_hot_rows

    @property
    def shape(self) -> torch.Size:
        """Of the table, `[N, ...]`."""
        return self.tier.shape

    def check(self) -> None:
        """Check nothing: no read was enqueued that could have failed."""

    def take(self, ids: Tensor) -> Tensor:
        """Return rows of ids on the device, `[n, ...]`; the host waits for them, and for errors of the tier."""
        self.num_read += ids.numel()
        tier = find_window(self.tier)
        if self.memory is None or self.locate is None:
            self.num_missed += ids.numel()
            return tier.take(ids)
        rows, num_missed = tier.take_beside(ids, self.locate, self.memory)
        self.num_missed += num_missed
        return rows

    def find_missing(self, ids: Tensor) -> Tensor:
        """Return the ids whose rows only the tier has, int64 on the CPU; the host waits for them."""
        missing = ids if self.memory is None or self.locate is None else ids[self.locate(ids) < 0]
        return missing.cpu().long()

    def count_served(self, served: Served | None) -> None:
        """Count reads and hits from zero, or stop."""
        self.num_read = self.num_missed = 0
        self.tier.count_served(served is not None)
        if self.memory is not None:
            self.memory.count_served(None if served is None else Served(self.tier.device))

    def count_hot(self, num_read: int) -> int:
        """Return how many of the rows that were read came from memory of GPUs; waits for the GPU."""
        return 0 if self.memory is None else self.memory.count_hot(num_read - self.num_missed)

    def describe(self, num_read: int, is_counted: bool, link: str | None) -> list[TierReport]:
        """Lines of a report, nearest tier first; see `MemoryRows.describe`."""
        held, lines = 0, []
        if self.memory is not None:
            held = self.memory.shape[0]
            lines = self.memory.describe(num_read - self.num_missed, is_counted, link)
        return lines + self.tier.describe(self.shape[0] - held, self.num_missed if is_counted else None, link)

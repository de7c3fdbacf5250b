"""Rows of a tier that kernels do not read in place; some of the rows are in memory too.

`spill_file` makes them of a file, and `shard_rows` of rows that the processes of a group share out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.features.hot_rows import choose_hottest
from pyg_direct.features.memory_rows import MemoryRows, Served
from pyg_direct.features.row_files import RowFile
from pyg_direct.features.tier_report import TierReport
from pyg_direct.features.tiers.base import Tier
from pyg_direct.features.tiers.choice import open_file
from pyg_direct.features.tiers.disk import DiskTier
from pyg_direct.features.tiers.sharded import ShardedTier, open_exchange, range_of
from pyg_direct.ops.local_ids.relabel_nodes import locate_ids
from pyg_direct.ops.rows.gather_rows import Directory
from pyg_direct.progress import show_wait
from pyg_direct.runtime.host.host_memory import parse_size

_LOGGER = logging.getLogger(__name__)

# Windows of planned rows that this thread reads from, and the number of the planned batch.
SERVED: Any = threading.local()


@contextmanager
def serving(windows: Mapping[int, Tier], number: int) -> Iterator[None]:
    """Read rows of tiers from their windows in this thread, in this block."""
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


def _find_places(ids: Tensor, num_rows: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Make the function that finds places of ids among those that are hot, ascending; -1 for others."""
    directory = Directory.of(ids.to(device), num_rows).wait()
    return partial(locate_ids, directory=directory, num_ids=num_rows)


def spill_file(file: RowFile, device: torch.device, scores: Tensor | None, count: int, hot_bytes: int,
               keep: Callable[..., MemoryRows]) -> SpilledRows:  # fmt: skip
    """Return rows of a file, of which the `count` with the highest scores are read into memory.

    Args:
        file: The file, of N rows.
        scores: A score for each row, `[N]`; None for the first rows.
        keep: Puts rows into memory, with these options of `Feature`.
    """
    shape, tier = file.rows.shape, open_file(file, device)
    if count == 0:
        return SpilledRows(tier)
    ids = choose_hottest(scores, shape[0], count).ids
    rows = torch.empty((count, *shape[1:]), dtype=file.rows.dtype, device="cpu")
    with show_wait("reading hot rows of a file"):
        DiskTier(file).read(ids, rows)
    hotness: Any = "degree" if scores is None else scores[ids.to(scores.device)]
    memory = keep(rows, device_cache_size=f"{hot_bytes}B", hotness=hotness)
    return SpilledRows(tier, _find_places(ids, shape[0], device), memory)


def shard_rows(rows: Tensor, device: torch.device, cache_size: int | str, rank: Callable[[], Tensor | None],
               keep: Callable[..., MemoryRows]) -> SpilledRows:  # fmt: skip
    """Put rows on all processes of the group, each a part and copies of the hot ones.

    Args:
        rows: `[N, ...]`, equal in all processes.
        rank: Returns a score for each row, `[N]`, or None for the first rows.
        keep: Puts rows into memory, with these options of `Feature`.
    """
    begin, num_bytes = time.perf_counter(), rows.numel() * rows.element_size()
    exchange = open_exchange(device)
    first, end = range_of(exchange.rank, exchange.size, len(rows))
    with show_wait("reading the rows of this process", items=rows[first:end].numel()):
        own = keep(rows[first:end].clone())
    hot = locate = None
    count = len(rows) * min(num_bytes, parse_size(cache_size, num_bytes)) // max(1, num_bytes)
    if count > 0:
        ids = choose_hottest(rank(), len(rows), count).ids
        hot = keep(rows[ids], device_cache_size="100%")
        locate = _find_places(ids, len(rows), device)
    _LOGGER.info("%d rows shared out over %d processes: %d of them here, %.3f GB of host memory, and copies of %d "
                 "hot rows; in %.1f s", len(rows), exchange.size, end - first, num_bytes / exchange.size / 1e9,
                 count, time.perf_counter() - begin)  # fmt: skip
    return SpilledRows(ShardedTier(len(rows), own, exchange), locate, hot)

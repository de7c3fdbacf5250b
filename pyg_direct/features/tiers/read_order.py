"""Order of the rows of a file by the windows that will read them.

`ReadRecorder` lists the rows that a window would read. `order_by_windows` puts rows that the same windows read side by
side. Batches are known, so this order is exact; DiskGNN (SIGMOD 2025) packs by a sample of batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyg_direct.features.tiers.disk import DiskTier, StagedTier
from pyg_direct.features.tiers.window import RowWindow


class ReadRecorder(RowWindow):
    """Window without memory for rows: it lists the rows that a window of so many bytes would read, and reads none.

    Attributes:
        reads: Positions in the file, int32 or int64 `[n]`, ascending, of each window that has rows to read.
    """

    def __init__(self, source: DiskTier | StagedTier, num_bytes: int, *, device_bytes: int = 0) -> None:
        memory, _ = self._choose_memory(source, num_bytes, device_bytes)
        self._held = np.full(self._settle(source, memory), -1, np.int64)
        self._dtype = np.int32 if self.shape[0] <= np.iinfo(np.int32).max else np.int64
        self.reads: list[np.ndarray] = []

    @property
    def is_broken(self) -> bool:
        """False: nothing is read."""
        return False

    def leave(self, is_left: bool = True) -> None:
        """Do nothing: nothing is read."""

    def read_ahead(self, number: int, released: int) -> bool:
        """List the rows of a window that are not in memory, as if all batches before it were released."""
        if number != self._number or self._missing is not None:
            return True
        self._missing = missing = self._begin_reads()
        slots = self._given[0][: len(missing)].astype(np.int64)
        old = self._held[slots]
        self._slots[old[old >= 0]] = -1
        self._held[slots] = missing
        self._slots[missing] = slots
        if len(missing) > 0:
            self.reads.append(missing.astype(self._dtype))
        return True

    def read_rest(self) -> None:
        """Do nothing: nothing is read."""


def order_by_windows(reads: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """Return an order of rows by which each window finds its rows side by side; position of each row, int64 `[N]`.

    A row comes before another if it is read by the first window that reads one of them alone. So the rows that the
    first window reads lie at the beginning, among these the ones that the next window reads again, and so on. Rows
    that no window reads lie at the end.

    Args:
        reads: Rows that each window reads, each at most once, by window.
        num_rows: N.
    """
    # Ranks of rows: each window, from the last to the first, moves its rows before all others.
    ranks, first = np.arange(num_rows), 0
    for rows in reversed(reads):
        in_order = rows[np.argsort(ranks[rows], kind="stable")]
        first -= len(rows)
        ranks[in_order] = np.arange(first, first + len(rows))
    return np.argsort(ranks, kind="stable")

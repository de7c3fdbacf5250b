"""What each tier of a feature holds and has served, in words and as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.local_ids.bitmap import locate_ids
from pyg_direct.ops.rows.gather import Directory
from pyg_direct.profiling import draw_shares, open_picture, show_bytes
from pyg_direct.runtime.cuda.peer_memory import Spread

# Of tiers, by a word of their names.
TIER_COLORS = {"GPU memory": "#4a90d9", "other GPUs": "#5bb98b", "host memory": "#90cdf4", "file": "#b8c0c8",
               "other processes": "#e0a458"}  # fmt: skip

# What rows come over from other memory than the GPU's own.
LINKS = ("PCIe", "NVLink")


class TierReport(NamedTuple):
    """One tier.

    Attributes:
        name: `GPU memory`, `memory of other GPUs`, `host memory (unified)`, ..., `file`, `other processes`.
        num_rows: Rows it alone serves.
        num_read: Rows that were read from it; None where reads were not counted.
        link: `PCIe` or `NVLink`, over which its rows come; None for none.
    """

    name: str
    num_rows: int
    num_read: int | None
    link: str | None = None


class Report(NamedTuple):
    """What each tier of a feature holds and has served, nearest first; `print` shows a table."""

    tiers: Sequence[TierReport]
    row_bytes: int

    @property
    def num_read(self) -> int:
        """Rows read from all tiers."""
        return sum(tier.num_read or 0 for tier in self.tiers)

    def link_bytes(self, link: str) -> int:
        """Bytes of the rows that were read over `PCIe` or `NVLink`."""
        return self.row_bytes * sum(tier.num_read or 0 for tier in self.tiers if tier.link == link)

    def to_dict(self) -> dict[str, Any]:
        """All of it in what `json.dumps` takes."""
        return {"row_bytes": self.row_bytes, "num_read": self.num_read,
                "tiers": [tier._asdict() for tier in self.tiers]}  # fmt: skip

    def __str__(self) -> str:
        is_counted = all(tier.num_read is not None for tier in self.tiers)
        hint = [] if is_counted else ["reads were not counted: call count_served() before them"]
        return "\n".join([*list_tiers({"": self}), *hint])

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw shares of rows held and of rows read into a picture (needs the extra `bench`); returns its path.

        Args:
            path: Where to draw it.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        bars = {"rows held": [(tier.name, tier.num_rows) for tier in self.tiers],
                "rows read": [(tier.name, tier.num_read or 0) for tier in self.tiers]}  # fmt: skip
        with open_picture(path, figsize=(7, 1.9)) as (_, axes):
            draw_shares(axes, bars, TIER_COLORS)
        return Path(path)


def list_tiers(reports: Mapping[str, Report]) -> list[str]:
    """A table of the tiers of several features, by name."""
    width = max((len(name) + 1 for name in reports if name), default=0)
    lines = [f"{'':<{width}}{'tier':<24} {'rows':>14} {'bytes':>10} {'rows read':>16} {'share':>8} {'bytes read':>10}"]
    for name, report in reports.items():
        for tier in report.tiers:
            held = show_bytes(tier.num_rows * report.row_bytes)
            line = f"{name:<{width}}{tier.name:<24} {tier.num_rows:>14,} {held:>10} "
            if tier.num_read is None:
                lines.append(f"{line}{'not counted':>16}")
                continue
            share = tier.num_read / max(1, report.num_read)
            read = show_bytes(tier.num_read * report.row_bytes)
            lines.append(f"{line}{tier.num_read:>16,} {share:>8.1%} {read:>10}")
    return lines


class FarRows:
    """Counts the rows that are read out of the memory of other GPUs.

    Args:
        spread: The memory of several GPUs.
        rows: The rows that lie in it, `[H, ...]`.
        device: The GPU that reads them.

    Attributes:
        num_rows: Rows that lie on other GPUs.
    """

    def __init__(self, spread: Spread, rows: Tensor, device: torch.device) -> None:
        self._row_bytes, self._chunk_bytes = rows[0].numel() * rows.element_size(), spread.chunks[0].num_bytes
        is_far = [chunk.owner != device.index for chunk in spread.chunks]
        # A row belongs to the chunk that it begins in.
        firsts = [min(len(rows), -(-i * self._chunk_bytes // self._row_bytes)) for i in range(len(is_far) + 1)]
        self.num_rows = sum(end - begin for far, begin, end in zip(is_far, firsts, firsts[1:], strict=False) if far)
        # The last one stands for the place -1.
        self._is_far = torch.tensor([*is_far, False], device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def count(self, places: Tensor) -> None:
        """Count a read of rows at these places, int64 `[n]`; -1 is none."""
        chunks = torch.div(places * self._row_bytes, self._chunk_bytes, rounding_mode="floor")
        self._count += self._is_far[chunks].sum()

    @property
    def num_read(self) -> int:
        """Rows counted so far; waits for the GPU."""
        return int(self._count)


class ReportedRows:
    """What a `Feature` tells of itself; its constructor sets the attributes."""

    _served: Tensor | None
    _num_served: int
    _hot: Tensor | None
    _cold: Tensor | None
    _directory: Directory | None
    _resident: Any
    _spilled: Any
    _handle: Any
    # Of the hot rows, those served by other GPUs.
    _far: FarRows | None = None

    def count_served(self, on: bool = True) -> None:
        """Count from now on what each tier serves, from zero, on the device; or stop. It takes two small kernels a
        read, and no wait.

        Args:
            on: False to stop.
        """
        self._num_served = 0
        self._served = self._far = None
        if on:
            self._served = torch.zeros((), dtype=torch.int64, device=self.device)
            spread = self._find_spread()
            if spread is not None and self._hot is not None:
                self._far = FarRows(spread, self._hot, self.device)
        if self._spilled is not None:
            self._spilled.forget_counts()
        if self._resident is not None:
            self._resident.count_served(on)

    def _find_spread(self) -> Spread | None:
        """The memory of several GPUs that the hot rows lie in, if so."""
        number = None if self._handle is None else self._handle.find_hot(self.device)
        return None if number is None else self._handle.hot[number].spread

    def _count(self, ids: Tensor) -> None:
        """Count the hot rows among `ids`."""
        self._num_served += ids.numel()
        if self._served is None or (self._directory is None and self._far is None):
            return
        places, num_rows = ids.to(self.device), self._filled()[0]
        if self._directory is not None:
            places = locate_ids(places, self._directory, num_rows)
            self._served += (places >= 0).sum()
        if self._far is not None:
            self._far.count(torch.where((places >= 0) & (places < num_rows), places.long(), -1))

    def _count_hot(self, num_read: int) -> int:
        """How many of the rows read from memory came from memory of GPUs."""
        if self._directory is not None and self._served is not None:
            return int(self._served)
        return num_read if self._hot is not None and self._hot.is_cuda and self._cold is None else 0

    def report(self, picture: str | os.PathLike[str] | None = None) -> Report:
        """Print what each tier holds and, where `count_served` was called, what it has served; returns it.

        Args:
            picture: Where to draw it too, such as `tiers.png` (needs the extra `bench`).

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        found = self.tell()
        print(found)
        if picture is not None:
            found.draw(picture)
        return found

    def tell(self) -> Report:
        """The report, not printed.

        Raises:
            ArgumentError: the feature holds no rows yet.
        """
        shape = self._filled()
        counted = self._served is not None
        memory: Any = self._resident if self._spilled is not None else self
        num_read = self._num_served
        if self._spilled is not None:
            num_read = self._spilled.num_read - self._spilled.num_missed
        # Rows that the CPU collects come over the same link.
        link = "PCIe" if self.device.type == "cuda" else None
        tiers = []
        if memory is not None:
            num_hot, in_memory = memory.num_hot_rows, memory.shape[0]
            hot_read = memory._count_hot(num_read)
            num_far, far_read = (0, 0) if memory._far is None else (memory._far.num_rows, memory._far.num_read)
            if num_hot > num_far:
                tiers.append(TierReport("GPU memory", num_hot - num_far, hot_read - far_read if counted else None))
            if num_far > 0:
                tiers.append(TierReport("memory of other GPUs", num_far, far_read, "NVLink"))
            if in_memory > num_hot:
                tiers.append(TierReport(f"host memory ({memory.placement})", in_memory - num_hot,
                                        num_read - hot_read if counted else None, link))  # fmt: skip
        if self._spilled is not None:
            held = 0 if memory is None else memory.shape[0]
            for name, num_rows, num_tier, is_linked in self._spilled.list_tiers(held):
                tiers.append(TierReport(name, num_rows, num_tier if counted else None, link if is_linked else None))
        row_bytes = shape[1:].numel() * (self.dtype if self._hot is None else self._hot.dtype).itemsize
        return Report(tiers, row_bytes)

    @property
    def hit_rate(self) -> float:
        """Share of the rows read since `count_served` that were in GPU memory; waits for the GPU.

        Raises:
            ArgumentError: reads are not counted.
        """
        if self._served is None:
            raise ArgumentError("hit_rate needs reads that are counted: call count_served first")
        memory: Any = self._resident if self._spilled is not None else self
        num_read = self._num_served if self._spilled is None else self._spilled.num_read
        held = num_read if self._spilled is None else num_read - self._spilled.num_missed
        return 0.0 if memory is None else memory._count_hot(held) / max(1, num_read)

    # What the rest of a `Feature` does.

    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows as they are read."""
        raise NotImplementedError

    def _filled(self) -> torch.Size:
        raise NotImplementedError

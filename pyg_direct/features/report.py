"""What each tier of a feature holds and has served, in words and as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.ops.gather import Directory
from pyg_direct.ops.locate import locate_ids


class TierReport(NamedTuple):
    """One tier.

    Attributes:
        name: `GPU memory`, `host memory (unified)`, ..., `file`.
        num_rows: Rows it alone serves.
        num_read: Rows that were read from it; None where reads were not counted.
    """

    name: str
    num_rows: int
    num_read: int | None


class Report(NamedTuple):
    """What each tier of a feature holds and has served, nearest first; `print` shows a table."""

    tiers: Sequence[TierReport]
    row_bytes: int

    @property
    def num_read(self) -> int:
        """Rows read from all tiers."""
        return sum(tier.num_read or 0 for tier in self.tiers)

    def __str__(self) -> str:
        lines = [f"{'tier':<24} {'rows':>14} {'bytes':>10} {'rows read':>16} {'share':>8} {'bytes read':>10}"]
        for tier in self.tiers:
            held = _in_words(tier.num_rows * self.row_bytes)
            if tier.num_read is None:
                lines.append(f"{tier.name:<24} {tier.num_rows:>14,} {held:>10} {'not counted':>16}")
                continue
            share = tier.num_read / max(1, self.num_read)
            lines.append(f"{tier.name:<24} {tier.num_rows:>14,} {held:>10} {tier.num_read:>16,} {share:>8.1%} "
                         f"{_in_words(tier.num_read * self.row_bytes):>10}")  # fmt: skip
        return "\n".join(lines)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw shares of rows held and of rows read into a picture (needs the extra `bench`); returns its path."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 1.9), constrained_layout=True)
        counts = {"rows held": [tier.num_rows for tier in self.tiers],
                  "rows read": [tier.num_read or 0 for tier in self.tiers]}  # fmt: skip
        for place, values in enumerate(counts.values()):
            left, total = 0.0, max(1, sum(values))
            for tier, value, color in zip(self.tiers, values, ("#2b6cb0", "#63b3ed", "#9aa5b1"), strict=False):
                axes.barh(place, value / total, left=left, color=color, label=tier.name if place == 0 else None)
                if value / total > 0.06:
                    axes.annotate(f"{value / total:.0%}", (left + value / total / 2, place), ha="center", va="center")
                left += value / total
            axes.annotate(f" {sum(values):,}", (1, place), va="center", fontsize=8)
        axes.set_yticks(range(2), list(counts))
        axes.set_xlim(0, 1.18)
        axes.set_xticks([])
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        return Path(path)


def _in_words(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


class ReportedRows:
    """What a `Feature` tells of itself; its constructor sets the attributes."""

    _served: Tensor | None
    _num_served: int
    _hot: Tensor | None
    _cold: Tensor | None
    _directory: Directory | None
    _resident: Any
    _spilled: Any

    def count_served(self, on: bool = True) -> None:
        """Count from now on what each tier serves, from zero, on the device; or stop. It takes two small kernels a
        read, and no wait.
        """
        self._num_served = 0
        self._served = None
        if on:
            self._served = torch.zeros((), dtype=torch.int64, device=self.device)
        if self._spilled is not None:
            self._spilled.num_read = self._spilled.num_missed = 0
        if self._resident is not None:
            self._resident.count_served(on)

    def _count(self, ids: Tensor) -> None:
        """Count the hot rows among `ids`."""
        self._num_served += ids.numel()
        if self._directory is not None and self._served is not None:
            self._served += (locate_ids(ids.to(self.device), self._directory, self._filled()[0]) >= 0).sum()

    def _count_hot(self, num_read: int) -> int:
        """How many of the rows read from memory came from GPU memory."""
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
        shape = self._filled()
        counted = self._served is not None
        memory: Any = self._resident if self._spilled is not None else self
        num_read = self._num_served
        if self._spilled is not None:
            num_read = self._spilled.num_read - self._spilled.num_missed
        tiers = []
        if memory is not None:
            num_hot, in_memory = memory.num_hot_rows, memory.shape[0]
            hot_read = memory._count_hot(num_read)
            if num_hot > 0:
                tiers.append(TierReport("GPU memory", num_hot, hot_read if counted else None))
            if in_memory > num_hot:
                tiers.append(TierReport(f"host memory ({memory.placement})", in_memory - num_hot,
                                        num_read - hot_read if counted else None))  # fmt: skip
        if self._spilled is not None:
            held = 0 if memory is None else memory.shape[0]
            tiers.append(TierReport("file", shape[0] - held, self._spilled.num_missed if counted else None))
        row_bytes = (
            shape[1:].numel() * (self._hot if self._hot is not None else torch.empty(0, dtype=self.dtype)).itemsize
        )
        found = Report(tiers, row_bytes)
        print(found)
        if picture is not None:
            found.draw(picture)
        return found

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

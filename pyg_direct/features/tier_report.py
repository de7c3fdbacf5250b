"""Report of the rows that each tier of a feature holds and has served, in words and as a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyg_direct.profiling import draw_shares, open_picture, show_bytes

# Of tiers, by a word of their names.
TIER_COLORS = {"GPU memory": "#4a90d9", "other GPUs": "#5bb98b", "host memory": "#90cdf4", "file": "#b8c0c8",
               "other processes": "#e0a458"}  # fmt: skip

# Link to each kind of memory outside the GPU.
LINKS = ("PCIe", "NVLink")


class TierReport(NamedTuple):
    """One tier.

    Attributes:
        name: `GPU memory`, `memory of other GPUs`, `host memory (unified)`, ..., `file`, `other processes`.
        num_rows: Rows it alone serves.
        num_read: Rows that were read from it; None if reads were not counted.
        link: `PCIe` or `NVLink`, over which its rows come; None for none.
    """

    name: str
    num_rows: int
    num_read: int | None
    link: str | None = None


class Report(NamedTuple):
    """Rows that each tier of a feature holds and has served, nearest first; `print` shows a table."""

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
        """Return the report as objects that `json.dumps` takes."""
        return {"row_bytes": self.row_bytes, "num_read": self.num_read,
                "tiers": [tier._asdict() for tier in self.tiers]}  # fmt: skip

    def __str__(self) -> str:
        is_counted = all(tier.num_read is not None for tier in self.tiers)
        hint = [] if is_counted else ["reads were not counted: call count_served() before them"]
        return "\n".join([*list_tiers({"": self}), *hint])

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw shares of rows held and of rows read into a picture (needs the extra `bench`); returns its path.

        Args:
            path: File of the picture.

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

"""Report of the rows that each tier of a feature holds and has served, in words and as a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from pyg_direct.object_text import flatten, show_place, show_table
from pyg_direct.profiling import draw_shares, open_picture, show_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of tiers, by a word of their names.
TIER_COLORS = {"GPU memory": "#4a90d9", "other GPUs": "#5bb98b", "host memory": "#90cdf4", "file": "#b8c0c8",
               "other processes": "#e0a458"}  # fmt: skip

# Link to each kind of memory outside the GPU.
LINKS = ("PCIe", "NVLink")


class TierReport(NamedTuple):
    """One tier.

    Attributes:
        name: `GPU memory`, `memory of other GPUs`, `host memory (unified)`, ..., `file`, `other processes`.
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
        """Return bytes of the rows that were read over `PCIe` or `NVLink`."""
        return self.row_bytes * sum(tier.num_read or 0 for tier in self.tiers if tier.link == link)

    def to_dict(self) -> dict[str, int | float]:
        """Return the numbers of the report by flat names, such as `GPU_memory/num_read`, for loggers of metrics.

        Numbers of reads are left out if reads were not counted.
        """
        tiers = {tier.name: {"num_rows": tier.num_rows, "num_read": tier.num_read} for tier in self.tiers}
        is_counted = all(tier.num_read is not None for tier in self.tiers)
        return flatten({"row_bytes": self.row_bytes, "num_read": self.num_read if is_counted else None, **tiers})

    def to_tree(self) -> dict[str, Any]:
        """Return the report as objects that `json.dumps` takes."""
        return {"row_bytes": self.row_bytes, "num_read": self.num_read,
                "tiers": [tier._asdict() for tier in self.tiers]}  # fmt: skip

    def _repr_html_(self) -> str:
        return show_table("tiers", tabulate_tiers({"": self}), TIER_HEADS)

    def __str__(self) -> str:
        is_counted = all(tier.num_read is not None for tier in self.tiers)
        hint = [] if is_counted else ["reads were not counted: call count_served() before them"]
        return "\n".join([*list_tiers({"": self}), *hint])

    @overload
    def draw(self, path: None = None) -> Figure: ...

    @overload
    def draw(self, path: str | os.PathLike[str]) -> Path: ...

    def draw(self, path: str | os.PathLike[str] | None = None) -> Path | Figure:
        """Draw shares of rows held and of rows read (needs the extra `bench`).

        Args:
            path: File of the picture; None saves none.

        Returns:
            The path, or without one the figure, which notebooks show.
        """
        bars = {"rows held": [(tier.name, tier.num_rows) for tier in self.tiers],
                "rows read": [(tier.name, tier.num_read or 0) for tier in self.tiers]}  # fmt: skip
        with open_picture(path, figsize=(7, 1.9)) as (figure, axes):
            draw_shares(axes, bars, TIER_COLORS)
        return figure if path is None else Path(path)


def report_tiers(feature: Any, dtype: torch.dtype, is_counted: bool) -> Report:
    """Return the report of a feature that holds rows stored in `dtype`, and counts reads or does not."""
    # Rows that the CPU collects come over the same link.
    shape, link, stored = feature.shape, "PCIe" if feature.device.type == "cuda" else None, feature.stored
    if stored is None:
        tiers = [TierReport(f"host memory ({feature.placement})", shape[0], 0 if is_counted else None, link)]
    else:
        tiers = stored.describe(stored.num_read, is_counted, link)
    return Report(tiers, shape[1:].numel() * dtype.itemsize)


def list_parts(feature: Any) -> Iterator[str]:
    """Iterate over the facts that the `repr` of a feature shows."""
    # Read here: a feature whose constructor failed has no shape.
    shape: torch.Size | None = feature._shape
    if shape is None:
        yield from ("empty", str(feature.device))
        return
    yield f"{list(shape)} of {feature.dtype}"
    yield show_bytes(shape.numel() * feature.dtype.itemsize)
    num_hot, placement = feature.num_hot_rows, feature.placement
    if 0 < num_hot < shape[0]:
        yield f"{num_hot:,} rows in GPU memory"
        placement = f"the others {placement}"
    yield show_place(placement, feature.device)


TIER_HEADS = ("", "tier", "rows", "bytes", "rows read", "share", "bytes read")
_TIER_LINE = "{:<{width}}{:<24} {:>14} {:>10} {:>16} {:>8} {:>10}"


def tabulate_tiers(reports: Mapping[str, Report]) -> list[tuple[str, ...]]:
    """Return the cells of the tiers of several features, by name, in the columns of `TIER_HEADS`."""
    found: list[tuple[str, ...]] = []
    for name, report in reports.items():
        for tier in report.tiers:
            held = name, tier.name, f"{tier.num_rows:,}", show_bytes(tier.num_rows * report.row_bytes)
            if tier.num_read is None:
                found.append((*held, "not counted", "", ""))
                continue
            share = tier.num_read / max(1, report.num_read)
            read = show_bytes(tier.num_read * report.row_bytes)
            found.append((*held, f"{tier.num_read:,}", f"{share:.1%}", read))
    return found


def list_tiers(reports: Mapping[str, Report]) -> list[str]:
    """List the tiers of several features, by name, as lines of a table."""
    width = max((len(name) + 1 for name in reports if name), default=0)
    rows = [TIER_HEADS, *tabulate_tiers(reports)]
    return [_TIER_LINE.format(*cells, width=width).rstrip() for cells in rows]

"""A benchmark row, the files that rows are kept in, and their pictures."""

from __future__ import annotations

import datetime
import importlib.metadata as metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pyg_direct.cache_folder import write_whole
from pyg_direct.errors import ArgumentError
from pyg_direct.profiling import open_picture
from pyg_direct.runtime.host.host_memory import count_cores

# Of the name of a GPU, words that its model does not need.
_BESIDE = re.compile(r"nvidia|\d+gb|hbm\w*|sxm\w*|pcie")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: Name of the case, such as `sampling/products/cuda/1024`.
        metric, unit: Name and unit of the numbers.
        p20, p50, p80: Percentiles over the repeats, in `unit`. p50 is the median; of two middle values, their mean.
        limit: Physical limit of the same run in `unit`; None for no limit.
        curve: Name of the growth curve that this is a point of; its metric names the line.
        at, at_name: Position on the curve, and the quantity that it counts.
    """

    case: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    limit: float | None = None
    limit_name: str = ""
    note: str = ""
    curve: str = ""
    at: float | None = None
    at_name: str = ""

    @classmethod
    def of(cls, case: str, metric: str, unit: str, values: Iterable[float], limit: float | None = None,
           limit_name: str = "", note: str = "", curve: str = "", at: float | None = None,
           at_name: str = "") -> Row:  # fmt: skip
        """Return a row from the values of the repeats."""
        ordered = sorted(values)

        def percentile(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(case, metric, unit, percentile(0.2), median(ordered), percentile(0.8), limit, limit_name, note,
                   curve, at, at_name)  # fmt: skip

    @property
    def ratio(self) -> float | None:
        """Median over the limit."""
        return None if not self.limit else self.p50 / self.limit

    @property
    def beats_limit(self) -> bool:
        """True if the median is better than the limit: a higher rate, or less time or memory."""
        if not self.limit:
            return False
        is_rate = "/s" in self.unit or self.unit == "x"
        return self.p50 > self.limit if is_rate else self.p50 < self.limit

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"   {self.ratio:.2f} of {self.limit:.4g} ({self.limit_name})"
        return f"{self.case:<44} {self.metric:<24} {self.p50:>10.4g} {self.unit}{ratio}"


@dataclass(frozen=True)
class Machine:
    """Machine and versions that a row was measured with."""

    gpu: str = field(default_factory=lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    cpu: str = field(default_factory=lambda: f"{count_cores()} cores, {platform.machine()}")
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    commit: str = field(default_factory=lambda: read_commit())
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def name(self) -> str:
        """Name for files of rows: `cpu`, or the GPU without its maker and its memory, such as `h200`."""
        words = [word for word in self.gpu.lower().split() if not _BESIDE.fullmatch(word)]
        return "cpu" if self.gpu == "none" else "-".join(words)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("pyg_direct", "torch", "torch_geometric", "numba", "numba-cuda", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_commit() -> str:
    """Short hash of the checked-out commit, or the value of PYG_DIRECT_COMMIT."""
    if "PYG_DIRECT_COMMIT" in os.environ:
        return os.environ["PYG_DIRECT_COMMIT"]
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def to_json(row: Row, machine: Machine) -> dict[str, Any]:
    """Return a row as files hold it."""
    return {**asdict(row), "ratio": row.ratio, **asdict(machine)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; if there is no file, there are none."""
    if not path.exists():
        return []
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())
        _ = [_key(row) for row in found]
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"path must be a file of rows, got {path}: {type(error).__name__}: {error}") from error
    return found


def save_rows(path: Path, rows: Iterable[Row], machine: Machine) -> None:
    """Merge rows into a JSON file: a row replaces the one of equal case, metric and GPU."""
    known = {_key(row): row for row in read_rows(path)}
    for row in rows:
        entry = to_json(row, machine)
        known[_key(entry)] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole, even if a second Ctrl-C ends it.
    write_whole(path, json.dumps(list(known.values()), indent=1) + "\n")


def _key(entry: dict[str, object]) -> tuple[object, ...]:
    return entry["case"], entry["metric"], entry["gpu"]


# Units worth a picture: rates, and times beside their limits.
UNITS = ("G/s", "M/s", "TB/s", "GB/s", "ms")

# Marks of ways that are not ours.
_OTHERS = re.compile(r"\b(torch|PyG|PyGT|pyg-lib|cuSPARSE|GE-SpMM)\b")


def draw_panels(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of any units into one PNG, a panel for each unit worth a picture."""
    panels = {unit: [r for r in rows if r["unit"] == unit] for unit in UNITS}
    panels = {unit: found for unit, found in panels.items() if found}
    heights = [0.42 * len(found) + 1.0 for found in panels.values()]
    with open_picture(path, len(panels), figsize=(9, sum(heights) + 0.5), squeeze=False,
                      height_ratios=heights) as (figure, places):  # fmt: skip
        for axes, found in zip(places[:, 0], panels.values(), strict=True):
            draw_bars(axes, found)
        figure.suptitle(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)


def draw_bars(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draw medians with their spread, from top to bottom, and the limits of the same run."""
    places = range(len(rows), 0, -1)
    errors = [[r["p50"] - r["p20"] for r in rows], [r["p80"] - r["p50"] for r in rows]]
    ours = ["#9aa5b1" if _is_of_others(r) else "#2b6cb0" for r in rows]
    axes.barh(list(places), [r["p50"] for r in rows], xerr=errors, color=ours, height=0.62)
    for place, row in zip(places, rows, strict=True):
        if row["limit"] is not None:
            axes.plot([row["limit"]] * 2, [place - 0.38, place + 0.38], color="#c53030", linewidth=2)
        axes.annotate(f" {row['p50']:.3g}", (row["p80"], place), va="center", fontsize=8)
    axes.set_yticks(list(places), [f"{r['case']}: {r['metric']}" for r in rows], fontsize=8)
    limits = ", ".join(dict.fromkeys(r["limit_name"] for r in rows if r["limit_name"]))
    axes.set_xlabel(rows[0]["unit"] + (f"   (red, same run: {limits})" if limits else ""), fontsize=8)
    axes.margins(x=0.12)


def describe_origin(row: dict[str, Any]) -> str:
    """Describe where and when a row was measured."""
    machine = row["cpu"] if row["gpu"] == "none" else row["gpu"]
    return f"{machine}, commit {row['commit']}, {row['date']}"


def _is_of_others(row: dict[str, Any]) -> bool:
    if row["case"].startswith("peers/"):
        return not row["metric"].startswith("pyg_direct")
    return _OTHERS.search(row["metric"]) is not None

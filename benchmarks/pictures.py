"""Pictures of a file of rows: bars, growth curves, and a table of colors of epochs of dynamic graph networks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pyg_direct.bench.result_row import UNITS, describe_origin, draw_bars
from pyg_direct.profiling import open_picture

_OVER, _STREAM = " over ours", "ours, stream"


def draw_file(path: Path) -> list[Path]:
    """Draw the rows of a results file, a PNG for each unit and each curve beside it; returns the pictures."""
    everything = json.loads(path.read_text())
    rows = [r for r in everything if not r.get("curve")]
    pictures = []
    for curve in dict.fromkeys(r["curve"] for r in everything if r.get("curve")):
        picture = path.with_name(f"{path.stem}_{curve.replace(' ', '_')}.png")
        draw_curve([r for r in everything if r.get("curve") == curve], picture, curve)
        pictures.append(picture)
    ways, cells = read_ways(rows)
    if cells:
        pictures.append(path.with_name(f"{path.stem}_ways.png"))
        draw_ways(ways, cells, pictures[-1], f"{path.stem.split('_')[0]}, {describe_origin(rows[-1])}")
        rows = [r for r in rows if not r["case"].startswith("dynamic/")]
    for unit in dict.fromkeys(r["unit"] for r in rows if r["unit"] in UNITS):
        picture = path.with_name(f"{path.stem}_{unit.replace('/', '_per_')}.png")
        draw_rows([r for r in rows if r["unit"] == unit], picture, path.stem.split("_")[0])
        pictures.append(picture)
    return pictures


def read_ways(rows: Sequence[dict[str, Any]]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """(ways to train a dynamic graph network, their times over those of `FrameTrainer` by graph and model)."""
    cells: dict[str, dict[str, float]] = {}
    medians = {(r["case"], r["metric"]): r["p50"] for r in rows}
    for row in rows:
        if row["case"].startswith("dynamic/") and row["metric"].endswith(_OVER):
            cells.setdefault(row["case"], {})[row["metric"].removesuffix(_OVER)] = row["p50"]
    for case, found in cells.items():
        ours, streamed = (medians.get((case, way)) for way in ("ours, FrameTrainer", _STREAM))
        if ours and streamed:
            found[_STREAM] = streamed / ours
    streamed_over_ours = [found[_STREAM] for found in cells.values() if _STREAM in found]
    if "dynamic/all" in cells and streamed_over_ours:
        cells["dynamic/all"][_STREAM] = geometric_mean(streamed_over_ours)
    # The column of our stream comes last, and so does the row of all cases.
    ways = sorted(dict.fromkeys(way for found in cells.values() for way in found), key=lambda way: way == _STREAM)
    order = sorted(cells, key=lambda case: case == "dynamic/all")
    return ways, {case.removeprefix("dynamic/"): cells[case] for case in order}


def draw_ways(ways: Sequence[str], cells: dict[str, dict[str, float]], path: Path, title: str) -> None:
    """Draw times over ours into a PNG: a line a graph and model, a column a way, colors by the logarithm."""
    size = (max(6.5, 3.4 + 0.9 * len(ways)), 1.6 + 0.27 * len(cells))
    with open_picture(path, figsize=size) as (figure, axes):
        logs = [[math.log(found[way]) if way in found else math.nan for way in ways] for found in cells.values()]
        most = max(abs(value) for line in logs for value in line if not math.isnan(value)) or 1.0
        # White: both take as long; blue: others take longer.
        axes.imshow(logs, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
        for y, (found, line) in enumerate(zip(cells.values(), logs, strict=True)):
            for x, (way, value) in enumerate(zip(ways, line, strict=True)):
                color = "white" if abs(value) > 0.6 * most else "black"
                axes.text(x, y, f"{found[way]:.3g}" if way in found else "-", ha="center", va="center", fontsize=8,
                          color=color)  # fmt: skip
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(ways)), [way.replace(" ", "\n") for way in ways], fontsize=8)
        names = ["geometric mean of all" if case == "all" else case for case in cells]
        axes.set_yticks(range(len(cells)), names, fontsize=8)
        figure.suptitle(f"an epoch takes so many times as long as with our FrameTrainer\n{title}", fontsize=9)


def draw_rows(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of one unit, from top to bottom, into a PNG."""
    with open_picture(path, figsize=(9, 0.42 * len(rows) + 1.4)) as (_, axes):
        draw_bars(axes, rows)
        axes.set_title(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of one curve, a line for each metric, into a PNG."""
    with open_picture(path, figsize=(8, 4.5)) as (_, axes):
        for metric in dict.fromkeys(r["metric"] for r in rows):
            line = sorted((r for r in rows if r["metric"] == metric), key=lambda r: r["at"])
            places = [r["at"] for r in line]
            (drawn,) = axes.plot(places, [r["p50"] for r in line], marker="o", markersize=4, label=metric)
            axes.fill_between(
                places, [r["p20"] for r in line], [r["p80"] for r in line], alpha=0.2, color=drawn.get_color()
            )
        limits: dict[str, dict[float, float]] = {}
        for row in rows:
            if row["limit"] is not None:
                limits.setdefault(row["limit_name"], {})[row["at"]] = row["limit"]
        for name, limit in limits.items():
            axes.plot(sorted(limit), [limit[at] for at in sorted(limit)], color="#c53030", linestyle="--",
                      label=f"{name}, same run")  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks = sorted({r["at"] for r in rows})
        axes.set_xticks(ticks, [f"{at:g}" for at in ticks], fontsize=8, rotation=45)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(rows[0]["at_name"])
        axes.set_ylabel(rows[0]["unit"])
        axes.legend(fontsize=8)
        axes.set_title(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)

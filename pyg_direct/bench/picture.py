"""Pictures of rows: bars of medians with their spread, growth curves, the limits of the same run in red."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Units worth a picture: rates, and times beside their limits.
UNITS = ("G/s", "M/s", "TB/s", "GB/s", "ms")


def draw_file(path: Path) -> list[Path]:
    """Draw the rows of a results file, a PNG for each unit and each curve beside it; returns the pictures."""
    everything = json.loads(path.read_text())
    rows = [r for r in everything if not r.get("curve")]
    pictures = []
    for curve in dict.fromkeys(r["curve"] for r in everything if r.get("curve")):
        picture = path.with_name(f"{path.stem}_{curve.replace(' ', '_')}.png")
        draw_curve([r for r in everything if r.get("curve") == curve], picture, curve)
        pictures.append(picture)
    for unit in dict.fromkeys(r["unit"] for r in rows if r["unit"] in UNITS):
        picture = path.with_name(f"{path.stem}_{unit.replace('/', '_per_')}.png")
        draw_rows([r for r in rows if r["unit"] == unit], picture, path.stem.split("_")[0])
        pictures.append(picture)
    return pictures


def draw_rows(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of one unit, from top to bottom, into a PNG."""
    plt = start_drawing()
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.4), constrained_layout=True)
    _draw_bars(axes, rows)
    axes.set_title(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_panels(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of any units into one PNG, a panel for each unit worth a picture."""
    plt = start_drawing()
    panels = {unit: [r for r in rows if r["unit"] == unit] for unit in UNITS}
    panels = {unit: found for unit, found in panels.items() if found}
    heights = [0.42 * len(found) + 1.0 for found in panels.values()]
    figure, places = plt.subplots(len(panels), figsize=(9, sum(heights) + 0.5), constrained_layout=True, squeeze=False,
                                  gridspec_kw={"height_ratios": heights})  # fmt: skip
    for axes, found in zip(places[:, 0], panels.values(), strict=True):
        _draw_bars(axes, found)
    figure.suptitle(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_bars(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
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


def draw_curve(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of one curve, a line for each metric, into a PNG."""
    plt = start_drawing()
    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
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
    figure.savefig(path, dpi=110)
    plt.close(figure)


def start_drawing() -> Any:
    """Matplotlib's pyplot, which draws into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def describe_origin(row: dict[str, Any]) -> str:
    """Where and when a row was measured."""
    machine = row["cpu"] if row["gpu"] == "none" else row["gpu"]
    return f"{machine}, commit {row['commit']}, {row['date']}"


def _is_of_others(row: dict[str, Any]) -> bool:
    if row["case"].startswith("peers/"):
        return not row["metric"].startswith("pyg_direct")
    return row["metric"].startswith(("torch", "PyG"))

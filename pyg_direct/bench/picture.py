"""Pictures of rows: bars of medians with their spread, the limit of the same run as a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Units worth a picture: rates, and times beside their limits.
UNITS = ("G/s", "M/s", "TB/s", "GB/s", "ms")


def draw_file(path: Path) -> list[Path]:
    """Draw the rows of a results file, a PNG for each unit beside it; returns the pictures."""
    rows = json.loads(path.read_text())
    pictures = []
    for unit in dict.fromkeys(r["unit"] for r in rows if r["unit"] in UNITS):
        picture = path.with_name(f"{path.stem}_{unit.replace('/', '_per_')}.png")
        draw_rows([r for r in rows if r["unit"] == unit], picture, path.stem.split("_")[0])
        pictures.append(picture)
    return pictures


def draw_rows(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw rows of one unit, from top to bottom, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.4), constrained_layout=True)
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
    axes.set_xlabel(rows[0]["unit"] + (f"   (red, same run: {limits})" if limits else ""))
    machine = rows[-1]["cpu"] if rows[-1]["gpu"] == "none" else rows[-1]["gpu"]
    axes.set_title(f"{title}\n{machine}, commit {rows[-1]['commit']}, {rows[-1]['date']}", fontsize=9)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _is_of_others(row: dict[str, Any]) -> bool:
    if row["case"].startswith("peers/"):
        return not row["metric"].startswith("pyg_direct")
    return row["metric"].startswith(("torch", "PyG"))

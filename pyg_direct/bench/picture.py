"""A picture of rows: bars of medians with their spread, the limit of the same run as a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyg_direct.bench.row import Machine, Row


def draw_rows(rows: Sequence[Row], path: Path, title: str, machine: Machine) -> None:
    """Draw rows of one unit, from top to bottom, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.4), constrained_layout=True)
    places = range(len(rows), 0, -1)
    errors = [[r.p50 - r.p20 for r in rows], [r.p80 - r.p50 for r in rows]]
    colors = ["#9aa5b1" if "torch" in r.metric else "#2b6cb0" for r in rows]
    axes.barh(list(places), [r.p50 for r in rows], xerr=errors, color=colors, height=0.62)
    for place, row in zip(places, rows, strict=True):
        if row.limit is not None:
            axes.plot([row.limit] * 2, [place - 0.38, place + 0.38], color="#c53030", linewidth=2)
        axes.annotate(f" {row.p50:.3g}", (row.p80, place), va="center", fontsize=8)
    axes.set_yticks(list(places), [f"{r.case}: {r.metric}" for r in rows], fontsize=8)
    axes.set_xlabel(f"{rows[0].unit}   (red: {rows[0].limit_name or 'limit'} of the same run)")
    axes.set_title(f"{title}\n{machine.gpu}, commit {machine.commit}, {machine.date}", fontsize=9)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=130)
    plt.close(figure)

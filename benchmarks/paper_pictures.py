"""Pictures of PyTorch-Direct's experiments beside the paper's published figures: figures 6 and 7, and training.

The published numbers are from other GPUs, from PCIe 3 and 4, and from a CPU that gathers rows by one program. So only
ratios are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyg_direct.bench.result_row import describe_origin
from pyg_direct.profiling import open_picture

# arXiv 2101.07956 and 2103.03330: time over a page-locked copy's; gain of rows not aligned to lines of 128 bytes over
# the baseline; gain of training over the baseline; and power of the whole machine, at the wall, over the baseline's.
PUBLISHED_IDEAL = (1.03, 1.20)
PUBLISHED_UNALIGNED = 1.93
PUBLISHED_TRAINING = 1.6
PUBLISHED_POWER = (1 - 0.175, 1 - 0.124)

_BASELINE = "baseline"
_ALIGNED = 2048
_COLORS = {"pyg_direct": "#2b6cb0", _BASELINE: "#1a202c", "naive": "#dd6b20", "": "#9aa5b1"}

Rows = Sequence[dict[str, Any]]


class Line(NamedTuple):
    """Points of one way, in the order of `at`."""

    way: str
    at: list[float]
    values: list[float]


def read_figure_6(rows: Rows) -> dict[int, list[Line]]:
    """Read time over a page-locked copy's, by thousands of rows, for each number of bytes per row."""
    found: dict[int, dict[str, dict[float, float]]] = {}
    for row in rows:
        if row["case"].startswith("fig6/") and row["limit"]:
            # Such as `fig6/8 K rows of 256 B`.
            count, _, _, _, row_bytes, _ = row["case"].removeprefix("fig6/").split()
            ways = found.setdefault(int(row_bytes), {})
            ways.setdefault(row["metric"], {})[float(count)] = row["p50"] / row["limit"]
    return {width: [Line(way, sorted(points), [points[at] for at in sorted(points)]) for way, points in ways.items()]
            for width, ways in sorted(found.items())}  # fmt: skip


def read_figure_7(rows: Rows) -> tuple[list[Line], list[Line]]:
    """Read (rate over aligned rows, rate over the baseline), by bytes per row."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["case"].startswith("fig7/"):
            found.setdefault(row["metric"].removeprefix("rate of "), {})[row["at"]] = row["p50"]
    base = next((points for way, points in found.items() if way.startswith(_BASELINE)), {})
    beside_aligned, over_baseline = [], []
    for way, points in found.items():
        widths = sorted(points)
        if _ALIGNED in points:
            beside_aligned.append(Line(way, widths, [points[at] / points[_ALIGNED] for at in widths]))
        shared = [at for at in widths if at in base]
        if points is not base:
            over_baseline.append(Line(way, shared, [points[at] / base[at] for at in shared]))
    return beside_aligned, over_baseline


def read_training(rows: Rows) -> dict[str, dict[str, dict[str, float]]]:
    """Read ratios to the baseline of each model and way: {"speed": {"GraphSAGE": {"unified": 1.8, ...}}, "cores": ...}.

    Speed is above 1 if steps are shorter; cores, power and energy are below 1 if less is used.
    """
    medians = {(row["case"].rsplit("/", 1)[-1], row["metric"]): row["p50"] for row in rows
               if row["case"].startswith("training/")}  # fmt: skip
    models = dict.fromkeys(model for model, _ in medians)
    kinds = {"speed": "", "cores": "CPU cores busy, ", "power": "GPU power, ", "energy": "GPU energy of a step, "}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model in models:
        ways = [way for name, way in medians if name == model and way.startswith((_BASELINE, "unified"))]
        base = next((way for way in ways if way.startswith(_BASELINE)), None)
        for kind, before in kinds.items():
            for way in ways:
                now, then = medians.get((model, before + way)), medians.get((model, f"{before}{base}"))
                if way != base and now and then:
                    ratio = then / now if kind == "speed" else now / then
                    found.setdefault(kind, {}).setdefault(model, {})[way] = ratio
    return found


def draw_figure_6(rows: Rows, path: Path) -> None:
    """Draw figure 6 into a PNG: times over the ideal one, and the band published in the paper."""
    panels = read_figure_6(rows)
    low, high = PUBLISHED_IDEAL
    with open_picture(path, 1, len(panels), figsize=(3.6 * len(panels), 4.2), sharey=True,
                      squeeze=False) as (figure, places):  # fmt: skip
        for axes, (row_bytes, lines) in zip(places[0], panels.items(), strict=True):
            _draw_lines(axes, lines)
            axes.axhspan(low, high, color="#c53030", alpha=0.25,
                         label=f"PyTorch-Direct, published: {low} to {high:.2f}")  # fmt: skip
            axes.axhline(1, color="#c53030", linestyle="--", label="ideal: a page-locked copy, same run")
            axes.set_xscale("log", base=2)
            axes.set_xticks(lines[0].at, [f"{at:g} K" for at in lines[0].at])
            axes.set_yscale("log")
            axes.set_yticks([1, 1.2, 2, 5, 10, 20], ["1", "1.2", "2", "5", "10", "20"])
            axes.set_xlabel(f"random rows of {row_bytes:,} B")
        places[0][0].set_ylabel("time over ideal")
        _add_titles(figure, places[0][:1], rows, "figure 6 of PyTorch-Direct")


def draw_figure_7(rows: Rows, path: Path) -> None:
    """Draw figure 7 into a PNG: rows by alignment to lines of 128 bytes, and the gain published in the paper."""
    beside_aligned, over_baseline = read_figure_7(rows)
    with open_picture(path, 1, 2, figsize=(11, 4.5)) as (figure, (left, right)):
        _draw_lines(left, beside_aligned)
        left.set_ylabel(f"rate over that of rows of {_ALIGNED:,} B")
        _draw_lines(right, over_baseline)
        right.axhline(PUBLISHED_UNALIGNED, color="#c53030", linestyle="--",
                      label=f"PyTorch-Direct, published: {PUBLISHED_UNALIGNED} x")  # fmt: skip
        right.set_ylabel("rate over the baseline's")
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.set_xlabel("bytes of a row")
        _add_titles(figure, [left, right], rows, "figure 7 of PyTorch-Direct")


def draw_training(rows: Rows, path: Path) -> None:
    """Draw the cost of training for the machine over the baseline into a PNG, beside the published figures."""
    found = read_training(rows)
    words = {"speed": "steps a second", "cores": "CPU cores busy", "power": "power of the GPU",
             "energy": "energy of the GPU a step"}  # fmt: skip
    kinds = [kind for kind in words if kind in found]
    with open_picture(path, 1, len(kinds), figsize=(3.6 * len(kinds), 4.2), squeeze=False) as (figure, places):
        for axes, kind in zip(places[0], kinds, strict=True):
            bars = [(f"{model}\n{way}", ratio) for model, ways in found[kind].items() for way, ratio in ways.items()]
            axes.bar(range(len(bars)), [ratio for _, ratio in bars], color="#2b6cb0", width=0.62)
            axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7, rotation=30, ha="right")
            axes.axhline(1, color="#4a5568", linewidth=1, label="baseline: torch on the CPU")
            axes.set_ylabel(f"{words[kind]} over the baseline's", fontsize=8)
            # Room for the legend.
            axes.set_ylim(0, 1.35 * max(1, *(ratio for _, ratio in bars)))
            if kind == "speed":
                axes.axhline(PUBLISHED_TRAINING, color="#c53030", linestyle="--",
                             label=f"PyTorch-Direct, published: up to {PUBLISHED_TRAINING} x")  # fmt: skip
            if kind == "power":
                axes.axhspan(*PUBLISHED_POWER, color="#c53030", alpha=0.25,
                             label="PyTorch-Direct, published: the machine at the wall")  # fmt: skip
        _add_titles(figure, list(places[0]), rows, "training as in PyTorch-Direct")


def _draw_lines(axes: Any, lines: Sequence[Line]) -> None:
    for line in lines:
        color = next(color for begin, color in _COLORS.items() if line.way.startswith(begin))
        axes.plot(line.at, line.values, marker="o", markersize=4, color=color, label=line.way)


def _add_titles(figure: Any, places: Sequence[Any], rows: Rows, title: str) -> None:
    for axes in places:
        axes.legend(fontsize=6)
    figure.suptitle(f"{title}\n{describe_origin(rows[-1])}", fontsize=9)


# Prefix of the cases of a picture, its name, and the function that draws it.
PICTURES: tuple[tuple[str, str, Callable[[Rows, Path], None]], ...] = (
    ("fig6/", "figure_6", draw_figure_6),
    ("fig7/", "figure_7", draw_figure_7),
    ("training/", "training", draw_training),
)


def draw_beside_paper(rows: Rows, path: Path) -> list[Path]:
    """Draw the paper's experiments in a results file as PNGs beside it; return the pictures."""
    pictures = []
    for begin, name, draw in PICTURES:
        part = [row for row in rows if row["case"].startswith(begin)]
        if part:
            pictures.append(path.with_name(f"{path.stem}_{name}.png"))
            draw(part, pictures[-1])
    return pictures

"""Write the figures of the README and of the documentation from the rows in `benchmarks/results`.

    python benchmarks/measured.py

`measured.md` holds the text of each part between `<!-- figures: NAME -->` and `<!-- end of figures -->`; the pages hold
the same marks around what is written there. A figure is the name of a row: `{file | case | metric}` for its median,
`{... | limit}` for the limit beside it, `{... | of limit}` for the median as a share of that, `{... | least}` and
`{... | most}` for its ends. The picture of the README's figures is drawn too (extra `bench`).
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pyg_direct.errors import needs_extra

HERE = Path(__file__).parent
# Pages, relative to the repository, and the part of `measured.md` that each of them shows.
PAGES = {"README.md": "headline", "docs/performance.md": "performance"}
PICTURE = HERE.parent / "docs" / "_static" / "step.svg"
# In a summary of several cases the ends are their least and their most.
FIGURES = {"median": "p50", "limit": "limit", "least": "p20", "most": "p80"}
PART = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->\n)", re.DOTALL)


@cache
def read_rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a file by case and metric."""
    rows = json.loads((HERE / "results" / f"{name}.json").read_text())
    return {(row["case"], row["metric"]): row for row in rows}


def show(value: float) -> str:
    """Format a figure with three digits, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def fill(found: re.Match[str]) -> str:
    """Return the figure for the name of a row."""
    name, case, metric, *what = (part.strip() for part in found[1].split(" | "))
    row = read_rows(name)[case, metric]
    if what == ["of limit"]:
        return show(row["p50"] / row["limit"])
    if row["unit"] == "cases":
        return f"{row['p50']:.0f}"
    return show(row[FIGURES[what[0] if what else "median"]])


def render(part: str) -> str:
    """Return a part of `measured.md` with its figures."""
    texts = {name: text for _, name, text, _ in PART.findall((HERE / "measured.md").read_text())}
    return re.sub(r"\{(\w+ \| [^{}]+)\}", fill, texts[part])


def update(page: str) -> str:
    """Return a page with the figures of the rows in each of its parts."""
    return PART.sub(lambda found: found[1] + render(found[2]) + found[4], page)


def read_headline() -> dict[str, float]:
    """Return the README's figures, milliseconds a step, by their labels."""
    rows = re.findall(r"^\| (.+) \| ([\d.]+) \|$", render("headline"), re.MULTILINE)
    return {label.replace("`", ""): float(value) for label, value in rows}


def draw_headline(path: Path) -> None:
    """Draw the README's figures as bars; the SVG keeps its words and figures as text."""
    with needs_extra("a picture", "bench"):
        import matplotlib
        from matplotlib import pyplot

    matplotlib.use("agg")

    steps = read_headline()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "step", "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
        bars = axes.barh(list(steps), list(steps.values()), color=["#9aa5b1"] + ["#1f77b4"] * (len(steps) - 1))
        axes.bar_label(bars, [f"{show(value)} ms" for value in steps.values()], padding=4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(steps.values()))
        axes.set_xlabel("milliseconds a training step, H100")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    for name in PAGES:
        page = HERE.parent / name
        page.write_text(update(page.read_text()))
    draw_headline(PICTURE)

"""Update the figures of the README from the rows in `benchmarks/results`: `python benchmarks/measured.py`.

`measured.md` names a row in place of each figure: `{file | case | metric}` for its median, `{... | limit}` for the
limit beside it, `{... | of limit}` for the median as a share of the limit, `{... | least}` and `{... | most}` for its
ends.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
# In a summary of several cases the ends are their least and their most.
FIGURES = {"median": "p50", "limit": "limit", "least": "p20", "most": "p80"}
BEGIN, END = "<!-- figures of benchmarks/measured.py -->\n", "<!-- end of figures -->\n"


@cache
def read_rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Read the rows of a file by case and metric."""
    rows = json.loads((HERE / "results" / f"{name}.json").read_text())
    return {(row["case"], row["metric"]): row for row in rows}


def show(value: float) -> str:
    """Format with three digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def fill(found: re.Match[str]) -> str:
    """Replace the name of a row by its figure."""
    name, case, metric, *what = (part.strip() for part in found[1].split(" | "))
    row = read_rows(name)[case, metric]
    if what == ["of limit"]:
        return show(row["p50"] / row["limit"])
    if row["unit"] == "cases":
        return f"{row['p50']:.0f}"
    return show(row[FIGURES[what[0] if what else "median"]])


def render() -> str:
    """Fill `measured.md` with its figures."""
    return re.sub(r"\{(\w+ \| [^{}]+)\}", fill, (HERE / "measured.md").read_text())


def update(readme: str) -> str:
    """Replace the figures in the README."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(update(README.read_text()))

"""Write the figures of the README anew from the rows in `benchmarks/results`: `python benchmarks/measured.py`.

`measured.md` names a row where a figure stands: `{file | case | metric}` for its median, `{... | limit}` for the limit
beside it, `{... | of limit}` for the median as a share of that, `{... | least}` and `{... | most}` for its ends.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
# Of a summary of several cases the ends are the least and the most of them.
FIGURES = {"median": "p50", "limit": "limit", "least": "p20", "most": "p80"}
BEGIN, END = "<!-- figures of benchmarks/measured.py -->\n", "<!-- end of figures -->\n"


@cache
def read_rows(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a file by case and metric."""
    rows = json.loads((HERE / "results" / f"{name}.json").read_text())
    return {(row["case"], row["metric"]): row for row in rows}


def show(value: float) -> str:
    """Three digits, and all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")


def fill(found: re.Match[str]) -> str:
    """The figure that stands for the name of a row."""
    name, case, metric, *what = (part.strip() for part in found[1].split(" | "))
    row = read_rows(name)[case, metric]
    if what == ["of limit"]:
        return show(row["p50"] / row["limit"])
    if row["unit"] == "cases":
        return f"{row['p50']:.0f}"
    return show(row[FIGURES[what[0] if what else "median"]])


def render() -> str:
    """`measured.md` with its figures."""
    return re.sub(r"\{(\w+ \| [^{}]+)\}", fill, (HERE / "measured.md").read_text())


def update(readme: str) -> str:
    """The README with the figures of the rows."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(update(README.read_text()))

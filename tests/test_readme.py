"""What the README says is there, and its figures are those of the rows."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def measured():
    spec = importlib.util.spec_from_file_location("measured", ROOT / "benchmarks" / "measured.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_of_the_rows(measured):
    # `python benchmarks/measured.py` writes them.
    assert measured.update(README) == README
    assert measured.render() in README


# With a point, in thousands, or of a unit of what is measured.
FIGURE = re.compile(r"\d+(?: to \d+)? (?:%|[mun]?s|seconds|minutes|[KMGT]i?B|times)(?!\w)|\d[\d,.]*[,.]\d+")


def find_figures(text):
    """What looks like a measured figure in a text, but for its code, links and names of rows."""
    bare = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}", "", text, flags=re.M | re.S)
    return set(FIGURE.findall(bare))


def test_no_figure_is_typed_by_hand(measured):
    # Sizes of graphs, and versions of other projects.
    known = {"2.45", "1.6", "0.6", "0.2.4", "0.1.0", "26.10"}

    text = re.sub(r"\{[^{}]*\}|`[^`]*`", "", (ROOT / "benchmarks" / "measured.md").read_text())

    assert set(re.findall(r"\d+(?:\.\d+)+", text)) == known


def test_no_figure_is_typed_beside_those_of_the_rows(measured):
    versions = {"3.10", "3.13", "3.14", "2.60", "7.5", "8.0", "10.0"}
    # Of a paper; shares that are what a row was measured for, and its sizes.
    cases = {"4.5", "5 to 20 %", "1,024", "2,048", "2,076"}
    rules_of_the_code = {"8 GiB", "96 KiB", "64 MB", "1 GB", "30 s"}

    before, _, rest = README.partition(measured.BEGIN)
    found = find_figures(before) | find_figures(rest.partition(measured.END)[2])

    assert found == versions | cases | rules_of_the_code


def test_figures_are_found():
    text = "It took 3 ms of `5 ms`, 40 % of 1,200 and [1.5](2.5.md) times, on 2 cores in 2026.\n```sh\nsleep 7 s\n```\n"

    assert find_figures(text) == {"3 ms", "40 %", "1,200", "1.5"}


def test_the_fastest_of_a_line_is_set_off(measured):
    lines = [line for line in measured.render().splitlines() if "**" in line]

    assert len(lines) > 5
    for line in lines:
        what, cells = line.removeprefix("| ").split(" | ", 1)
        figures = [float(figure.replace(",", "")) for figure in re.findall(r"[\d.,]*\d", cells)]
        bold = re.findall(r"\*\*([\d.,]+)\*\*", cells)
        assert [float(figure.replace(",", "")) for figure in bold] == [max(figures)], what


def test_figures_have_three_digits(measured):
    assert [measured.show(value) for value in (0.01504, 1.0, 52.42, 326.9, 1991.2)] == [
        "0.0150", "1.00", "52.4", "327", "1,991",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name):
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", (ROOT / name).read_text())

    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_programs_are_python():
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)

    assert len(blocks) > 5
    for block in blocks:
        compile(block, "README.md", "exec")


def test_every_room_is_on_the_map():
    table = README.split("## The rooms")[1].split("## ")[0]

    rooms = [path.parent.name for path in (ROOT / "pyg_direct").glob("*/__init__.py")]
    assert [room for room in rooms if not re.search(rf"`(pyg_direct/)?{room}`", table)] == []

"""README and documentation: figures equal the rows, links lead to files, and one address names the repository."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "limits.md", *GUIDES]
IDS = [f"{path.relative_to(ROOT)}" for path in PAGES]
# `OWNER` is replaced here, in the README and in the documentation, when the repository has a home.
REPOSITORY = re.search(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


@pytest.fixture(scope="module")
def measured():
    spec = importlib.util.spec_from_file_location("measured", ROOT / "benchmarks" / "measured.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250
    assert len(README.split()) <= 2500


# Figures.


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_figures_are_those_of_the_rows(measured, name):
    # `python benchmarks/measured.py` writes them.
    page = (ROOT / name).read_text()

    assert measured.update(page) == page
    assert measured.render(measured.PAGES[name]) in page


def test_each_page_with_figures_is_written(measured):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

    found = {f"{path.relative_to(ROOT)}" for path in pages if measured.PART.search(path.read_text())}

    assert found == measured.PAGES.keys()


def test_the_picture_shows_the_headline(measured):
    steps = measured.read_headline()

    texts = re.findall(r"<text [^>]*>([^<]+)</text>", measured.PICTURE.read_text())

    assert len(steps) == 5
    assert [text.removesuffix(" ms") for text in texts if text.endswith(" ms")] == [*map(measured.show, steps.values())]
    assert set(steps) <= set(texts)


def test_a_picture_is_drawn(measured, tmp_path):
    measured.draw_headline(tmp_path / "step.svg")

    assert measured.show(measured.read_headline()["... and accelerate(model)"]) in (tmp_path / "step.svg").read_text()


# With a point, in thousands, or with a unit of measurement.
FIGURE = re.compile(r"\d+(?: to \d+)? (?:%|[mun]?s|seconds|minutes|[KMGT]i?B|times)(?!\w)|\d[\d,.]*[,.]\d+")


def find_figures(text):
    """Return texts that look like measured figures, outside of code, links and names of rows."""
    bare = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(FIGURE.findall(bare))


def test_no_figure_is_typed_by_hand():
    # Sizes of graphs, versions of other projects, and the record of MLPerf Training.
    known = {"2.45", "0.88", "13.7", "3.2", "9.4", "2.3", "1.6", "0.6", "0.2.4", "0.1.0", "26.10", "27.8"}

    text = re.sub(r"\{[^{}]*\}|`[^`]*`", "", (ROOT / "benchmarks" / "measured.md").read_text())

    assert set(re.findall(r"\d+(?:\.\d+)+", text)) == known


def test_no_figure_is_typed_beside_those_of_the_rows(measured):
    versions = {"2.6", "3.10", "3.13", "3.14", "2.60", "7.5", "8.0", "10.0"}
    # Figures of a paper; shares and sizes that describe the setting of a row.
    cases = {"4.5", "5 to 20 %", "1,024", "2,048", "2,076"}
    rules_of_the_code = {"8 GiB", "64 MB", "1 GB", "30 s"}

    found = set().union(*(find_figures(measured.PART.sub("", path.read_text())) for path in PAGES))

    assert found == versions | cases | rules_of_the_code


def test_figures_are_found():
    text = "It took 3 ms of `5 ms`, 40 % of 1,200 and [1.5](2.5.md) times, on 2 cores in 2026.\n```sh\nsleep 7 s\n```\n"

    assert find_figures(text) == {"3 ms", "40 %", "1,200", "1.5"}


def test_the_fastest_of_a_line_is_set_off(measured):
    lines = [line for line in measured.render("performance").splitlines() if "**" in line]

    assert len(lines) > 5
    for line in lines:
        case, cells = line.removeprefix("| ").split(" | ", 1)
        figures = [float(figure.replace(",", "")) for figure in re.findall(r"[\d.,]*\d", cells)]
        bold = re.findall(r"\*\*([\d.,]+)\*\*", cells)
        assert [float(figure.replace(",", "")) for figure in bold] == [max(figures)], case


def test_figures_have_three_digits(measured):
    assert [measured.show(value) for value in (0.01504, 1.0, 52.42, 326.9, 1991.2)] == [
        "0.0150", "1.00", "52.4", "327", "1,991",
    ]  # fmt: skip


# Links.


def find_anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    bare = re.sub(r"^```.*?^```|`", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", bare), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def follow(page, link):
    """Return the error of a link of a page, "" if there is none, None if it leaves the repository."""
    target, _, anchor = link.partition("#")
    if target.startswith(REPOSITORY):
        target = re.sub(r"^/(?:blob|tree|raw)/main/", "", target.removeprefix(REPOSITORY)) or "README.md"
        path = ROOT / target
    elif re.match(r"\w+:", target):
        return None
    else:
        path = page.parent / target if target else page
    if not path.exists():
        return f"{link}: no such file"
    if anchor and anchor not in find_anchors(path.read_text()):
        return f"{link}: no such heading"
    return ""


LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", LINKING, ids=[f"{path.relative_to(ROOT)}" for path in LINKING])
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`(?!\])", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)

    assert [wrong for link in re.findall(r"\]\(([^)\s]+)\)", text) if (wrong := follow(page, link))] == []


def test_wrong_links_are_found():
    page = ROOT / "docs" / "limits.md"
    links = ["performance.md", "performance.md#accuracy", f"{REPOSITORY}/blob/main/LICENSE", "https://pyg.org"]

    assert [follow(page, link) for link in links] == ["", "", "", None]
    assert follow(page, "#nothing") == "#nothing: no such heading"
    assert follow(page, f"{REPOSITORY}/blob/main/LICENCE").endswith("no such file")


def test_the_readme_reads_alike_on_a_package_index():
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))

    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "```mermaid" not in README


def test_one_place_names_the_repository():
    """Also in files that others write, such as pages of the documentation and forms of the repository."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.toml", "*.cff", "*.yml", "*.yaml", "docs/*.py"], cwd=ROOT,
                            capture_output=True, text=True, check=False)  # fmt: skip
    names = listed.stdout.split() or ["README.md", "pyproject.toml", *IDS]

    addresses = {name: re.findall(r"https://github\.com/([\w.-]+/pyg_direct)\b", (ROOT / name).read_text())
                 for name in names}  # fmt: skip

    known = {REPOSITORY.removeprefix("https://github.com/")}
    assert [name for name, found in addresses.items() if set(found) - known] == []
    assert f"git clone {REPOSITORY} && cd pyg_direct" in README
    assert len(addresses["README.md"]) > 20


# Pages, and names in them.


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_has_one_title(page):
    bare = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)

    assert len(re.findall(r"^# ", bare, re.MULTILINE)) == 1
    assert re.search(r"^#", bare, re.MULTILINE).start() == 0


def test_every_guide_is_in_the_table_and_in_the_tree():
    index = (ROOT / "docs" / "guides" / "index.md").read_text()
    names = {path.stem for path in GUIDES} - {"index"}

    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == names
    assert set(index.partition("```{toctree}")[2].partition("```")[0].split()) - {":hidden:"} == names


def test_pages_show_one_command_alike():
    partition = re.search(r"^python -m pyg_direct partition .*$", README, re.MULTILINE)[0]

    assert partition in (ROOT / "docs" / "guides" / "several_machines.md").read_text()


@pytest.mark.slow
def test_commands_of_the_guide_are_there():
    told = re.findall(r"^\| `(\w+)", (ROOT / "docs" / "guides" / "commands.md").read_text(), re.MULTILINE)

    done = subprocess.run([sys.executable, "-m", "pyg_direct", "--help"], capture_output=True, text=True, check=True)

    assert len(told) >= 5
    assert [name for name in told if not re.search(rf"^\W*{name}\b", done.stdout, re.MULTILINE)] == []


def test_every_room_is_on_the_map():
    drawing = CONTRIBUTING.split("## The floors")[1].split("```")[1]
    floors = [line.partition("  ")[0] for line in drawing.splitlines()]

    rooms = [path.parent.name for path in (ROOT / "pyg_direct").glob("*/__init__.py")]
    assert [room for room in rooms if not any(room in re.findall(r"\w+", floor) for floor in floors)] == []
    assert "CONTRIBUTING.md#the-floors" in (ROOT / "docs" / "guides" / "how_it_works.md").read_text()

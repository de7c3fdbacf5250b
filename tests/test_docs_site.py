"""The documentation site names everything that is public, and only what exists; its programs run."""

import builtins
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
import typer
from torch_geometric.nn import GraphSAGE

import pyg_direct
from pyg_direct import errors
from pyg_direct.cli.app import app
from pyg_direct.datasets import synthetic_graph

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts and "generated" not in path.parts)
CLASSES = {name: thing for name, thing in vars(errors).items() if getattr(thing, "__module__", "") == errors.__name__
           and inspect.isclass(thing) and issubclass(thing, Exception)}  # fmt: skip


def find_rooms():
    """Modules of the package that list their public names."""
    package = ROOT / "pyg_direct"
    for path in sorted(package.rglob("*.py")):
        if "\n__all__ = " in path.read_text():
            yield ".".join(["pyg_direct", *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")


def find_documented():
    """Full names in the tables of the reference, and those of its data."""
    for path in (DOCS / "reference").glob("*.md"):
        text = path.read_text()
        yield from re.findall(r"^```\{py:data\} (\S+)$", text, re.M)
        for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```$", text, re.M | re.S):
            module = re.search(r"currentmodule:: (\S+)", block)[1]
            yield from (f"{module}.{name}" for name in re.findall(r"^   (\w+)$", block, re.M))


def read(full_name):
    module, _, name = full_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


DOCUMENTED = [name for name in find_documented() if ".ray_servers." not in name]


@pytest.mark.parametrize("room", list(find_rooms()))
def test_every_public_name_has_a_page(room):
    documented = [read(name) for name in DOCUMENTED]
    names = [name for name in importlib.import_module(room).__all__ if not name.startswith("__")]

    missing = [name for name in names if not any(read(f"{room}.{name}") is thing for thing in documented)]

    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_page_is_about_a_name_that_exists(name):
    assert DOCUMENTED.count(name) == 1
    assert inspect.getdoc(read(name))


def test_servers_of_parts_have_pages():
    source = (ROOT / "pyg_direct" / "distributed" / "server" / "ray_servers.py").read_text()
    public = set(re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", source, re.M))

    room = "pyg_direct.distributed.server.ray_servers"
    assert {name for name in find_documented() if name.startswith(room)} == {f"{room}.{name}" for name in public}


def find_entries():
    """Sections of the page on errors, by class."""
    text = (DOCS / "troubleshooting.md").read_text().partition("## Errors")[2].partition("\n## ")[0]
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", text, re.M | re.S))


ENTRIES = find_entries()


def test_every_error_has_an_entry():
    assert set(CLASSES) <= set(ENTRIES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_entry_says_what_to_do(name):
    text = ENTRIES[name]

    assert "**What to do:**" in text
    for base in re.findall(r"It is (?:a|an) `(\w+)`", text):
        assert issubclass(CLASSES[name], getattr(errors, base, None) or getattr(builtins, base))


def find_programs(text, kind="python"):
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)


RUN = {name: text for name, text in ENTRIES.items() if name in CLASSES and find_programs(text)}


def test_errors_that_a_cpu_can_meet_have_programs():
    assert set(CLASSES) - set(RUN) == {
        "PygDirectError", "CudaError", "ForkedProcessError", "RankError", "PlacementWarning",
    }  # fmt: skip


@pytest.mark.parametrize("name", RUN)
def test_programs_give_the_message_that_is_shown(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.save(torch.ones(3), "x.pt")
    data = synthetic_graph("products", num_nodes=1000, num_edges=5000).to_data()
    names = {"torch": torch, "data": data, "plan_replicas": pyg_direct.distributed.plan_replicas,
             **{name: getattr(pyg_direct, name) for name in ("CSRTopo", "Feature", "NeighborLoader")}}  # fmt: skip
    (program,), (shown,) = find_programs(RUN[name]), find_programs(RUN[name], "text")

    # Warnings are errors in the tests.
    with pytest.raises(CLASSES[name]) as caught:
        exec(program, names)

    assert type(caught.value) is CLASSES[name]
    # Sizes of memory are those of the machine.
    assert re.sub(r"\d{6,}", "N", str(caught.value)) == re.sub(r"\d{6,}", "N", shown.strip())


def test_the_message_of_a_driver_call_has_the_form_that_is_shown():
    (shown,) = find_programs(ENTRIES["CudaError"], "text")

    error = errors.CudaError("cuMemAllocManaged", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    assert str(error) == shown.strip()


def find_variables():
    """Environment variables of the package in all of its files, and those of others that it reads."""
    folders = ("pyg_direct", "benchmarks", "examples", "tests", ".ci")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()} - {Path(__file__)}
    kinds = ("", ".py", ".slurm", ".txt")
    text = "\n".join(path.read_text() for path in [ROOT / "hatch_build.py", *files] if path.suffix in kinds)
    return set(re.findall(r"\bPYG_DIRECT_[A-Z_]+\b", text))


def test_every_environment_variable_has_an_entry():
    text = (DOCS / "reference" / "environment.md").read_text()
    listed = set(re.findall(r"`(PYG_DIRECT_[A-Z_]+)`", text))

    assert {"PYG_DIRECT_CACHE", "PYG_DIRECT_COMPILER"} <= listed
    assert listed == find_variables()


def test_every_variable_that_the_package_reads_has_an_entry():
    text = (DOCS / "reference" / "environment.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "pyg_direct").rglob("*.py"))
    found = re.findall(r"os\.(?:environ\.get\(|environ\[|getenv\()\"(\w+)\"", sources)

    assert len(found) > 8
    inner = {"PYTHONPATH", "TORCH_CPP_LOG_LEVEL", "GOMP_SPINCOUNT"}  # set for a moment, and then as before
    assert [name for name in found if name not in inner and f"`{name}`" not in text] == []


def read_tables(path):
    """Rows of the migration tables of a page: there, here, differs."""
    rows = re.findall(r"^\|(.*)\|$", path.read_text(), re.M)
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
        if cells[0] != "there" and not set(cells[0]) <= {"-", " "}:
            yield cells


MIGRATIONS = sorted(path for path in (DOCS / "migrate").glob("*.md") if path.name != "index.md")
ROWS = {f"{path.stem}: {cells[0]}": cells for path in MIGRATIONS for cells in read_tables(path)}


def find_spans(text):
    return re.findall(r"`([^`]+)`", text)


def find_thing(name):
    thing = pyg_direct
    for part in name.split("."):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(f"{thing.__name__}.{part}")
    return thing


def takes(thing, argument):
    parameters = inspect.signature(thing).parameters
    has_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    further = inspect.signature(torch.utils.data.DataLoader).parameters if has_more else {}
    return argument in parameters or argument in further


def find_option(command, option):
    options = typer.main.get_command(app).commands[command].params
    return any(option in parameter.opts for parameter in options)


@pytest.fixture(scope="module")
def batch():
    data = synthetic_graph("products", num_nodes=100, num_edges=500).to_data()
    return next(iter(pyg_direct.NeighborLoader(data, [2], batch_size=8, device="cpu")))


def test_migration_tables_are_found():
    assert len(MIGRATIONS) == 7
    assert len(ROWS) > 90


@pytest.mark.parametrize("row", ROWS)
def test_names_on_our_side_exist(row, batch):
    there, here, differs = ROWS[row]

    assert there
    assert find_spans(here) or here == "none"
    for span in find_spans(here):
        if span.startswith("pyg-direct "):
            _, command, *options = span.split()
            assert all(find_option(command, option) for option in options)
            continue
        if span.startswith("batch."):
            assert span.removeprefix("batch.") in batch
            continue
        if ".ray_servers." in span:
            name = f"pyg_direct.{span}"
            assert name in set(find_documented())
            continue
        name, _, arguments = span.partition("(")
        thing = find_thing(name)
        for argument in re.findall(r"(\w+)=", arguments):
            assert takes(thing, argument), (name, argument)
    # What is ours in the last column, by its spelling.
    for span in find_spans(differs):
        if re.fullmatch(r"[A-Z]\w+(\.\w+)?(\(\w+=[^)]*\))?", span) and hasattr(pyg_direct, re.match(r"\w+", span)[0]):
            assert find_thing(re.match(r"[\w.]+", span)[0])


def test_examples_that_pages_name_exist():
    named = {name for path in PAGES for name in re.findall(r"`(examples/[\w.]+)`", path.read_text())}

    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)

    for link in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", text):
        if not link.startswith("http") and "generated/" not in link:
            assert (page.parent / link).exists(), link
        elif "generated/pyg_direct" in link:
            assert link.rpartition("generated/")[2].removesuffix(".rst") in DOCUMENTED


def test_extras_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.M)

    rows = (DOCS / "install.md").read_text().partition("| extra | for |")[2].partition("\n\n")[0]

    named = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(named))) == sorted(extras)


def test_the_site_can_be_built_by_ci():
    assert os.access(ROOT / ".ci" / "docs", os.X_OK)
    assert "docs/conf.py" in (ROOT / ".readthedocs.yaml").read_text()


def make_names():
    """What programs of the concepts take for given."""
    data = synthetic_graph("products", num_nodes=300, num_edges=3000).to_data()
    train_idx, val_idx = torch.arange(0, 300, 3), torch.arange(1, 300, 3)
    model = GraphSAGE(data.num_features, 8, 2, 47)
    loader = pyg_direct.NeighborLoader(data, [3, 3], train_idx, batch_size=20, device="cpu")
    return {"pyg_direct": pyg_direct, "torch": torch, "F": torch.nn.functional, "data": data, "train_idx": train_idx,
            "val_idx": val_idx, "model": model, "loader": loader, "NeighborLoader": pyg_direct.NeighborLoader,
            "optimizer": torch.optim.Adam(model.parameters())}  # fmt: skip


@pytest.mark.parametrize("name", ["pipeline", "placement", "replay", "reproducibility", "exchange"])
def test_programs_of_concepts_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = make_names()

    for program in find_programs((DOCS / "concepts" / f"{name}.md").read_text()):
        code = compile(program, name, "exec")
        # For processes of a group.
        if "DistGraph" not in program:
            exec(code, names)

    # The one picture of the page on batches.
    assert Path("batches.png").exists() == (name == "pipeline")


# The share of right answers at the end of a tutorial, at the least.
TUTORIALS = {"nodes": 0.4, "links": 0.65}


def test_all_tutorials_are_run():
    assert {path.stem for path in (DOCS / "tutorials").glob("*.ipynb")} == set(TUTORIALS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorials_run(name):
    notebook = json.loads((DOCS / "tutorials" / f"{name}.ipynb").read_text())
    state, names = torch.get_rng_state(), {}

    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            # Outputs are made by the build of the site.
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)

    torch.set_rng_state(state)
    assert names["accuracy"] > TUTORIALS[name]


def test_dead_links_of_a_built_site_are_found(tmp_path):
    spec = importlib.util.spec_from_file_location("check_links", ROOT / ".ci" / "check_links.py")
    check_links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_links)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "a.html").write_text('<a href="../b.html#here"></a><a href="b.html"></a><img src="c.png">')
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="#there"></a><a href="https://pyg.org/none"></a>')

    found = [(str(page), link) for page, link in check_links.find_dead(tmp_path)]

    assert found == [("b.html", "#there"), ("pages/a.html", "b.html"), ("pages/a.html", "c.png")]

"""What the README says is there, its programs run, and its figures are those of the rows."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE

import pyg_direct
from pyg_direct.datasets.synthetic_dynamic import synthetic_dtdg
from pyg_direct.dynamic.nn import TGCN
from tests.graphs import make_random_graph

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def find_programs():
    """Every program, in Python or as what a diff makes of one, by its heading and its number below it."""
    programs = {}
    for section in README.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        for number, (kind, text) in enumerate(re.findall(r"^```(python|diff)\n(.*?)^```", section, re.M | re.S), 1):
            lines = text.splitlines()
            if kind == "diff":
                lines = [line[1:] for line in lines if not line.startswith("-")]
            programs[f"{heading} {number}"] = "\n".join(lines)
    return programs


PROGRAMS = find_programs()
# Compiled only: the first is for processes of a group, the second for programs of a cluster of Ray.
NOT_RUN = {"Several machines 1", "Several machines 2"}


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
    known = {"2.45", "0.88", "13.7", "3.2", "9.4", "2.3", "1.6", "0.6", "0.2.4", "0.1.0", "26.10"}

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


class Recurrent(torch.nn.Module):
    """A T-GCN and what reads it."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = TGCN(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x, edge_index, edge_attr, h):
        h = self.layer(x, edge_index, edge_attr, h)
        return self.out(h.relu()), h


@pytest.fixture
def given(request, tmp_path, monkeypatch):
    """What the README's programs take for given."""
    monkeypatch.chdir(tmp_path)
    edge_index, num_nodes = make_random_graph(300, 3000)
    x, y = torch.randn(num_nodes, 4), torch.randint(3, (num_nodes,))
    data = Data(x=x, y=y, edge_index=edge_index)
    np.save("x.npy", x.numpy())
    model, train_idx = GraphSAGE(4, 8, 3, 3), torch.arange(0, num_nodes, 3)
    ratings = HeteroData(user={"x": x}, movie={"x": x}, user__rates__movie={"edge_index": edge_index},
                         movie__rev_rates__user={"edge_index": edge_index.flip(0)})  # fmt: skip
    snapshots = synthetic_dtdg(30, 120, 5, weighted=True)

    def compute(batch):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    names = {"pyg_direct": pyg_direct, "NeighborLoader": pyg_direct.NeighborLoader, "Feature": pyg_direct.Feature,
             "Data": Data, "data": data, "x": x, "edge_index": edge_index, "num_nodes": num_nodes,
             "feature": pyg_direct.Feature().from_file("x.npy"), "epochs": 2, "train_idx": train_idx,
             "seeds": train_idx, "n_id": train_idx, "topo": pyg_direct.CSRTopo(edge_index, num_nodes=num_nodes),
             "model": model, "compute": compute, "optimizer": torch.optim.Adam(model.parameters()),
             "loader": pyg_direct.NeighborLoader(data, [3, 3, 3], train_idx, batch_size=20)}  # fmt: skip
    others = {"One import 2": {"data": ratings}, "One import 3": {"dataset": [data] * 3},
              "Dynamic graphs 1": {"train_dataset": snapshots, "model": Recurrent(), "h": None}}  # fmt: skip
    return names | others.get(request.node.callspec.params["name"], {})


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - NOT_RUN))
def test_programs_run(name, given):
    exec(compile(PROGRAMS[name], f"README.md: {name}", "exec"), given)


def test_other_programs_are_python():
    assert len(PROGRAMS) > 13
    for name in NOT_RUN:
        compile(PROGRAMS[name], f"README.md: {name}", "exec")


def test_every_room_is_on_the_map():
    drawing = CONTRIBUTING.split("## The floors")[1].split("```")[1]
    floors = [line.partition("  ")[0] for line in drawing.splitlines()]

    rooms = [path.parent.name for path in (ROOT / "pyg_direct").glob("*/__init__.py")]
    assert [room for room in rooms if not any(room in re.findall(r"\w+", floor) for floor in floors)] == []
    assert "CONTRIBUTING.md#the-floors" in README.split("## The rooms")[1].split("## ")[0]

"""Run every program of the README and of the guides, block after block of a page, as a reader would."""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GraphSAGE

import pyg_direct
from pyg_direct.datasets.dynamic_graphs import synthetic_dtdg
from pyg_direct.dynamic.nn import TGCN

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path for path in [ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")]}
BLOCK = re.compile(r"(?:^<!-- (not run|needs): ([^\n]+) -->\n)?^```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def find_programs(text):
    """Return (mark, its words, line, source) of each block of Python, or of the result of a diff."""
    programs = []
    for found in BLOCK.finditer(text):
        mark, words, kind, source = found.groups()
        lines = source.splitlines()
        if kind == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        programs.append((mark, words, text.count("\n", 0, found.start(4)) + 1, "\n".join(lines)))
    return programs


PROGRAMS = {name: programs for name, path in PAGES.items() if (programs := find_programs(path.read_text()))}


class Recurrent(torch.nn.Module):
    """A T-GCN and a layer that reads its state."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = TGCN(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x, edge_index, edge_attr, h):
        h = self.layer(x, edge_index, edge_attr, h)
        return self.out(h.relu()).view(-1), h


class Writer:
    """Stands for TensorBoard's writer: it takes numbers under names."""

    def add_scalar(self, name, number, step):
        assert isinstance(name, str)
        assert isinstance(number, int | float)


def make_ratings(x, edge_index):
    times = torch.arange(edge_index.shape[1])
    ratings = HeteroData(user={"x": x}, movie={"x": x}, user__rates__movie={"edge_index": edge_index, "time": times},
                         movie__rev_rates__user={"edge_index": edge_index.flip(0), "time": times})  # fmt: skip
    assert ratings.validate()
    return ratings


@pytest.fixture
def given(request, tmp_path, monkeypatch):
    """Names that the programs of a page take for granted; the folder has the file of rows."""
    monkeypatch.chdir(tmp_path)
    num_nodes = 300
    edge_index = torch.randint(num_nodes, (2, 3000))
    x, y = torch.randn(num_nodes, 4), torch.randint(3, (num_nodes,))
    data = Data(x=x, y=y, edge_index=edge_index)
    np.save("x.npy", x.numpy())
    topo = pyg_direct.CSRTopo(edge_index, num_nodes=num_nodes)
    np.save("indptr.npy", topo.indptr.numpy())
    np.save("indices.npy", topo.indices.numpy())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, train_idx = GraphSAGE(4, 8, 3, 3).to(device), torch.arange(0, num_nodes, 3)
    snapshots = synthetic_dtdg(30, 120, 6, weighted=True)

    def compute(batch):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size])

    loader = pyg_direct.NeighborLoader(data, [3, 3, 3], train_idx, batch_size=20)
    names = {"data": data, "dataset": [data] * 3, "ratings": make_ratings(x, edge_index), "snapshots": snapshots,
             "train_dataset": snapshots, "x": x, "y": y, "edge_index": edge_index, "num_nodes": num_nodes,
             "train_idx": train_idx, "seeds": train_idx, "n_id": train_idx, "ids": train_idx, "rows": x[train_idx],
             "topo": topo, "loader": loader, "model": model,
             "compute": compute, "optimizer": torch.optim.Adam(model.parameters()), "epochs": 2,
             "epoch": 1, "writer": Writer(), "recurrent": Recurrent().to(device), "h": None}  # fmt: skip
    page = request.node.callspec.params["name"]
    if page in ("embeddings", "hetero", "links", "times"):
        names["data"] = names["ratings"]
    if page == "dynamic":
        names["model"] = names["recurrent"]
    return names


@pytest.fixture
def group(request, tmp_path, monkeypatch):
    """Process group of this process alone, as torchrun would begin it, but at a file instead of a port."""
    begin = dist.init_process_group

    def begin_alone(backend):
        begin(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    monkeypatch.setattr(dist, "init_process_group", begin_alone)
    if not any("dist.init_process_group(" in program[-1] for program in PROGRAMS[request.node.callspec.params["name"]]):
        begin_alone("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _leave_nothing_installed():
    yield
    pyg_direct.uninstall()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"lightning"}))
def test_programs_of_a_page_run(name, given, group):
    # A thread of its own: a page may change how torch reads names of devices there.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_page, name, given).result()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["lightning"])
def test_programs_for_lightning_run(name, given):
    run_page(name, given)


def run_page(name, names):
    for mark, _, line, source in PROGRAMS[name]:
        # As many lines above it as on the page, so that an error names the line there.
        program = compile("\n" * (line - 1) + source, PAGES[name], "exec")
        if mark != "not run":
            exec(program, names)


def test_programs_that_are_not_run_say_why():
    told = {name: [words for mark, words, *_ in programs if mark == "not run"] for name, programs in PROGRAMS.items()}

    assert {name: words for name, words in told.items() if words} == {
        "README": ["needs a process for each part"],
        "several_gpus": ["needs a GPU in each process"],
        "several_machines": ["needs a process for each part", "needs a cluster of Ray"],
    }


def test_no_block_is_overlooked():
    for name, path in PAGES.items():
        fences = re.findall(r"^```(\S+)$", path.read_text(), re.MULTILINE)

        assert set(fences) <= {"python", "diff", "sh", "{toctree}"}, name
        assert len(PROGRAMS.get(name, [])) == sum(fence in ("python", "diff") for fence in fences), name
    assert sum(map(len, PROGRAMS.values())) > 35


def test_a_diff_is_run_as_its_result():
    text = "\n<!-- not run: because -->\n```diff\n-a = 1\n+a = 2\n b = 3\n```\n\n```python\na\n```\n"

    assert find_programs(text) == [("not run", "because", 4, "a = 2\nb = 3"), (None, None, 10, "a")]

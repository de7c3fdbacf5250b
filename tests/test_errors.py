"""Warnings are told at the line of the user's that led to them, and what is missing is told with what to install."""

import importlib
import re
import runpy
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch_geometric

from pyg_direct import NeighborLoader
from pyg_direct.datasets import synthetic_graph
from pyg_direct.errors import LoaderWarning, needs_extra, warn
from pyg_direct.runtime.host.tensor_views import ordinary_tensors


@pytest.mark.parametrize("function", [warn, ordinary_tensors()(warn), ordinary_tensors()(ordinary_tensors()(warn))],
                         ids=["plain", "decorated", "twice"])  # fmt: skip
def test_the_line_outside_of_the_package_is_named(function):
    with pytest.warns(UserWarning, match="said") as caught:
        function("said", UserWarning)

    assert [warning.filename for warning in caught] == [__file__]


def test_each_line_of_a_program_is_told_once():
    data = synthetic_graph("products", scale=1e-4).to_data()

    def load():
        return NeighborLoader(data, [2], torch.arange(4), device="cpu", num_workers=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            load()
        NeighborLoader(data, [2], torch.arange(4), device="cpu", num_workers=2)

    lines = [warning.lineno for warning in caught if warning.category is LoaderWarning]
    assert len(lines) == len(set(lines)) == 2


EXAMPLES = sorted(path for path in (Path(__file__).parents[1] / "examples").glob("*.py") if path.name != "model.py")
EXTRAS = ("lightning", "matplotlib", "ogb", "pyarrow", "pymetis", "ray", "torch_geometric_temporal", "torch_sparse")


def import_engine(folder):
    importlib.import_module("pyg_direct.distributed.server.ray_servers")


def read_parquet(folder):
    from pyg_direct.distributed import partition_graph

    (folder / "edges.parquet").write_bytes(b"")
    partition_graph(folder / "parts", folder / "edges.parquet", 1, num_nodes=3)


def patch_temporal(folder):
    from pyg_direct.dynamic import patch

    patch()


def import_callback(folder):
    # Lightning has another name, too.
    with patch.dict(sys.modules, {"pytorch_lightning": None}):
        importlib.import_module("pyg_direct.loader.lightning")


def compile_source(folder):
    from pyg_direct.compiler import nvrtc as source

    source.compile_source.__wrapped__("draw", (9, 0))


def compile_grid(folder):
    from pyg_direct.compiler.jit import _gpu_compiler

    _gpu_compiler.__wrapped__()


def draw_figures(folder):
    importlib.import_module("benchmarks.measured").draw_headline(folder / "step.svg")


def cluster(folder):
    from pyg_direct import ClusterData

    ClusterData(synthetic_graph("products", scale=1e-4).to_data(), 2, log=False)


@pytest.mark.parametrize(("package", "call", "extra"), [
    ("ray", import_engine, '".[ray]"'), ("lightning", import_callback, '".[lightning]"'),
    ("pyarrow", read_parquet, '".[distributed]"'), ("pymetis", cluster, '".[distributed]"'),
    ("matplotlib", draw_figures, '".[bench]"'),
    ("torch_geometric_temporal", patch_temporal, '".[temporal]"'),
    ("cuda.bindings", compile_source, '".[compile13]" or pip install ".[compile12]"'),
    ("numba_cuda", compile_grid, '".[compile13]" or pip install ".[compile12]"'),
])  # fmt: skip
def test_a_package_that_is_missing_is_told_with_its_extra(monkeypatch, tmp_path, package, call, extra):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "pyg_direct.distributed.server.ray_servers", raising=False)
    for name in ("WITH_METIS", "WITH_TORCH_SPARSE"):
        # These have METIS too.
        monkeypatch.setattr(torch_geometric.typing, name, False)

    with pytest.raises(ModuleNotFoundError) as caught:
        call(tmp_path)

    assert f"needs the package {package}" in str(caught.value)
    assert f"pip install {extra} in the clone" in str(caught.value)


def test_packages_of_another_extra_are_told_with_that():
    error = ModuleNotFoundError("No module named 'torch_sparse'", name="torch_sparse")

    with pytest.raises(ModuleNotFoundError, match=r'torch_sparse: pip install "\.\[sparse\]"'):  # noqa: SIM117
        with needs_extra("a layer", "temporal"):
            raise error


# What the help of an example that needs an extra, or takes one, says about it.
COMMANDS = {"distributed_server_client": "[ray]", "distributed_worker": "[distributed]", "multi_gpu_sage": "[ogb]",
            "multi_gpu_lightning": "lightning", "ogbn_products_sage": "[ogb]"}  # fmt: skip


def run_example(monkeypatch, path, *arguments):
    """Exit code of an example, which has no extras."""
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("model", "pyg_direct.distributed.server.ray_servers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except (SystemExit, ModuleNotFoundError) as ended:
        return ended
    finally:
        sys.modules.pop("model", None)
    return None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_tell_their_arguments_without_extras(monkeypatch, capsys, path):
    monkeypatch.setenv("COLUMNS", "500")

    ended = run_example(monkeypatch, path, "--help")

    told = capsys.readouterr().out
    assert ended.code == 0
    assert "usage: " in told
    extra = COMMANDS.get(path.stem)
    assert extra is None or any(extra in line for line in told.splitlines() if "pip install" in line)


@pytest.mark.parametrize(("name", "extra"), [("distributed_server_client", "[ray]"),
                                             ("multi_gpu_lightning", "lightning")])  # fmt: skip
def test_examples_that_need_an_extra_say_how_to_install_it(monkeypatch, capsys, name, extra):
    ended = run_example(monkeypatch, EXAMPLES[0].with_name(f"{name}.py"), "--device", "cpu")

    told = f"{ended}{capsys.readouterr().err}"
    assert re.search(rf"needs the package \w+: pip install \S*{re.escape(extra)}", told), told


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [("ogbn_products_sage", "--batch-size 0", "argument --batch-size: must be at least 1, got 0"),
     ("ogbn_products_sage", "--scale -1", "argument --scale: must be above 0, got -1"),
     ("hetero", "--epochs 0", "argument --epochs: must be at least 1, got 0"),
     ("multi_gpu_sage", "--placement gpu", "argument --placement: invalid choice: 'gpu'"),
     ("distributed_worker", "--processes 0", "argument --processes: must be at least 1, got 0"),
     ("dynamic_tgcn", "--hidden 0", "argument --hidden: must be at least 1, got 0")],
)  # fmt: skip
def test_examples_name_the_option_that_is_wrong(monkeypatch, capsys, name, arguments, words):
    ended = run_example(monkeypatch, EXAMPLES[0].with_name(f"{name}.py"), *arguments.split())

    assert ended.code == 2
    assert words in capsys.readouterr().err

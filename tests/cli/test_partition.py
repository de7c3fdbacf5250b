"""The command that partitions: what it writes, prints and ends with."""

import json
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from pyg_direct.cli.app import app
from pyg_direct.distributed.partitioning import partition_graph as partition_module
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import Builder
from pyg_direct.errors import PartitionError
from tests.distributed.partitions import EDGES, NODES, collect_rows, list_rows


@pytest.fixture
def edges():
    """Ends of random edges, `[2, EDGES]`."""
    return np.random.default_rng(0).integers(0, NODES, (2, EDGES))


def test_command(tmp_path, edges):
    np.save(tmp_path / "edges.npy", edges)
    np.save(tmp_path / "x.npy", np.ones((NODES, 2)))

    result = CliRunner().invoke(app, ["partition", str(tmp_path / "p"), "--edges", str(tmp_path / "edges.npy"),
                                      "--num-parts", "3", "--node-rows", f"x={tmp_path / 'x.npy'}",
                                      "--num-nodes", str(NODES)])  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "60 nodes and 400 edges in 3 parts" in result.output
    assert collect_rows(tmp_path / "p", NODES) == list_rows(*edges, NODES)


def test_command_with_types(tmp_path, edges):
    np.save(tmp_path / "edges.npy", edges)
    np.save(tmp_path / "x.npy", np.ones((NODES, 2)))

    result = CliRunner().invoke(app, ["partition", str(tmp_path / "p"), "--num-parts", "2", "--no-progress",
                                      "--edges", f"a:to:b={tmp_path / 'edges.npy'}", "--num-nodes", f"a={NODES}",
                                      "--num-nodes", f"b={NODES}",
                                      "--node-rows", f"b.x={tmp_path / 'x.npy'}"])  # fmt: skip

    assert result.exit_code == 0, result.output
    assert Manifest.read(tmp_path / "p").nodes[1].rows == {"x": "node-1.rows-0.npy"}


def test_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["partition", str(tmp_path), "--edges", "none.npy", "--num-parts", "2"])

    assert result.exit_code == 2
    assert "must not exist" in result.output


@pytest.mark.parametrize("twice", ["--edges a:to:b=1.npy --edges a:to:b=2.npy",
                                   "--edges a:to:b=1.npy --node-rows a.x=1.npy --node-rows a.x=2.npy",
                                   "--edges 1.npy --node-rows x=1.npy --node-rows x=2.npy"])  # fmt: skip
def test_what_is_named_twice_is_refused(tmp_path, edges, monkeypatch, twice):
    monkeypatch.chdir(tmp_path)
    for name in ("1.npy", "2.npy"):
        np.save(name, edges)

    result = CliRunner().invoke(app, ["partition", "p", "--num-parts", "2", "--no-progress", *twice.split()])

    assert result.exit_code == 2
    assert "must name each" in result.output


def test_the_command_prints_json(tmp_path, edges):
    np.save(tmp_path / "edges.npy", edges)

    result = CliRunner().invoke(app, ["partition", str(tmp_path / "p"), "--edges", str(tmp_path / "edges.npy"),
                                      "--num-parts", "2", "--json", "--no-progress"])  # fmt: skip

    told = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (told["num_parts"], told["num_edges"]) == (2, EDGES)
    assert told["num_cut"] == Manifest.read(tmp_path / "p").num_cut


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left")], ids=["interrupt", "error"])
def test_what_was_begun_is_told_and_gone_on_with(tmp_path, edges, monkeypatch, error):
    np.save(tmp_path / "edges.npy", edges)
    arguments = ["partition", str(tmp_path / "parts"), "--edges", str(tmp_path / "edges.npy"), "--num-parts", "2"]
    with monkeypatch.context() as patched:
        patched.setattr(Builder, "build", lambda *_: (_ for _ in ()).throw(error))
        failed = CliRunner().invoke(app, arguments)

    assert failed.exit_code != 0
    assert f"{tmp_path / 'parts'}.partial holds what is done: the same command goes on" in failed.output
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (tmp_path / "parts.partial").exists()


def test_a_partition_that_cannot_be_written_is_a_failure(tmp_path, edges, monkeypatch):
    def refuse(*args, **kwargs):
        raise PartitionError("the disk is full")

    monkeypatch.setattr(partition_module, "partition_graph", refuse)

    result = CliRunner().invoke(app, ["partition", str(tmp_path / "p"), "--edges", "edges.npy", "--num-parts", "2"])

    assert result.exit_code == 1
    assert "the disk is full" in result.output


@pytest.mark.parametrize("name", ["edges.npy", "x.npy", "parts.npy", "edges.parquet"])
@pytest.mark.parametrize("content", [b"", b"text", np.lib.format.MAGIC_PREFIX])
def test_a_damaged_file_is_named(tmp_path, edges, name, content):
    for other, array in (("edges", edges), ("x", np.ones((NODES, 2))), ("parts", np.zeros(NODES, dtype=int))):
        np.save(tmp_path / f"{other}.npy", array)
    (tmp_path / name).write_bytes(content)
    given = tmp_path / (name if name.startswith("edges") else "edges.npy")

    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, [
        "partition", str(tmp_path / "p"), "--edges", str(given), "--num-parts", "2", "--method",
        str(tmp_path / "parts.npy"), "--node-rows", f"x={tmp_path / 'x.npy'}"])  # fmt: skip

    assert result.exit_code == 2
    assert str(tmp_path / name) in result.stderr


def test_a_parquet_file_that_is_damaged_further_on_is_named(tmp_path):
    parquet.write_table(pyarrow.table({"src": range(1000), "dst": range(1000)}), tmp_path / "edges.parquet")
    whole = (tmp_path / "edges.parquet").read_bytes()
    (tmp_path / "edges.parquet").write_bytes(whole[:4] + bytes(200) + whole[204:])

    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, [
        "partition", str(tmp_path / "p"), "--edges", str(tmp_path / "edges.parquet"), "--num-parts", "2"])  # fmt: skip

    assert result.exit_code == 2
    assert f"--edges must be a whole parquet file, got '{tmp_path / 'edges.parquet'}', which says: " in result.stderr


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, edges, monkeypatch):
    np.save(tmp_path / "edges.npy", edges)
    monkeypatch.setitem(sys.modules, "pymetis", None)

    result = CliRunner().invoke(app, ["partition", str(tmp_path / "p"), "--edges", str(tmp_path / "edges.npy"),
                                      "--num-parts", "2", "--method", "metis"])  # fmt: skip

    assert result.exit_code == 1
    assert "pymetis" in result.stderr
    assert 'pip install ".[distributed]"' in result.stderr

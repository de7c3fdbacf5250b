"""Steps of partitioning that can take long say so, and say nothing where nobody wants it."""

import contextlib

import pytest

from pyg_direct import progress
from pyg_direct.distributed.partitioning import partition_graph as steps
from pyg_direct.distributed.partitioning.manifest import Manifest
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.graph import metis


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Any bar is told of, and any step that is told of ahead."""
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr(progress, "FEW_ITEMS", 1)
    monkeypatch.setattr(steps, "_MOST_PIECE", 150)


def read_shares(err, what):
    """Shares of the lines that tell of a step in a file."""
    return [line.partition(what)[2].split()[1] for line in err.splitlines() if f"{what}: " in line]


def test_passes_of_the_streaming_partitioner_have_bars(tmp_path, edges, capfd):
    partition_graph(tmp_path / "p", edges, 3, method="streaming", progress=True)

    err = capfd.readouterr().err
    passes = [read_shares(err, f"partition: streaming, pass {number} over edges") for number in range(1, 6)]
    # The first piece of 150, and the end.
    assert passes == [["38%", "100%"]] * 4 + [[]]


def test_metis_is_told_of_before_it_stops_all_threads(tmp_path, edges, monkeypatch, capfd):
    waits = []

    @contextlib.contextmanager
    def note(what, *, items):
        waits.append((what, items))
        yield

    monkeypatch.setattr(metis, "show_wait", note)

    partition_graph(tmp_path / "p", edges, 3, method="metis", progress=True)

    err = capfd.readouterr().err
    num_pairs = len({frozenset(pair) for pair in edges.T.tolist() if pair[0] != pair[1]})
    assert read_shares(err, "partition: metis, pass 1 over edges") == ["38%", "100%"]
    assert waits == [("partition: sorting edges for metis", 2 * int((edges[0] != edges[1]).sum()))]
    assert f"pyg_direct: partition: metis over 60 nodes and {num_pairs} edges: nothing is told until" in err


def test_a_step_over_few_items_is_not_told_of_ahead(monkeypatch, capfd):
    monkeypatch.setattr(progress, "FEW_ITEMS", 100)

    progress.tell_ahead("short", items=99)
    progress.tell_ahead("long", items=100)

    assert capfd.readouterr().err == "pyg_direct: long: nothing is told until it is done\n"


def test_checksums_have_bars(tmp_path, edges, capfd):
    partition_graph(tmp_path / "p", edges, 2, progress=True)
    written = capfd.readouterr().err
    manifest = Manifest.read(tmp_path / "p")

    manifest.check(tmp_path / "p", None, full=False)
    sizes = capfd.readouterr().err
    manifest.check(tmp_path / "p", 0)
    compared = capfd.readouterr().err

    assert read_shares(written, "partition: checksums")[-1] == "100%"
    assert sizes == ""
    assert read_shares(compared, "comparing checksums")[-1] == "100%"


@pytest.mark.parametrize("method", ["hash", "streaming", "metis"])
def test_nothing_is_said_where_nobody_wants_it(tmp_path, edges, method, capfd):
    partition_graph(tmp_path / "p", edges, 2, method=method)

    # Kernels may be compiled.
    assert "partition:" not in capfd.readouterr().err

"""Rows of processes that keep a graph in one memory."""

import pytest

from benchmarks.distributed import clique
from benchmarks.distributed.clique import measure_clique
from pyg_direct.datasets import synthetic_graph


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(clique, "_EPOCHS", 2)
    return synthetic_graph("products", scale=0.002, device="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_processes_have_the_batches_of_one_and_a_row_each(graph):
    rows = {row.case: row for row in measure_clique(graph, "tiny", "cpu", [1, 2])}

    assert set(rows) == {f"clique/tiny/cpu/{end}" for end in ("1", "2", "1/speed-up", "2/speed-up")}
    assert "neighbors in cpu, rows in cpu" in rows["clique/tiny/cpu/2"].note
    assert rows["clique/tiny/cpu/2"].limit == pytest.approx(2 * rows["clique/tiny/cpu/1"].limit)
    two, one = rows["clique/tiny/cpu/2"].p50, rows["clique/tiny/cpu/1"].p50
    assert rows["clique/tiny/cpu/2/speed-up"].p50 == pytest.approx(two / one)
    assert rows["clique/tiny/cpu/1/speed-up"].p50 == 1


def test_other_batches_have_no_row(graph, monkeypatch):
    monkeypatch.setattr(clique, "run_processes", lambda *args: {"hash": 7, "rates": [1.0], "placed": ""})

    with pytest.raises(AssertionError, match="batches of 2 processes are not those of one"):
        list(measure_clique(graph, "tiny", "cpu", [2]))

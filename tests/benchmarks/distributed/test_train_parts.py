"""Steps of training on a graph in parts stand beside steps with the whole graph."""

import pytest

from benchmarks.distributed import train_parts
from benchmarks.distributed.train_parts import measure_training_in_parts
from pyg_direct.datasets import synthetic_graph


def test_steps_have_a_row_beside_those_of_whole_graphs(monkeypatch):
    calls = []

    def run(work, count, device, *args):
        calls.append((work, count, device))
        return {"parts": [0.003, 0.004, 0.005], "whole": [0.002, 0.004, 0.002]}

    monkeypatch.setattr(train_parts, "run_processes", run)

    rows = list(
        measure_training_in_parts(synthetic_graph("products", scale=0.001, device="cpu"), "tiny", "cuda", [2, 4])
    )

    assert calls == [(train_parts._train, count, "cuda") for count in (2, 4)]
    assert [row.case for row in rows] == [f"distributed/tiny/cuda/{count}/SAGE by DDP" for count in (2, 2, 4, 4)]
    assert (rows[0].p50, rows[0].limit) == (pytest.approx(4.0), pytest.approx(2.0))
    assert rows[1].p50 == pytest.approx(1.5)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_processes_train_on_parts_and_on_whole_graphs(monkeypatch):
    monkeypatch.setattr(train_parts, "_STEPS", 2)
    monkeypatch.setattr(train_parts, "_EPOCHS", 2)
    monkeypatch.setattr(train_parts, "_SEEDS", 64)
    monkeypatch.setattr(train_parts, "_HIDDEN", 8)

    step, ratio = measure_training_in_parts(synthetic_graph("products", scale=0.001, device="cpu"), "tiny", "cpu", [2])

    assert step.p50 > 0
    assert step.limit > 0
    assert ratio.p50 > 0

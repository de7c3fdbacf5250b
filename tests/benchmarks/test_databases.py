"""Programs on relational databases: they train by `run`, and a case measures them."""

import pytest

from benchmarks.nn.databases import TASKS, measure_databases

pytest.importorskip("torch_frame", reason="needs torch_frame", exc_type=ImportError)


@pytest.mark.parametrize("task", TASKS)
def test_a_program_trains_by_run(task):
    rows = list(measure_databases(1e-4, (task,), workers=(), steps=8, window=2, size=8))

    assert [row.metric for row in rows if "plain" not in row.metric] == ["step, run"]
    assert rows[0].p50 > 0
    assert "losses" in rows[0].note

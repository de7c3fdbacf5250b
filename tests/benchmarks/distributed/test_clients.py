"""Answers of servers of Ray are measured both ways."""

import importlib.util
import tempfile

import pytest

from benchmarks.cases import LONG_CASES
from benchmarks.distributed import clients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]


@pytest.fixture
def _apart(monkeypatch):
    """Ray notes a cluster with several nodes for programs to come, of which other tests have some meanwhile."""
    # Paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.usefixtures("_apart")
def test_answers_come_sooner_over_a_line_than_over_ray(monkeypatch):
    monkeypatch.setattr(clients, "_SIZES", (1 << 10,))

    rows = {row.metric: row for row in LONG_CASES["answers"](1.0)}

    over_ray, line = (rows[f"from another node, over {way}"] for way in ("Ray", "a line"))
    assert over_ray.case == line.case == "answers/1024 KiB/cpu"
    assert line.limit == over_ray.p50
    # By a third of the time; a busy machine leaves some of it.
    assert 0 < line.p20 < over_ray.p20


def test_where_ray_is_missing_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(clients.importlib.util, "find_spec", lambda name: None)

    assert list(LONG_CASES["answers"](1.0)) == []

"""Rows of a graph of IGBH's shape in files, beside rows in host memory."""

import pytest

from benchmarks.features.igbh_files import measure_igbh_files


@pytest.mark.full
def test_steps_over_files_are_measured_beside_host_memory(tmp_path):
    rows = [*measure_igbh_files(1e-5, "tiny", batch_size=16, batches=6, folder=tmp_path)]

    assert {row.case for row in rows} == {"disk/tiny/R-GAT step, 16 seeds"}
    metrics = [row.metric for row in rows]
    assert metrics[:2] == ["rows in host memory", "disk, 1 MB at a time in order"]
    way = "rows in files, host memory for 25%"
    assert metrics[2:5] == [f"{way}, first step", f"{way}, steps 2 to 3", f"{way}, steps after"]
    assert metrics[5].startswith(f"{way}, epoch of ")
    assert rows[2].limit_name == "one pass over the files"
    assert all(row.p50 > 0 for row in rows)
    assert not list(tmp_path.iterdir())

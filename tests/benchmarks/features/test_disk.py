"""Rows of files are measured beside a plain thread, and training from them beside host memory."""

from benchmarks.features.disk import measure_disk_rows, measure_disk_training
from pyg_direct.datasets import synthetic_graph


def test_a_training_from_a_file_is_measured_beside_host_memory(tmp_path):
    graph = synthetic_graph("products", scale=0.0002)

    rows = list(
        measure_disk_training(graph.to_data(), graph.train_idx, graph.num_classes, "tiny", batches=6, folder=tmp_path)
    )

    assert [row.limit for row in rows[:2]] == [None, rows[0].p50]
    assert rows[2].limit > 0
    cold = "step, features in a file, 10 % in memory, forgotten at every step"
    assert [row.metric for row in rows] == [
        "step, features in host memory",
        "step, features in a file, 10 % in memory",
        cold,
        f"{cold}, planned ahead in memory for 100%, whole epoch",
        f"{cold}, planned ahead in memory for 25%, whole epoch",
    ]


def test_rows_are_read_in_and_out_of_the_page_cache(tmp_path):
    rows = list(measure_disk_rows(2000, folder=tmp_path))

    assert [row.case for row in rows] == [
        f"disk/512 B, {share} of the rows, {state}in the page cache"
        for share in ("0.5 %", "5 %", "50 %")
        for state in ("not ", "")
    ]
    assert all(row.p50 > 0 and row.limit > 0 for row in rows)

"""Training from a file is measured beside host memory on graphs of any size."""

from pyg_direct.bench.disk import measure_disk_training
from pyg_direct.datasets import synthetic_graph


def test_a_training_from_a_file_is_measured_beside_host_memory(tmp_path):
    graph = synthetic_graph("products", scale=0.0002)

    rows = list(
        measure_disk_training(graph.to_data(), graph.train_idx, graph.num_classes, "tiny", batches=6, folder=tmp_path)
    )

    assert [row.limit for row in rows] == [None, rows[0].p50, rows[0].p50]
    assert [row.metric for row in rows[:2]] == [
        "step, features in host memory",
        "step, features in a file, 10 % in memory",
    ]

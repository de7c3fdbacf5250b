"""The loader is measured on graphs of any size."""

from pyg_direct.bench.loader import measure_loader
from pyg_direct.datasets import synthetic_graph


def test_a_graph_smaller_than_a_batch_is_measured_with_all_its_seeds():
    graph = synthetic_graph("products", scale=0.0002)

    rows = list(measure_loader(graph.to_data(), graph.train_idx, graph.num_classes, "tiny", batches=2))

    assert {row.case for row in rows} == {f"loader/tiny/auto/{len(graph.train_idx)}"}
    assert "step, loader and compute" in {row.metric for row in rows}

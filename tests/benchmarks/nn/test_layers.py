"""Convolutions, first layers, caches and unified tensors are measured on graphs of any size, without a GPU too."""

import pytest
import torch

from benchmarks.features.hot_rows import measure_drift
from benchmarks.features.unified import measure_indexing
from benchmarks.nn.aggregation import read_batch
from benchmarks.nn.convolutions import KINDS, OURS, measure_convolutions
from benchmarks.nn.first_layer import measure_first_layer
from pyg_direct import NeighborLoader
from pyg_direct.datasets import synthetic_graph


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph("products", scale=0.0005, device="cpu")


@pytest.fixture(scope="module")
def batch(graph):
    return next(iter(NeighborLoader(graph.to_data(), [3, 2], graph.train_idx, batch_size=32, seed=0)))


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")
def test_convolutions_are_compared_with_the_fastest_of_the_others(batch):
    kinds = ["SAGE mean", "GINE", "GAT"]
    rows = list(measure_convolutions(batch, "tiny", [8], [torch.float32], compiles=False, kinds=kinds))

    times = {(row.case, row.metric): row.p50 for row in rows if row.unit == "ms"}
    for row in rows:
        if row.unit == "x":
            others = [time for (case, way), time in times.items() if case == row.case and way != OURS]
            assert row.p50 == pytest.approx(min(others) / times[row.case, OURS])
    assert {row.case.split("/")[2] for row in rows} == set(kinds) < set(KINDS)


def test_a_first_layer_reads_more_rows_where_they_lie(graph, batch):
    num_targets = sum(batch.num_sampled_nodes[:-1])

    rows = list(measure_first_layer(graph.x.clone(), batch.n_id, read_batch(batch), num_targets, "tiny"))

    ratio = next(row.p50 for row in rows if row.metric == "rows read, in place over brought")
    assert ratio == (num_targets + batch.num_edges) / batch.num_nodes


def test_a_cache_that_follows_drifting_reads_beats_one_that_is_kept():
    device = torch.device("cpu")
    rates = [row.p50 for row in measure_drift(2000, changes=(0.01, 0.05), num_batches=200, device=device)]

    kept, following = rates[::2], rates[1::2]
    assert all(b > a for a, b in zip(kept, following, strict=True))


def test_indexing_is_timed_beside_torch():
    rows = list(measure_indexing((1,), repeats=3))

    assert [(row.metric, row.unit) for row in rows] == [("Python time of unified[ids]", "us")]

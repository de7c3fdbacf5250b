"""Rows of epochs on several GPUs, with epochs of a fake."""

import pytest

from benchmarks.distributed import ddp
from benchmarks.distributed.ddp import measure_papers
from pyg_direct.datasets import synthetic_graph

RUNS, NUM_TRAINED = [], 24


class Epochs:
    """An epoch of one process takes a second for 1,000 seeds, and half of it is shared out."""

    def __init__(self, rank, groups, data, train_idx, num_classes, hidden, is_replayed, seeds):
        self.seconds, self.train_idx = len(train_idx) / 1000, train_idx
        assert is_replayed
        assert len(train_idx) in (2 * seeds, NUM_TRAINED)
        assert (*data.x.shape, data.x.element_size()) in ((data.num_nodes, 128, 4), (data.num_nodes, 768, 2))

    def describe(self):
        return "; first batch at once"

    def run(self, count, **options):
        RUNS.append((count, options.get("cache_policy")))
        return [self.seconds * (0.5 + 0.5 / count)] * 3


def test_epochs_have_a_row_and_a_point_of_a_curve_each(monkeypatch):
    graph = synthetic_graph("papers100M", scale=2e-5, device="cpu", topology_only=True)
    monkeypatch.setattr(ddp, "synthetic_graph", lambda *args, **options: graph)
    monkeypatch.setattr(ddp, "_Epochs", Epochs)
    monkeypatch.setattr(ddp, "_MORE_BATCHES", 2)
    monkeypatch.setattr(ddp, "_MORE_SEEDS", 1100)
    rows = []

    measure_papers(0, 4, 1.0, {}, rows.append)

    assert RUNS == 4 * [(1, None), (2, None), (4, None), (1, None),
                               (4, "device_replicate"), (4, "p2p_clique_replicate")]  # fmt: skip
    assert len({(row.case, row.metric) for row in rows}) == len(rows) == 48
    seconds, points = rows[::2], rows[1::2]
    alone = len(graph.train_idx) / 1000
    assert [row.p50 for row in seconds[:3]] == pytest.approx([alone, 0.75 * alone, 0.625 * alone])
    assert [row.limit for row in seconds[:3]] == pytest.approx([alone, alone / 2, alone / 4])
    assert seconds[2].note == "1.60 times as fast as one GPU; first batch at once"
    assert seconds[6].case.startswith("multi_gpu/epoch/papers100M x 0.05, 2 batches")
    assert seconds[6].p50 == pytest.approx(2.048)
    assert seconds[12].case.startswith("multi_gpu/epoch/papers100M x 0.05, 2 batches of 1100 seeds")
    assert seconds[12].p50 == pytest.approx(2.2)
    assert [(row.at, row.limit, row.curve) for row in points[:3]] == [(n, n, "speed-up of epochs") for n in (1, 2, 4)]
    assert [row.p50 for row in points[:3]] == pytest.approx([1, 1 / 0.75, 1.6])

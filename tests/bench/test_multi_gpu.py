"""Rows of epochs on several GPUs, with epochs of a fake."""

import pytest
import torch

from pyg_direct.bench import multi_gpu
from pyg_direct.bench.multi_gpu import PLACES, _measure_papers, _try_places
from pyg_direct.datasets import synthetic_graph

RUNS = []


class Epochs:
    """An epoch of one process takes a second for 1,000 seeds, and half of it is shared out."""

    def __init__(self, rank, groups, data, train_idx, num_classes, hidden):
        self.seconds, self.train_idx = len(train_idx) / 1000, train_idx
        assert data.x.shape == (data.num_nodes, 128)

    def describe(self):
        return "; first batch at once"

    def run(self, count, **options):
        RUNS.append((count, options.get("cache_policy")))
        return [self.seconds * (0.5 + 0.5 / count)] * 3


def test_epochs_have_a_row_and_a_point_of_a_curve_each(monkeypatch):
    graph = synthetic_graph("papers100M", scale=2e-5, device="cpu", topology_only=True)
    monkeypatch.setattr(multi_gpu, "synthetic_graph", lambda *args, **options: graph)
    monkeypatch.setattr(multi_gpu, "_Epochs", Epochs)
    monkeypatch.setattr(multi_gpu, "_MORE_BATCHES", 2)
    rows = []

    _measure_papers(0, 4, 1.0, {}, rows.append)

    assert RUNS == 2 * [(1, None), (2, None), (4, None), (1, None),
                               (4, "device_replicate"), (4, "p2p_clique_replicate")]  # fmt: skip
    assert len({(row.case, row.metric) for row in rows}) == len(rows) == 24
    seconds, points = rows[::2], rows[1::2]
    alone = len(graph.train_idx) / 1000
    assert [row.p50 for row in seconds[:3]] == pytest.approx([alone, 0.75 * alone, 0.625 * alone])
    assert [row.limit for row in seconds[:3]] == pytest.approx([alone, alone / 2, alone / 4])
    assert seconds[2].note == "1.60 times as fast as one GPU; first batch at once"
    assert seconds[6].case.startswith("multi_gpu/epoch/papers100M x 0.05, 2 batches")
    assert seconds[6].p50 == pytest.approx(2.048)
    assert [(row.at, row.limit, row.curve) for row in points[:3]] == [(n, n, "speed-up of epochs") for n in (1, 2, 4)]
    assert [row.p50 for row in points[:3]] == pytest.approx([1, 1 / 0.75, 1.6])


class Reader:
    """Reads so many bytes a second as there are places."""

    def __init__(self, table, cold, directory, errors, max_blocks, *, strands):
        self.table, self.strands = table, strands

    def read(self, ids):
        return self.table[ids]


class Rows:
    whole = torch.arange(40.0).view(10, 4)

    def read(self, ids):
        return self.whole[ids]


def test_rows_are_read_from_several_numbers_of_places(monkeypatch):
    made = []
    monkeypatch.setattr(
        multi_gpu, "RowReader", lambda *args, **options: made.append(Reader(*args, **options)) or made[-1]
    )
    monkeypatch.setattr(multi_gpu, "_together", lambda work: [len(work()) * 3 * 16 / 1e9 / made[-1].strands])
    rows = []

    _try_places(Rows(), torch.tensor([0, 3, 9]), "rows/60%", 2e9, rows.append)

    assert [reader.strands for reader in made] == list(PLACES)
    assert [row.metric for row in rows] == [f"read from {places} places at once" for places in PLACES]
    assert [row.p50 for row in rows] == pytest.approx(list(PLACES))
    assert {(row.case, row.limit) for row in rows} == {("rows/60%/places", 2.0)}

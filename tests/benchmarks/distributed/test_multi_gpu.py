"""Rows of features on several GPUs, with a fake that reads them."""

import pytest
import torch

from benchmarks.distributed import multi_gpu
from benchmarks.distributed.multi_gpu import PLACES, _try_places


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

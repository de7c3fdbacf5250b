"""Offsets of runs of ascending ids, and the ids of offsets."""

import pytest
import torch

from pyg_direct.ops import offsets
from pyg_direct.ops.offsets import compress, expand, repeat_each
from tests.poison import poisoned_memory

RUNS = {"all": [0, 0, 1, 2, 2, 2], "with gaps": [2, 2, 7, 7, 7], "none behind": [0, 1, 1], "one": [5], "none": []}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("num_rows", [8, 3000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_count_what_is_below(device, runs, num_rows, dtype):
    ordered = torch.tensor(RUNS[runs], dtype=dtype, device=device)

    with poisoned_memory():
        got = compress(ordered, num_rows)

    assert got.tolist() == [sum(item < row for item in RUNS[runs]) for row in range(num_rows + 1)]
    assert got.dtype == dtype


def test_no_rows_have_one_offset(device):
    assert compress(torch.empty(0, dtype=torch.int64, device=device), 0).tolist() == [0]


@pytest.mark.parametrize("runs", RUNS)
def test_ids_return_from_offsets(device, runs):
    ordered = torch.tensor(RUNS[runs], dtype=torch.int64, device=device)

    indptr = compress(ordered, 9)

    assert expand(indptr, len(ordered)).tolist() == RUNS[runs]
    assert expand(indptr, len(ordered) // 2).tolist() == RUNS[runs][: len(ordered) // 2]


@pytest.mark.parametrize("few", [0, 2**16])
def test_numbers_are_repeated_as_often_as_told(device, monkeypatch, few):
    monkeypatch.setattr(offsets, "_FEW", few)
    values, counts = (torch.tensor(given, device=device) for given in ([7, 5, 7, 1], [2, 0, 1, 3]))

    assert repeat_each(values, counts, 6).tolist() == [7, 7, 7, 1, 1, 1]
    assert repeat_each(values.int(), counts.int(), 6).dtype == torch.int32
    assert repeat_each(values[:0], counts[:0], 0).tolist() == []

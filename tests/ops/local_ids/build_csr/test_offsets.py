"""Offsets of runs of ascending ids, and the ids of offsets."""

import pytest
import torch

from pyg_direct.ops.local_ids import build_csr
from pyg_direct.ops.local_ids.build_csr import compress_ids, expand, mark_edges, read_hops, repeat_each
from tests.poison import poisoned_memory

RUNS = {"all": [0, 0, 1, 2, 2, 2], "with gaps": [2, 2, 7, 7, 7], "none behind": [0, 1, 1], "one": [5], "none": []}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("num_rows", [8, 3000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_count_what_is_below(device, runs, num_rows, dtype):
    ordered = torch.tensor(RUNS[runs], dtype=dtype, device=device)

    with poisoned_memory():
        got = compress_ids(ordered, num_rows)

    assert got.tolist() == [sum(item < row for item in RUNS[runs]) for row in range(num_rows + 1)]
    assert got.dtype == dtype


def test_no_rows_have_one_offset(device):
    assert compress_ids(torch.empty(0, dtype=torch.int64, device=device), 0).tolist() == [0]


@pytest.mark.parametrize("runs", RUNS)
def test_ids_return_from_offsets(device, runs):
    ordered = torch.tensor(RUNS[runs], dtype=torch.int64, device=device)

    indptr = compress_ids(ordered, 9)

    assert expand(indptr, len(ordered)).tolist() == RUNS[runs]
    assert expand(indptr, len(ordered) // 2).tolist() == RUNS[runs][: len(ordered) // 2]


@pytest.mark.parametrize("few", [0, 2**16])
def test_numbers_are_repeated_as_often_as_told(device, monkeypatch, few):
    monkeypatch.setattr(build_csr, "_FEW", few)
    values, counts = (torch.tensor(given, device=device) for given in ([7, 5, 7, 1], [2, 0, 1, 3]))

    assert repeat_each(values, counts, 6).tolist() == [7, 7, 7, 1, 1, 1]
    assert repeat_each(values.int(), counts.int(), 6).dtype == torch.int32
    assert repeat_each(values[:0], counts[:0], 0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_marks_tell_edges_and_their_orders_apart(dtype):
    edges = torch.tensor([[1, 2, 0, 2, 1], [0, 0, 1, 1, 2]], dtype=dtype)
    others = [edges[:, order] for order in ([1, 0, 2, 3, 4], [1, 0, 3, 2, 4], [0, 1, 2, 4, 3])] + [edges.flip(0)]

    marks = {mark_edges(other) for other in [edges, *others]}

    assert len(marks) == 5
    assert read_hops(edges, [(2, 3, 1), (2, 3, 1), (5, 3, 3)]) == [mark_edges(edges[:, :n]) for n in (2, 2, 5)]


@pytest.mark.parametrize(("row", "target", "expected"), [
    ([2, 0, 3], [0, 0, 1], True), ([2, 0, 3], [0, 1, 0], False), ([3, 0, 1], [0, 0, 1], False),
    ([2, 0, -1], [0, 0, 1], False), ([2, 0, 4], [0, 0, 1], False), ([2, 0, 1], [0, 0, 2], False),
    ([2, 0, 1], [-1, 0, 1], False), ([2, 0, 1], [0, 1, 1], False),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_order_is_that_of_targets_within_the_bounds_of_hops(real_device, row, target, expected, dtype):
    edges = torch.tensor([row, target], dtype=dtype, device=real_device)

    assert (read_hops(edges, [(2, 3, 1), (3, 4, 2)]) is not None) == expected


def test_no_edges_are_in_order(real_device):
    none = torch.empty(2, 0, dtype=torch.int64, device=real_device)

    assert read_hops(none, []) == []
    assert read_hops(none, [(0, 0, 0)]) is not None

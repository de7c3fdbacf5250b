"""Contents that are compared: every change of a small tensor is found, most runs of changes of a large one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from pyg_direct.kernels.content_hash import BLOCK, sum_all_cpu
from pyg_direct.ops import compute_content_hash
from pyg_direct.ops.compute_content_hash import glance_only, has_content, have_contents, read_content
from tests.reference.content import sum_words

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)


def list_places(*arrays):
    return np.array([(array.ctypes.data, array.size) for array in arrays], np.int64)


@given(strategies.lists(strategies.integers(0, 2**64 - 1), max_size=40), strategies.integers(1, 5))
def test_a_sum_is_that_of_the_reference_for_any_number_of_chunks(words, chunks):
    given, other = np.array(words, np.uint64), np.arange(9, dtype=np.uint64)
    sums = np.empty((2, chunks), np.uint64)

    sum_all_cpu(list_places(given, other), compute_content_hash._list_factors(), sums)

    assert sums.sum(1).tolist() == [sum_words(words), sum_words(range(9))]


def test_words_of_several_blocks_are_added_alike_by_loops_numpy_and_the_reference():
    table = torch.randint(-(2**62), 2**62, (2 * BLOCK + 5,))
    words, sums = table.numpy().view(np.uint64), np.empty((1, 3), np.uint64)

    sum_all_cpu(list_places(words), compute_content_hash._list_factors(), sums)

    assert int(sums.sum()) == sum_words(words.tolist()) == compute_content_hash._sum_by_numpy(words, 1, True)


def test_signs_that_turn_in_pairs_are_found(real_device):
    table = torch.ones(4096, dtype=torch.float64, device=real_device)
    known = read_content(table)

    table.data[[7, 2000]] *= -1

    assert not has_content(table, known)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 8, 37])
def test_each_number_that_changes_is_found(real_device, dtype, count):
    table = torch.zeros(count, dtype=dtype, device=real_device)
    known = read_content(table)

    for place in range(count):
        table.data[place] = 1
        assert not has_content(table, known)
        table.data[place] = 0

    assert has_content(table, known)


def test_two_that_change_places_are_found(real_device):
    table = torch.tensor([1.0, 2.0], device=real_device).repeat_interleave(4096)
    known = read_content(table)

    table.data[[5, 5 + 4096]] = table[[5 + 4096, 5]]

    assert not has_content(table, known)


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, 1:], lambda t: t[::2], lambda t: t[0].expand(3, 6)])
def test_views_are_compared_by_the_memory_that_they_are_of(real_device, view):
    whole = torch.arange(24, device=real_device).view(4, 6)
    table = view(whole)
    known = read_content(table)
    assert has_content(table, known)

    whole.data[0, 3] = 100

    assert not has_content(table, known)


@pytest.mark.parametrize("make", [
    lambda: np.zeros((5, 3)), lambda: np.zeros((5, 3))[::-1],
    lambda: torch.eye(5).to_sparse_csr(),
    lambda: torch.zeros(0, 3), lambda: torch.tensor(1.0), lambda: torch.zeros(4, requires_grad=True),
    lambda: torch.ones(3, dtype=torch.cfloat).conj(), lambda: "a word",
])  # fmt: skip
def test_all_kinds_of_attributes_are_equal_to_themselves(make):
    value = make()

    assert has_content(value, read_content(value))


def test_columns_of_a_sparse_tensor_are_compared():
    table = torch.eye(5).to_sparse_csr()
    known = read_content(table)

    table.col_indices().numpy()[2] = 4

    assert not has_content(table, known)


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_change_of_any_of_several_tensors_is_found(real_device, monkeypatch, seconds):
    monkeypatch.setattr(compute_content_hash, "_NUMPY_SECONDS", seconds)
    tables = [torch.zeros(count, dtype=torch.uint8, device=real_device) for count in (0, 3, 8, 4099, 70_000)]
    known = [read_content(table) for table in tables]
    assert have_contents(tables, known)

    for table in tables[1:]:
        table.data[-1] = 1
        assert not have_contents(tables, known)
        table.data[-1] = 0

    assert have_contents(tables, known)


def test_another_form_over_equal_bytes_is_found():
    table = torch.zeros(4, 2)

    assert not has_content(table.view(2, 4), read_content(table))
    assert not has_content(table.view(torch.int32), read_content(table))


class TestLargeTensors:
    """More bytes than are all looked at."""

    @pytest.fixture(autouse=True)
    def _is_large(self, monkeypatch):
        monkeypatch.setattr(compute_content_hash, "WHOLE_BYTES", 1 << 10)
        monkeypatch.setattr(compute_content_hash, "_FEW_BYTES", 1 << 10)
        monkeypatch.setattr(compute_content_hash, "_PIECES", 16)
        monkeypatch.setattr(compute_content_hash, "_FEW_PIECES", 4)

    @pytest.mark.parametrize("count", [1, 127, 128, 4099])
    def test_sums_without_the_compiler_are_those_of_the_loops(self, monkeypatch, count):
        table = torch.randint(-(2**62), 2**62, (count,))
        monkeypatch.setattr(compute_content_hash, "_NUMPY_SECONDS", 0.0)
        known = read_content(table)

        monkeypatch.delitem(sys.modules, "numba")

        assert read_content(table) == known

    def test_loops_follow_once_numpy_has_taken_long(self, monkeypatch):
        used = []
        monkeypatch.setattr(compute_content_hash, "run_cpu", lambda kernel, *args: used.append(kernel))
        monkeypatch.setattr(compute_content_hash._Spent, "seconds", 0.0)
        table = torch.ones(4096, dtype=torch.int64)

        while not used:
            read_content(table)

        assert compute_content_hash._Spent.seconds >= compute_content_hash._NUMPY_SECONDS

    @pytest.mark.parametrize("begin", [0, 777, 2900])
    def test_a_run_of_two_parts_in_sixteen_is_found(self, real_device, begin):
        table = torch.zeros(4096, dtype=torch.int64, device=real_device)
        known = read_content(table)

        table.data[begin : begin + 2 * 4096 // 16] = 1

        assert not has_content(table, known)

    def test_a_run_of_two_parts_in_four_is_found_at_a_glance(self, real_device):
        table = torch.zeros(4096, dtype=torch.int64, device=real_device)
        known = read_content(table)

        table.data[1000:3048] = 1

        with glance_only():
            assert not has_content(table, known)

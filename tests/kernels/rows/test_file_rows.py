"""Rows that a batch claims first of its window."""

import numpy as np
import pytest

from pyg_direct.kernels.rows.file_rows import list_fresh_rows_cpu


def list_fresh(ids, claims, first_batch):
    fresh, table = np.empty(len(ids), np.int64), np.full(1 << (2 * len(ids)).bit_length(), -1, np.int64)
    return fresh[: list_fresh_rows_cpu(ids, claims, first_batch, table, fresh)]


@pytest.mark.parametrize("step", [1, 7, 64, 4096])
def test_each_row_that_no_batch_of_the_window_has_claimed_is_listed_once(step):
    draws = np.random.default_rng(0)
    # Rows with equal steps between them, some several times.
    ids = step * draws.integers(0, 500, 900)
    claims = draws.integers(-1, 10, 500 * step).astype(np.int32)

    fresh = list_fresh(ids, claims, 5)

    assert np.array_equal(np.sort(fresh), np.unique(ids[claims[ids] < 5]))


def test_a_new_window_has_no_claims():
    claims = np.full(4, 9, np.int32)

    assert list_fresh(np.array([2, 2, 0]), claims, np.iinfo(np.int32).max).tolist() == [2, 0]
    assert list_fresh(np.array([], np.int64), claims, 0).tolist() == []

"""Common behavior of all tiers, beyond the contract that each of them passes."""

import pytest
import torch

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.features.tiers.base import ReadErrors, TableTier
from tests.features.contract import make_rows


def test_a_strided_table_is_refused():
    with pytest.raises(ArgumentError, match="table must be contiguous"):
        TableTier(torch.zeros(4, 6)[:, ::2], "cpu")


def test_writing_rows_of_another_shape_is_refused():
    tier = TableTier(make_rows(), "cpu")

    with pytest.raises(ArgumentError, match=r"rows must be \(2, 5\) of torch.float32 on cpu, got \(2, 4\)"):
        tier.write(torch.tensor([1, 2]), torch.zeros(2, 4))


def test_what_a_kernel_reports_is_raised_once():
    errors = ReadErrors(is_pinned=False)
    errors.raise_first("ids", 40)
    errors.word[0] = 3

    with pytest.raises(IdError, match=r"ids must lie in \[0, 40\); an earlier read had an id outside at position 3"):
        errors.raise_first("ids", 40)

    errors.raise_first("ids", 40)

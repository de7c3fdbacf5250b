"""Ids of a directory are found at their positions; other ids are not found."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentTypeError
from pyg_direct.ops.local_ids.relabel_nodes import locate_ids
from pyg_direct.ops.rows.gather_rows import Directory
from tests.poison import poisoned_memory
from tests.reference import locate as reference


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(present=st.sets(st.integers(0, 69), max_size=70), ids=st.lists(st.integers(-3, 75), max_size=90))
def test_matches_reference(device, dtype, present, ids):
    expected = reference.locate(ids, present)
    directory = Directory.of(torch.tensor(sorted(present), dtype=torch.int64, device=device), 70)

    with poisoned_memory():
        got = locate_ids(torch.tensor(ids, dtype=dtype, device=device), directory, 70)

    assert (got.tolist(), got.dtype) == (expected, torch.int64)


@pytest.mark.parametrize("bad", [2**40, -(2**40), 70])
def test_what_is_no_id_is_nowhere(device, bad):
    directory = Directory.of(torch.arange(70, device=device), 70)

    assert locate_ids(torch.tensor([69, bad], device=device), directory, 70).tolist() == [69, -1]


def test_ids_of_another_dtype_are_refused(device):
    with pytest.raises(ArgumentTypeError, match="ids must have dtype int64 or int32"):
        locate_ids(torch.zeros(3, device=device), Directory.empty(device), 70)

"""The union of lists of ids equals Python's."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.ops.local_ids.relabel_nodes import unite
from tests.poison import poisoned_memory

METHODS = pytest.mark.parametrize("method", ["bitmap", "sort"])


@METHODS
@given(lists=st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=4))
def test_holds_every_id_once_in_order(device, method, lists):
    expected = sorted(set().union(*lists))

    with poisoned_memory():
        union = unite([torch.tensor(ids, dtype=torch.int64, device=device) for ids in lists], 100, method=method)

    assert union.ids.tolist() == expected
    assert union.ids.dtype == torch.int64
    for ids in lists:
        places = union.find(torch.tensor(ids, dtype=torch.int64, device=device))
        assert places.tolist() == [expected.index(item) for item in ids]


@METHODS
@pytest.mark.slow
def test_long_lists(device, method):
    lists = [torch.randint(0, 10**6, (50_000,), device=device) for _ in range(3)]

    union = unite(lists, 10**6, method=method)

    assert torch.equal(union.ids, torch.unique(torch.cat(lists)))
    assert all(torch.equal(union.ids[union.find(ids)], ids) for ids in lists)

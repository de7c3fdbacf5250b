"""Nodes are grouped by the parts that own them, other parts first."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.distributed.partitioning.manifest import Book
from pyg_direct.ops.sampling.join_remote_edges import find_buckets, group_keys, make_keys
from tests.poison import poisoned_memory
from tests.reference import owner as reference


def as_tensor(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("kind", ["hash", "range", "table"])
@given(data=st.data(), num_parts=st.integers(1, 6), scale=st.integers(1, 60))
@pytest.mark.full
def test_matches_reference(device, kind, data, num_parts, scale):
    ids = data.draw(st.lists(st.integers(0, 49) if kind != "hash" else st.integers(0, 2**40), max_size=80))
    own, add = data.draw(st.integers(-1, num_parts - 1)), data.draw(st.integers(0, scale - 1))
    bounds = sorted(data.draw(st.lists(st.integers(0, 50), min_size=num_parts - 1, max_size=num_parts - 1)))
    table = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=50, max_size=50))
    bounds, table = bounds if kind == "range" else [], table if kind == "table" else []
    # As a range of one part has no bounds.
    owners = [reference.find_owner(item, num_parts, bounds, table) if kind != "range" or bounds else 0 for item in ids]
    expected = [reference.find_bucket(owner, own, num_parts) * scale + add for owner in owners]
    numbers = num_parts, as_tensor(bounds, device), as_tensor(table, device, torch.uint8), own, scale, add

    with poisoned_memory():
        keys = make_keys(len(ids), num_parts * scale, device)
        find_buckets(as_tensor(ids, device), *numbers, keys)
        order, begins = group_keys(keys, num_parts * scale)

    assert keys.tolist() == expected
    assert (order.tolist(), begins.tolist()) == reference.group(expected, num_parts * scale)
    assert (order.dtype, begins.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("num_parts", [1, 3, 300])
@pytest.mark.parametrize("kind", ["hash", "range", "table"])
def test_books_say_the_same(device, kind, num_parts):
    ids = torch.arange(1000, device=device)
    book = {"hash": Book(1000, num_parts), "range": Book.by_range(1000, num_parts),
            "table": Book.by_table(torch.arange(1000) * 7 % num_parts, num_parts)}[kind]  # fmt: skip
    keys = make_keys(1000, num_parts, device)

    book.find_buckets(ids, -1, 1, 0, keys)

    assert keys.tolist() == book.owners(ids).tolist()


def test_an_id_outside_a_table_reads_nothing(device):
    keys = make_keys(3, 2, device)

    find_buckets(as_tensor([-1, 1, 2**40], device), 2, as_tensor([], device), as_tensor([1, 1], device, torch.int16),
                 -1, 1, 0, keys)  # fmt: skip

    assert keys.tolist() == [0, 1, 0]

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.ops.local_ids.relabel_nodes import choose_method, relabel
from tests.poison import poisoned_memory
from tests.reference import relabel as reference

METHODS = ["bitmap", "sort"]
CASES = {
    "plain": ([5, 2, 9], [2, 7, 0, 9, 7]),
    "repeated seeds": ([4, 4, 1, 4], [1, 4, 3, 3, 0]),
    "no neighbors": ([3, 1], []),
    "no seeds": ([], [8, 2, 8]),
    "nothing": ([], []),
    "all present": ([2, 1, 0], [0, 1, 2, 2]),
    "word borders": ([31, 64], [32, 0, 63, 31, 33, 64, 96, 99]),
    "last id": ([99], [99, 98]),
}


def check_against_reference(seeds, neighbors, num_nodes, *, method):
    """Check that both fields equal the reference."""
    n_id, local = reference.relabel(seeds.tolist(), neighbors.tolist())

    with poisoned_memory():
        got = relabel(seeds, neighbors, num_nodes, method=method)

    assert got.n_id.tolist() == n_id
    assert got.local.tolist() == local
    assert (got.n_id.dtype, got.local.dtype) == (torch.int64, torch.int64)


def place_ids(ids, device, dtype=torch.int64):
    return torch.tensor(ids, dtype=dtype, device=device)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_matches_reference(device, name, method):
    seeds, neighbors = (place_ids(ids, device) for ids in CASES[name])

    check_against_reference(seeds, neighbors, 100, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int32), (torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_ids_of_either_dtype_match_reference(device, method, dtypes):
    seeds, neighbors = (place_ids(ids, device, dtype) for ids, dtype in zip(CASES["plain"], dtypes, strict=True))

    check_against_reference(seeds, neighbors, 10, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_nodes", [40, 5000, 100_000])
def test_many_ids_match_reference(device, num_nodes, method):
    seeds, neighbors = torch.randint(num_nodes, (300,), device=device), torch.randint(num_nodes, (900,), device=device)

    check_against_reference(seeds, neighbors, num_nodes, method=method)


@given(seeds=st.lists(st.integers(0, 69), max_size=12), neighbors=st.lists(st.integers(0, 69), max_size=40),
       method=st.sampled_from(METHODS))  # fmt: skip
def test_any_ids_match_reference(device, seeds, neighbors, method):
    check_against_reference(place_ids(seeds, device), place_ids(neighbors, device), 70, method=method)


def test_method_follows_the_size_of_the_id_space():
    methods = [choose_method(num_nodes, num_items) for num_nodes, num_items in [
        (1000, 1), (1 << 24, 1), ((1 << 24) + 1, 1), (10**9, 1000), (10**9, 10**6),
    ]]  # fmt: skip

    assert methods == ["bitmap", "bitmap", "sort", "sort", "bitmap"]


def test_huge_id_space_is_served_by_sorting(device):
    seeds, neighbors = place_ids([2**40, 5], device), place_ids([7, 2**40, 2**41], device)

    check_against_reference(seeds, neighbors, 2**42, method="auto")


@pytest.mark.parametrize(("seeds", "neighbors", "error", "words"), [
    ([10], [1], IdError, r"seeds must lie in \[0, 10\), got 10"),
    ([1], [2, -4], IdError, r"neighbors must lie in \[0, 10\), got -4"),
    ([1.5], [2], ArgumentTypeError, "seeds must have dtype int64 or int32, got torch.float32"),
    ([[1]], [2], ArgumentError, r"seeds must have one dimension, got shape \(1, 1\)"),
])  # fmt: skip
def test_bad_ids_are_refused(device, seeds, neighbors, error, words):
    ids = [torch.tensor(values, device=device) for values in (seeds, neighbors)]

    with pytest.raises(error, match=words):
        relabel(*ids, 10)


def test_unknown_method_is_refused():
    ids = torch.tensor([0])

    with pytest.raises(ArgumentError, match="method must be one of auto, bitmap, sort, got 'hash'"):
        relabel(ids, ids, 1, method="hash")

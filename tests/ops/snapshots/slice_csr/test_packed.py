"""Structures are unpacked as they were, from the bytes that nodes, degrees and weights need."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.ops.snapshots.slice_csr import PackedCSR, slice_exclusives, slice_keys, slice_union, unite
from pyg_direct.runtime.cuda.graph_capture import waits_refused


def make_keys(num_nodes, num_edges, seed=0):
    keys = torch.randint(num_nodes**2, (num_edges,), generator=torch.Generator().manual_seed(seed))
    return torch.unique(keys)


def assert_unpacked(piece, device="cpu"):
    packed = PackedCSR.of(piece)
    got = packed.to(torch.device(device)).unpack()
    assert got.cols.device.type == torch.device(device).type
    assert got.to(torch.device("cpu")).equals(piece)
    assert (got.num_rows, got.num_snapshots, got.long_rows) == (piece.num_rows, piece.num_snapshots, piece.long_rows)
    assert packed.num_edges == piece.num_edges
    return packed


@pytest.mark.parametrize(("num_nodes", "num_bytes"), [
    (1, 2), (300, 2), (2**16, 2), (2**16 + 1, 3), (2**24, 3), (2**24 + 1, 4),
])  # fmt: skip
def test_sources_take_as_many_bytes_as_nodes_need(device, num_nodes, num_bytes):
    last = num_nodes - 1
    rows = torch.tensor([0, last // 2, last])
    keys = torch.unique(torch.cat([rows * num_nodes, rows * num_nodes + last // 2, rows * num_nodes + last]))

    packed = assert_unpacked(slice_keys(keys, num_nodes), device)

    # And a byte for the edges of each row, or five for each row that has any.
    of_rows = min(num_nodes, 5 * torch.unique(rows).numel())
    assert packed.num_bytes == num_bytes * keys.numel() + of_rows


@pytest.mark.parametrize(("degree", "size"), [(255, 1), (256, 2), (40_000, 2), (65_535, 2), (65_536, 4)])
def test_degrees_take_as_many_bytes_as_the_largest_needs(device, degree, size):
    # Node 1 has them, and all have one.
    num_nodes = 70_000
    keys = torch.unique(torch.cat([torch.arange(num_nodes) * (num_nodes + 1), num_nodes + 1 + torch.arange(degree)]))

    packed = assert_unpacked(slice_keys(keys, num_nodes), device)

    assert packed.num_bytes == 3 * keys.numel() + size * num_nodes


@pytest.mark.parametrize(("values", "expected"), [
    # Bytes of all weights, of none, and of places and values of some.
    ([1.0] * 100, 0),
    ([1.0] * 99 + [3.0], 5),
    ([1.0] * 99 + [2.5], 8),
    ([1.0, 2.0] * 50, 100),
    ([float("nan")] + [1.0] * 99, 8),
    ([-1.0] * 100, 400),
    ([256.0] * 100, 400),
    ([0.0] * 100, 100),
])  # fmt: skip
def test_weights_are_told_where_they_are_not_one(device, values, expected):
    keys = torch.arange(100) * 101
    bare = PackedCSR.of(slice_keys(keys, 100)).num_bytes
    piece = slice_keys(keys, 100, torch.tensor(values).unsqueeze(1))

    packed = PackedCSR.of(piece)

    assert packed.num_bytes - bare == expected
    got = packed.to(device).unpack().weight
    assert (got.dtype, got.shape) == (torch.float32, (100, 1))
    torch.testing.assert_close(got.cpu(), piece.weight, rtol=0, atol=0, equal_nan=True)


def test_rows_without_edges_are_not_told_where_most_have_none(device):
    num_nodes = 1000
    keys = torch.tensor([5 * num_nodes + 1, 5 * num_nodes + 2, 700 * num_nodes])

    packed = assert_unpacked(slice_keys(keys, num_nodes), device)

    assert packed.segments.tolist() == [5, 700]
    assert packed.num_bytes == 3 * 2 + 2 * 5


@given(num_nodes=st.integers(1, 50), num_edges=st.integers(0, 400), count=st.integers(1, 8), seed=st.integers(0, 99),
       weighted=st.booleans(), stacked=st.booleans())  # fmt: skip
def test_any_structure_comes_back(num_nodes, num_edges, count, seed, weighted, stacked):
    torch.manual_seed(seed)
    union = unite([make_keys(num_nodes, num_edges, seed + t // 2) for t in range(count)])
    size = union.keys.numel()
    weight = torch.randint(3, (size, count if stacked else 1)).float() if weighted else None

    assert_unpacked(slice_union(union, num_nodes, weight))
    assert_unpacked(slice_exclusives(union.keys, union.presence, num_nodes, count, weight))


@pytest.mark.gpu
def test_page_locked_structures_arrive_without_a_wait():
    piece = slice_keys(make_keys(5000, 30_000), 5000)
    pinned = PackedCSR.of(piece).pin_memory()
    assert pinned.is_pinned

    with waits_refused():
        got = pinned.to(torch.device("cuda"), non_blocking=True).unpack()

    assert got.to(torch.device("cpu")).equals(piece)

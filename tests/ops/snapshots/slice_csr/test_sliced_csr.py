"""Sliced CSR: slices of at most 32 edges of one row, and back."""

import numpy as np
import torch
from hypothesis import given, strategies as st

from pyg_direct.kernels.aggregate.sum import LONG_ROW, slice_length
from pyg_direct.kernels.snapshots.sliced_csr import SLICE
from pyg_direct.ops.aggregate.operators import LongRows
from pyg_direct.ops.snapshots.slice_csr import slice_exclusives, slice_keys, slice_union, unite
from tests.reference import snapshots as reference

degrees = st.lists(st.integers(0, 3 * SLICE), min_size=1, max_size=8)


def make_keys(degrees, device="cpu"):
    """Ascending keys of rows of these degrees, among 3 * SLICE columns."""
    num_nodes = max(len(degrees), 3 * SLICE)
    random = np.random.default_rng(len(degrees))
    keys = [row * num_nodes + random.choice(3 * SLICE, degree, replace=False) for row, degree in enumerate(degrees)]
    return torch.from_numpy(np.sort(np.concatenate(keys))).long().to(device), num_nodes


@given(degrees=degrees)
def test_slices_equal_the_reference(device, degrees):
    keys, num_nodes = make_keys(degrees, device)
    expected = reference.slices((keys // num_nodes).tolist(), SLICE)

    sliced = slice_keys(keys, num_nodes)

    assert (sliced.rows & 0x7FFFFFFF).tolist() == [row for row, _, _ in expected]
    assert sliced.offsets.tolist() == [first for _, first, _ in expected] + [keys.numel()]
    assert sliced.cols.tolist() == (keys % num_nodes).tolist()
    several = [degrees[row] > SLICE for row, _, _ in expected]
    assert (sliced.rows < 0).tolist() == several


@given(degrees=degrees)
def test_csr_comes_back(device, degrees):
    keys, num_nodes = make_keys(degrees, device)

    indptr, cols = slice_keys(keys, num_nodes).to_csr()

    target = torch.repeat_interleave(indptr.diff())
    assert torch.equal(target * num_nodes + cols, keys)


@given(degrees=st.lists(st.integers(0, 5 * LONG_ROW), min_size=1, max_size=4))
def test_long_rows_are_counted(degrees):
    num_nodes = max(len(degrees), 5 * LONG_ROW)
    keys = torch.cat([row * num_nodes + torch.arange(degree) for row, degree in enumerate(degrees)])

    piece = slice_keys(keys, num_nodes)

    long = [degree for degree in degrees if degree > LONG_ROW]
    assert piece.long_rows == (len(long), sum(-(-degree // slice_length(degree)) for degree in long))


def test_slices_of_ever_longer_rows_are_counted():
    degrees = [LONG_ROW, LONG_ROW + 1, *(4**k + more for k in range(5, 16) for more in (0, 1)), 2**31 - 1]

    for degree in degrees[1:]:
        assert LongRows.measure(torch.tensor([degree])) == (1, -(-degree // slice_length(degree)))
    assert LongRows.measure(torch.tensor(degrees[:1])) == (0, 0)


@given(degrees=degrees)
def test_transposed_twice_is_the_same(device, degrees):
    keys, num_nodes = make_keys(degrees, device)
    sliced = slice_keys(keys, num_nodes, torch.rand(keys.numel(), 2, device=device), None, 2)

    turned = sliced.transpose()

    assert turned.transpose().equals(sliced)
    target = turned.expand_rows()
    assert sorted((turned.cols * num_nodes + target).tolist()) == keys.tolist()
    assert (target.diff() >= 0).all()


@given(snapshots=st.lists(st.sets(st.integers(0, 48)), min_size=2, max_size=8))
def test_exclusives_and_overlap_are_all_edges(device, snapshots):
    num_nodes, count = 7, len(snapshots)
    union = unite([torch.tensor(sorted(s), dtype=torch.int64, device=device) for s in snapshots])
    shared = union.presence == union.full

    overlap = slice_keys(union.keys[shared], num_nodes, None, None, count)
    rest = slice_exclusives(union.keys[~shared], union.presence[~shared], num_nodes, count)

    common = set((overlap.expand_rows() * num_nodes + overlap.cols).tolist())
    keys = rest.expand_rows() * num_nodes + rest.cols
    of_edges = torch.repeat_interleave(rest.snapshot, rest.offsets.diff()).tolist()
    for t, snapshot in enumerate(snapshots):
        assert common | {k for k, s in zip(keys.tolist(), of_edges, strict=True) if s == t} == snapshot
    assert len(of_edges) == sum(len(s - common) for s in snapshots)
    assert slice_union(union, num_nodes).presence.tolist() == union.presence.tolist()


def test_weights_of_exclusives_are_those_of_their_snapshot(device):
    keys = torch.tensor([1, 5], device=device)
    presence = torch.tensor([0b01, 0b11], dtype=torch.uint8, device=device)

    sliced = slice_exclusives(keys, presence, 4, 2, torch.tensor([[1.0, 0.0], [2.0, 3.0]], device=device))

    assert sliced.snapshot.tolist() == [0, 0, 1]
    assert sliced.weight.view(-1).tolist() == [1, 2, 3]


def test_sizes_follow_the_paper():
    keys, num_nodes = make_keys([40, 0, 3])
    sliced = slice_keys(keys, num_nodes)

    # nnz + 2 slices + 1 words, without values.
    assert sliced.num_bytes == 4 * (43 + 2 * 3 + 1)


def test_what_csr_has_of_its_own_is_counted():
    keys, num_nodes = make_keys([5, 0, 3])
    presence = torch.arange(8).remainder(8).byte()
    plain, masked = slice_keys(keys, num_nodes), slice_keys(keys, num_nodes, None, presence, 3)
    apart = slice_exclusives(keys, presence, num_nodes, 3)
    before = [piece.num_bytes for piece in (plain, masked, apart)]

    more = [piece.num_bytes - known for piece, known in zip((plain, masked, apart), before, strict=True) if piece.csr]

    # Offsets of rows, and of rows in each snapshot; ids with bits or snapshots in them.
    of_rows, of_snapshots = 4 * (num_nodes + 1), 4 * (3 * num_nodes + 1)
    assert more == [of_rows, of_rows + 4 * 8, of_snapshots + 4 * apart.num_edges]


@given(degrees=degrees)
def test_snapshots_of_slices_are_one_graph_in_csr_form(device, degrees):
    keys, num_nodes = make_keys(degrees, device)
    presence = torch.arange(keys.numel(), device=device).remainder(8).byte()

    indptr, row = slice_exclusives(keys, presence, num_nodes, 3).to_csr()

    target = torch.repeat_interleave(torch.arange(3 * num_nodes, device=device), indptr.diff())
    expected = [
        (int(key) // num_nodes * 3 + t, int(key) % num_nodes * 3 + t)
        for key, bits in zip(keys.tolist(), presence.tolist(), strict=True)
        for t in range(3)
        if bits >> t & 1
    ]
    assert list(zip(target.tolist(), row.tolist(), strict=True)) == sorted(expected)

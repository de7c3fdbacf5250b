"""Unions of consecutive snapshots: equal to sets of edges, nested, and the same wherever blocks are cut."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks.dynamic.snapshots import measure_overlap
from pyg_direct.errors import ArgumentError
from pyg_direct.ops.snapshots import slice_csr
from pyg_direct.ops.snapshots.slice_csr import EdgeUnion, merge_unions, unite
from tests.reference import snapshots as reference

keys_of_snapshots = st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=8)


def to_keys(snapshot, device="cpu"):
    return torch.tensor(sorted(snapshot), dtype=torch.int64, device=device)


def assert_equal(union, snapshots):
    expected = reference.unite([{(0, key) for key in snapshot} for snapshot in snapshots])
    assert union.keys.tolist() == [key for _, key in expected]
    assert union.presence.tolist() == list(expected.values())


@given(snapshots=keys_of_snapshots)
def test_union_tells_who_has_each_edge(device, snapshots):
    union = unite([to_keys(snapshot, device) for snapshot in snapshots])

    assert_equal(union, snapshots)
    for t, snapshot in enumerate(snapshots):
        assert union.keys[union.has(t)].tolist() == sorted(snapshot)


@given(snapshots=st.lists(st.sets(st.integers(0, 60)), min_size=8, max_size=8))
def test_unions_nest(device, snapshots):
    pairs = [unite([to_keys(s, device) for s in snapshots[i : i + 2]]) for i in range(0, 8, 2)]

    four = merge_unions(pairs[0], pairs[1])
    eight = merge_unions(four, merge_unions(pairs[2], pairs[3]))

    assert_equal(four, snapshots[:4])
    assert_equal(eight, snapshots)


@pytest.mark.parametrize("sizes", [(5000, 5000), (0, 3000), (3000, 0), (10, 4000), (4000, 10)])
def test_blocks_are_merged_side_by_side(monkeypatch, sizes):
    monkeypatch.setattr(slice_csr, "_KEYS_PER_BLOCK", 64)
    random = np.random.default_rng(0)
    snapshots = [random.choice(9000, size, replace=False).tolist() for size in sizes]

    union = unite([to_keys(snapshot) for snapshot in snapshots])

    assert_equal(union, [set(snapshot) for snapshot in snapshots])


@given(snapshots=keys_of_snapshots)
def test_statistics_count_edges(device, snapshots):
    found = measure_overlap(unite([to_keys(snapshot, device) for snapshot in snapshots]))

    shared, total = set.intersection(*snapshots), sum(map(len, snapshots))
    assert found.num_edges == tuple(map(len, snapshots))
    assert (found.num_shared, found.num_union) == (len(shared), len(set.union(*snapshots)))
    assert found.overlap_rate == pytest.approx(len(snapshots) * len(shared) / total if total else 1)
    change = [1 - len(a & b) / len(b) if b else 0 for a, b in itertools.pairwise(snapshots)]
    assert found.change_rate == pytest.approx(tuple(change))


def test_more_than_eight_snapshots_are_refused():
    one = EdgeUnion.of(torch.arange(3))

    with pytest.raises(ArgumentError, match="1 to 8"):
        unite([])
    with pytest.raises(ArgumentError, match="at most 8 snapshots, got 9"):
        merge_unions(unite([one.keys] * 8), one)

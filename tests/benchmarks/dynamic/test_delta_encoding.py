"""Edges made from those before and what changed are the snapshot's own."""

import pytest
import torch
from hypothesis import given

from benchmarks.dynamic.delta_encoding import apply_delta, find_delta
from pyg_direct.dynamic.sequence_edges import GCN, Sum
from tests.snapshots import drawn_snapshots, make_snapshots, order_snapshots


def walk(num_nodes, snapshots, operator, device="cpu"):
    """(before, after, what changed) of each pair of neighbors, the later made out of the earlier one."""
    factors = [operator.factorise(snapshot) for snapshot in order_snapshots(snapshots, num_nodes, device)]
    before = factors[0]
    for after in factors[1:]:
        delta = find_delta(before, after, num_nodes)
        keys, weight = apply_delta(before, delta, num_nodes)
        yield before, after, delta, keys, weight
        before = after._replace(keys=keys, weight=weight)


def assert_same(after, keys, weight):
    assert torch.equal(keys, after.keys)
    assert (weight is None) == (after.weight is None)
    assert weight is None or torch.equal(weight, after.weight)


@given(drawn_snapshots())
def test_any_snapshots_follow_each_other(drawn):
    num_nodes, snapshots = drawn

    for _, after, _, keys, weight in walk(num_nodes, snapshots, Sum()):
        assert_same(after, keys, weight)


@pytest.mark.parametrize("weighted", [False, True])
def test_only_changes_are_sent(device, weighted):
    snapshots = make_snapshots(200, 2000, 4, change=0.05, weighted=weighted)

    for before, after, delta, keys, weight in walk(200, snapshots, GCN(), device):
        assert_same(after, keys, weight)
        old, new = set(before.keys.tolist()), set(after.keys.tolist())
        assert (delta.removed.numel(), delta.rows.numel()) == (len(old - new), len(new - old))
        # Whether an edge replaces its parallel one shows in its weight, which is then told of every edge.
        all_weights = 0 if weight is None else weight.numel()
        sent = 4 * (delta.removed.numel() + 2 * delta.rows.numel() + all_weights)
        assert delta.num_bytes <= sent
        assert 4 * (delta.removed.numel() + 2 * delta.rows.numel()) < 0.4 * 4 * keys.numel()


def test_equal_weights_of_kept_edges_are_not_sent():
    # A weight for each pair of nodes, the same at any time.
    snapshots = order_snapshots(make_snapshots(50, 300, 2, change=0.1), 50)
    before, after = (Sum().factorise(s)._replace(weight=1 + s.keys.float() / 7) for s in snapshots)

    delta = find_delta(before, after, 50)

    assert delta.weight.numel() == delta.rows.numel() < after.keys.numel() / 2
    assert_same(after, *apply_delta(before, delta, 50))

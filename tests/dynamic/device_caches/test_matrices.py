"""Matrices that stay on the device packed, unpacked, or not at all, are the same to whoever asks."""

import pytest
import torch

from pyg_direct.dynamic.device_caches import Budget, MatrixCache
from pyg_direct.dynamic.matrix_group import build_group
from pyg_direct.dynamic.overlapped_work import CopyStream
from pyg_direct.dynamic.sequence_edges import GCN
from pyg_direct.dynamic.snapshot import order_edges
from tests.snapshots import make_snapshots

NODES = 40


def make_group(seed):
    return build_group(
        [GCN().factorise(order_edges(torch.from_numpy(edges), None, NODES))
         for edges, _ in make_snapshots(NODES, 90, seed + 2)[seed:]], NODES,
    )  # fmt: skip


def make_cache(device, limit):
    return MatrixCache(device, Budget(limit), CopyStream(device))


def train(cache, groups):
    """Return the matrices of a pass over frames of one group each, and the bytes that it copies."""
    moved, got = cache.moved_bytes, []
    for number, group in enumerate(groups):
        cache.visit(range(2 * number, 2 * number + 2))
        here = cache.get(number, range(2 * number, 2 * number + 2), lambda group=group: group)
        # As gradients do.
        here.by_source()
        got.append([piece.to(torch.device("cpu")) for piece in here.pieces])
    cache.visit(range(100, 102))
    return cache.moved_bytes - moved, got


@pytest.mark.parametrize(
    ("whole", "packed", "copied"), [([], [], (0, 1, 2)), ([], [0, 2], (1,)), ([1], [0, 2], ()), ([0, 1, 2], [], ())]
)
def test_what_stays_packed_is_neither_copied_nor_changed(device, whole, packed, copied):
    groups = [make_group(seed) for seed in range(3)]
    cache = make_cache(device, 10**6)
    _, expected = train(cache, groups)

    cache.keep_only(whole, packed)
    cache.bring(whole, packed)
    # Without room for more, and with no frame that still has those that left.
    cache._budget.limit = cache._budget.used
    cache.visit(range(100, 102))

    for _ in range(2):
        moved, got = train(cache, groups)
        assert moved == sum(cache.sent_bytes[key] for key in copied)
        assert all(mine.equals(theirs) for a, b in zip(got, expected, strict=True)
                   for mine, theirs in zip(a, b, strict=True))  # fmt: skip
    held = cache.device_bytes
    assert cache._budget.used == held
    assert held >= sum(cache.sent_bytes[key] for key in packed) + sum(groups[key].num_bytes for key in whole)


def test_packed_ones_may_leave_and_come_back(device):
    groups = [make_group(seed) for seed in range(2)]
    cache = make_cache(device, 10**6)
    train(cache, groups)

    for whole, packed in (([], [0, 1]), ([0], []), ([], [0]), ([], [])):
        cache.keep_only(whole, packed)
        cache.bring(whole, packed)
        assert (cache.device_bytes > 0) == bool(whole or packed)
        assert cache._budget.used == cache.device_bytes
        train(cache, groups)


def test_packed_ones_take_less(device):
    cache = make_cache(device, 10**6)
    train(cache, [make_group(0)])

    (packed,) = cache.list_candidates(lambda times: 3)
    (more,) = cache.list_unpacked([0], lambda times: 3)

    assert packed.saved_bytes == 3 * packed.held_bytes == 3 * cache.sent_bytes[0]
    assert packed.held_bytes + more.held_bytes == cache.device_bytes
    assert packed.held_bytes < more.held_bytes

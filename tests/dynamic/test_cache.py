"""Rows stay on the device while the budget lasts; the others come back equal, and are counted."""

import torch

from pyg_direct.dynamic.cache import Budget, RowCache


def test_rows_beyond_the_budget_are_copied_when_fetched(device):
    rows = [torch.full((4, 2), float(t), device=device) for t in range(3)]
    cache = RowCache(device, Budget(2 * 32))

    for t, part in enumerate(rows):
        cache.store(t, part)

    assert (cache.device_bytes, cache.host_bytes) == (64, 32)
    for t, part in enumerate(rows):
        cache.prefetch(t)
        assert torch.equal(cache.fetch(t), part)
        assert cache.fetch(t).device.type == device.type
    assert cache.moved_bytes == 2 * 32
    assert 2 in cache
    assert 3 not in cache


def test_no_limit_is_without_end():
    budget = Budget()

    assert budget.take(1 << 60)
    assert budget.take(1)
    assert not Budget(0).take(1)

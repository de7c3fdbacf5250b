"""Rows stay on the device while the budget lasts; the others come back equal, and are counted."""

import pytest
import torch

from pyg_direct.dynamic import device_caches
from pyg_direct.dynamic.device_caches import Budget, RowCache


def test_rows_beyond_the_budget_are_copied_when_fetched(device):
    rows = [torch.full((4, 2), float(t), device=device) for t in range(3)]
    kept = RowCache(device, Budget(2 * 32))

    for t, part in enumerate(rows):
        kept.store(t, part)

    assert (kept.device_bytes, kept.host_bytes) == (64, 32)
    for t, part in enumerate(rows):
        kept.prefetch(t)
        assert torch.equal(kept.fetch(t), part)
        assert kept.fetch(t).device.type == device.type
    assert kept.moved_bytes == 2 * 32
    assert 2 in kept
    assert 3 not in kept


@pytest.mark.gpu
def test_rows_that_stay_hold_no_memory_of_those_that_left():
    before = torch.cuda.memory_allocated()
    kept = RowCache(torch.device("cuda"), Budget(8 << 20))
    # Rows of a group come in one block.
    for t, rows in enumerate(torch.arange(8.0, device="cuda").view(8, 1, 1).repeat(1, 1 << 12, 64).unbind()):
        kept.store(t, rows)
    del rows
    assert torch.cuda.memory_allocated() - before == kept.device_bytes == 8 << 20

    kept.keep_only([1, 6])

    assert torch.cuda.memory_allocated() - before == kept.device_bytes == kept.budget.used == 2 << 20
    assert [float(kept.fetch(t).mean()) for t in range(8)] == list(range(8))


def test_no_limit_is_without_end():
    budget = Budget()

    assert budget.take(1 << 60)
    assert budget.take(1)
    assert not Budget(0).take(1)


def test_free_memory_of_a_gpu_is_a_limit(monkeypatch):
    free = [100]
    monkeypatch.setattr(device_caches, "free_bytes", lambda index: free[index - 1])
    budget = Budget(None, torch.device("cuda", 1))

    assert budget.take(50)
    assert not budget.take(51)
    assert Budget(60, torch.device("cuda", 1)).take(60)
    assert budget.used == 50


def test_what_passes_need_stays_free_once_it_is_known(monkeypatch):
    free = 10 << 30
    monkeypatch.setattr(device_caches, "free_bytes", lambda index: free)
    budget = Budget(None, torch.device("cuda", 1))

    assert not budget.take(6 << 30)
    budget.need = 1 << 30

    # Twice as much, and a GiB.
    assert budget.take(7 << 30)
    assert not budget.take((7 << 30) + 1)

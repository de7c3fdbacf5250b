"""A hash table numbers any identities, however they fall into it."""

import numpy as np
import torch

from pyg_direct.kernels.local_ids.hash_table import slot_at
from pyg_direct.sampling import local_ids
from pyg_direct.sampling.local_ids import HashNumbering, Space

SPACE = Space(torch.tensor([0, 2**40]), 62, 0)


def number(hops):
    """Local ids of each hop's items, and its new ones."""
    by_hash = HashNumbering(SPACE)
    by_hash.start(hops[0], np.array([len(hops[0])]))
    out = []
    for items in hops[1:]:
        new_counts = by_hash.enter(items, torch.tensor([len(items)]))
        settled = by_hash.settle(len(items), new_counts[1:].numpy())
        out.append((settled.locals.tolist(), settled.rows.tolist()))
    return out, by_hash


def expect(hops):
    known, out = hops[0].tolist(), []
    for items in hops[1:]:
        new = sorted(set(items.tolist()) - set(known))
        known += new
        out.append(([known.index(item) for item in items.tolist()], new))
    return out


def test_items_are_numbered_hop_after_hop():
    hops = [torch.tensor([5, 2, 5]), torch.tensor([2, 9, 3, 9]), torch.tensor([3, 5, 4]), torch.tensor([9])]

    got, _ = number(hops)

    assert got == expect(hops)


def test_items_that_meet_in_one_region_are_numbered(monkeypatch):
    # Eight regions of 128 slots: the first gets more than it holds.
    monkeypatch.setattr(local_ids, "_SMALL_REGION", 16)
    monkeypatch.setattr(local_ids, "cpu_chunks", lambda: 8)
    table = np.empty(1024, np.int64)
    crowd = [item for item in range(10_000) if slot_at(table, 128, 62, 0, item, 0) < 128][:300]
    hops = [torch.tensor([7, 1]), torch.tensor(crowd[:20]), torch.tensor(crowd[10:]), torch.tensor(crowd[::7])]

    got, by_hash = number(hops)

    assert got == expect(hops)
    assert by_hash.num_slots == 1024


def test_what_was_not_entered_is_not_found():
    _, by_hash = number([torch.tensor([5, 2]), torch.tensor([9])])

    assert by_hash.find(torch.tensor([9, 2, 4, 5])).tolist() == [2, 1, -1, 0]

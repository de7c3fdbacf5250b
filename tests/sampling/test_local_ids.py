"""Identities are numbered hop after hop by sorting, with torch on a GPU and in loops on a CPU."""

import numpy as np
import pytest
import torch

from pyg_direct.sampling import local_ids
from pyg_direct.sampling.local_ids import SortedNumbering, Space, TorchNumbering

WAYS = pytest.mark.parametrize(("make", "device"), [
    pytest.param(SortedNumbering, torch.device("cpu"), id="loops"),
    pytest.param(TorchNumbering, torch.device("cpu"), id="torch"),
    pytest.param(TorchNumbering, torch.device("cuda"), id="torch-cuda", marks=pytest.mark.gpu),
])  # fmt: skip


def number(hops, make, device, bases=(0, 2**40), tree_shift=62, tree_bits=0):
    """Local ids of each hop's items, and its new ones."""
    hops, starts = [hop.to(device) for hop in hops], torch.tensor(bases)
    numbering = make(Space(starts.to(device), tree_shift, tree_bits))
    numbering.start(hops[0], count_types(hops[0], starts))
    # Behind the sources of a hop there may be room for more.
    room = 5 if make is TorchNumbering else 0
    out = []
    for items in hops[1:]:
        given = torch.cat([items, items.new_full((room,), 7)])
        total, *new_counts = numbering.enter(given, torch.tensor([0, len(items)], device=device)).tolist()
        settled = numbering.settle(len(items), np.array(new_counts))
        assert total == sum(new_counts) == len(settled.rows)
        out.append((settled.locals.tolist(), settled.rows.tolist(), settled.trees.tolist()))
    return out, numbering


def count_types(items, bases):
    return np.diff(np.searchsorted(np.sort(items.cpu().numpy()), bases.numpy()))


def expect(hops, bases=(0, 2**40), tree_shift=62, tree_bits=0):
    known, out = [[] for _ in bases[1:]], []
    for number, items in enumerate(hops):
        kinds = [np.searchsorted(bases, item, side="right") - 1 for item in items.tolist()]
        seen = {item for own in known for item in own}
        new = sorted(set(items.tolist()) - seen)
        for item in items.tolist() if number == 0 else new:
            known[np.searchsorted(bases, item, side="right") - 1].append(item)
        places = [item - bases[np.searchsorted(bases, item, side="right") - 1] for item in new]
        trees = [place >> tree_shift for place in places]
        if number > 0:
            out.append(([known[kind].index(item) for kind, item in zip(kinds, items.tolist(), strict=True)],
                        [place - (tree << tree_shift) for place, tree in zip(places, trees, strict=True)],
                        trees if tree_bits else []))  # fmt: skip
    return out


@WAYS
def test_items_are_numbered_hop_after_hop(make, device):
    hops = [torch.tensor([5, 2, 5]), torch.tensor([2, 9, 3, 9]), torch.tensor([3, 5, 4]), torch.tensor([9])]

    got, _ = number(hops, make, device)

    assert got == expect(hops)


@WAYS
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_types_and_trees_are_numbered(make, device, monkeypatch, seed, chunks):
    monkeypatch.setattr(local_ids, "cpu_chunks", lambda: chunks)
    generator = torch.Generator().manual_seed(seed)
    tree_shift, tree_bits = (7, 2) if seed % 2 else (5, 3)
    width = 1 << (tree_shift + tree_bits)
    # The second type has no nodes.
    bases = (0, width, width, 2 * width, 3 * width)
    numbers = torch.cat([torch.arange(width), torch.arange(2 * width, 3 * width)])
    seeds = numbers[torch.randperm(len(numbers), generator=generator)[:6]].sort().values
    sizes = [0, 1, 40, 700, 0, 300]
    hops = [seeds, *(numbers[torch.randint(len(numbers) // (1 + seed), (size,), generator=generator)]
                     for size in sizes)]  # fmt: skip

    got, _ = number(hops, make, device, bases, tree_shift, tree_bits)

    assert got == expect(hops, bases, tree_shift, tree_bits)


@WAYS
def test_wide_identities_are_told_apart(make, device):
    """Bits of every digit."""
    generator = torch.Generator().manual_seed(1)
    hops = [torch.tensor([3]), torch.randint(2**61, (500,), generator=generator)]
    hops += [hops[1][::3] ^ 1, torch.cat([hops[1], torch.tensor([3, 4])])]

    got, _ = number(hops, make, device, (0, 2**61))

    assert got == expect(hops, (0, 2**61))


@WAYS
def test_what_was_not_entered_is_not_found(make, device):
    _, numbering = number([torch.tensor([5, 2, 5]), torch.tensor([9])], make, device)

    assert numbering.find(torch.tensor([9, 2, 4, 5, 2**39], device=device)).tolist() == [3, 1, -1, 0, -1]

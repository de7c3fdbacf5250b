"""Identities are numbered hop after hop, by a hash table on a GPU and by sorting on a CPU."""

import numpy as np
import pytest
import torch

from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.sampling import local_ids
from pyg_direct.sampling.local_ids import HashNumbering, SortedNumbering, Space


def number(hops, device, bases=(0, 2**40), tree_shift=62, tree_bits=0):
    """Local ids of each hop's items, and its new ones."""
    hops, starts = [hop.to(device) for hop in hops], torch.tensor(bases)
    space = Space(starts.to(device), tree_shift, tree_bits)
    numbering = (HashNumbering if runs_on_gpu(space.bases) else SortedNumbering)(space)
    numbering.start(hops[0], count_types(hops[0], starts))
    out = []
    for items in hops[1:]:
        total, *new_counts = numbering.enter(items, torch.tensor([len(items)], device=device)).tolist()
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


def test_items_are_numbered_hop_after_hop(device):
    hops = [torch.tensor([5, 2, 5]), torch.tensor([2, 9, 3, 9]), torch.tensor([3, 5, 4]), torch.tensor([9])]

    got, _ = number(hops, device)

    assert got == expect(hops)


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_types_and_trees_are_numbered(device, monkeypatch, seed, chunks):
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

    got, _ = number(hops, device, bases, tree_shift, tree_bits)

    assert got == expect(hops, bases, tree_shift, tree_bits)


def test_wide_identities_are_told_apart(device):
    """Bits of every digit."""
    generator = torch.Generator().manual_seed(1)
    hops = [torch.tensor([3]), torch.randint(2**61, (500,), generator=generator)]
    hops += [hops[1][::3] ^ 1, torch.cat([hops[1], torch.tensor([3, 4])])]

    got, _ = number(hops, device, (0, 2**61))

    assert got == expect(hops, (0, 2**61))


def test_what_was_not_entered_is_not_found(device):
    _, numbering = number([torch.tensor([5, 2, 5]), torch.tensor([9])], device)

    assert numbering.find(torch.tensor([9, 2, 4, 5, 2**39], device=device)).tolist() == [3, 1, -1, 0, -1]

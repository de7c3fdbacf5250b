"""Edges that owners pack are joined by the asking part, in the order of its work list."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.kernels.sampling.worklist import COLUMNS, FIRST, FRONT, LOCAL, SOURCE_BASE, SOURCE_START
from pyg_direct.ops.sampling.join_remote_edges import Asked, Layout, Wire, join_edges, pack_edges
from pyg_direct.ops.sampling.sample_hetero import Picked
from tests.poison import poisoned_memory
from tests.reference import answer as reference

SHIFT = 40
WIRES = [Wire(torch.uint8, torch.int32), Wire(torch.int32, torch.int64)]


def pack(answers, wire, real_device, trees):
    """Answers of owners, one after the other, whose sources carry the numbers of trees."""
    sizes = [[len(item) for item in items] for items in answers]
    layouts = [Layout.of(np.array([len(own)]), np.array([sum(own)]), wire) for own in sizes]
    out = torch.empty(sum(int(layout.sizes.sum()) for layout in layouts), dtype=torch.uint8, device=real_device)
    at = 0
    for items, own, layout, own_trees in zip(answers, sizes, layouts, trees, strict=True):
        offsets = torch.tensor([0, *accumulate(own)], device=real_device)
        targets = [place for place, item in enumerate(items) for _ in item]
        sources = [edge[0] + (own_trees[place] if own_trees else 0)
                   for place, item in enumerate(items) for edge in item]  # fmt: skip
        ids = [edge[1] for item in items for edge in item]
        sources, ids, targets, given = (torch.tensor(values, dtype=torch.int64, device=real_device)
                                        for values in (sources, ids, targets, own_trees))  # fmt: skip
        end = at + int(layout.sizes.sum())
        pack_edges(Picked(sources, ids, targets, offsets, offsets), given, layout, wire, out[at:end])
        at = end
    return out


@pytest.mark.parametrize("wire", WIRES, ids=["small", "large"])
@given(data=st.data(), num_owners=st.integers(1, 4), has_trees=st.booleans())
@pytest.mark.full
def test_matches_reference(real_device, wire, data, num_owners, has_trees):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2))
    types = data.draw(st.lists(st.integers(0, 1), max_size=3))
    types = [kind for kind in types if counts[kind]]
    front = [list(range(counts[0])), list(range(counts[0], sum(counts)))]
    owner_of = data.draw(st.lists(st.integers(0, num_owners - 1), min_size=sum(counts), max_size=sum(counts)))
    edge = st.tuples(st.integers(0, 99), st.integers(0, 99))
    edges = {(entry, place): data.draw(st.lists(edge, max_size=3))
             for entry, kind in enumerate(types) for place in front[kind]}  # fmt: skip
    answers = [reference.list_answer(edges, types, front, owner_of, owner) for owner in range(num_owners)]
    expected = reference.join(edges, types, front)
    work = np.zeros((len(types) + 1, COLUMNS), np.int64)
    work[1:, FIRST] = np.cumsum([counts[kind] for kind in types])
    for entry, kind in enumerate(types):
        work[entry, [FRONT, LOCAL, SOURCE_BASE, SOURCE_START]] = [front[kind][0], 50 * entry, 1000 * entry, 10]
    trees = torch.arange(sum(counts) * has_trees, device=real_device) + 3
    order = [place for owner in range(num_owners) for kind in front for place in kind if owner_of[place] == owner]
    by_owner = np.array([[sum(owner_of[place] == owner for place in kind) for kind in front]
                         for owner in range(num_owners)])  # fmt: skip
    asked = Asked(work.reshape(-1), np.array(types, np.int64), by_owner,
                  torch.tensor(order, dtype=torch.int64, device=real_device), trees, SHIFT)  # fmt: skip

    with poisoned_memory():
        given_trees = [[5 + place for place in range(len(items))] if has_trees else [] for items in answers]
        packed = pack(answers, wire, real_device, given_trees)
        layout = Layout.of(asked.num_items, np.array([sum(map(len, items)) for items in answers]), wire)
        got = join_edges(asked, layout, wire, packed)

    places = [(entry, place) for entry, kind in enumerate(types) for place in front[kind]]
    flat = [(where, item) for where, items in zip(places, expected, strict=True) for item in items]
    tree = [place + 3 if has_trees else 0 for (_, place), _ in flat]
    assert got.sources.tolist() == [edge[0] + 1000 * entry - 10 + (number << SHIFT)
                                    for ((entry, _), edge), number in zip(flat, tree, strict=True)]  # fmt: skip
    assert got.ids.tolist() == [edge[1] for _, edge in flat]
    assert got.targets.tolist() == [50 * entry + place - front[types[entry]][0] for (entry, place), _ in flat]
    assert got.offsets.tolist() == [0, *accumulate(map(len, expected))]
    assert got.ends.tolist() == [got.offsets.tolist()[first] for first in work[:, FIRST]]

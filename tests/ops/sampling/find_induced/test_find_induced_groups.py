"""Edges among the nodes of several sets are those of each set alone, in one order and place."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.ops.sampling.find_induced import enter_ranges, enter_sets
from tests.ops.sampling.find_induced.test_find_induced import make_lists
from tests.poison import poisoned_memory
from tests.reference.induced import induce

ROWS = [[1, 1, 5], [0], [2, 1, 4, 3, 0], [], [4, 2], [5, 0, 0, 6], [0, 6]]
# The last range is empty.
BOUNDS = np.array([0, 2, 3, 5, 7, 7])


def read(sets, rows_first=False):
    """(nodes, edges as (neighbor, row, id)) of each set."""
    with poisoned_memory():
        sums = sets.count_edges()
        ends, edges = sets.emit(sums, int(sums.sum()), rows_first=rows_first)
    counts = sums.view(sets.num_sets, -1).sum(1)
    found = []
    begins, own = sets.begins.tolist(), list(zip(ends.split((2 * counts).tolist()), edges.split(counts.tolist()),
                                                 strict=True))  # fmt: skip
    for which, (pairs, ids) in enumerate(own):
        first, second = pairs.view(2, -1).tolist()
        others, rows = (second, first) if rows_first else (first, second)
        nodes = sets.nodes[begins[which] : begins[which + 1]].tolist()
        found.append((nodes, list(zip(others, rows, ids.tolist(), strict=True))))
    return found


def expect(lists, ids, sets, rows=ROWS):
    flat = [other for row in rows for other in row]
    return [(nodes, induce(lists.indptr.tolist(), flat, ids, nodes)) for nodes in sets]


def list_nodes(ranges):
    return [node for r in ranges for node in range(BOUNDS[r], BOUNDS[r + 1])]


@pytest.mark.parametrize("form", ["apart", "together", "without"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(chosen=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4))
@pytest.mark.full
def test_sets_of_ranges_match_reference(device, form, dtype, chosen):
    lists, ids = make_lists(ROWS, device, dtype, form)
    if not runs_on_gpu(lists.indptr):
        # A CPU makes each set alone.
        return
    owners = torch.tensor(np.repeat(np.arange(5), np.diff(BOUNDS)), dtype=torch.int32, device=device)

    with poisoned_memory():
        sets = enter_ranges(lists, BOUNDS, owners, np.array([*chain.from_iterable(chosen)], np.int64),
                            np.array(list(map(len, chosen))))  # fmt: skip

    assert read(sets) == expect(lists, ids, map(list_nodes, chosen))
    assert read(sets, rows_first=True) == expect(lists, ids, map(list_nodes, chosen))


@pytest.mark.parametrize("form", ["apart", "together", "without"])
@given(chosen=st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=4), behind=st.integers(0, 3))
@pytest.mark.full
def test_sets_of_nodes_match_reference(device, form, chosen, behind):
    lists, ids = make_lists(ROWS, device, torch.int32, form)
    if not runs_on_gpu(lists.indptr):
        # A CPU makes each set alone.
        return
    nodes = torch.tensor([*chain.from_iterable(chosen), *[2] * behind], dtype=torch.int64, device=device)
    begins = torch.tensor(np.cumsum([0, *map(len, chosen)]), device=device)

    with poisoned_memory():
        sets = enter_sets(lists, nodes, begins)

    assert read(sets) == expect(lists, ids, chosen)


def test_rows_longer_than_blocks_keep_their_order(device):
    rows = [[1 + i % 9 for i in range(700)], *([0] for _ in range(9))]
    lists, ids = make_lists(rows, device)
    if not runs_on_gpu(lists.indptr):
        # A CPU makes each set alone.
        return
    chosen = [[3, 0, 7, 9], [1, 2], [0, 5]]
    nodes = torch.tensor([*chain.from_iterable(chosen)], device=device)

    sets = enter_sets(lists, nodes, torch.tensor([0, 4, 6, 8], device=device))

    assert read(sets) == expect(lists, ids, chosen, rows)


def test_neighbors_that_are_no_nodes_are_left_out(device):
    lists, _ = make_lists([[1, 0], [0]], device)
    if not runs_on_gpu(lists.indptr):
        # A CPU makes each set alone.
        return
    lists.neighbors[0] = 99
    owners = torch.zeros(2, dtype=torch.int32, device=device)

    by_range = enter_ranges(lists, np.array([0, 2]), owners, np.array([0]), np.array([1]))
    by_node = enter_sets(lists, torch.tensor([0, 1], device=device), torch.tensor([0, 2], device=device))

    for sets in (by_range, by_node):
        assert [edge[:2] for edge in read(sets)[0][1]] == [(0, 0), (0, 1)]

"""Edges among the nodes of a set are those that looking at all rows finds, in the same order on every device."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import IdError
from pyg_direct.ops.run_kernel import runs_on_gpu
from pyg_direct.ops.sampling.find_induced import NeighborLists, count_inside, enter_set
from tests.poison import poisoned_memory
from tests.reference.induced import induce


def make_lists(rows, device, dtype=torch.int32, form="apart"):
    """The rows with ids that are no positions, apart, interleaved with the neighbors or left out."""
    indptr = torch.tensor(np.cumsum([0, *map(len, rows)]), device=device)
    neighbors = torch.tensor([node for row in rows for node in row], dtype=dtype, device=device)
    ids = torch.arange(neighbors.numel(), device=device, dtype=dtype).flip(0).contiguous()
    if form == "together":
        pairs = torch.stack([neighbors, ids], 1).view(-1)
        return NeighborLists(indptr, pairs, pairs, 2), ids.tolist()
    none = ids[:0]
    return NeighborLists(indptr, neighbors, ids if form == "apart" else none), (
        ids.tolist() if form == "apart" else list(range(neighbors.numel()))
    )


def find_inside(lists, nodes):
    """(edges as (neighbor, row, id), the table as it was left)."""
    local = torch.full((lists.num_nodes,), -1, dtype=torch.int32, device=nodes.device)
    # The first of those that are repeated.
    for place in reversed(range(nodes.numel())):
        local[nodes[place]] = place
    with poisoned_memory():
        candidates = count_inside(lists, nodes, local)
        ends, edges = candidates.emit(int(candidates.sums.sum()))
    return list(zip(*ends.tolist(), edges.tolist(), strict=True))


@pytest.mark.parametrize("form", ["apart", "together", "without"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(data=st.data(), num_nodes=st.integers(1, 8))
@pytest.mark.full
def test_matches_reference(device, form, dtype, data, num_nodes):
    node = st.integers(0, num_nodes - 1)
    rows = data.draw(st.lists(st.lists(node, max_size=6), min_size=num_nodes, max_size=num_nodes))
    nodes = data.draw(st.lists(node, unique=True, max_size=num_nodes))
    lists, ids = make_lists(rows, device, dtype, form)
    indptr, flat = lists.indptr.tolist(), [other for row in rows for other in row]

    got = find_inside(lists, torch.tensor(nodes, dtype=torch.int64, device=device))

    assert got == induce(indptr, flat, ids, nodes)


def test_a_row_longer_than_blocks_keeps_its_order(device):
    hub = [1 + i % 9 for i in range(700)]
    rows = [hub, *([0] for _ in range(9))]
    lists, ids = make_lists(rows, device)
    nodes = [3, 0, 7, 9]

    got = find_inside(lists, torch.tensor(nodes, device=device))

    assert got == induce(lists.indptr.tolist(), lists.neighbors.tolist(), ids, nodes)


def test_repeated_nodes_repeat_their_rows(device):
    lists, ids = make_lists([[1, 1], [0], [2]], device)

    got = find_inside(lists, torch.tensor([0, 1, 0], device=device))

    assert got == induce(lists.indptr.tolist(), lists.neighbors.tolist(), ids, [0, 1, 0])


def test_nodes_behind_the_count_have_no_rows(device):
    lists, ids = make_lists([[1, 1], [0], [2, 1]], device)
    if not runs_on_gpu(lists.indptr):
        # A CPU has exact sets.
        return
    nodes = torch.tensor([0, 1, 2, 0], device=device)
    local = torch.full((3,), -1, dtype=torch.int32, device=device)

    offsets = enter_set(lists, nodes, local, torch.tensor([2], device=device))
    candidates = count_inside(lists, nodes, local, offsets)
    ends, edges = candidates.emit(int(candidates.sums.sum()), rows_first=True)

    expected = induce(lists.indptr.tolist(), lists.neighbors.tolist(), ids, [0, 1])
    assert list(zip(ends[1].tolist(), ends[0].tolist(), edges.tolist(), strict=True)) == expected


@pytest.mark.parametrize("nodes", [[], [2], [2, 0, 2, 1, 0], list(range(3)) * 300])
def test_a_set_is_entered_at_first_places(device, nodes):
    lists, _ = make_lists([[1, 1], [0], []], device)
    if not runs_on_gpu(lists.indptr):
        # A CPU enters sets by NumPy.
        return
    local = torch.full((3,), -1, dtype=torch.int32, device=device)

    with poisoned_memory():
        offsets = enter_set(lists, torch.tensor(nodes, dtype=torch.int64, device=device), local)

    degrees = [[2, 1, 0][node] for node in nodes]
    assert offsets.tolist() == [sum(degrees[:place]) for place in range(len(nodes) + 1)]
    assert local.tolist() == [nodes.index(node) if node in nodes else -1 for node in range(3)]


def test_neighbors_that_are_no_nodes_are_left_out(device):
    lists, _ = make_lists([[1, 0], [0]], device)
    lists.neighbors[0] = 99

    assert [edge[:2] for edge in find_inside(lists, torch.tensor([0, 1], device=device))] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("node", [-1, 3])
def test_nodes_outside_the_graph_are_refused_on_a_cpu(node):
    lists, _ = make_lists([[1], [0], []], "cpu")
    if runs_on_gpu(lists.indptr):
        # Blocks of a GPU are not waited for to be asked.
        return
    with pytest.raises(IdError, match=rf"nodes must lie in \[0, 3\), got {node}"):
        count_inside(lists, torch.tensor([0, node]), torch.full((3,), -1, dtype=torch.int32))

"""Cached rows read as the rows they are copies of, from whichever side in memory."""

import ctypes
import itertools

import pytest
import torch

from pyg_direct.graph.csr_topo import cache_rows, choose_rows
from pyg_direct.graph.placed_topology import PlacedTopology
from tests.graphs import make_random_graph


def place(num_nodes, num_edges):
    indptr, indices, edge_ids = (torch.tensor(a) for a in make_random_graph(num_nodes, num_edges).in_rows())
    return PlacedTopology(indptr, indices.int(), edge_ids, "cpu")


def read_rows(topology):
    """The rows as a kernel finds them: by address from the start of `lists`."""
    rows = []
    for row, degree in enumerate(topology.indptr.diff().tolist()):
        address = topology.lists.data_ptr() + 4 * int(topology.starts[row])
        rows.append(list((ctypes.c_int32 * degree).from_address(address)) if degree else [])
    return rows


# Small arrays come from the heap, large ones from below: the copies then lie on either side of the original.
@pytest.mark.parametrize("num_edges", [300, 200_000])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rows_read_through_the_cache_are_the_rows(num_edges, share):
    topology = place(100, num_edges)

    cached = cache_rows(topology, int(4 * num_edges * share))

    indptr = topology.indptr.tolist()
    assert read_rows(cached) == [topology.indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]
    assert 0 < cached.cached.numel() <= share * num_edges
    assert int(cached.starts.min()) >= 0


def test_no_room_leaves_the_topology_as_it_is():
    topology = place(100, 300)

    assert cache_rows(topology, 0) is topology


def test_rows_that_are_listed_most_for_their_size_come_first():
    # Rows 0 and 1 have ten neighbors each; row 1 is listed by one of them, row 0 by all others.
    indptr = torch.tensor([0, 10, 20])
    indices = torch.tensor([1] + [0] * 19, dtype=torch.int32)

    rows = choose_rows(indptr, indices, 10)

    assert rows.tolist() == [0]


def test_short_rows_come_before_hubs_that_every_batch_meets():
    # Row 0 is listed 1,000 times and has 1,000 neighbors; row 1 is listed 40 times and has 8, the others are empty.
    indptr = torch.tensor([0, 1000, 1008] + [1008] * 98)
    indices = torch.tensor([0] * 960 + [1] * 40 + [0] * 8, dtype=torch.int32)

    rows = choose_rows(indptr, indices, 1000)

    assert rows.tolist() == [1]

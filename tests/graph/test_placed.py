"""Arrays of a topology stay on the host where they leave no room in GPU memory."""

import pytest
import torch

from pyg_direct.graph import placed, topology
from pyg_direct.graph.topology import CSRTopo

GPU = torch.device("cuda", 0)
EDGES = torch.arange(1000).remainder(40).view(2, 500)


@pytest.fixture
def places(monkeypatch):
    """Where each array is put, of a GPU that is not there."""
    seen = {}

    def place_array(source, placement, device, what):
        seen[what] = placement
        return source, source, None

    monkeypatch.setattr(topology, "place_array", place_array)
    return seen


@pytest.mark.parametrize(("free", "offsets", "edge_ids"), [
    (8 * 2000, "cuda", "cuda"), (8 * 2000 - 1, "cuda", "unified"), (8 * 300, "unified", "unified"),
])  # fmt: skip
def test_short_arrays_go_to_the_gpu_up_to_an_eighth_of_what_is_free(monkeypatch, places, free, offsets, edge_ids):
    monkeypatch.setattr(placed, "free_bytes", lambda index: free)

    CSRTopo(EDGES, num_nodes=40)._place("unified", GPU)

    assert places == {"offsets": offsets, "neighbors": "unified", "edge ids": edge_ids}


@pytest.mark.parametrize(("free", "expected"), [(8000, "cuda"), (7998, "unified")])
def test_a_topology_goes_to_the_gpu_where_it_leaves_half_of_little_memory(monkeypatch, free, expected):
    monkeypatch.setattr(placed, "free_bytes", lambda index: free)
    monkeypatch.setattr(placed, "choose_host_memory", lambda index: "unified")

    assert placed.choose_placement(4000, GPU) == expected

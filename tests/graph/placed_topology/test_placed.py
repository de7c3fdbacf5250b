"""Arrays of a topology stay on the host if they leave no room in GPU memory."""

import pytest
import torch

from pyg_direct.graph import csr_topo, placed_topology
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.runtime.cuda.memory import Block

GPU = torch.device("cuda", 0)
EDGES = torch.arange(1000).remainder(40).view(2, 500)


@pytest.fixture
def places(monkeypatch):
    """Record the placement of each array, for a GPU that does not exist."""
    seen = {}

    def place_array(source, placement, device, what):
        seen[what] = placement
        return source, source, None

    monkeypatch.setattr(csr_topo, "place_array", place_array)
    return seen


@pytest.mark.parametrize(("free", "offsets", "edge_ids"), [
    (8 * 2000, "cuda", "cuda"), (8 * 2000 - 1, "cuda", "unified"), (8 * 300, "unified", "unified"),
])  # fmt: skip
def test_short_arrays_go_to_the_gpu_up_to_an_eighth_of_what_is_free(monkeypatch, places, free, offsets, edge_ids):
    monkeypatch.setattr(placed_topology, "free_bytes", lambda index: free)

    CSRTopo(EDGES, num_nodes=40)._place("unified", GPU)

    assert places == {"offsets": offsets, "neighbors": "unified", "edge ids": edge_ids}


@pytest.mark.parametrize(("free", "expected"), [(8 << 30, "cuda"), ((8 << 30) - 2, "unified")])
def test_a_topology_goes_to_the_gpu_where_it_leaves_half_of_little_memory(monkeypatch, free, expected):
    monkeypatch.setattr(placed_topology, "free_bytes", lambda index: free)
    monkeypatch.setattr(placed_topology, "choose_host_memory", lambda index: "unified")

    assert placed_topology.choose_placement(4 << 30, GPU) == expected


@pytest.mark.parametrize(("free", "offsets", "edge_ids"), [
    (8 * 64, "cuda", "cuda"), (8 * 64 - 1, "unified", "cuda"), (8 * 32, "unified", "cuda"),
    (8 * 32 - 1, "unified", "unified"),
])  # fmt: skip
def test_more_offsets_than_edges_leave_room_for_edge_ids(monkeypatch, places, free, offsets, edge_ids):
    # 7 nodes have offsets of 64 bytes, 8 edges have ids of 32.
    topo = CSRTopo(torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0], [6, 5, 4, 3, 2, 1, 0, 1]]), num_nodes=7)
    monkeypatch.setattr(placed_topology, "free_bytes", lambda index: free)
    monkeypatch.setattr(csr_topo, "resolve_device", lambda device: GPU)

    topo.place("unified", "cuda")

    assert places == {"offsets": offsets, "neighbors": "unified", "edge ids": edge_ids}


@pytest.mark.gpu
def test_a_share_of_gpu_memory_below_the_topology_keeps_edge_ids_out_of_it():
    torch.cuda.empty_cache()
    topo, before = CSRTopo(torch.randint(1000, (2, 1 << 20)), num_nodes=1000), torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + (7 << 20)) / total)
    try:
        got = topo.place("unified", "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    # Each takes 4 MiB, and 1 MiB would exceed an eighth of the remaining memory.
    assert [block.placement for block in got.blocks] == ["unified", "unified"]
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert torch.equal(got.edge_ids.cpu(), topo.eid)


@pytest.mark.parametrize(
    ("on_host", "expected"),
    [
        ((), None),
        (("indices",), placed_topology.ListReads(0, 4, False)),
        (("indices", "edge_ids"), placed_topology.ListReads(0, 12, False)),
        (("indptr", "indices", "edge_ids"), placed_topology.ListReads(16, 12, False)),
    ],
)
@pytest.mark.parametrize("memory", ["unified", "pinned", "cpu"])
def test_what_is_read_of_lists_is_that_in_host_memory(on_host, expected, memory):
    arrays = {"indptr": torch.tensor([0, 2, 3]), "indices": torch.tensor([1, 0, 1], dtype=torch.int32),
              "edge_ids": torch.tensor([2, 0, 1])}  # fmt: skip
    blocks = []
    for name in on_host:
        block = Block(memory, arrays[name].numel() * arrays[name].element_size(), None)
        block._address = arrays[name].data_ptr()
        blocks.append(block)

    reads = placed_topology.PlacedTopology(**arrays, placement=memory, blocks=blocks).list_reads()

    assert reads == (None if memory == "cpu" else expected)


def test_bytes_of_lists_are_those_of_rows_and_edges():
    assert placed_topology.ListReads(16, 12, False).sum_bytes(3, 10) == 168

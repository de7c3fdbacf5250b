"""A topology in the memories of two GPUs is sampled as one in the memory of one."""

import pytest
import torch

from pyg_direct import CSRTopo, NeighborLoader
from pyg_direct.errors import ArgumentError
from tests.batches import hash_batches, make_data
from tests.graphs import make_random_graph
from tests.processes import run_ranks


def make_big():
    # More than a chunk of neighbors.
    return make_data(make_random_graph(20_000, 2_000_000))


def make_hashes(device, topology_placement, **options):
    loader = NeighborLoader(make_big(), [5, 3], batch_size=512, seed=1, device=device, placement="cuda",
                            topology_placement=topology_placement, **options)  # fmt: skip
    return [hash_batches([batch]) for _, batch in zip(range(4), loader, strict=False)]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.gpu
@pytest.mark.gpus
def test_arrays_are_those_of_the_topology(index, is_on_gpu):
    edges = make_big().edge_index
    topo, expected = CSRTopo(edges.to(f"cuda:{index}") if is_on_gpu else edges), CSRTopo(edges)

    placed = topo.place("peer", index)

    assert placed.placement == "peer"
    assert placed.indices.device.index == index
    assert torch.equal(placed.indices.cpu(), expected.indices)
    assert torch.equal(placed.edge_ids.cpu(), expected.eid)
    assert torch.equal(placed.indptr.cpu(), expected.indptr)


@pytest.mark.gpu
@pytest.mark.gpus
def test_an_empty_graph_lies_nowhere():
    placed = CSRTopo(torch.empty(2, 0, dtype=torch.int64), num_nodes=3).place("peer", 0)

    assert placed.num_edges == 0


@pytest.mark.gpu
@pytest.mark.gpus
def test_batches_are_the_same():
    assert make_hashes("cuda:1", "peer") == make_hashes("cuda:1", "cuda")


def sample_in_group(rank):
    torch.cuda.set_device(rank)
    return make_hashes(f"cuda:{rank}", "peer")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.gpus
def test_processes_of_a_group_hold_one_topology():
    first, second = run_ranks(sample_in_group, 2)

    assert first == second == make_hashes("cuda:0", "cuda")


def test_a_cpu_has_no_peers():
    with pytest.raises(ArgumentError, match="placement must be one that device=cpu can read, got 'peer'"):
        CSRTopo(make_data().edge_index).place("peer", "cpu")
    with pytest.raises(ArgumentError, match="topology_placement must be one that device=cpu can read, got 'peer'"):
        NeighborLoader(make_data(), [3], topology_placement="peer", device="cpu")
    with pytest.raises(ArgumentError, match="placement must be one of auto, cuda, unified, pinned, cpu, got 'peer'"):
        NeighborLoader(make_data(), [3], placement="peer", device="cpu")

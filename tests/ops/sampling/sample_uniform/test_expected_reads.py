"""Values of rows are added up over the nodes that they list."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct import CSRTopo
from pyg_direct.compiler.jit import SIMULATED
from pyg_direct.ops.sampling import sample_uniform
from pyg_direct.ops.sampling.sample_uniform import spread_values
from tests.graphs import GRAPHS
from tests.poison import poisoned_memory
from tests.reference import expected as reference

gpu_or_sim = pytest.mark.sim if SIMULATED else pytest.mark.gpu

edges = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=60)


def check(topo, values, device, rtol=1e-5):
    wanted = reference.spread_values(topo.indptr.tolist(), topo.indices.tolist(), values.tolist())

    with poisoned_memory():
        got = spread_values(topo.indptr.to(device), topo.indices.to(device), values.to(device))

    assert (got.dtype, got.device.type) == (torch.float32, torch.device(device).type)
    torch.testing.assert_close(got.cpu(), torch.tensor(wanted), atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("piece", [1 << 24, 7, 1])
@given(edges=edges, zeros=st.sets(st.integers(0, 11)))
def test_matches_reference(device, piece, edges, zeros):
    values = torch.rand(12)
    values[list(zeros)] = 0
    before, sample_uniform._EDGES_AT_ONCE = sample_uniform._EDGES_AT_ONCE, piece
    try:
        check(CSRTopo(torch.tensor(edges, dtype=torch.int64).view(-1, 2).t(), num_nodes=12), values, device)
    finally:
        sample_uniform._EDGES_AT_ONCE = before


@pytest.mark.parametrize("name", GRAPHS)
def test_any_graph_matches_reference(device, name):
    graph = GRAPHS[name]

    check(CSRTopo(graph.edge_index, num_nodes=graph.num_nodes), torch.rand(graph.num_nodes), device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_hub_and_many_edges_match_reference(real_device, dtype):
    # Two nodes of three list no neighbor; the first one lists, and is listed, 20,000 times.
    source = torch.cat([torch.randint(3000, (20_000,)), torch.zeros(20_000, dtype=torch.int64)])
    target = torch.cat([torch.zeros(20_000, dtype=torch.int64), torch.randint(1000, (20_000,)) * 3])
    topo = CSRTopo(torch.stack([source, target]), num_nodes=3000)
    topo._indices = topo.indices.to(dtype)

    # A GPU adds 20,000 numbers to one in any order, and loses up to half a bit of the sum each time.
    check(topo, torch.rand(3000), real_device, rtol=1e-4 if real_device.type == "cuda" else 1e-5)


def test_neighbors_may_lie_among_edge_ids(device):
    topo = CSRTopo(torch.randint(50, (2, 300)), num_nodes=50)
    pairs = torch.stack([topo.indices, torch.full_like(topo.indices, 2**30)], dim=1)
    values = torch.rand(50)

    got = spread_values(topo.indptr.to(device), pairs.to(device)[:, 0], values.to(device))

    torch.testing.assert_close(got.cpu(), spread_values(topo.indptr, topo.indices, values))


def test_rows_may_list_other_nodes_than_the_rows(device):
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([6, 4, 6])

    got = spread_values(indptr.to(device), indices.to(device), torch.tensor([0.5, 2], device=device), num_nodes=7)

    assert got.tolist() == [0, 0, 0, 0, 0.5, 0, 2.5]


@pytest.mark.parametrize("count", [1, 5])
def test_one_neighbor_may_stand_for_all(device, count):
    indptr, indices = torch.tensor([0, 0, count, count]), torch.tensor([2]).expand(count)

    got = spread_values(indptr.to(device), indices.to(device), torch.tensor([9.0, 0.5, 9.0], device=device))

    assert got.tolist() == [0, 0, 0.5 * count]


@gpu_or_sim
@pytest.mark.parametrize("bad", [12, -1, 2**31 - 1])
def test_what_is_no_node_is_left_out(bad):
    device = "cpu" if SIMULATED else "cuda"
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([bad, 1, 0], dtype=torch.int32)

    got = spread_values(indptr.to(device), indices.to(device), torch.tensor([0.5, 0.25], device=device))

    assert got.tolist() == [0.25, 0.5]

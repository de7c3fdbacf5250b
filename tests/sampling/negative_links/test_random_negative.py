import pickle

import pytest
import torch

from pyg_direct import CSRTopo, RandomNegativeSampler
from pyg_direct.errors import ArgumentError

EDGES = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 2, 0, 3]])


def pairs_of(edges):
    return set(map(tuple, edges.t().tolist()))


@pytest.mark.parametrize("graph", [EDGES, CSRTopo(EDGES, num_nodes=4, direction="out")])
def test_pairs_are_no_edges(device, graph):
    got = RandomNegativeSampler(graph, num_nodes=4, device=device, seed=0).sample(200, trials_num=30)

    assert got.shape == (2, 200)
    assert got.device.type == device.type
    assert pairs_of(got) == {(s, t) for s in range(4) for t in range(4)} - pairs_of(EDGES)


def as_offsets(topo):
    return CSRTopo(indptr=topo.indptr, indices=topo.indices)


@pytest.mark.parametrize(("graph", "edge_dir"), [
    (CSRTopo(EDGES, num_nodes=4), "in"),
    (CSRTopo(EDGES, num_nodes=4), None),
    (pickle.loads(pickle.dumps(CSRTopo(EDGES, num_nodes=4))), None),
    (CSRTopo(EDGES, num_nodes=4, direction="out"), None),
    (as_offsets(CSRTopo(EDGES, num_nodes=4)), "in"),
    (as_offsets(CSRTopo(EDGES, num_nodes=4, direction="out")), None),
])  # fmt: skip
def test_rows_of_a_topology_may_be_targets(graph, edge_dir):
    got = RandomNegativeSampler(graph, edge_dir=edge_dir, device="cpu", seed=0).sample(200)

    assert not pairs_of(got) & pairs_of(EDGES)


@pytest.mark.parametrize(("listed", "told"), [("in", "out"), ("out", "in")])
def test_rows_of_a_topology_are_what_it_was_made_of(listed, told):
    topo = CSRTopo(EDGES, num_nodes=4, direction=listed)

    with pytest.raises(ArgumentError, match=f"edge_dir must be what the rows of graph are, '{listed}', got '{told}'"):
        RandomNegativeSampler(topo, edge_dir=told, device="cpu")


def test_pairs_that_stay_edges_are_left_out_or_kept():
    full = torch.cartesian_prod(torch.arange(3), torch.arange(3)).t()
    sampler = RandomNegativeSampler(full, device="cpu", seed=0)

    assert sampler.sample(10).shape == (2, 0)
    assert sampler.sample(10, padding=True).shape == (2, 10)


def test_two_types_of_nodes_have_their_own_numbers():
    got = RandomNegativeSampler(torch.tensor([[0, 1], [5, 6]]), num_nodes=(2, 7), device="cpu", seed=0).sample(500)

    assert int(got[0].max()) == 1
    assert int(got[1].max()) == 6


def test_calls_are_functions_of_the_seed_and_their_number():
    first, second = (RandomNegativeSampler(EDGES, device="cpu", seed=5) for _ in range(2))

    draws = [first.sample(20), first.sample(20)]

    assert torch.equal(second.sample(20), draws[0])
    assert torch.equal(second.sample(20), draws[1])
    assert not torch.equal(*draws)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"mode": "TPU"}, "mode must be one of"),
    ({"edge_dir": "up"}, "edge_dir must be"),
    ({"num_nodes": 3}, "num_nodes must be above all ids, got 3"),
])  # fmt: skip
def test_refuses_bad_arguments(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        RandomNegativeSampler(EDGES, **{"device": "cpu", **arguments})


@pytest.mark.parametrize(("arguments", "words"), [((-1,), "req_num"), ((1, 0), "trials_num")])
def test_refuses_bad_numbers(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        RandomNegativeSampler(EDGES, device="cpu").sample(*arguments)

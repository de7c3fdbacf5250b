"""Subgraphs of sets of nodes are those of the reference, whatever the rows lie in, and leave nothing behind."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct import CSRTopo
from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.sampling.induced_plan import InducedPlan, _gather_first, _gather_first_of_each
from tests.poison import poisoned_memory
from tests.reference.induced import induce

PLACES = [pytest.param("cpu", "cpu"), *(pytest.param("cuda", place, marks=pytest.mark.gpu)
                                        for place in ("cuda", "pinned", "unified"))]  # fmt: skip


def make_topology(num_nodes=40, num_edges=300, direction="in"):
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(1))
    return CSRTopo(edge_index, num_nodes=num_nodes, direction=direction)


def list_edges(topology, nodes):
    ids = range(topology.edge_count) if topology.eid is None else topology.eid.tolist()
    return induce(topology.indptr.tolist(), topology.indices.tolist(), list(ids), nodes)


@pytest.mark.parametrize(("device", "placement"), PLACES)
@pytest.mark.parametrize("direction", ["in", "out"])
@given(nodes=st.lists(st.integers(0, 39), max_size=30))
def test_equals_reference(device, placement, direction, nodes):
    topology = make_topology(direction=direction)
    expected = list_edges(topology, nodes)
    plan = InducedPlan(topology.place(placement, device), direction)

    with poisoned_memory():
        sample = plan.sample(torch.tensor(nodes, dtype=torch.int64))

    source, target = sample.edge_index.tolist()
    others, rows = (source, target) if direction == "in" else (target, source)
    assert sample.n_id.tolist() == nodes
    assert list(zip(others, rows, sample.e_id.tolist(), strict=True)) == expected
    assert (sample.num_sampled_nodes, sample.num_sampled_edges) == ([len(nodes), 0], [len(expected)])


@pytest.mark.parametrize(("device", "placement"), PLACES)
@given(draws=st.lists(st.integers(0, 39), max_size=30))
def test_draws_become_nodes_once_each_and_ascending(device, placement, draws):
    plan = InducedPlan(make_topology().place(placement, device))

    got = plan.sample(torch.tensor(draws, dtype=torch.int64, device=device), is_set=False)

    expected = plan.sample(torch.tensor(sorted(set(draws)), dtype=torch.int64))
    assert torch.equal(got.n_id, expected.n_id)
    assert torch.equal(got.edge_index, expected.edge_index)
    assert torch.equal(got.e_id, expected.e_id)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@given(draws=st.lists(st.integers(0, 39), max_size=30))
def test_draws_are_gathered_without_a_wait(dtype, draws):
    nodes, count = _gather_first(torch.tensor(draws, dtype=dtype))

    expected = sorted(set(draws))
    assert int(count) == len(expected)
    assert nodes[: len(expected)].tolist() == expected
    assert nodes.numel() == len(draws)
    assert nodes.dtype == torch.int64


@pytest.mark.parametrize("num_nodes", [40, 2**31])
@given(
    draws=st.integers(0, 6).flatmap(
        lambda width: st.lists(st.lists(st.integers(0, 39), min_size=width, max_size=width), min_size=1, max_size=4)
    )
)
def test_draws_of_several_batches_are_gathered_without_a_wait(num_nodes, draws):
    nodes, begins = _gather_first_of_each(torch.tensor(draws, dtype=torch.int64), num_nodes)

    expected = [sorted(set(own)) for own in draws]
    assert begins.diff().tolist() == list(map(len, expected))
    assert nodes[: begins[-1]].tolist() == [node for own in expected for node in own]
    assert nodes.dtype == torch.int64


def test_batches_on_their_way_together_do_not_meet(real_device):
    topology = make_topology()
    plan = InducedPlan(topology.place(device=real_device))
    sets = [[1, 2, 3, 4], [3, 4, 5, 6], [1, 6], list(range(40)), []]

    pending = [plan.submit(torch.tensor(nodes, dtype=torch.int64)) for nodes in sets]
    got = [one.finish() for one in reversed(pending)][::-1]

    for nodes, sample in zip(sets, got, strict=True):
        assert sample.e_id.tolist() == [edge for _, _, edge in list_edges(topology, nodes)]
    again = plan.sample(torch.tensor(sets[0]))
    assert again.e_id.tolist() == got[0].e_id.tolist()


def test_a_graph_without_edges_or_nodes_has_subgraphs_without(real_device):
    for num_nodes in (0, 3):
        topology = CSRTopo(torch.empty(2, 0, dtype=torch.int64), num_nodes=num_nodes)
        nodes = torch.arange(num_nodes)

        sample = InducedPlan(topology.place(device=real_device)).sample(nodes)

        assert sample.n_id.tolist() == nodes.tolist()
        assert sample.edge_index.shape == (2, 0)


@pytest.mark.parametrize("node", [-1, 40])
def test_nodes_outside_the_graph_are_refused(real_device, node):
    plan = InducedPlan(make_topology().place(device=real_device))

    with pytest.raises(IdError, match=rf"nodes must lie in \[0, 40\), got {node}"):
        plan.submit(torch.tensor([3, node]))


def test_rows_that_were_written_to_are_looked_at_again():
    topology = make_topology()
    given = CSRTopo(indptr=topology.indptr.clone(), indices=topology.indices.clone())
    plan = InducedPlan(given.place(device="cpu"))
    given.indptr[3] = 10**6

    with pytest.raises(ArgumentError, match="indptr must not decrease"):
        plan.sample(torch.tensor([2, 3]))

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError
from pyg_direct.sampling.sampling_options import Recipe, Sample, check_hops, empty_sample
from tests.graphs import odd_graphs
from tests.reference.sample import sample


def test_counts_of_hops_follow_pyg():
    none = torch.empty(0, dtype=torch.int64)

    batch = Sample(none, none.view(2, 0), none, node_counts=[4, 9, 9], edge_counts=[0, 7, 10])

    assert batch.num_sampled_nodes == [4, 5, 0]
    assert batch.num_sampled_edges == [7, 3]


@pytest.mark.parametrize("hops", [0, 2])
def test_empty_sample_keeps_its_hops(hops):
    batch = empty_sample(torch.tensor([3, 3], dtype=torch.int32), hops)

    assert batch.n_id.tolist() == [3, 3]
    assert batch.n_id.dtype == torch.int64
    assert batch.edge_index.shape == (2, 0)
    assert (batch.num_sampled_nodes, batch.num_sampled_edges) == ([2] + [0] * hops, [0] * hops)


@given(graph=odd_graphs(), fanouts=st.lists(st.integers(0, 6), max_size=3), replace=st.booleans(),
       expand_all=st.booleans(), num_seeds=st.integers(0, 30))  # fmt: skip
def test_no_batch_exceeds_the_worst_case(graph, fanouts, replace, expand_all, num_seeds):
    seeds = [place % graph.num_nodes for place in range(num_seeds)] if graph.num_nodes else []
    worst = Recipe(tuple(fanouts), replace, expand_all).worst_case(
        len(seeds), graph.num_nodes, graph.edge_index.shape[1]
    )

    batch = sample(graph.in_rows(), seeds, fanouts, 7, replace, expand_all)

    assert batch.edge_counts[-1] <= worst


def test_all_neighbors_have_no_worst_case():
    assert Recipe((3, -1)).worst_case(10, 100, 1000) is None


def test_worst_case_is_clamped_by_the_graph():
    assert Recipe((10, 10, 10)).worst_case(5, 100, 300) == 50 + 300


def test_too_many_hops_are_refused():
    with pytest.raises(ArgumentError, match="sizes must have at most 31 hops, got 32"):
        check_hops([1] * 32, 31, "sizes")

"""LABOR: one row picks as uniform sampling does, rows share what they pick. All keys are fixed."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from pyg_direct.sampling.random_key import batch_key
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import odd_graphs
from tests.reference.sample import sample
from tests.sampling.uniform_plan.test_distribution import FAIR, chi_square, number_subsets

NUM_ROWS = 20_000


def pick(rows, fanout, *, key=1, hop=0, layer_dependency=False):
    """Neighbors that each row of equal length picks, int64 `[num_rows, fanout]`."""
    num_rows, degree = rows.shape
    picks = sample_neighbors(torch.arange(num_rows + 1) * degree, rows.reshape(-1), torch.arange(num_rows),
                             fanout=fanout, key=key, hop=hop, sampling="labor",
                             layer_dependency=layer_dependency)  # fmt: skip
    return picks.nodes.view(num_rows, fanout)


def list_apart(degree, num_rows=NUM_ROWS):
    """Rows that list no node in common."""
    return torch.arange(num_rows * degree).view(num_rows, degree)


@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (5, 2), (7, 6), (9, 1)])
def test_whole_subsets_of_one_row_are_uniform(degree, fanout):
    picks = pick(list_apart(degree), fanout) % degree

    cells, num_subsets = number_subsets(picks, degree)

    assert chi_square(cells, num_subsets) == FAIR


@pytest.mark.parametrize(("degree", "fanout"), [(50, 10), (1000, 3), (100, 80)])
def test_every_neighbor_is_picked_with_chance_k_of_d(degree, fanout):
    picks = pick(list_apart(degree, 5000), fanout) % degree

    counts = torch.bincount(picks.view(-1), minlength=degree).double()

    # Without replacement, a count varies by (1 - k / d) less than if it were binomial.
    share = fanout / degree
    deviations = (counts - 5000 * share) / (5000 * share * (1 - share)) ** 0.5
    assert float(deviations.abs().max()) < 4.5
    assert float(deviations.square().mean()) == pytest.approx(1, abs=5 * (2 / degree) ** 0.5)


def test_mean_of_picks_is_unbiased_over_batches():
    values = torch.arange(40).double() ** 2
    row = torch.arange(40).view(1, 40)

    means = torch.stack([values[pick(row, 8, key=batch_key(0, 0, number))].mean() for number in range(2000)])

    deviation = values.std() * (8 / 40 * (1 - 8 / 40)) ** 0.5 / 8 * 40**0.5
    assert float(means.mean() - values.mean()) == pytest.approx(0, abs=3 * float(deviation) / 2000**0.5)
    assert float(means.std()) == pytest.approx(float(deviation), rel=0.1)


def test_rows_that_list_the_same_nodes_pick_the_same():
    row = torch.arange(30)
    rows = torch.stack([row, row.flip(0), row[torch.randperm(30)]])

    picks = pick(rows, 7).sort(dim=1).values

    assert picks[0].tolist() == picks[1].tolist() == picks[2].tolist()


def test_rows_share_more_the_more_they_overlap():
    # Row i lists 100 nodes from 10 * i on: nodes picked by a row and listed by its neighbor are picked there too, but
    # for the changes at both ends.
    rows = torch.arange(0, 10_000, 10).view(-1, 1) + torch.arange(100)

    num_shared = int(pick(rows, 10).unique().numel())
    num_uniform = int(sample_neighbors(torch.arange(1001) * 100, rows.reshape(-1), torch.arange(1000), fanout=10,
                                       key=1).nodes.unique().numel())  # fmt: skip

    assert num_shared < 0.5 * num_uniform


@pytest.mark.parametrize(("options", "is_equal"), [
    ({"hop": 1}, False),
    ({"key": 2}, False),
    ({"hop": 1, "layer_dependency": True}, True),
    ({"key": 2, "layer_dependency": True}, False),
], ids=["hops", "keys", "dependent hops", "keys of dependent hops"])  # fmt: skip
def test_draws_are_shared_within_a_hop_alone_unless_hops_depend(options, is_equal):
    rows = list_apart(4)
    cells, num_subsets = number_subsets(pick(rows, 2) % 4, 4)

    others, _ = number_subsets(pick(rows, 2, **options) % 4, 4)

    if is_equal:
        assert torch.equal(cells, others)
    else:
        assert chi_square(cells * num_subsets + others, num_subsets**2) == FAIR


@pytest.mark.parametrize("layer_dependency", [False, True])
@given(graph=odd_graphs(), fanouts=st.lists(st.integers(-1, 5), max_size=3), expand_all=st.booleans(),
       key=st.integers(0, 2**64 - 1))  # fmt: skip
@pytest.mark.full
def test_plan_matches_reference_on_any_graph(device, layer_dependency, graph, fanouts, expand_all, key):
    seeds = list(range(0, graph.num_nodes, 3))
    recipe = Recipe(tuple(fanouts), expand_all=expand_all, sampling="labor", layer_dependency=layer_dependency)
    topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes).place("auto", device)

    got = open_plan(topology, recipe).sample(torch.tensor(seeds, dtype=torch.int64, device=device), key)

    expected = sample(graph.in_rows(), seeds, fanouts, key, False, expand_all, "labor", layer_dependency)
    assert got.n_id.tolist() == expected.n_id
    assert got.edge_index.tolist() == expected.edge_index
    assert got.e_id.tolist() == expected.e_id
    assert (got.node_counts, got.edge_counts) == (expected.node_counts, expected.edge_counts)

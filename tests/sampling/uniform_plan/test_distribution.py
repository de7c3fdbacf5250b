"""Draws are uniform and independent. All keys are fixed, so a test that passes once passes always."""

import itertools

import pytest
import torch

from pyg_direct.ops.sampling.draw_random import draw_bits, permute
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from pyg_direct.sampling.random_key import batch_key, call_key
from tests.reference.draw import hop_key
from tests.reference.neighbor import pick_neighbors

# What a fair draw gives: neither too uneven nor too even, either by a chance of one in a thousand.
FAIR = pytest.approx(0.5, abs=0.499)
NUM_NODES = 20_000


def chi_square(cells, num_cells):
    """Chance that a fair draw over `num_cells` spreads at least as unevenly as `cells`, int64 `[n]`."""
    counts = torch.bincount(cells, minlength=num_cells).double()
    assert len(counts) == num_cells
    expected = len(cells) / num_cells
    assert expected >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((num_cells - 1) / 2, dtype=torch.float64), statistic / 2))


def pick(degree, fanout, *, key=1, hop=0, replace=False, num_nodes=NUM_NODES):
    """Positions that nodes of one degree pick among their neighbors, int64 `[num_nodes, fanout]`."""
    indptr = torch.arange(num_nodes + 1) * degree
    indices = torch.zeros(num_nodes * degree, dtype=torch.int32)
    picks = sample_neighbors(indptr, indices, torch.arange(num_nodes), fanout=fanout, key=key, hop=hop, replace=replace)
    return picks.ids.view(num_nodes, fanout) - indptr[:-1, None]


def number_subsets(picks, degree):
    """Which of the subsets of their size the rows are, int64 `[n]`; and how many such subsets there are."""
    subsets = {subset: number for number, subset in enumerate(itertools.combinations(range(degree), picks.shape[1]))}
    rows = picks.sort(dim=1).values.tolist()
    return torch.tensor([subsets[tuple(row)] for row in rows]), len(subsets)


@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (5, 2), (7, 6), (8, 4), (9, 1)])
def test_whole_subsets_are_uniform(degree, fanout):
    cells, num_subsets = number_subsets(pick(degree, fanout), degree)

    assert chi_square(cells, num_subsets) == FAIR


@pytest.mark.parametrize(("degree", "fanout"), [(50, 10), (50, 49), (1000, 3), (100, 80)])
def test_single_picks_are_uniform(degree, fanout):
    picks = pick(degree, fanout, num_nodes=5000)

    counts = torch.bincount(picks.view(-1), minlength=degree).double()

    # Without replacement, a count varies by (1 - k / d) less than if it were binomial.
    share = fanout / degree
    deviations = (counts - 5000 * share) / (5000 * share * (1 - share)) ** 0.5
    assert float(deviations.abs().max()) < 4.5
    assert float(deviations.square().mean()) == pytest.approx(1, abs=5 * (2 / degree) ** 0.5)


def test_subsets_of_one_node_are_uniform_over_batches():
    indptr, indices = torch.tensor([0, 0, 0, 0, 5]), torch.zeros(5, dtype=torch.int32)
    node = torch.tensor([3])

    picks = torch.stack([
        sample_neighbors(indptr, indices, node, fanout=2, key=batch_key(0, epoch, number)).ids
        for epoch in range(10) for number in range(200)
    ])  # fmt: skip

    cells, num_subsets = number_subsets(picks, 5)
    assert chi_square(cells, num_subsets) == FAIR


@pytest.mark.parametrize(("degree", "fanout"), [(4, 3), (2, 6), (7, 2), (1, 1)])
def test_picks_with_replacement_are_uniform_and_independent(degree, fanout):
    picks = pick(degree, fanout, replace=True)

    cells = (picks * degree ** torch.arange(fanout)).sum(1)

    if degree > 1:
        assert chi_square(cells, degree**fanout) == FAIR
    else:
        assert cells.tolist() == [0] * NUM_NODES


@pytest.mark.parametrize(("one", "other"), [
    ({"hop": 0}, {"hop": 1}),
    ({"hop": 1}, {"hop": 2}),
    ({"key": batch_key(0, 0, 0)}, {"key": batch_key(0, 0, 1)}),
    ({"key": batch_key(0, 0, 0)}, {"key": batch_key(0, 1, 0)}),
    ({"key": batch_key(0, 0, 1)}, {"key": batch_key(0, 1, 0)}),
    ({"key": batch_key(0, 0, 0)}, {"key": batch_key(1, 0, 0)}),
    ({"key": batch_key(0, 0, 0)}, {"key": call_key(0, 0)}),
    ({"key": batch_key(0, 0, 0), "hop": 1}, {"key": batch_key(0, 0, 1), "hop": 0}),
    ({"replace": False}, {"replace": False, "key": 2}),
], ids=["hops", "later hops", "batches", "epochs", "swapped numbers", "seeds", "calls", "crossed", "keys"])  # fmt: skip
def test_picks_of_one_node_are_independent(one, other):
    cells, num_subsets = number_subsets(pick(4, 2, **one), 4)
    others, _ = number_subsets(pick(4, 2, **other), 4)

    joint = chi_square(cells * num_subsets + others, num_subsets**2)

    assert joint == FAIR


@pytest.mark.parametrize("distance", [1, 2, 1024])
def test_picks_of_two_nodes_are_independent(distance):
    cells, num_subsets = number_subsets(pick(4, 2), 4)

    joint = chi_square(cells[:-distance] * num_subsets + cells[distance:], num_subsets**2)

    assert joint == FAIR


def test_measure_finds_a_bias():
    # Slots that draw below one bound and drop repeats are what Floyd's rule avoids.
    picks = pick(6, 3, replace=True)
    picks = picks[[len(set(row)) == 3 for row in picks.tolist()]]
    biased = torch.where(picks[:, :1] == 0, torch.tensor([[0, 1, 2]]), picks)

    cells, num_subsets = number_subsets(biased, 6)

    assert chi_square(cells, num_subsets) < 1e-6


def test_reference_draws_the_same():
    picks = pick(6, 3, num_nodes=50)

    expected = [pick_neighbors(6, node, 3, hop_key(1, 0), False) for node in range(50)]

    assert picks.tolist() == expected


def test_every_bit_is_balanced():
    bits = draw_bits(torch.arange(NUM_NODES), key=3)

    ones = torch.stack([(bits >> place) & 1 for place in range(64)]).sum(1).double()

    deviations = (ones - NUM_NODES / 2) / (NUM_NODES / 4) ** 0.5
    assert float(deviations.abs().max()) < 4.0
    assert float(deviations.square().mean()) == pytest.approx(1, abs=0.6)


def test_orders_are_uniform():
    orders = {order: number for number, order in enumerate(itertools.permutations(range(4)))}

    cells = torch.tensor([orders[tuple(permute(4, key=call_key(0, number)).tolist())] for number in range(2000)])

    assert chi_square(cells, 24) == FAIR


def test_places_in_a_long_order_are_uniform():
    order = permute(100_000, key=5)

    cells = order[:10_000] // 10_000

    assert chi_square(cells, 10) == FAIR

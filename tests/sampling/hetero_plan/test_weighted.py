"""Weighted draws follow the weights. All keys are fixed, so a test that passes once passes always."""

import itertools

import numpy as np
import pytest
import torch

from pyg_direct.graph.hetero_topo import LINKS, HeteroTopo
from pyg_direct.kernels.sampling.uniform import SHORT_ROW
from pyg_direct.kernels.sampling.weighted import order_of, pick_lightest, pick_lightest_in_loop
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.hetero_graphs import make_topo
from tests.reference.general import Parts, sample

# What a fair draw gives: neither too uneven nor too even, either by a chance of one in a thousand.
FAIR = pytest.approx(0.5, abs=0.499)
NUM_ROWS = 20_000
WEIGHTS = [0.5, 3.0, 0.0, 1.0, 2.5]


def pick_places(device, weights, fanout, *, replace=False, times=None, seed_time=0, window=None):
    """Places of edges that many equal rows pick, int64 `[NUM_ROWS, picks]`."""
    degree = len(weights)
    indptr = torch.arange(NUM_ROWS + 1) * degree
    sources = torch.zeros(NUM_ROWS * degree, dtype=torch.int64)
    edge_time = None if times is None else torch.tensor(times).repeat(NUM_ROWS)
    topo = HeteroTopo(NUM_ROWS, (indptr, sources, None), edge_time=edge_time,
                      edge_weight=torch.as_tensor(weights).repeat(NUM_ROWS))  # fmt: skip
    plan = GeneralPlan(topo.place("auto", device), GeneralRecipe([fanout], replace, time_window=window))
    seed_times = None if times is None else torch.full((NUM_ROWS,), seed_time)
    batch = plan.sample(torch.arange(NUM_ROWS, device=device), 5, seed_time=seed_times)
    return (batch.edge[LINKS] % degree).view(NUM_ROWS, -1).cpu()


def chi_square(cells, chances):
    """Chance that draws with these chances spread at least as unevenly as `cells`."""
    expected = torch.tensor(chances, dtype=torch.float64) * len(cells)
    counts = torch.bincount(cells, minlength=len(chances)).double()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def chances_of_orders(weights, count):
    """{order of picks: its chance} of draws one after the other, each in proportion to the weights left."""
    orders = {}
    for order in itertools.permutations(range(len(weights)), count):
        chance, left = 1.0, sum(weights)
        for place in order:
            chance *= weights[place] / left if left > 1e-9 else 0.0
            left -= weights[place]
        orders[order] = chance
    return orders


@pytest.mark.slow
@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_picks_without_replacement_follow_the_weights(device, fanout):
    orders = chances_of_orders(WEIGHTS, fanout)
    number = {order: index for index, order in enumerate(orders)}

    picks = pick_places(device, WEIGHTS, fanout)

    cells = torch.tensor([number[tuple(row)] for row in picks.tolist()])
    assert chi_square(cells, list(orders.values())) == FAIR


@pytest.mark.slow
@pytest.mark.parametrize("fanout", [1, 3, 7])
def test_picks_with_replacement_follow_the_weights_and_are_independent(device, fanout):
    chances = [weight / sum(WEIGHTS) for weight in WEIGHTS]

    picks = pick_places(device, WEIGHTS, fanout, replace=True)

    first, last = picks[:, 0], picks[:, -1]
    assert chi_square(last, chances) == FAIR
    if fanout > 1:
        joint = [a * b for a in chances for b in chances]
        assert chi_square(first * len(WEIGHTS) + last, joint) == FAIR


@pytest.mark.slow
@pytest.mark.parametrize("replace", [False, True])
def test_weights_hold_among_the_edges_that_time_allows(device, replace):
    times = [1, 2, 3, 4, 5]
    allowed = [0.0, 3.0, 0.0, 1.0, 0.0]

    picks = pick_places(device, WEIGHTS, 1, replace=replace, times=times, seed_time=4, window=3)

    assert chi_square(picks[:, 0], [weight / 4 for weight in allowed]) == FAIR


WIDE = {
    "small": [2.0**-1072, 3 * 2.0**-1072, 0.0, 2.0**-1074, 2.0**-1073],
    "below float32": [weight * 1e-60 for weight in WEIGHTS],
    "above float32": [weight * 1e50 for weight in WEIGHTS],
    "large": [weight * 2.0**1021 for weight in WEIGHTS],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("replace", [False, True])
def test_picks_follow_weights_that_float32_does_not_hold(device, name, replace):
    weights = WIDE[name]
    shares = [weight / max(weights) for weight in weights]

    picks = pick_places(device, torch.tensor(weights, dtype=torch.float64), 2, replace=replace)

    assert chi_square(picks[:, 0], [share / sum(shares) for share in shares]) == FAIR


@pytest.mark.slow
def test_the_smallest_weights_come_after_the_largest_and_before_none(device):
    weights = torch.tensor([0.0, 5e-324, 1.7e308, 0.0, 1e-300, 1.7e308], dtype=torch.float64)

    alone, apart, again = (pick_places(device, weights, count, replace=replace)
                           for count, replace in ((4, False), (5, False), (3, True)))  # fmt: skip

    assert alone.sort(1).values.unique(dim=0).tolist() == [[1, 2, 4, 5]]
    assert alone[:, 2:].unique(dim=0).tolist() == [[4, 1]]
    assert torch.equal(apart, alone)
    assert again.unique().tolist() == [2, 5]


@pytest.mark.slow
def test_with_replacement_weights_hold_beside_larger_ones_that_are_past(device):
    weights, times = torch.tensor([1e30, 1.0, 3.0]), [1, 4, 4]

    picks = pick_places(device, weights, 1, replace=True, times=times, seed_time=4, window=2)

    assert chi_square(picks[:, 0], [0, 0.25, 0.75]) == FAIR


@pytest.mark.slow
def test_a_measure_finds_ignored_weights(device):
    picks = pick_places(device, [1.0, 1.0, 0.0, 1.0, 1.0], 1)

    chances = [weight / sum(WEIGHTS) for weight in WEIGHTS]

    assert chi_square(picks[:, 0], chances) < 1e-6


@pytest.mark.slow
def test_edges_without_weight_come_only_where_all_are_taken(device):
    all_taken, some, none = (pick_places(device, weights, 3) for weights in ([0.0, 1.0, 0.0], WEIGHTS, [0.0] * 4))

    assert all_taken[0].tolist() == [0, 1, 2]
    assert 2 not in some
    assert none.numel() == 0


@pytest.mark.slow
def test_with_replacement_edges_without_weight_come_only_where_the_fanout_asks_for_all(device):
    drawn, none, every = (
        pick_places(device, weights, fanout, replace=True)
        for weights, fanout in (([0.0, 1.0, 0.0], 5), ([0.0] * 4, 5), ([0.0, 1.0, 0.0], -1))
    )

    assert drawn.shape == (NUM_ROWS, 5)
    assert set(drawn.flatten().tolist()) == {1}
    assert none.numel() == 0
    assert every[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fanout", [1, 5, 40])
def test_a_long_row_picks_as_the_reference(device, fanout, wide):
    num_edges = 3000 if device.type == "cuda" else 150
    pairs = [(edge % 7, 1) for edge in range(num_edges)] + [(1, 0), (2, 0)]
    weights = [(edge * 37 % 101) / 8 for edge in range(num_edges)] + [1.0, 0.0]
    if wide:
        weights = [weight * 10.0 ** (edge * 53 % 400 - 310) for edge, weight in enumerate(weights)]
    graph = Parts({"a": 7}, {("a", "to", "a"): pairs}, edge_weight={("a", "to", "a"): weights})
    seeds, fanouts = {"a": [1, 0]}, {("a", "to", "a"): [fanout]}
    expected = sample(graph, seeds, fanouts, 5)

    plan = GeneralPlan(make_topo(graph).place("auto", device), GeneralRecipe([fanout]))
    got = plan.sample({"a": torch.tensor([1, 0], device=device)}, 5)

    assert got.edge["a", "to", "a"].tolist() == expected.edge["a", "to", "a"]
    assert got.node["a"].tolist() == expected.node["a"]


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e-20, 2e-20), (0.49, 0.51), (1.0, 1.0 + 2**-52), (36.0, 1e46), (1e-55, 1e-54), (2**-410, 2**410)],
)
def test_order_of_scores_is_kept(low, high):
    assert 0 < order_of(low) < order_of(high) < 2**62
    assert order_of(low) >> 56 <= order_of(high) >> 56


@pytest.mark.parametrize(("size", "count"), [(9, 7), (64, 5), (65, 50), (700, 1), (700, 100)])
@pytest.mark.parametrize("wide", [False, True])
def test_loops_of_a_cpu_pick_the_lightest_as_a_gpu_does(size, count, wide):
    weights = np.random.default_rng(size).random(size).astype(np.float32) ** 8
    if wide:
        weights = weights.astype(np.float64) * 10.0 ** np.random.default_rng(1).integers(-310, 300, size)
    weights[::5] = 0
    found = []
    none = np.zeros(0, np.int64)
    for pick, others in ((pick_lightest, (none, 0, 20)), (pick_lightest_in_loop, (20, np.empty(SHORT_ROW)))):
        scores, picks = np.empty(count + 1), np.zeros(count + 1, np.int64)
        with np.errstate(over="ignore"):
            pick(np.uint64(11), 3, 0, size, count, weights, *others, scores, picks, 0)
        found.append((scores[:count].tolist(), picks[:count].tolist()))
    assert found[0] == found[1]
    assert set(found[0][1]) <= {20 + place for place in range(size) if weights[place] > 0}

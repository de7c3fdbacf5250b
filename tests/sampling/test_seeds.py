"""Links as seeds of a plan on a GPU: negatives, places and labels are those of the reference."""

import pytest
import torch

from pyg_direct.errors import IdError
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.seeds import Ends
from pyg_direct.sampling.uniform_plan import GpuPlan
from tests.graphs import make_random_graph
from tests.plans import KEY, ON_GPU_PLANS, assert_equal, expect_batch, place
from tests.reference.negative import draw_negatives

NUM_NODES = 40
SOURCES, TARGETS = [3, 39, 3, 0, 17], [0, 39, 5, 3, 21]
# Fanouts, and negatives at sources and at targets: none, binary, more than there are links, triplets.
CASES = [((3, 2), 0, 0), ((3, 2), 12, 12), ((), 5, 5), ((2,), 0, 5), ((2,), 0, 15)]


def make_ends(more_sources, more_targets, has_labels=True, sources=SOURCES, targets=TARGETS):
    return Ends(torch.tensor(sources), torch.tensor(targets), more_sources, more_targets, has_labels)


def list_ends(more_sources, more_targets, key=KEY):
    drawn = draw_negatives(more_targets, key, NUM_NODES, NUM_NODES)
    return [*SOURCES, *(source for source, _ in drawn[:more_sources]), *TARGETS, *(target for _, target in drawn)]


@ON_GPU_PLANS
@pytest.mark.parametrize(("fanouts", "more_sources", "more_targets"), CASES)
def test_links_are_sampled_around_and_placed(device, fanouts, more_sources, more_targets):
    graph, recipe = make_random_graph(NUM_NODES, 300), Recipe(fanouts, unique_seeds=True)
    ends = list_ends(more_sources, more_targets)

    got = GpuPlan(place(graph, device), recipe).sample(make_ends(more_sources, more_targets), KEY)

    seeds = sorted(set(ends))
    assert_equal(got, expect_batch(graph, seeds, recipe))
    assert got.ends.places.tolist() == [seeds.index(end) for end in ends]
    assert got.ends.labels.tolist() == [1.0] * len(SOURCES) + [0.0] * more_sources


@ON_GPU_PLANS
def test_a_plan_that_is_too_small_draws_the_same_negatives_again(device):
    graph, recipe = make_random_graph(NUM_NODES, 300), Recipe((-1, -1), unique_seeds=True)
    plan = GpuPlan(place(graph, device), recipe)
    plan._edges_at_first = lambda num_seeds: 1

    got = plan.sample(make_ends(5, 5, has_labels=False), KEY)

    ends = list_ends(5, 5)
    assert_equal(got, expect_batch(graph, sorted(set(ends)), recipe))
    assert got.ends.places.tolist() == [sorted(set(ends)).index(end) for end in ends]
    assert got.ends.labels.numel() == 0


@ON_GPU_PLANS
def test_nodes_and_links_take_turns_in_a_plan(device):
    graph, recipe = make_random_graph(NUM_NODES, 300), Recipe((3,), unique_seeds=True)
    plan, nodes = GpuPlan(place(graph, device), recipe), torch.tensor([7, 7, 2])
    asked = [nodes, make_ends(5, 5), nodes, make_ends(0, 0), nodes.to(device)]

    got = [pending.finish() for pending in [plan.submit(seeds, KEY) for seeds in asked]]

    for sample, seeds in zip(got, [[2, 7], list_ends(5, 5), [2, 7], list_ends(0, 0), [2, 7]], strict=True):
        assert_equal(sample, expect_batch(graph, sorted(set(seeds)), recipe))
    assert [sample.ends is None for sample in got] == [True, False, True, False, True]


@ON_GPU_PLANS
@pytest.mark.parametrize("end", ["sources", "targets"])
def test_a_node_outside_the_graph_is_named(device, end):
    plan = GpuPlan(place(make_random_graph(NUM_NODES, 300), device), Recipe((2,), unique_seeds=True))

    with pytest.raises(IdError, match="got 40"):
        plan.sample(make_ends(5, 5, **{end: [1, 2, 40, 3, 4]}), KEY)

"""Every plan gives the batch of the reference, bit for bit, whatever its capacity, placement and threads."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.compiler.jit import set_cpu_threads
from pyg_direct.graph.placed_topology import PlacedTopology
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import GRAPHS, make_random_graph, odd_graphs
from tests.plans import KEY, assert_equal, choose_seeds, expect_batch, make_seeds, place
from tests.poison import poisoned_memory

FANOUTS = [(), (0,), (2,), (-1,), (3, 2), (2, 0, 3), (-1, 2), (2, -1), (40, 1), (1, 2, 3, 1)]


@pytest.mark.parametrize(("name", "recipe"), [
    ("random", Recipe((3, 2))),
    ("random", Recipe((3, 2), expand_all=True)),
    ("random", Recipe((2, 3), replace=True)),
    ("hub", Recipe((-1, 2))),
    ("parallel", Recipe((2, 0, 3), expand_all=True)),
    ("isolated", Recipe((4, 1))),
    ("empty", Recipe((4, 1))),
    ("one loop", Recipe(())),
    ("random", Recipe((3, 2), sampling="labor")),
    ("random", Recipe((2, 4), expand_all=True, sampling="labor", layer_dependency=True)),
    ("hub", Recipe((-1, 2), sampling="labor")),
    ("parallel", Recipe((2, 0, 3), sampling="labor", layer_dependency=True)),
])  # fmt: skip
def test_plan_matches_reference(device, name, recipe):
    graph = GRAPHS[name]
    seeds = choose_seeds(graph.num_nodes)
    plan = open_plan(place(graph, device), recipe)

    with poisoned_memory():
        got = plan.sample(make_seeds(seeds, device), KEY)

    assert_equal(got, expect_batch(graph, seeds, recipe))


@pytest.mark.parametrize(
    ("name", "fanouts"), [("random", (3, 2)), ("parallel", (-1, 2)), ("empty", (4,)), ("one loop", ())]
)
def test_seeds_that_repeat_become_one(device, name, fanouts):
    graph = GRAPHS[name]
    seeds = choose_seeds(graph.num_nodes)
    plan = open_plan(place(graph, device), Recipe(fanouts, unique_seeds=True))

    with poisoned_memory():
        got = [plan.sample(make_seeds(seeds, device), KEY) for _ in range(2)]

    for sample in got:
        assert_equal(sample, expect_batch(graph, sorted(set(seeds)), Recipe(fanouts)))


@pytest.mark.slow
@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_plan_matches_reference_on_every_odd_graph(device, name, fanouts):
    graph, topology = GRAPHS[name], place(GRAPHS[name], device)
    seeds = choose_seeds(graph.num_nodes)
    for replace, expand_all in itertools.product([False, True], repeat=2):
        recipe = Recipe(fanouts, replace, expand_all)

        with poisoned_memory():
            got = open_plan(topology, recipe).sample(make_seeds(seeds, device), KEY)

        assert_equal(got, expect_batch(graph, seeds, recipe))


@given(graph=odd_graphs(), fanouts=st.lists(st.integers(-1, 5), max_size=3), replace=st.booleans(),
       expand_all=st.booleans(), key=st.integers(0, 2**64 - 1), data=st.data())  # fmt: skip
def test_plan_matches_reference_on_any_graph(device, graph, fanouts, replace, expand_all, key, data):
    node = st.integers(0, max(graph.num_nodes - 1, 0))
    seeds = data.draw(st.lists(node, max_size=6)) if graph.num_nodes else []
    recipe = Recipe(tuple(fanouts), replace, expand_all)

    got = open_plan(place(graph, device), recipe).sample(make_seeds(seeds, device), key)

    assert_equal(got, expect_batch(graph, seeds, recipe, key))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Recipe((15, 10, 5)), Recipe((10, 5), expand_all=True), Recipe((1300,))])
def test_large_batch_matches_reference(device, recipe):
    graph = make_random_graph(1000, 8000)
    seeds = list(range(0, 1000, 10))
    plan = open_plan(place(graph, device), recipe)

    got = plan.sample(make_seeds(seeds, device), KEY)

    assert_equal(got, expect_batch(graph, seeds, recipe))


@pytest.mark.parametrize("has_edge_ids", [True, False])
def test_wide_ids_match_reference(device, has_edge_ids):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    arrays = [torch.tensor(array, device=device) for array in graph.in_rows()]
    indptr, indices, edge_ids = arrays if has_edge_ids else (*arrays[:2], arrays[2][:0])
    topology = PlacedTopology(indptr, indices, edge_ids, "cuda" if indptr.is_cuda else "cpu")
    expected = expect_batch(graph, [0, 5], recipe)
    if not has_edge_ids:
        places = {edge: place for place, edge in enumerate(arrays[2].tolist())}
        expected.e_id = [places[edge] for edge in expected.e_id]

    got = open_plan(topology, recipe).sample(make_seeds([0, 5], device), KEY)

    assert topology.indices.dtype == torch.int64
    assert_equal(got, expected)


def test_no_seeds_give_empty_hops(device):
    plan = open_plan(place(GRAPHS["random"], device), Recipe((3, 2)))

    got = plan.sample(make_seeds([], device), KEY)

    assert (got.node_counts, got.edge_counts) == ([0, 0, 0], [0, 0, 0])
    assert (got.n_id.shape, got.edge_index.shape, got.e_id.shape) == ((0,), (2, 0), (0,))


def test_batches_of_one_plan_do_not_touch_each_other(device):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    plan = open_plan(place(graph, device), recipe)
    first = plan.sample(make_seeds([1, 2], device), 1)

    second = plan.sample(make_seeds([60, 3, 3, 9], device), 2)
    again = plan.sample(make_seeds([1, 2], device), 1)

    assert_equal(first, expect_batch(graph, [1, 2], recipe, 1))
    assert_equal(second, expect_batch(graph, [60, 3, 3, 9], recipe, 2))
    assert_equal(again, expect_batch(graph, [1, 2], recipe, 1))


def test_batch_does_not_depend_on_threads():
    graph, recipe = make_random_graph(500, 6000), Recipe((5, 4, 3))
    plan = open_plan(place(graph, "cpu"), recipe)
    seeds = torch.arange(0, 500, 7)
    before = set_cpu_threads(1)

    alone = plan.sample(seeds, KEY)
    set_cpu_threads(before)
    together = plan.sample(seeds, KEY)

    assert_equal(together, expect_batch(graph, seeds.tolist(), recipe))
    assert all(torch.equal(getattr(alone, name), getattr(together, name)) for name in ("n_id", "edge_index", "e_id"))

"""LABOR picks equal the reference on any device; their chances: tests/sampling/uniform_plan/test_labor.py."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.sampling.labor import BLOCK_CANDIDATES, CANDIDATES, LONG_ROW
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from tests.graphs import GRAPHS, odd_graphs
from tests.ops.sampling.sample_uniform.test_neighbor import place_rows
from tests.poison import poisoned_memory
from tests.reference import labor as reference

KEY = 2**64 - 3


def check_against_reference(indptr, indices, seeds, *, fanout, hop=0, key=KEY, layer_dependency=False):
    """Check that every field equals the reference."""
    rows = reference.sample_neighbors(indptr.tolist(), indices.tolist(), seeds.tolist(), fanout, key, hop,
                                      layer_dependency)  # fmt: skip
    expected = [position for row in rows for position in row]

    with poisoned_memory():
        got = sample_neighbors(indptr, indices, seeds, fanout=fanout, key=key, hop=hop, sampling="labor",
                               layer_dependency=layer_dependency)  # fmt: skip

    assert got.counts.tolist() == [len(row) for row in rows]
    assert got.ids.tolist() == expected
    assert got.nodes.tolist() == indices[expected].tolist()
    assert (got.nodes.dtype, got.counts.dtype, got.ids.dtype) == (indices.dtype, torch.int64, torch.int64)


@pytest.mark.parametrize(("name", "fanout", "layer_dependency"), [
    ("random", 3, False),
    ("random", 3, True),
    ("random", -1, False),
    ("hub", 17, False),
    ("hub", 64, True),
    ("parallel", 8, False),
    ("isolated", 2, False),
    ("one loop", 5, False),
])  # fmt: skip
def test_matches_reference(device, name, fanout, layer_dependency):
    indptr, indices = place_rows(GRAPHS[name], device)
    seeds = torch.arange(GRAPHS[name].num_nodes, device=device).flip(0)

    check_against_reference(indptr, indices, seeds, fanout=fanout, hop=2, layer_dependency=layer_dependency)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fanout", [0, 1, 3, 17, -1])
@pytest.mark.parametrize("name", GRAPHS)
def test_matches_reference_on_every_odd_graph(device, name, fanout, dtype):
    indptr, indices = place_rows(GRAPHS[name], device, dtype)
    seeds = torch.arange(GRAPHS[name].num_nodes, device=device).repeat(2)

    check_against_reference(indptr, indices, seeds, fanout=fanout, hop=4)


@given(graph=odd_graphs(), fanout=st.integers(-1, 6), hop=st.integers(0, 5), key=st.integers(0, 2**64 - 1))
def test_matches_reference_on_any_graph(device, graph, fanout, hop, key):
    indptr, indices = place_rows(graph, device)
    seeds = torch.arange(graph.num_nodes, dtype=torch.int32, device=device)

    check_against_reference(indptr, indices, seeds, fanout=fanout, hop=hop, key=key)


# Rows of one source many times have equal keys, which no bound parts.
@pytest.mark.parametrize(("num_sources", "fanout"), [
    (10**6, 1),
    (10**6, 5),
    (10**6, CANDIDATES - 1),
    (10**6, BLOCK_CANDIDATES + 3),
    (1, 4),
    (3, 5),
    (3, CANDIDATES - 1),
])  # fmt: skip
def test_rows_of_any_length_match_reference(device, fanout, num_sources):
    degrees = [LONG_ROW, LONG_ROW + 1, 0, BLOCK_CANDIDATES + 5, CANDIDATES + 1, 2, 2 * LONG_ROW + 3]
    indptr = torch.tensor([0, *torch.tensor(degrees).cumsum(0).tolist()], device=device)
    # Their number differs from the number of the graph's nodes, which picking does not read.
    indices = (torch.arange(sum(degrees), device=device) * 7919).remainder(num_sources).int()
    seeds = torch.tensor([6, 3, 0, 1, 2, 5, 4], device=device)

    check_against_reference(indptr, indices, seeds, fanout=fanout)


@pytest.mark.slow
@pytest.mark.parametrize("fanout", [5, 2000])
def test_hub_matches_reference(device, fanout):
    # More than ten times what a block of a GPU takes at once.
    degree = 25_000
    indptr = torch.tensor([0, 0, degree], device=device)
    indices = torch.arange(degree, dtype=torch.int32, device=device)

    check_against_reference(indptr, indices, torch.tensor([1, 0, 1], device=device), fanout=fanout)


def test_hub_of_a_million_takes_the_smallest_keys(device):
    from pyg_direct.ops.sampling.draw_random import draw_bits

    degree = 100 if LONG_ROW < 100 else 10**6
    indptr, indices = torch.tensor([0, degree], device=device), torch.arange(degree, device=device)

    picks = sample_neighbors(indptr, indices, torch.tensor([0], device=device), fanout=10, key=KEY, sampling="labor")

    # As unsigned numbers.
    keys = draw_bits(indices, key=reference.labor_key(KEY, 0, False)) ^ -(2**63)
    assert picks.nodes.tolist() == keys.topk(10, largest=False).indices.sort().values.tolist()


@pytest.mark.parametrize(("options", "words"), [
    ({"sampling": "poisson"}, "sampling must be one of uniform, labor, got 'poisson'"),
    ({"sampling": "labor", "replace": True}, "replace must be False with sampling='labor', got True"),
    ({"layer_dependency": True}, "layer_dependency must be False with sampling='uniform', got True"),
])  # fmt: skip
def test_options_of_another_sampler_are_refused(options, words):
    indptr, indices = place_rows(GRAPHS["random"], "cpu")

    with pytest.raises(ArgumentError, match=words):
        sample_neighbors(indptr, indices, torch.tensor([0]), fanout=2, key=KEY, **options)

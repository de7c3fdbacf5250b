"""The general plan gives the batch of the reference, bit for bit, with every option and on every device."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError
from pyg_direct.graph.hetero import HeteroTopo
from pyg_direct.graph.relation import LINKS, NODES
from pyg_direct.graph.topology import CSRTopo
from pyg_direct.sampling.general import GeneralPlan
from pyg_direct.sampling.open import open_plan
from pyg_direct.sampling.options import GeneralRecipe
from pyg_direct.sampling.sample import Recipe
from tests.graphs import GRAPHS, make_random_graph
from tests.hetero_graphs import make_parts, make_topo, odd_parts, odd_requests
from tests.poison import poisoned_memory
from tests.reference.general import Options, sample

KEY = 2**63 + 11


def make_plan(graph, device, fanouts, options):
    return GeneralPlan(make_topo(graph).place("auto", device), GeneralRecipe(fanouts, **asdict(options)))


def as_tensors(parts, device):
    return {kind: torch.tensor(values, dtype=torch.int64, device=device) for kind, values in parts.items()}


def assert_equal(got, expected):
    for name, value in vars(expected).items():
        found = getattr(got, name)
        if isinstance(found, dict):
            found = {kind: part if isinstance(part, list) else part.tolist() for kind, part in found.items()}
        assert found == value, name
    for parts in (got.node, got.row, got.col, got.edge, got.batch or {}):
        assert {part.dtype for part in parts.values()} <= {torch.int64}


SEEDS = {"paper": [39, 0, 7, 0], "author": [3, 24]}
SEED_TIME = {"paper": [3, 11, 0, 7], "author": [5, -9]}
OPTIONS = {
    "uniform": Options(),
    "replace": Options(replace=True),
    "disjoint": Options(disjoint=True),
    "last": Options(temporal_strategy="last"),
    "last with replacement": Options(temporal_strategy="last", replace=True),
    "before": Options(time_comparison="<"),
    "window": Options(time_window=4),
    "last before within a window": Options(temporal_strategy="last", time_comparison="<", time_window=5),
    "induced": Options(subgraph_type="induced"),
    "disjoint induced": Options(disjoint=True, subgraph_type="induced", time_window=6),
}


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("weighted", [False, True], ids=["uniform", "weighted"])
@pytest.mark.parametrize("times", ["", "node", "edge"], ids=["no times", "node times", "edge times"])
@pytest.mark.parametrize("name", OPTIONS)
def test_batch_matches_reference(device, name, times, weighted, direction):
    graph = make_parts(times=times, weighted=weighted, direction=direction)
    fanouts = {edge_type: [4 - number, 2, -1 if number == 2 else 3] for number, edge_type in enumerate(graph.edges)}
    plan = make_plan(graph, device, fanouts, OPTIONS[name])

    with poisoned_memory():
        got = plan.sample(as_tensors(SEEDS, device), KEY, seed_time=as_tensors(SEED_TIME, device))

    assert_equal(got, sample(graph, SEEDS, fanouts, KEY, OPTIONS[name], SEED_TIME))


@given(data=st.data(), replace=st.booleans(), disjoint=st.booleans(), induced=st.booleans(), last=st.booleans(),
       strict=st.booleans(), window=st.none() | st.integers(0, 4) | st.just(2**63 - 1), weighted=st.booleans(),
       key=st.integers(0, 2**64 - 1))  # fmt: skip
def test_batch_matches_reference_on_any_graph(device, data, replace, disjoint, induced, last, strict, window, weighted,
                                              key):  # fmt: skip
    graph = data.draw(odd_parts(weighted))
    seeds, seed_time, fanouts = data.draw(odd_requests(graph))
    options = Options(replace, disjoint, "induced" if induced else "directional", "last" if last else "uniform",
                      "<" if strict else "<=", window)  # fmt: skip
    plan = make_plan(graph, device, fanouts, options)

    got = plan.sample(as_tensors(seeds, device), key, seed_time=as_tensors(seed_time, device))

    assert_equal(got, sample(graph, seeds, fanouts, key, options, seed_time))

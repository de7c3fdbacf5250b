"""Batches sampled from parts are those of one machine, bit for bit, with every option."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.distributed.partitioning.partition_graph import partition_graph
from pyg_direct.errors import IdError
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.distributed.threads import run_threads
from tests.hetero_graphs import make_parts, make_topo, odd_parts, odd_requests
from tests.reference.general import Options

KEY = 2**63 + 11
CPU = torch.device("cpu")
OPTIONS = {
    "uniform": Options(),
    "replace": Options(replace=True),
    "disjoint": Options(disjoint=True),
    "induced": Options(subgraph_type="induced"),
    "bidirectional": Options(subgraph_type="bidirectional"),
    "last": Options(temporal_strategy="last"),
    "window": Options(time_comparison="<", time_window=6),
}
RECIPES = {**OPTIONS, "windows": Options(seed_windows=True)}


def write(folder, graph, num_parts, method="hash"):
    edges = {t: torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t() for t, pairs in graph.edges.items()}

    def tensors(parts, dtype=torch.int64):
        return {kind: torch.tensor(values, dtype=dtype) for kind, values in parts.items()} or None

    partition_graph(folder, edges, num_parts, num_nodes=graph.num_nodes, method=method, direction=graph.direction,
                    node_time=tensors(graph.node_time), edge_time=tensors(graph.edge_time),
                    edge_weight=tensors(graph.edge_weight, torch.float64))  # fmt: skip


def as_lists(sample):
    found = {}
    # How a batch lies in memory, and the order of types, are no part of what it is.
    for name in vars(sample).keys() - {"packed", "sizes", "num_together", "starts", "edge_starts", "seed_time"}:
        value = getattr(sample, name)
        found[name] = value if name != "memory" else len(value)
        if isinstance(value, dict):
            found[name] = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in value.items()}
    return found


def sample_alone(graph, requests, recipe):
    topo = make_topo(graph)
    plan = GeneralPlan(topo.place("auto", CPU), recipe)
    return [as_lists(plan.sample(seeds, KEY + n, seed_time=times)) for n, (seeds, times) in enumerate(requests)]


def sample_in_parts(folder, graph, requests, recipe, num_parts, device=CPU):
    """Every rank samples one of the requests at a time, the last ones nothing where there are no more."""
    timed = bool(graph.node_time or graph.edge_time)
    steps = -(-len(requests) // num_parts)
    none = {}, {} if timed else None
    parts = [GraphPart(folder, part, device=device) for part in range(num_parts)]
    for part in parts:
        part.place(timed=timed, weighted=bool(graph.edge_weight))

    def run(communicator):
        plan = PartPlan(parts[communicator.rank], recipe, communicator, timed=timed, weighted=bool(graph.edge_weight))
        found = {}
        for number in range(communicator.rank, steps * num_parts, num_parts):
            seeds, times = requests[number] if number < len(requests) else none
            sample = plan.sample(seeds, KEY + number, seed_time=times)
            if number < len(requests):
                found[number] = as_lists(sample)
        return found, communicator.num_exchanges / steps

    results = run_threads(run, num_parts, device)
    found = {number: sample for samples, _ in results for number, sample in samples.items()}
    return [found[number] for number in range(len(requests))], results[0][1]


def make_requests(graph, timed):
    requests = []
    for number in range(5):
        seeds = {"paper": torch.tensor([number, 3, 39, 3]), "author": torch.tensor([24, number])}
        times = {kind: torch.arange(len(ids)) * 3 + number for kind, ids in seeds.items()}
        requests.append((seeds, times if timed else None))
    return requests


@pytest.mark.parametrize(("times", "name"), [
    ("", "bidirectional"), ("node", "uniform"), ("edge", "window"), ("node", "windows"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_batches_of_a_group_are_sampled_by_the_exchanges_of_one(tmp_path, times, name):
    graph = make_parts(times=times)
    write(tmp_path / "p", graph, 2)
    requests, recipe = make_requests(graph, bool(times)), GeneralRecipe([3, -1, 2], **asdict(RECIPES[name]))
    if name == "windows":
        requests = [(seeds, {kind: torch.stack([own - 6, own], 1) for kind, own in given.items()})
                    for seeds, given in requests]  # fmt: skip
    parts = [GraphPart(tmp_path / "p", part, device=CPU) for part in range(2)]

    def run(communicator):
        plan = PartPlan(parts[communicator.rank], recipe, communicator, timed=bool(times), weighted=False)
        # Ranks have different numbers of batches.
        own = range(communicator.rank, len(requests), 2)
        samples = plan.sample_together([requests[n] for n in own], [KEY + n for n in own])
        return list(map(as_lists, samples)), communicator.num_exchanges

    (even, num_exchanges), (odd, _) = run_threads(run, 2)

    alone = sample_alone(graph, requests, recipe)
    assert drop_memory(even) == drop_memory(alone[::2])
    assert drop_memory(odd) == drop_memory(alone[1::2])
    assert num_exchanges == 2 * 3


def drop_memory(samples):
    """Batches of a group share their memory."""
    for sample in samples:
        sample.pop("memory", None)
    return samples


@pytest.mark.parametrize(("times", "weighted"), [("", False), ("node", False), ("edge", True)])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_batches_are_those_of_one_machine(tmp_path, real_device, times, weighted, name):
    num_parts = 2
    graph = make_parts(times=times, weighted=weighted)
    write(tmp_path / "p", graph, num_parts)
    requests, recipe = make_requests(graph, bool(times)), GeneralRecipe([3, -1, 2], **asdict(OPTIONS[name]))

    got, num_exchanges = sample_in_parts(tmp_path / "p", graph, requests, recipe, num_parts, real_device)

    assert got == sample_alone(graph, requests, recipe)
    # Two a hop: nodes there, edges back.
    assert num_exchanges == 2 * (4 if name == "induced" else 3)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_batches_of_odd_graphs(tmp_path_factory, data, replace, disjoint, induced, weighted, num_parts):
    graph = data.draw(odd_parts(weighted=weighted))
    seeds, times, fanouts = data.draw(odd_requests(graph))
    recipe = GeneralRecipe(fanouts, replace=replace, disjoint=disjoint,
                           subgraph_type="induced" if induced else "directional")  # fmt: skip
    seeds = {kind: torch.tensor(ids, dtype=torch.int64) for kind, ids in seeds.items()}
    timed = graph.node_time or graph.edge_time
    times = {kind: torch.tensor(t, dtype=torch.int64) for kind, t in times.items()} if timed else None
    folder = tmp_path_factory.mktemp("p") / "p"
    write(folder, graph, num_parts, data.draw(st.sampled_from(["hash", "range"])))

    got, _ = sample_in_parts(folder, graph, [(seeds, times)], recipe, num_parts)

    assert got == sample_alone(graph, [(seeds, times)], recipe)


def test_one_part_answers_itself_as_several_do(tmp_path):
    graph, requests = make_parts(), make_requests(make_parts(), False)
    write(tmp_path / "p", graph, 1)
    part, recipe = GraphPart(tmp_path / "p", 0, device=CPU), GeneralRecipe([3, -1, 2])

    def run(communicator):
        plan = PartPlan(part, recipe, communicator, timed=False, weighted=False)
        found = [as_lists(plan.sample(seeds, KEY + n)) for n, (seeds, _) in enumerate(requests)]
        return found, communicator.num_exchanges, sum(communicator.sent.values())

    (found, num_exchanges, num_bytes) = run_threads(run, 1)[0]

    assert found == sample_alone(graph, requests, recipe)
    assert (num_exchanges, num_bytes) == (2 * 3 * len(requests), 0)


def test_times_and_weights_can_be_left_aside(tmp_path):
    graph, plain = make_parts(times="edge", weighted=True), make_parts()
    write(tmp_path / "p", graph, 2)
    requests, recipe = make_requests(plain, False), GeneralRecipe([3, 2])

    got, _ = sample_in_parts(tmp_path / "p", plain, requests, recipe, 2)

    assert got == sample_alone(plain, requests, recipe)


def test_a_bad_seed_is_named(tmp_path):
    graph = make_parts()
    write(tmp_path / "p", graph, 2)

    with pytest.raises(IdError, match=r"seeds\['paper'\] must lie in"):
        sample_in_parts(tmp_path / "p", graph, [({"paper": torch.tensor([40])}, None)] * 2, GeneralRecipe([2]), 2)

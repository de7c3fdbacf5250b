"""Captured plans that exchange give the batches of the reference on every rank, whatever room their segments have."""

from dataclasses import asdict

import pytest
import torch

from pyg_direct.distributed import exchange_plan
from pyg_direct.distributed.exchange_plan import ExchangePlan
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.errors import IdError, PartitionError
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.distributed.lockstep import run_lockstep
from tests.distributed.test_frontier_exchange import write
from tests.hetero_graphs import make_parts
from tests.plans import KEY, ON_GPU_PLANS
from tests.reference.general import Options, sample
from tests.sampling.hetero_plan.test_general import as_tensors, assert_equal

pytestmark = ON_GPU_PLANS
FANOUTS = [3, 2]
KINDS = {
    "uniform": ("", False, Options()),
    "replace": ("", False, Options(replace=True)),
    "disjoint": ("", False, Options(disjoint=True)),
    "weighted": ("", True, Options()),
    "last": ("node", False, Options(temporal_strategy="last")),
    "window": ("edge", True, Options(replace=True, time_comparison="<", time_window=6)),
}


def make_requests(count):
    return [({"paper": [number, 3, 39, 3], "author": [24, number]},
             {"paper": [3 * number, 9, 12, 30], "author": [20, 2 * number]}) for number in range(count)]  # fmt: skip


def sample_in_parts(folder, graph, requests, options, num_parts, device, fanouts=FANOUTS):
    """Samples of all requests, which the ranks take in turn; a rank that has none left takes part without seeds."""
    timed, weighted = bool(graph.node_time or graph.edge_time), bool(graph.edge_weight)
    steps = -(-len(requests) // num_parts)

    def run(transport):
        part = GraphPart(folder, transport.rank, device=device)
        plan = GeneralPlan(part.place(timed=timed, weighted=weighted), GeneralRecipe(fanouts, **asdict(options)))
        own, found = ExchangePlan(part, plan, transport), {}
        for number in range(transport.rank, steps * num_parts, num_parts):
            seeds, times = requests[number] if number < len(requests) else ({}, {})
            request = as_tensors(seeds, device), as_tensors(times, device) if timed else None
            (found[number],) = own.submit([request], [KEY + number]).finish()
        return found, own, transport.num_exchanges

    results = run_lockstep(run, num_parts)
    return [results[number % num_parts][0][number] for number in range(len(requests))], results


def expect(graph, request, number, options, fanouts=FANOUTS):
    timed = bool(graph.node_time or graph.edge_time)
    return sample(graph, request[0], dict.fromkeys(graph.edges, fanouts), KEY + number, options,
                  request[1] if timed else None)  # fmt: skip


@pytest.mark.parametrize(("num_parts", "method"), [(2, "hash"), (4, "range")])
@pytest.mark.parametrize("name", KINDS)
def test_every_rank_has_the_batch_of_the_reference(tmp_path, device, name, num_parts, method):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    write(tmp_path / "p", graph, num_parts, method)
    requests = make_requests(num_parts + 1)

    got, _ = sample_in_parts(tmp_path / "p", graph, requests, options, num_parts, device)

    for number, request in enumerate(requests):
        assert_equal(got[number], expect(graph, request, number, options))

"""Captured plans that exchange give the batches of the reference on every rank, whatever room their segments have."""

import random
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

from pyg_direct.distributed import exchange_plan
from pyg_direct.distributed.exchange_plan import ExchangePlan
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.distributed.part_plan import PartPlan
from pyg_direct.errors import IdError, PartitionError
from pyg_direct.kernels.sampling.frontier_segments import SHARED_BUCKETS
from pyg_direct.runtime.comm.nccl_segments import NcclSegments
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.distributed.lockstep import LockstepCommunicator, run_lockstep
from tests.distributed.test_part_plan import OPTIONS, as_lists, drop_memory, sample_alone, write
from tests.hetero_graphs import make_parts, make_topo, odd_parts, odd_requests
from tests.plans import KEY, ON_GPU_PLANS
from tests.reference.general import Options, sample
from tests.sampling.hetero_plan.test_general import as_tensors, assert_equal, choose_pairs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FANOUTS = [3, 2]
KINDS = {
    "uniform": ("", False, Options()),
    "replace": ("", False, Options(replace=True)),
    "disjoint": ("", False, Options(disjoint=True)),
    "weighted": ("", True, Options()),
    "last": ("node", False, Options(temporal_strategy="last")),
    "window": ("edge", True, Options(replace=True, time_comparison="<", time_window=6)),
    "windows": ("node", True, Options(seed_windows=True)),
    "induced windows": ("edge", False, Options(seed_windows=True, subgraph_type="induced", replace=True)),
    "induced": ("", False, Options(subgraph_type="induced")),
    "induced_trees": ("", True, Options(subgraph_type="induced", disjoint=True)),
    "induced_last": ("node", False, Options(subgraph_type="induced", temporal_strategy="last", time_window=9)),
}


def make_requests(count):
    return [({"paper": [number, 3, 39, 3], "author": [24, number]},
             {"paper": [3 * number, 9, 12, 30], "author": [20, 2 * number]}) for number in range(count)]  # fmt: skip


def make_windows(requests):
    """The requests with a window for each seed that ends at its time."""
    return [(seeds, {kind: [[time - 6, time] for time in own] for kind, own in times.items()})
            for seeds, times in requests]  # fmt: skip


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


@ON_GPU_PLANS
@pytest.mark.parametrize(("num_parts", "method"), [(2, "hash"), (4, "range")])
@pytest.mark.parametrize("name", KINDS)
def test_every_rank_has_the_batch_of_the_reference(tmp_path, device, name, num_parts, method):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    write(tmp_path / "p", graph, num_parts, method)
    requests = make_requests(num_parts + 1)
    if options.seed_windows:
        requests = make_windows(requests)

    got, _ = sample_in_parts(tmp_path / "p", graph, requests, options, num_parts, device)

    for number, request in enumerate(requests):
        assert_equal(got[number], expect(graph, request, number, options))


@ON_GPU_PLANS
@settings(deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 4))
def test_batches_of_odd_graphs(tmp_path_factory, device, data, repeats, disjoint, induced, weighted, num_parts):
    graph = data.draw(odd_parts(weighted=weighted))
    seeds, times, fanouts = data.draw(odd_requests(graph))
    strategy = data.draw(st.sampled_from(["uniform", "last"])) if graph.node_time or graph.edge_time else "uniform"
    options = Options(replace=repeats, disjoint=disjoint, temporal_strategy=strategy,
                      subgraph_type="induced" if induced else "directional")  # fmt: skip
    folder = tmp_path_factory.mktemp("p") / "p"
    write(folder, graph, num_parts, data.draw(st.sampled_from(["hash", "range"])))

    (got,), _ = sample_in_parts(folder, graph, [(seeds, times)], options, num_parts, device, fanouts)

    timed = bool(graph.node_time or graph.edge_time)
    assert_equal(got, sample(graph, seeds, fanouts, KEY, options, times if timed else None))


@ON_GPU_PLANS
def test_all_ranks_sample_again_what_one_has_no_room_for(tmp_path, device, monkeypatch):
    graph = make_parts()
    write(tmp_path / "p", graph, 2)
    monkeypatch.setattr(exchange_plan, "_FIRST_NODES", 1)
    monkeypatch.setattr(exchange_plan, "_FIRST_EDGES", 1)
    # The second rank has no seeds, and answers.
    requests = make_requests(3)

    got, results = sample_in_parts(tmp_path / "p", graph, requests, Options(), 2, device)

    for number, request in enumerate(requests):
        assert_equal(got[number], expect(graph, request, number, Options()))
    (_, plan, num_exchanges), (_, other, num_exchanges_there) = results
    assert plan.room == other.room
    assert min(plan.room.nodes) > 1
    # Two a hop and one at the end, of both batches and of those that were sampled again.
    assert num_exchanges == num_exchanges_there > 2 * (2 * len(FANOUTS) + 1)


@ON_GPU_PLANS
def test_a_batch_that_fits_has_two_exchanges_a_hop_and_one_at_its_end(tmp_path, device):
    graph = make_parts()
    write(tmp_path / "p", graph, 2)
    requests = make_requests(2)

    def run(transport):
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        plan = ExchangePlan(part, GeneralPlan(part.place(), GeneralRecipe(FANOUTS)), transport)
        seeds = as_tensors(requests[transport.rank][0], device)
        plan.sample([(seeds, None)], [KEY])
        before, slots = transport.num_exchanges, list(plan._slots)
        plan.sample([(seeds, None)], [KEY])
        return transport.num_exchanges - before, plan._slots == slots

    assert run_lockstep(run, 2) == [(2 * len(FANOUTS) + 1, True)] * 2


@ON_GPU_PLANS
def test_a_graph_without_relations_has_one_exchange_a_batch(tmp_path, device):
    graph = replace(make_parts(), edges={})
    write(tmp_path / "p", graph, 2)
    requests = make_requests(2)

    got, results = sample_in_parts(tmp_path / "p", graph, requests, Options(), 2, device)

    alone = sample_alone(graph, [(as_tensors(seeds, CPU), None) for seeds, _ in requests], GeneralRecipe(FANOUTS))
    assert drop_memory(list(map(as_lists, got))) == drop_memory(alone)
    assert [num_exchanges for *_, num_exchanges in results] == [1, 1]


@ON_GPU_PLANS
@pytest.mark.parametrize("subgraph_type", ["directional", "induced"])
def test_owners_are_counted_of_more_types_than_a_block_has_memory_for(tmp_path, device, subgraph_type):
    num_types = SHARED_BUCKETS // 2 + 1
    graph = make_parts()
    graph = replace(graph, num_nodes=graph.num_nodes | {f"more {number}": 1 for number in range(num_types - 2)})
    write(tmp_path / "p", graph, 2)
    requests, options = make_requests(2), Options(subgraph_type=subgraph_type)

    got, _ = sample_in_parts(tmp_path / "p", graph, requests, options, 2, device)

    for number, request in enumerate(requests):
        assert_equal(got[number], expect(graph, request, number, options))


@ON_GPU_PLANS
@pytest.mark.parametrize("name", ["uniform", "bidirectional", "induced", "last"])
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_a_plan_of_a_part_exchanges_in_segments_if_its_communicator_can(tmp_path, device, name):
    options, timed = OPTIONS[name], name == "last"
    graph = make_parts(times="node" if timed else "", weighted=False)
    write(tmp_path / "p", graph, 2)
    requests, recipe = make_requests(2), GeneralRecipe(FANOUTS, **asdict(options))

    def run(transport):
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        plan = PartPlan(part, recipe, LockstepCommunicator(transport), timed=timed, weighted=False)
        seeds, times = requests[transport.rank]
        return as_lists(plan.sample(as_tensors(seeds, device), KEY + transport.rank,
                                    seed_time=as_tensors(times, device) if timed else None))  # fmt: skip

    alone = [(as_tensors(seeds, CPU), as_tensors(times, CPU) if timed else None) for seeds, times in requests]
    assert run_lockstep(run, 2) == sample_alone(graph, alone, recipe)


@ON_GPU_PLANS
@pytest.mark.parametrize(("weighted", "name"), [
    (False, "uniform"), (False, "disjoint"), (False, "induced"), (True, "uniform"), (True, "replace"), (True, "last"),
])  # fmt: skip
def test_edges_that_ranks_leave_out_are_found_by_their_owners(tmp_path, device, weighted, name):
    options, timed = OPTIONS[name], name == "last"
    graph = make_parts(times="node" if timed else "", weighted=weighted)
    write(tmp_path / "p", graph, 2)
    rng, recipe = random.Random(1), GeneralRecipe(FANOUTS, **asdict(options))
    # The first batch of a rank leaves out few edges, the second many, the last none.
    requests = make_requests(6)
    excluded = [choose_pairs(graph, rng, share)[0] for share in (0.1, 0.2, 0.9, 0.5, 0.0, 0.0)]

    def run(transport):
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        plan, found = PartPlan(part, recipe, LockstepCommunicator(transport), timed=timed, weighted=weighted), []
        for number in range(transport.rank, 6, 2):
            seeds, times = requests[number]
            own = {kind: pairs.to(device) for kind, pairs in excluded[number].items()}
            found.append(as_lists(plan.sample(as_tensors(seeds, device), KEY + number, excluded=own,
                                              seed_time=as_tensors(times, device) if timed else None)))  # fmt: skip
        assert plan._captured_plans
        return found

    first, second = run_lockstep(run, 2)

    alone = GeneralPlan(make_topo(graph).place("auto", CPU), recipe)
    for number, ((seeds, times), own) in enumerate(zip(requests, excluded, strict=True)):
        expected = as_lists(alone.sample(as_tensors(seeds, CPU), KEY + number, excluded=own,
                                         seed_time=as_tensors(times, CPU) if timed else None))  # fmt: skip
        got = (first, second)[number % 2][number // 2]
        assert drop_memory([got]) == drop_memory([expected])


@ON_GPU_PLANS
def test_pairs_to_leave_out_take_one_exchange_and_none_of_the_host(tmp_path, device):
    graph = make_parts()
    write(tmp_path / "p", graph, 2)
    requests, recipe = make_requests(2), GeneralRecipe(FANOUTS)
    pairs, _ = choose_pairs(graph, random.Random(2), 0.5)
    # Each pair twice: its edges are left out once.
    pairs = {kind: torch.cat([own, own], 1) for kind, own in pairs.items()}
    alone = GeneralPlan(make_topo(graph).place("auto", CPU), recipe)

    def run(transport):
        communicator = LockstepCommunicator(transport)
        communicator.exchange = None
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        plan = PartPlan(part, recipe, communicator, timed=False, weighted=False)
        seeds, own = as_tensors(requests[transport.rank][0], device), pairs if transport.rank else {}
        # The first batch finds how much room pairs need.
        plan.sample(seeds, KEY, excluded=own)
        before = transport.num_exchanges
        sample = plan.sample(seeds, KEY, excluded=own)
        (captured,) = plan._captured_plans.values()
        return as_lists(sample), transport.num_exchanges - before, captured.room

    (first, count, room), (second, *others) = run_lockstep(run, 2)

    assert others == [count, room]
    assert count == 2 * len(FANOUTS) + 2
    assert room.pairs[0] >= sum(own.shape[1] for own in pairs.values())
    for got, (seeds, _), own in zip((first, second), requests, ({}, pairs), strict=True):
        assert drop_memory([got]) == drop_memory([as_lists(alone.sample(as_tensors(seeds, CPU), KEY, excluded=own))])


@ON_GPU_PLANS
def test_a_bad_seed_is_named_after_all_ranks_have_sampled(tmp_path, device, monkeypatch):
    graph = make_parts()
    write(tmp_path / "p", graph, 2)
    # So that the batch is sampled again.
    monkeypatch.setattr(exchange_plan, "_FIRST_EDGES", 1)

    def run(transport):
        part = GraphPart(tmp_path / "p", transport.rank, device=device)
        plan = ExchangePlan(part, GeneralPlan(part.place(), GeneralRecipe(FANOUTS)), transport)
        pending = plan.submit([(as_tensors({"paper": [1, 2]}, device), None)], [KEY])
        if transport.rank == 0:
            # As of a seed on a GPU, which kernels check.
            pending.seeds[0].ids[1] = 40
            plan._write_inbox(pending._slot, pending)
            plan._enqueue_batch(pending)
            with pytest.raises(IdError, match=r"seeds\['paper'\] must lie in \[0, 40\), got 40"):
                pending.finish()
            return None
        plan._enqueue_batch(pending)
        return pending.finish()

    _, (sample_of_other,) = run_lockstep(run, 2)

    assert_equal(sample_of_other, expect(graph, ({"paper": [1, 2]}, None), 0, Options()))


@ON_GPU_PLANS
def test_a_part_without_some_of_its_nodes_is_refused(tmp_path, device):
    write(tmp_path / "p", make_parts(), 2)
    part = GraphPart(tmp_path / "p", 0, device=device)
    plan = GeneralPlan(part.place(), GeneralRecipe(FANOUTS))
    part.tables["paper"].ids = part.tables["paper"].ids[1:]

    with pytest.raises(PartitionError, match=r"must hold the \d+ nodes of 'paper'"):
        ExchangePlan(part, plan, None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_exchanges_of_nccl_are_captured(tmp_path, name):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    write(tmp_path / "p", graph, 1)
    part = GraphPart(tmp_path / "p", 0, device=CUDA)
    plan = GeneralPlan(part.place(timed=bool(times), weighted=weighted), GeneralRecipe(FANOUTS, **asdict(options)))
    requests = make_windows(make_requests(4)) if options.seed_windows else make_requests(4)

    # A group after another one in the same program, too.
    for _ in range(2):
        segments = NcclSegments.open(dist.HashStore(), 0, 1, CUDA, timeout=60)
        own = ExchangePlan(part, plan, segments)
        for number, (seeds, seed_times) in enumerate(requests):
            request = as_tensors(seeds, CUDA), as_tensors(seed_times, CUDA) if times else None
            (got,) = own.sample([request], [KEY + number])
            assert_equal(got, expect(graph, (seeds, seed_times), number, options))
        assert all(slot.graph is not None for slot in own._slots)
        segments.close()
        assert own._slots == []

"""Batches that are sampled together are those that the reference draws for each, bit for bit."""

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.ops import run_kernel
from pyg_direct.sampling import seeds as reading
from tests.hetero_graphs import make_parts, odd_parts, odd_requests
from tests.poison import poisoned_memory
from tests.reference.general import Options, sample
from tests.sampling.hetero_plan.test_general import KEY, OPTIONS, SEED_TIME, SEEDS, as_tensors, assert_equal, make_plan

FANOUTS = [3, 2, -1]
SIMULATED = [("last", "node", False)]
GROUP = [
    (SEEDS, SEED_TIME),
    ({"author": [3], "venue": [0]}, {"author": [9], "venue": [4]}),
    ({}, {}),
    ({"paper": [], "author": [24, 3]}, {"paper": [], "author": [3, 11]}),
    (SEEDS, SEED_TIME),
]


# The simulator takes seconds for one.
CASES = [pytest.param(name, times, weighted, marks=() if (name, times, weighted) in SIMULATED else pytest.mark.slow)
         for name in OPTIONS for times in ("", "node", "edge") for weighted in (False, True)]  # fmt: skip


@pytest.mark.parametrize(("name", "times", "weighted"), CASES)
def test_batches_match_the_reference(device, name, times, weighted):
    graph = make_parts(times=times, weighted=weighted)
    plan = make_plan(graph, device, FANOUTS, OPTIONS[name])
    requests = [(as_tensors(seeds, device), as_tensors(seed_time, device)) for seeds, seed_time in GROUP]
    keys = [KEY + number for number in range(len(GROUP))]

    with poisoned_memory():
        got = plan.sample_together(requests, keys)

    fanouts = dict.fromkeys(graph.edges, FANOUTS)
    for batch, (seeds, seed_time), key in zip(got, GROUP, keys, strict=True):
        assert_equal(batch, sample(graph, seeds, fanouts, key, OPTIONS[name], seed_time))


@pytest.mark.slow
@given(data=st.data(), replace=st.booleans(), disjoint=st.booleans(), last=st.booleans(), weighted=st.booleans(),
       many=st.booleans())  # fmt: skip
def test_batches_match_the_reference_on_any_graph(device, data, replace, disjoint, last, weighted, many):
    graph = data.draw(odd_parts(weighted))
    requests = [data.draw(odd_requests(graph)) for _ in range(2 if many else 1)]
    fanouts = requests[0][2]
    options = Options(replace, disjoint, "directional", "last" if last else "uniform")
    plan = make_plan(graph, device, fanouts, options)

    got = plan.sample_together([(as_tensors(seeds, device), as_tensors(seed_time, device))
                                for seeds, seed_time, _ in requests], range(len(requests)))  # fmt: skip

    for key, (batch, (seeds, seed_time, _)) in enumerate(zip(got, requests, strict=True)):
        assert_equal(batch, sample(graph, seeds, fanouts, key, options, seed_time))


@pytest.mark.slow
@pytest.mark.parametrize("disjoint", [False, True])
def test_large_batches_match_those_alone(device, disjoint):
    graph = make_parts(weighted=True)
    plan = make_plan(graph, device, [9, 9, 9], Options(disjoint=disjoint))
    seeds = [{"paper": torch.arange(40, device=device)} for _ in range(20)]
    expected = [plan.sample(own, key) for key, own in enumerate(seeds)]

    # As when the loops of small batches take one thread.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_kernel, "FEW_ITEMS", 1 << 30)
        got = plan.sample_together([(own, None) for own in seeds], range(20))

    for batch, alone in zip(got, expected, strict=True):
        for parts, others in ((batch.node, alone.node), (batch.edge_index, alone.edge_index), (batch.edge, alone.edge)):
            assert all(torch.equal(part, other) for part, other in zip(parts.values(), others.values(), strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no reverse relation")
def test_bidirectional_batches_are_those_alone(device):
    plan = make_plan(make_parts(), device, [3, 2], Options(subgraph_type="bidirectional"))
    requests = [(as_tensors(seeds, device), None) for seeds, _ in GROUP[:2]]

    got = plan.sample_together(requests, [5, 6])

    for batch, (seeds, _), key in zip(got, requests, [5, 6], strict=True):
        alone = plan.sample(seeds, key)
        assert {kind: pair.tolist() for kind, pair in batch.edge_index.items()} == \
            {kind: pair.tolist() for kind, pair in alone.edge_index.items()}  # fmt: skip


def count_steps(plan, requests, monkeypatch):
    """Loops and grids that sample these batches together."""
    calls = []

    def note(run):
        return lambda *args, **stream: calls.append(args[0]) or run(*args, **stream)

    with monkeypatch.context() as patch:
        for room in ("ops.sampling.sample_hetero", "ops.local_ids.build_csr"):
            for run in (run_kernel.run_cpu, run_kernel.run_gpu):
                patch.setattr(f"pyg_direct.{room}.{run.__name__}", note(run))
        patch.setattr("pyg_direct.sampling.local_ids.run_cpu", note(run_kernel.run_cpu))
        patch.setattr("pyg_direct.sampling.hetero_gpu.run_gpu", note(run_kernel.run_gpu))
        plan.sample_together(requests, range(len(requests)))
    return len(calls)


def test_steps_do_not_grow_with_the_batches(device, monkeypatch):
    plan = make_plan(make_parts(times="node"), device, [2, 2], Options())
    request = (as_tensors(SEEDS, device), as_tensors(SEED_TIME, device))
    plan.sample_together([request] * 3, range(3))

    steps = count_steps(plan, [request] * 3, monkeypatch)

    assert steps == count_steps(plan, [request] * 2, monkeypatch)
    # Beside a captured graph there is only the export, whose arguments were prepared.
    assert steps == 0 if device.type == "cuda" else steps > 5


@pytest.mark.parametrize("options", [Options(), Options(disjoint=True)])
@pytest.mark.parametrize("times", ["", "node"])
def test_seeds_of_one_type_are_those_read_the_long_way(device, options, times):
    plan = make_plan(make_parts(times=times), device, [2], options)
    requests = [({"paper": torch.arange(count) + count}, {"paper": torch.arange(count)} if times else None)
                for count in (5, 0, 1, 12)]  # fmt: skip

    short = reading._read_alike(plan.topology, requests, plan.disjoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_read_alike", lambda *_: None)
        long = reading.read_group(plan.topology, requests, plan.disjoint)

    for name, part, expected in zip(long._fields, short, long, strict=True):
        assert (part.tolist() if hasattr(part, "tolist") else part) == \
            (expected.tolist() if hasattr(expected, "tolist") else expected), name  # fmt: skip


@pytest.mark.parametrize("request_of_many", [
    ({"paper": torch.tensor([1]), "author": torch.tensor([2])},) * 2,
    ({"paper": torch.tensor([1])}, None),
    ({"paper": torch.tensor([1], dtype=torch.int32)}, {"paper": torch.tensor([1])}),
    ({"paper": torch.tensor([1])}, {"paper": torch.tensor([1.5])}),
    ({"paper": torch.tensor([1])}, {"paper": torch.tensor([1, 2])}),
    ({"paper": torch.tensor([1])}, {"author": torch.tensor([1])}),
    ({}, {}),
])  # fmt: skip
def test_other_seeds_are_read_the_long_way(device, request_of_many):
    plan = make_plan(make_parts(times="node"), device, [2], Options())

    assert reading._read_alike(plan.topology, [request_of_many] * 2, True) is None


def test_bad_batches_are_named(device):
    plan = make_plan(make_parts(), device, [2], Options())
    good = {"paper": torch.tensor([1])}

    with pytest.raises(IdError, match=r"seeds\['paper'\] must lie in \[0, 40\), got 40"):
        plan.sample_together([(good, None), ({"paper": torch.tensor([40])}, None)], [1, 2])
    with pytest.raises(ArgumentError, match="key must lie in"):
        plan.sample_together([(good, None), (good, None)], [1, -2])

    assert plan.sample_together([(good, None)], [1])[0].node["paper"][0] == 1

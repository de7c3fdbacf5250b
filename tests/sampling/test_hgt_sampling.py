import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pyg_direct.errors import ArgumentError, IdError
from pyg_direct.graph.hetero_topo import HeteroTopo
from pyg_direct.kernels.batch_counters import NODES, STATE
from pyg_direct.kernels.sampling import hgt_budget
from pyg_direct.ops.run_kernel import run_gpu
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from pyg_direct.sampling import hetero_gpu
from pyg_direct.sampling.hgt_sampling import HgtPlan
from tests.hetero_graphs import make_parts, make_topo, odd_parts
from tests.plans import ON_GPU_PLANS
from tests.poison import poisoned_memory
from tests.reference import hgt as reference
from tests.reference.general import Parts

NUM_SAMPLES = {"paper": [4, 3], "author": [3, 5], "venue": [1, 1]}


SEEDS = {"paper": [3, 17, 3], "author": [0]}


def place(graph, device):
    return make_topo(graph).place(device=device)


def as_tensors(parts, device="cpu"):
    return {kind: torch.tensor(ids, dtype=torch.int64, device=device) for kind, ids in parts.items()}


def edges_of(sample):
    return {kind: sorted((int(sample.node[kind[0]][row]), int(col), int(ids)) for row, col, ids
                         in zip(sample.row[kind], sample.col[kind], sample.edge[kind], strict=True))
            for kind in sample.row}  # fmt: skip


def assert_matches_reference(got, graph, seeds, wanted, key):
    nodes, edges = reference.sample(graph, seeds, wanted, key)
    assert {kind: ids.tolist() for kind, ids in got.node.items()} == nodes
    assert edges_of(got) == {kind: sorted(pairs) for kind, pairs in edges.items()}


@pytest.mark.parametrize("key", [0, 7])
def test_matches_reference(device, key):
    graph = make_parts()

    got = HgtPlan(place(graph, device), NUM_SAMPLES).sample(as_tensors(SEEDS), key)

    assert_matches_reference(got, graph, SEEDS, NUM_SAMPLES, key)


def test_matches_reference_where_a_node_lists_thousands(real_device):
    # More than a table of budgets begins with; both layers leave some of equal budgets.
    pairs = [(source, 0) for source in range(1, 2500)] + [(source, 1) for source in range(500, 900)]
    graph = Parts({"a": 2500}, {("a", "to", "a"): pairs})
    topo = HeteroTopo({"a": 2500}, {("a", "to", "a"): torch.tensor(pairs).t()}).place(device=real_device)

    got = HgtPlan(topo, {"a": [900, 7]}, -1).sample({"a": torch.tensor([1, 0])}, 5)

    assert_matches_reference(got, graph, {"a": [1, 0]}, {"a": [900, 7]}, 5)


@settings(max_examples=20)
@given(graph=odd_parts(), key=st.integers(0, 2**64 - 1), data=st.data())
def test_matches_reference_on_odd_graphs(device, graph, key, data):
    graph = Parts(graph.num_nodes, graph.edges)
    seeds = {kind: data.draw(st.lists(st.integers(0, size - 1), max_size=3))
             for kind, size in graph.num_nodes.items() if size}  # fmt: skip
    wanted = {kind: data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) for kind in graph.num_nodes}
    plan = HgtPlan(place(graph, device), wanted)

    with poisoned_memory():
        got = plan.sample(as_tensors(seeds), key)

    assert_matches_reference(got, graph, seeds, wanted, key)


@ON_GPU_PLANS
@pytest.mark.parametrize("limit", ["edges", "items"])
def test_capacity_changes_no_batch(device, monkeypatch, limit):
    graph = make_parts()
    monkeypatch.setattr(hetero_gpu, "_FIRST_EDGES", 1 if limit == "edges" else 1000)
    slot, shrink = hetero_gpu.Slot.__init__, [limit == "items"]

    def make_smaller(self, plan, capacity):
        slot(self, plan, capacity._replace(items=1) if shrink.pop() else capacity)
        shrink.append(False)

    monkeypatch.setattr(hetero_gpu.Slot, "__init__", make_smaller)
    plan = HgtPlan(place(graph, device), NUM_SAMPLES)

    for key in (0, 7, 7):
        with poisoned_memory():
            got = plan.sample(as_tensors(SEEDS, device), key)
        assert_matches_reference(got, graph, SEEDS, NUM_SAMPLES, key)

    assert plan._captured.num_captures > 1
    assert len(plan._captured._slots) == 1


@ON_GPU_PLANS
@pytest.mark.parametrize("has_groups", [False, True])
def test_layers_take_many_of_many_candidates(device, monkeypatch, has_groups):
    if has_groups:
        # As over so many nodes that only the words of groups that were met are read.
        monkeypatch.setattr(hetero_gpu, "_SCAN_NODES", 0)
    rng, kinds = random.Random(3), ["a", "b", "c"]
    edges = {(source, "to", target): [(rng.randrange(150), int(rng.random() ** 2 * 150)) for _ in range(300)]
             for source, target in [("a", "b"), ("b", "a"), ("c", "a"), ("c", "c"), ("a", "c")]}  # fmt: skip
    graph, wanted = Parts(dict.fromkeys(kinds, 150), edges), {"a": [20, 9], "b": [0, 150], "c": [17, 3]}
    seeds = {"a": [0, 7, 3, 0], "c": [5]}

    got = HgtPlan(place(graph, device), wanted, -1).sample(as_tensors(seeds), 11)

    assert_matches_reference(got, graph, seeds, wanted, 11)


@ON_GPU_PLANS
@pytest.mark.parametrize("most_neighbors", [1, 3, -1])
def test_layers_on_a_gpu_and_loops_of_a_cpu_draw_alike(device, most_neighbors):
    graph = make_parts(4)
    on_gpu, on_cpu = (HgtPlan(place(graph, own), NUM_SAMPLES, most_neighbors) for own in (device, torch.device("cpu")))

    for key in (0, 2**64 - 1):
        got, expected = on_gpu.sample(as_tensors(SEEDS), key), on_cpu._sample(as_tensors(SEEDS), key)
        for name in ("node", "row", "col", "edge"):
            found, own = ({kind: part.tolist() for kind, part in getattr(sample, name).items()}
                          for sample in (got, expected))  # fmt: skip
            assert found == own, name


@ON_GPU_PLANS
def test_batches_on_their_way_at_once_do_not_disturb_each_other(device):
    graph = make_parts()
    plan = HgtPlan(place(graph, device), NUM_SAMPLES)
    seeds = [{"paper": [number, 3], "author": [2 * number]} for number in range(4)]

    pending = [plan.submit(as_tensors(own, device), number) for number, own in enumerate(seeds)]

    for number in (2, 0, 3, 1):
        assert_matches_reference(pending[number].finish(), graph, seeds[number], NUM_SAMPLES, number)


@ON_GPU_PLANS
@pytest.mark.parametrize("is_there", [False, True])
def test_a_batch_waits_for_the_gpu_once_and_leaves_nothing_behind(device, monkeypatch, is_there):
    plan = HgtPlan(place(make_parts(), device), NUM_SAMPLES)
    seeds, waits = as_tensors(SEEDS, device if is_there else "cpu"), []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(event), wait(event)))
    plan.sample(seeds, 0)
    waits.clear()

    # Torch raises on every other wait of its own.
    with waits_refused() if device.type == "cuda" else nullcontext():
        plan.sample(seeds, 1)

    assert len(waits) == (device.type == "cuda")
    scratch, (slot,) = plan._captured._scratch, plan._captured._slots
    for bits in (scratch.seen, scratch.fresh, slot.met_bits):
        assert not bits.view(torch.int32).any()
    assert not slot.budgets.any()
    assert not slot.digit_counts.any()


@ON_GPU_PLANS
@pytest.mark.parametrize(("left", "taken"), [(1, [3]), (2, [3, 7]), (3, [3, 7, 9])])
def test_of_equal_scores_those_of_the_first_nodes_are_taken(device, left, taken):
    # Scores of one type: 5 is below the largest that is taken, 11 above, and 1029 of another type.
    met = torch.tensor([7, 5, 9, 3, 11, 1029], device=device)
    orders = torch.tensor([50, 20, 50, 50, 60, 50], device=device)
    met_state, (fresh, touched) = torch.zeros(STATE, dtype=torch.int64, device=device), torch.zeros(2, 64).unbind()
    met_state[NODES + 1] = len(met)
    fresh, touched = fresh.int().to(device).view(torch.uint32), touched[:0].to(torch.uint8).to(device)
    starts, prefixes, lefts, equal = torch.tensor([[0, 1024], [50, -2], [left, 0], [3, 0]], device=device).unbind()

    run_gpu(hgt_budget.mark_chosen_gpu, 1, met_state, 0, 2, met, orders, starts, prefixes, lefts, equal, fresh, touched)

    bits = fresh.view(torch.int32).tolist()
    assert [node for node in range(2048) if bits[node >> 5] >> (node & 31) & 1] == sorted([5, *taken])


def test_chances_grow_with_the_square_of_the_budget():
    # Two targets list node 0, one of them also node 1: budgets 1 + 1/2 and 1/2, chances 9 to 1.
    pairs = torch.tensor([[0, 0, 1], [0, 1, 1]])
    topo = HeteroTopo({"a": 2, "b": 2}, {("a", "to", "b"): pairs}).place(device="cpu")
    plan = HgtPlan(topo, {"a": [1]})

    first = [int(plan.sample({"b": torch.tensor([0, 1])}, key).node["a"][0]) for key in range(2000)]

    assert np.mean(first) == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 2000) ** 0.5)


def test_a_hub_is_looked_at_in_part():
    pairs = torch.stack([torch.arange(1, 201), torch.zeros(200, dtype=torch.int64)])
    topo = HeteroTopo({"a": 201}, {("a", "to", "a"): pairs}).place(device="cpu")
    seeds = {"a": torch.tensor([0])}

    few = HgtPlan(topo, {"a": [500]}).sample(seeds, 1)
    all_of_them = HgtPlan(topo, {"a": [500]}, most_neighbors=-1).sample(seeds, 1)

    assert few.node["a"].numel() == 51
    assert all_of_them.node["a"].numel() == 201
    assert all_of_them.row["a", "to", "a"].numel() == 200


def test_no_seeds_give_an_empty_sample(device):
    got = HgtPlan(place(make_parts(), device), NUM_SAMPLES).sample({}, 0)

    assert all(ids.numel() == 0 for ids in [*got.node.values(), *got.row.values()])


@pytest.mark.parametrize(("wanted", "words"), [({"nope": [1]}, "nope"), ({"paper": [-1]}, "at least 0")])
def test_refuses_unknown_types_and_negative_numbers(wanted, words):
    with pytest.raises(ArgumentError, match=words):
        HgtPlan(place(make_parts(), torch.device("cpu")), wanted)


@pytest.mark.parametrize("is_there", [False, True])
def test_refuses_seeds_outside_the_graph(device, is_there):
    seeds = as_tensors({"paper": [40]}, device if is_there else "cpu")

    with pytest.raises(IdError, match=r"seeds\['paper'\] must lie in \[0, 40\), got 40"):
        HgtPlan(place(make_parts(), device), NUM_SAMPLES).sample(seeds, 0)


def test_refuses_more_layers_than_a_batch_counts():
    with pytest.raises(ArgumentError, match=r"num_samples\['paper'\] must have at most 31 hops, got 32"):
        HgtPlan(place(make_parts(), torch.device("cpu")), {"paper": [1] * 32})

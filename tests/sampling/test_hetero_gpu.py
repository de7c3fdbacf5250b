"""The captured plan of graphs with types gives the batch of the reference, whatever its capacity and numbering."""

from contextlib import nullcontext
from dataclasses import asdict
from itertools import accumulate, chain

import pytest
import torch
from hypothesis import given, strategies as st

from pyg_direct.errors import IdError, MemoryLimitError
from pyg_direct.kernels.local_ids import sorted_buckets
from pyg_direct.kernels.local_ids.bitmap import WORD
from pyg_direct.ops.rows.gather_rows import list_layout
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from pyg_direct.sampling import captured_plan, hetero_gpu
from pyg_direct.sampling.hetero_plan import GeneralPlan
from pyg_direct.sampling.sampling_options import GeneralRecipe
from tests.hetero_graphs import make_parts, make_topo, odd_parts, odd_requests
from tests.plans import KEY, ON_GPU_PLANS
from tests.poison import poisoned_memory
from tests.reference.general import Options, Parts, sample
from tests.sampling.hetero_plan.test_general import SEED_TIME, SEEDS, as_tensors, assert_equal

FANOUTS = [4, 3]
KINDS = {
    "uniform": ("", False, Options()),
    "disjoint": ("", False, Options(disjoint=True)),
    "timed": ("node", False, Options(temporal_strategy="last")),
    "weighted": ("edge", True, Options(replace=True, time_window=5)),
    "induced": ("", False, Options(subgraph_type="induced")),
    "labor": ("", False, Options(sampling="labor")),
    "labor by time": ("edge", False, Options(sampling="labor", layer_dependency=True, time_window=8)),
    "trees induced": ("edge", True, Options(subgraph_type="induced", time_window=8)),
}
pytestmark = ON_GPU_PLANS


def make_plan(graph, device, fanouts, options):
    return GeneralPlan(make_topo(graph).place("auto", device), GeneralRecipe(fanouts, **asdict(options)))


def expect(graph, seeds, fanouts, options, times=None, key=KEY):
    return sample(graph, seeds, dict.fromkeys(graph.edges, fanouts), key, options, times)


@pytest.mark.parametrize("limit", ["edges", "items", "buckets"])
@pytest.mark.parametrize("name", KINDS)
def test_capacity_changes_no_batch(device, monkeypatch, name, limit):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    monkeypatch.setattr(hetero_gpu, "_WORST_CASE_EDGES", 0)
    monkeypatch.setattr(hetero_gpu, "_FIRST_EDGES", 1 if limit == "edges" else 1000)
    if limit == "items":
        slot, shrink = hetero_gpu.Slot.__init__, [True]

        def make_smaller(self, plan, capacity):
            if shrink:
                capacity = capacity._replace(items=shrink.pop())
            slot(self, plan, capacity)

        monkeypatch.setattr(hetero_gpu.Slot, "__init__", make_smaller)
    elif limit == "buckets":
        # Ranges of as few nodes as there can be.
        monkeypatch.setattr(sorted_buckets, "KEY_BITS", 1)
    plan = make_plan(graph, device, FANOUTS, options)

    for key in (KEY, 5):
        with poisoned_memory():
            got = plan.sample(as_tensors(SEEDS, device), key, seed_time=as_tensors(SEED_TIME, device))
        assert_equal(got, expect(graph, SEEDS, FANOUTS, options, SEED_TIME, key))

    captured = plan._captured[1, False]
    # Learned by the first batch, so that the second is sampled once; a slot of each size is replaced by the next.
    assert len(captured._slots) == 1
    assert captured.num_captures == 1 if limit == "buckets" else captured.num_captures > 1


@pytest.mark.parametrize("most_buckets", [1, 1 << 10])
def test_more_sources_than_a_block_sorts_are_numbered_in_order(device, monkeypatch, most_buckets):
    count, num_leaves = 5 * sorted_buckets.TILE + 3, 5 * sorted_buckets.TILE * WORD // 2
    # Some twice, so that there are fewer new nodes than edges; and leaves lead to each other.
    leaves = [number * num_leaves // count for number in range(count)] + list(range(sorted_buckets.TILE))
    graph = Parts({"hub": 2, "leaf": num_leaves}, {
        ("leaf", "to", "hub"): [(leaf, hub) for hub in range(2) for leaf in leaves],
        ("leaf", "next", "leaf"): [((leaf + 1) % num_leaves, leaf) for leaf in sorted({*leaves})]})  # fmt: skip
    monkeypatch.setattr(hetero_gpu, "_MOST_BUCKETS", most_buckets)
    plan = make_plan(graph, device, [-1, -1], Options(disjoint=True))

    got = plan.sample(as_tensors({"hub": [1, 0, 1], "leaf": [0, 7]}, device), KEY)

    assert_equal(got, expect(graph, {"hub": [1, 0, 1], "leaf": [0, 7]}, [-1, -1], Options(disjoint=True)))


@pytest.mark.parametrize("name", KINDS)
def test_batches_on_their_way_at_once_do_not_disturb_each_other(device, name):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    plan = make_plan(graph, device, FANOUTS, options)
    plan.sample(as_tensors({"paper": [1]}, device), KEY, seed_time=as_tensors({"paper": [1]}, device))
    captured = plan._captured[1, False]
    requests = [{"paper": [number, 3], "author": [2 * number]} for number in range(4)]
    seed_times = [{"paper": [number, 7], "author": [9]} for number in range(4)]

    pending = [captured.submit([(as_tensors(seeds, device), as_tensors(own, device))], [number])
               for number, (seeds, own) in enumerate(zip(requests, seed_times, strict=True))]  # fmt: skip

    for number in (2, 0, 3, 1):
        (got,) = pending[number].finish()
        assert_equal(got, expect(graph, requests[number], FANOUTS, options, seed_times[number], number))


@pytest.mark.parametrize("name", KINDS)
def test_fewer_batches_than_a_plan_samples_together_use_it_too(device, name):
    times, weighted, options = KINDS[name]
    graph = make_parts(times=times, weighted=weighted)
    plan = make_plan(graph, device, FANOUTS, options)
    requests = [({"author": [number], "paper": [3, 3]}, {"author": [4], "paper": [number, 8]}) for number in range(3)]

    for count in (3, 1, 2):
        got = plan.sample_together(
            [tuple(as_tensors(part, device) for part in request) for request in requests[:count]], range(count)
        )
        assert len(got) == count
        for number, (batch, (seeds, own)) in enumerate(zip(got, requests, strict=False)):
            assert_equal(batch, expect(graph, seeds, FANOUTS, options, own, number))

    # Those that share a bitmap are sampled one after the other.
    assert list(plan._captured) == [(3 if plan.disjoint else 1, False)]


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_brings_the_words_by_which_its_rows_are_read(device, name):
    times, weighted, options = KINDS[name]
    plan = make_plan(make_parts(times=times, weighted=weighted), device, FANOUTS, options)
    request = as_tensors({"author": [1, 4], "paper": [3]}, device), as_tensors({"author": [4, 9], "paper": [8]}, device)

    samples = plan.sample_together([request, request], [1, 2])

    groups = [samples] if plan.disjoint else [[sample] for sample in samples]
    for group in groups:
        nodes, _, ids = group[0].memory
        for words, parts, whole in (
            (group[0].starts, [own.node.values() for own in group], nodes),
            (group[0].edge_starts, [own.edge.values() for own in group], ids),
        ):
            sizes = [part.numel() for own in parts for part in own]
            begins = [*accumulate(sizes, initial=0)]
            assert words.tolist() == list_layout(begins[:-1], sizes)
            for part, begin, size in zip(chain.from_iterable(parts), begins, sizes, strict=False):
                assert torch.equal(whole[begin : begin + size], part)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "links"])
def test_a_batch_waits_for_the_gpu_once(device, name, is_there, monkeypatch):
    times, weighted, options = KINDS["uniform" if name == "links" else name]
    plan = make_plan(make_parts(times=times, weighted=weighted), device, FANOUTS, options)
    seeds, seed_time = (as_tensors(part, device if is_there else torch.device("cpu")) for part in (SEEDS, SEED_TIME))
    pair = torch.tensor([[1], [3]], device=device)
    excluded = [{("author", "writes", "paper"): pair}] if name == "links" else None
    waits = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(event), wait(event)))

    def sample(key):
        plan.submit_together([(seeds, seed_time)], [key], excluded, repeats=name == "links").finish()

    sample(KEY)
    waits.clear()
    # Torch raises on every other wait of its own.
    with waits_refused() if device.type == "cuda" else nullcontext():
        sample(KEY + 1)

    assert len(waits) == (device.type == "cuda")


def test_a_batch_without_seeds_samples_nothing(device):
    graph = make_parts(times="node")
    plan = make_plan(graph, device, FANOUTS, Options())

    got = plan.sample(as_tensors({"paper": []}, device), KEY, seed_time=as_tensors({"paper": []}, device))

    assert_equal(got, expect(graph, {"paper": []}, FANOUTS, Options(), {"paper": []}))


@pytest.mark.parametrize("seed", [-1, 25, 2**40])
def test_a_seed_that_is_no_node_is_named(device, seed):
    plan = make_plan(make_parts(), device, FANOUTS, Options())
    # Those of the host are checked before they travel.
    seeds = as_tensors({"paper": [3, 39], "author": [24, seed]}, device)

    with pytest.raises(IdError, match=rf"seeds\['author'\] must lie in \[0, 25\), got {seed}"):
        plan.sample(seeds, KEY)
    got = plan.sample(as_tensors(SEEDS, device), KEY)

    assert_equal(got, expect(make_parts(), SEEDS, FANOUTS, Options()))


def test_excluded_edges_are_left_out_in_batches_of_different_numbers(device):
    graph = make_parts()
    edge_type = "author", "writes", "paper"
    plan = make_plan(graph, device, FANOUTS, Options())

    for number in (0, 1, 20, 0, 3):
        graph.excluded = {edge_type: graph.edges[edge_type][:number]}
        pairs = torch.tensor(graph.excluded[edge_type], dtype=torch.int64, device=device).reshape(-1, 2).t()
        got = plan.sample(as_tensors(SEEDS, device), KEY, excluded={edge_type: pairs})
        assert_equal(got, expect(graph, SEEDS, FANOUTS, Options()))


def test_more_edges_than_pairs_are_left_out(device):
    graph = make_parts()
    edge_type = "author", "writes", "paper"
    pair = graph.edges[edge_type][0]
    graph.edges[edge_type] += [pair] * 9
    plan = make_plan(graph, device, FANOUTS, Options())
    pairs = torch.tensor([pair], device=device).t()
    seeds = {"paper": [pair[1], 3]}

    got = plan.sample(as_tensors(seeds, device), KEY, excluded={edge_type: pairs})

    graph.excluded = {edge_type: [pair]}
    assert_equal(got, expect(graph, seeds, FANOUTS, Options()))
    assert plan._captured[1, False].num_captures == 2


def test_seeds_that_repeat_become_the_different_ones_ascending(device):
    graph = make_parts()
    plan = make_plan(graph, device, FANOUTS, Options())
    requests = [{"paper": [9, 3, 9, 39, 3], "author": [7, 7]}, {"author": [2]}, {"paper": [], "author": [5, 1]}]

    for number, repeated in enumerate(requests):
        with poisoned_memory():
            (got,) = plan.submit_together([(as_tensors(repeated, device), None)], [number], repeats=True).finish()
        seeds = {kind: sorted({*own}) for kind, own in repeated.items()}
        assert_equal(got, expect(graph, seeds, FANOUTS, Options(), key=number))
        assert got.num_seeds == {kind: len(seeds.get(kind, [])) for kind in graph.num_nodes}


@pytest.mark.parametrize("kind", ["directional", "induced"])
def test_words_of_groups_that_were_not_met_are_not_read(device, monkeypatch, kind):
    # As over very many nodes.
    monkeypatch.setattr(hetero_gpu, "_SCAN_NODES", 0)
    graph, options = make_parts(), Options(subgraph_type=kind)
    plan = make_plan(graph, device, FANOUTS, options)

    for key in (KEY, 4):
        got = plan.sample(as_tensors(SEEDS, device), key)
        assert_equal(got, expect(graph, SEEDS, FANOUTS, options, key=key))

    touched = plan._captured[1, False]._scratch.touched
    assert touched.numel() > 0
    assert not touched.any()


@pytest.mark.parametrize("disjoint", [False, True])
def test_edges_among_sets_of_nodes_need_no_hops(device, disjoint):
    graph, options = make_parts(), Options(disjoint=disjoint, subgraph_type="induced")
    plan = make_plan(graph, device, [], options)
    sets = [{"paper": [9, 3, 9, 0], "author": [7, 1]}, {"venue": [0]}, {"paper": list(range(40)), "venue": [0]}]

    for seeds in sets:
        with poisoned_memory():
            got = plan.sample(as_tensors(seeds, device), KEY)
        assert_equal(got, expect(graph, seeds, [], options))
        assert got.num_seeds == {kind: len(seeds.get(kind, [])) for kind in graph.num_nodes}


def test_edges_of_a_subgraph_have_no_bound_by_fanouts(device):
    graph = make_parts()
    bounds = [make_plan(graph, device, FANOUTS, Options(subgraph_type=kind)).sample(as_tensors(SEEDS, device), KEY)
              .max_degree for kind in ("directional", "induced")]  # fmt: skip

    assert bounds == [4, None]


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("kind", ["directional", "induced"])
@pytest.mark.parametrize("has_table", [False, True])
def test_a_batch_leaves_nothing_behind_in_the_scratch(device, monkeypatch, has_table, kind, repeats):
    monkeypatch.setattr(hetero_gpu, "fits_table", lambda *_: has_table)
    graph, options = make_parts(), Options(subgraph_type=kind)
    plan = make_plan(graph, device, FANOUTS, options)

    for key in (KEY, 3):
        with poisoned_memory():
            (got,) = plan.submit_together([(as_tensors(SEEDS, device), None)], [key], repeats=repeats).finish()
        seeds = {kind: sorted({*own}) if repeats else own for kind, own in SEEDS.items()}
        assert_equal(got, expect(graph, seeds, FANOUTS, options, key=key))

    scratch = plan._captured[1, repeats]._scratch
    assert (scratch.place_of_id.numel() > 0) == has_table != (scratch.ranks.numel() > 0)
    assert not scratch.seen.view(torch.int32).any()
    assert not scratch.fresh.view(torch.int32).any()


@pytest.mark.parametrize("seed", [-1, 25])
def test_a_seed_that_may_repeat_and_is_no_node_is_named(device, seed):
    plan = make_plan(make_parts(), device, FANOUTS, Options())
    seeds = as_tensors({"paper": [3, 39, 3], "author": [24, seed]}, device)

    with pytest.raises(IdError, match=rf"seeds\['author'\] must lie in \[0, 25\), got {seed}"):
        plan.submit_together([(seeds, None)], [KEY], repeats=True).finish()


def test_a_batch_too_large_for_its_arrays_is_refused(device, monkeypatch):
    monkeypatch.setattr(hetero_gpu, "_MAX_EDGES", 10)
    plan = make_plan(make_parts(), device, FANOUTS, Options())

    with pytest.raises(MemoryLimitError, match="fewer than 10 edges"):
        plan.sample(as_tensors(SEEDS, device), KEY)


def test_plans_share_the_scratch_of_a_topology(device):
    graph = make_parts()
    topology = make_topo(graph).place("auto", device)
    plans = [GeneralPlan(topology, GeneralRecipe(fanouts)) for fanouts in ([2], [3, 1])]
    for plan in plans:
        plan.sample(as_tensors(SEEDS, device), KEY)

    first, second = (plan._captured[1, False] for plan in plans)
    assert first._scratch is second._scratch
    assert first.num_scratch_bytes == first._scratch.num_bytes > 0
    assert first.num_bytes > 0
    assert first.release()
    assert first.num_bytes == 0
    assert_equal(plans[0].sample(as_tensors(SEEDS, device), KEY), expect(graph, SEEDS, [2], Options()))
    assert captured_plan.count_bytes(first._slots[0]) == first.num_bytes


@given(st.data())
def test_any_graph_matches_the_reference(device, data):
    graph = data.draw(odd_parts(weighted=data.draw(st.booleans())))
    seeds, seed_time, fanouts = data.draw(odd_requests(graph))
    options = Options(replace=data.draw(st.booleans()), disjoint=data.draw(st.booleans()),
                      subgraph_type=data.draw(st.sampled_from(["directional", "induced"])),
                      temporal_strategy=data.draw(st.sampled_from(["uniform", "last"])),
                      time_window=data.draw(st.none() | st.integers(0, 5)))  # fmt: skip
    has_table = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hetero_gpu, "fits_table", lambda *_: has_table)
        plan = make_plan(graph, device, fanouts, options)
        plan.submit_together([(as_tensors(seeds, device), as_tensors(seed_time, device))], [KEY]).finish()

    with poisoned_memory():
        got = plan.sample(as_tensors(seeds, device), KEY, seed_time=as_tensors(seed_time, device))

    assert_equal(got, sample(graph, seeds, fanouts, KEY, options, seed_time))

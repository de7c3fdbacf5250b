"""The plan on a GPU, and in the simulator: its capacity, its scratch, batches on their way, memory, streams."""

import gc

import pytest
import torch

from pyg_direct.errors import IdError, MemoryLimitError, PlacementWarning
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.kernels.local_ids import new_nodes as kernels
from pyg_direct.runtime.cuda.graph_capture import waits_refused
from pyg_direct.sampling import captured_plan, uniform_plan
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import open_plan
from tests.graphs import GRAPHS, make_random_graph
from tests.plans import KEY, ON_GPU_PLANS, assert_equal, expect_batch, make_seeds, place


def poison(plan):
    """Fill all buffers of a GPU plan but those that a batch leaves ready for the next one."""
    for holder in (plan._scratch, *plan._slots):
        for name, buffer in vars(holder).items():
            if isinstance(buffer, torch.Tensor) and name not in ("fresh", "seen", "state"):
                buffer.view(torch.uint8).fill_(0xAB)


@ON_GPU_PLANS
@pytest.mark.parametrize("recipe", [Recipe((5, 3)), Recipe((-1, 2), expand_all=True)])
def test_plan_that_is_too_small_grows(device, recipe, monkeypatch):
    monkeypatch.setattr(uniform_plan, "_WORST_CASE_EDGES", 0)
    monkeypatch.setattr(uniform_plan, "_FIRST_EDGES", 1)
    graph = GRAPHS["random"]
    seeds = list(range(0, 70, 4))
    plan = open_plan(place(graph, device), recipe)

    got = plan.sample(make_seeds(seeds, device), KEY)
    captures = plan.num_captures
    again = plan.sample(make_seeds(seeds, device), KEY + 1)

    assert_equal(got, expect_batch(graph, seeds, recipe))
    assert_equal(again, expect_batch(graph, seeds, recipe, KEY + 1))
    assert captures > 1
    assert plan.num_captures == captures


@ON_GPU_PLANS
def test_plan_grows_with_its_seeds(device):
    graph, recipe = GRAPHS["random"], Recipe((2, 2))
    plan = open_plan(place(graph, device), recipe)
    plan.sample(make_seeds([1], device), KEY)

    got = plan.sample(make_seeds([5, 6, 7], device), KEY)

    assert_equal(got, expect_batch(graph, [5, 6, 7], recipe))
    assert plan.num_captures == 2
    assert plan.num_bytes > 0


@ON_GPU_PLANS
def test_what_lay_in_the_buffers_does_not_matter(device):
    graph, recipe = GRAPHS["random"], Recipe((3, 2), expand_all=True)
    plan = open_plan(place(graph, device), recipe)
    plan.sample(make_seeds([9, 9, 1], device), KEY)
    poison(plan)

    got = plan.sample(make_seeds([4, 60], device), KEY)

    assert_equal(got, expect_batch(graph, [4, 60], recipe))


@ON_GPU_PLANS
@pytest.mark.parametrize("bad", [70, -1, 2**40])
def test_bad_seed_is_told_at_the_end_and_the_plan_stays_usable(device, bad):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    plan = open_plan(place(graph, device), recipe)
    pending = plan.submit(make_seeds([3, bad, 5, -7], device), KEY)

    with pytest.raises(IdError, match=rf"seeds must lie in \[0, 70\), got {bad}"):
        pending.finish()
    got = plan.sample(make_seeds([3, 5], device), KEY)

    assert_equal(got, expect_batch(graph, [3, 5], recipe))
    assert plan.num_captures == 1


@ON_GPU_PLANS
def test_seed_of_an_empty_graph_is_refused(device):
    plan = open_plan(place(GRAPHS["empty"], device), Recipe((3,)))

    with pytest.raises(IdError, match=r"seeds must lie in \[0, 0\), got 4"):
        plan.sample(make_seeds([4], device), KEY)


@ON_GPU_PLANS
def test_two_batches_are_on_their_way_and_a_third_finishes_the_first(device):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    plan = open_plan(place(graph, device), recipe)
    first = plan.submit(make_seeds([1, 2, 3], device), 1)
    second = plan.submit(make_seeds([4], device), 2)
    unfinished = [first._result, second._result]

    third = plan.submit(make_seeds([60, 4, 60], device), 3)

    assert unfinished == [None, None]
    assert first._result is not None
    assert second._result is None
    assert_equal(third.finish(), expect_batch(graph, [60, 4, 60], recipe, 3))
    assert_equal(second.finish(), expect_batch(graph, [4], recipe, 2))
    assert_equal(first.finish(), expect_batch(graph, [1, 2, 3], recipe, 1))
    assert first.finish() is first.finish()
    assert len(plan._slots) == 2


@ON_GPU_PLANS
def test_batch_that_does_not_fit_leaves_the_one_behind_it_alone(device, monkeypatch):
    monkeypatch.setattr(uniform_plan, "_WORST_CASE_EDGES", 0)
    monkeypatch.setattr(uniform_plan, "_FIRST_EDGES", 1)
    graph, recipe = GRAPHS["random"], Recipe((5, 3))
    plan = open_plan(place(graph, device), recipe)
    large = list(range(0, 70, 4))
    first = plan.submit(make_seeds(large, device), 1)

    second = plan.submit(make_seeds([7], device), 2)

    assert_equal(first.finish(), expect_batch(graph, large, recipe, 1))
    assert_equal(second.finish(), expect_batch(graph, [7], recipe, 2))


@ON_GPU_PLANS
@pytest.mark.parametrize(("module", "name"), [(uniform_plan, "TABLE_SHARE"), (uniform_plan, "_SCAN_NODES"),
                                              (uniform_plan, "_FEW_WORDS"), (kernels, "_DENSE")])  # fmt: skip
def test_forms_for_many_nodes_give_the_same_batches(device, module, name, monkeypatch):
    # A ranked bitmap instead of a table, flags of touched groups, four words a thread, a thread for every bit.
    monkeypatch.setattr(module, name, 0)
    graph, recipe = make_random_graph(3000, 9000), Recipe((4, 3), expand_all=True)
    plan = open_plan(place(graph, device), recipe)
    seeds = [2999, 5, 5, 1500, 0]

    got = [plan.sample(make_seeds(seeds, device), key) for key in (1, 2)]

    assert_equal(got[0], expect_batch(graph, seeds, recipe, 1))
    assert_equal(got[1], expect_batch(graph, seeds, recipe, 2))


@ON_GPU_PLANS
def test_plans_of_one_topology_share_scratch_and_take_turns(device):
    graph, recipes = GRAPHS["random"], [Recipe((3, 2)), Recipe((-1,), expand_all=True)]
    topology = place(graph, device)
    one, other = (open_plan(topology, recipe) for recipe in recipes)

    first = one.submit(make_seeds([1, 2], device), 1)
    second = other.submit(make_seeds([3], device), 2)
    third = one.submit(make_seeds([4], device), 3)

    assert one._scratch is other._scratch
    assert_equal(third.finish(), expect_batch(graph, [4], recipes[0], 3))
    assert_equal(second.finish(), expect_batch(graph, [3], recipes[1], 2))
    assert_equal(first.finish(), expect_batch(graph, [1, 2], recipes[0], 1))


@ON_GPU_PLANS
def test_equal_recipes_over_one_topology_share_a_plan(device):
    topology = place(GRAPHS["random"], device)

    plan = open_plan(topology, Recipe((3, 2)))

    assert open_plan(topology, Recipe((3, 2))) is plan
    assert open_plan(topology, Recipe((3, 2), replace=True)) is not plan
    assert open_plan(place(GRAPHS["random"], device), Recipe((3, 2))) is not plan


@pytest.mark.gpu
def test_plan_used_longest_ago_gives_its_buffers_back(monkeypatch):
    graph = GRAPHS["random"]
    topology = place(graph, "cuda")
    old, new = open_plan(topology, Recipe((3,))), open_plan(topology, Recipe((2,)))
    old.sample(torch.tensor([1]), 1)
    busy = open_plan(topology, Recipe((1,)))
    pending = busy.submit(torch.tensor([5]), 1)
    monkeypatch.setattr(captured_plan, "_SHARE", 0)

    new.sample(torch.tensor([2]), 1)

    assert (old.num_bytes, busy.num_bytes > 0, new.num_bytes > 0) == (0, True, True)
    assert_equal(old.sample(torch.tensor([1]), 2), expect_batch(graph, [1], old.recipe, 2))
    assert_equal(pending.finish(), expect_batch(graph, [5], busy.recipe, 1))


@pytest.mark.gpu
def test_memory_for_one_batch_only_samples_them_one_by_one(monkeypatch):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    plan = open_plan(place(graph, "cuda"), recipe)
    first = plan.submit(torch.tensor([1, 2]), 1)

    class NoSlot(uniform_plan.Slot):
        def __init__(self, *_args):
            raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(uniform_plan, "Slot", NoSlot)
    with pytest.warns(PlacementWarning, match="one by one"):
        second = plan.submit(torch.tensor([3]), 2)

    assert_equal(first.finish(), expect_batch(graph, [1, 2], recipe, 1))
    assert_equal(second.finish(), expect_batch(graph, [3], recipe, 2))


@ON_GPU_PLANS
def test_batch_beyond_all_limits_is_refused_and_the_plan_stays_usable(device, monkeypatch):
    graph, recipe = GRAPHS["random"], Recipe((3,))
    plan = open_plan(place(graph, device), recipe)
    plan.sample(make_seeds([1], device), KEY)
    monkeypatch.setattr(uniform_plan, "_MAX_EDGES", 8)

    with pytest.raises(MemoryLimitError, match=r"fewer than 8 edges, and 3 seeds with fanouts \[3\] need 9"):
        plan.sample(make_seeds([1, 2, 3], device), KEY)
    got = plan.sample(make_seeds([1], device), KEY)

    assert_equal(got, expect_batch(graph, [1], recipe))


@pytest.mark.gpu
@pytest.mark.parametrize("seeds_at", ["cpu", "cuda"])
@pytest.mark.parametrize("cache", [None, "30%", "100%"])
@pytest.mark.parametrize("placement", ["cuda", "unified", "pinned"])
def test_batch_does_not_depend_on_placement(placement, cache, seeds_at):
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes).place(placement, "cuda", topology_cache=cache)
    plan = open_plan(topology, recipe)
    seeds = make_seeds([1, 2, 3], seeds_at)

    got = plan.sample(seeds, KEY)

    assert topology.placement == placement
    assert (topology.cached is not None) == (cache is not None and placement != "cuda")
    assert_equal(got, expect_batch(graph, [1, 2, 3], recipe))


@pytest.mark.gpu
def test_equal_keys_replay_to_equal_bytes():
    graph = make_random_graph(2000, 40_000)
    plan = open_plan(place(graph, "cuda"), Recipe((10, 5, 5)))
    seeds = torch.arange(0, 2000, 3, device="cuda")
    batches = [plan.sample(seeds, key) for key in (1, 2, 1)]

    first, other, again = ([batch.n_id, batch.edge_index, batch.e_id] for batch in batches)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], other[2])


@pytest.mark.gpu
def test_batch_is_sampled_on_the_current_stream():
    graph, recipe = GRAPHS["random"], Recipe((3, 2))
    plan = open_plan(place(graph, "cuda"), recipe)
    stream = torch.cuda.Stream()

    with torch.cuda.stream(stream):
        # Seeds that are late show a plan that does not wait for them.
        torch.cuda._sleep(10**7)
        seeds = make_seeds([0, 0, 0], "cuda").add_(torch.tensor([8, 9, 8], device="cuda"))
        got = plan.sample(seeds, KEY)
    stream.synchronize()

    assert_equal(got, expect_batch(graph, [8, 9, 8], recipe))


@pytest.mark.gpu
def test_plan_that_is_gone_writes_nowhere():
    graph = make_random_graph(2000, 40_000)
    plan = open_plan(place(graph, "cuda"), Recipe((10, 5)))
    plan.sample(torch.arange(100), KEY)
    size = plan._slots[0].outbox.numel()

    with torch.cuda.stream(torch.cuda.Stream()):
        # The batch is still to come when its plan is dropped.
        torch.cuda._sleep(10**8)
        plan.submit(torch.arange(100), KEY)
    del plan
    gc.collect()
    others = [torch.full((size,), 7, dtype=torch.int64, pin_memory=True) for _ in range(4)]
    torch.cuda.synchronize()

    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("seeds_at", ["cpu", "cuda"])
def test_batch_waits_for_the_gpu_once(seeds_at, monkeypatch):
    plan = open_plan(place(make_random_graph(2000, 40_000), "cuda"), Recipe((10, 5)))
    seeds = make_seeds(range(100), seeds_at)
    plan.sample(seeds, KEY)
    waits = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(event), wait(event)))

    # torch raises on every other wait of its own.
    with waits_refused():
        plan.sample(seeds, KEY + 1)

    assert len(waits) == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_positions_beyond_31_bits_are_real_edges():
    # 2**31 + 2**20 edges of 2**21 + 2**10 nodes, 1024 each: 9 GB.
    degree, num_nodes = 1024, 2**21 + 2**10
    indices = torch.empty(num_nodes * degree, dtype=torch.int32, device="cuda").random_(num_nodes)
    topology = CSRTopo(indptr=torch.arange(num_nodes + 1, device="cuda") * degree, indices=indices)
    seeds = torch.arange(num_nodes - 50, num_nodes)

    batch = open_plan(topology.place("cuda", "cuda"), Recipe((10, 5))).sample(seeds.cuda(), KEY)

    assert int(batch.e_id.max()) >= 2**31
    assert torch.equal(indices[batch.e_id].long(), batch.n_id[batch.edge_index[0]])
    assert torch.equal(batch.e_id // degree, batch.n_id[batch.edge_index[1]])

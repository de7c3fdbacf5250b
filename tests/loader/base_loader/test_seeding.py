"""Without a seed, loaders and samplers follow torch's generator, and draw from it as often as torch's loaders do."""

import copy
import itertools
import json
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    CSRTopo,
    DataLoader as SmallGraphLoader,
    GraphSageSampler,
    HGTLoader,
    LinkNeighborLoader,
    MixedGraphSageSampler,
    NeighborLoader,
    NodeLoader,
    Producers,
    RandomNegativeSampler,
    RandomNodeLoader,
    SampleJob,
    ShaDowKHopSampler,
    SubGraphLoader,
)
from pyg_direct.errors import ArgumentError
from pyg_direct.loader import NeighborSampler as LayerLoader
from pyg_direct.sampler import HGTSampler, NeighborSampler
from tests.batches import make_data
from tests.hetero_data import make_hetero
from tests.loader.data_loader.small_graphs import make_molecules

DATA, TYPED = make_data(), make_hetero()
CLUSTERS = ClusterData(DATA, 12, log=False)
TOPO, KIND = CSRTopo(DATA.edge_index), TYPED.node_types[0]
GRAPHS = make_molecules(70)
SHUFFLED = {"batch_size": 16, "shuffle": True}
LOADERS = {
    "plain": lambda **options: NeighborLoader(DATA, [3, 2], **options),
    "alone": lambda **options: NeighborLoader(DATA, [3, 2], prefetch=0, super_batch=3, **options),
    "ahead": lambda **options: NeighborLoader(DATA, [3, 2], prefetch=3, super_batch=2, **options),
    "trees": lambda **options: NeighborLoader(DATA, [3, 2], disjoint=True, **options),
    "types": lambda **options: NeighborLoader(TYPED, [3, 2], KIND, **options),
    "groups": lambda **options: NeighborLoader(TYPED, [3, 2], KIND, super_batch=3, **options),
    "links": lambda **options: LinkNeighborLoader(DATA, [3, 2], neg_sampling="binary",
                                                  **{**options, "batch_size": 200}),
    "own sampler": lambda **options: NodeLoader(DATA, NeighborSampler(DATA, [3, 2], device=options["device"]),
                                                **options),
    "subgraphs": lambda **options: SubGraphLoader(DATA, None, [3], **options),
    "hgt": lambda **options: HGTLoader(TYPED, [9, 9], KIND, **options),
    "shadow": lambda **options: ShaDowKHopSampler(DATA, 2, 3, **options),
    "clusters": lambda **options: ClusterLoader(CLUSTERS, **{**options, "batch_size": 2}),
    "parts": lambda device, shuffle=True, batch_size=16, **options: RandomNodeLoader(DATA, 5, shuffle=shuffle,
                                                                                     device=device, **options),
    "layers": lambda **options: LayerLoader(DATA.edge_index, [3, 2], **options),
    "graphs": lambda **options: SmallGraphLoader(GRAPHS, **options),
    "mixed": lambda **options: MixedGraphSageSampler(
        Job(), 2, TOPO, [3, 2], mode="CPU_ONLY" if options["device"].type == "cpu" else "GPU_ONLY"),
}  # fmt: skip
SEEDS = torch.arange(9)
SAMPLERS = {
    "nodes": lambda device: (NeighborSampler(DATA, [3, 2], device=device).sample_from_nodes,
                             NodeSamplerInput(None, SEEDS)),
    "hgt": lambda device: (HGTSampler(TYPED, [9, 9], device=device).sample_from_nodes,
                           NodeSamplerInput(None, SEEDS, None, KIND)),
    "sage": lambda device: (GraphSageSampler(TOPO, [3, 2], device).sample, SEEDS),
    "one hop": lambda device: (GraphSageSampler(TOPO, [3], device).sample_layer, SEEDS, 3),
    "negatives": lambda device: (RandomNegativeSampler(TOPO, device=device).sample, 20),
    "loader": lambda device: (NeighborLoader(DATA, [3, 2], device=device), SEEDS),
    "links": lambda device: (LinkNeighborLoader(DATA, [3], device=device), SEEDS),
    "layers": lambda device: (LayerLoader(DATA.edge_index, [3, 2], device=device).sample, SEEDS),
}  # fmt: skip


class Job(SampleJob):
    def __getitem__(self, index):
        return torch.arange(index, 20 + index)

    def __len__(self):
        return 4


def describe(batches):
    return [str(batch if isinstance(batch, tuple) else batch.to_dict()) for batch in batches]


def make_loader(device="cpu", **options):
    return NeighborLoader(DATA, [3, 2], **{**SHUFFLED, "device": device, **options})


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_repeats_with_the_program_s_seed(real_device, name):
    loader, epochs = LOADERS[name](device=real_device, **SHUFFLED), []

    for seed in (1, 1, None, 2):
        if seed is not None:
            torch.manual_seed(seed)
        epochs.append(describe(loader))

    assert epochs[0] == epochs[1]
    assert len(set(map(str, epochs))) == 3


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_call_repeats_with_the_program_s_seed(real_device, name):
    call, *arguments = SAMPLERS[name](real_device)

    torch.manual_seed(1)
    first = [str(call(*arguments)), str(call(*arguments))]
    torch.manual_seed(1)
    again = [str(call(*arguments)), str(call(*arguments))]

    assert first == again
    assert first[0] != first[1]


@pytest.mark.parametrize("name", LOADERS)
def test_nothing_is_drawn_before_an_epoch(name):
    before = torch.get_rng_state()

    loader = LOADERS[name](device=torch.device("cpu"), **SHUFFLED)
    len(loader)
    if name != "mixed":
        loader.load_state_dict(loader.state_dict())
        copy.copy(loader)

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_drawn_as_a_sampler_is_made(name):
    before = torch.get_rng_state()

    SAMPLERS[name](torch.device("cpu"))

    assert torch.equal(torch.get_rng_state(), before)


class Eager:
    """A sampler that draws as it is asked for an iterator."""

    def __iter__(self):
        return iter(torch.randperm(70).split(16))


ORDERS = {
    "in order": lambda: {"batch_size": 16},
    "shuffled": lambda: SHUFFLED,
    "replacement": lambda: {"batch_size": 16, "sampler": RandomSampler(range(70), True, 50)},
    "subset": lambda: {"batch_size": 16, "sampler": SubsetRandomSampler(range(50))},
    "weights": lambda: {"batch_size": 16, "sampler": WeightedRandomSampler([0.5] * 70, 40)},
    "batches": lambda: {"batch_sampler": Eager()},
    "generator": lambda: {**SHUFFLED, "generator": torch.Generator().manual_seed(3)},
    "generator, in order": lambda: {"batch_size": 16, "generator": torch.Generator().manual_seed(3)},
}


@pytest.mark.parametrize("name", ORDERS)
def test_as_many_numbers_are_drawn_as_by_torch_s_loader(real_device, name):
    ours, theirs = ORDERS[name](), ORDERS[name]()
    loader = NeighborLoader(DATA, [3, 2], device=real_device, **ours)
    other = DataLoader(range(70), collate_fn=list, **theirs)

    torch.manual_seed(5)
    orders = [[batch.input_id.tolist() for batch in loader] for _ in range(2)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    expected = [[list(map(int, batch)) for batch in other] for _ in range(2)]

    assert torch.equal(after, torch.get_rng_state())
    if name != "shuffled":
        assert orders == expected
    if "generator" in ours:
        assert torch.equal(ours["generator"].get_state(), theirs["generator"].get_state())


def test_a_generator_of_the_user_is_what_an_epoch_follows(real_device):
    def run(seed):
        return describe(make_loader(real_device, generator=torch.Generator().manual_seed(seed), shuffle=False))

    torch.manual_seed(1)
    first = run(3)
    torch.manual_seed(2)

    assert first == run(3) != run(4)


def test_numbers_that_are_forked_off_are_none_of_the_program_s():
    loader = make_loader()
    torch.manual_seed(1)
    expected = torch.rand(3)

    torch.manual_seed(1)
    with torch.random.fork_rng([]):
        first = describe(loader)

    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(1)
    assert describe(loader) == first


@pytest.mark.parametrize("make_other", [lambda loader: loader, lambda loader: make_loader()])
def test_loaders_that_are_iterated_at_once_make_their_own_batches(make_other):
    loader = make_loader()
    torch.manual_seed(1)
    expected = [describe(loader), describe(loader)]

    torch.manual_seed(1)
    pairs = list(zip(loader, make_other(loader), strict=True))

    assert [describe(batches) for batches in zip(*pairs, strict=True)] == expected


@pytest.mark.parametrize("name", ["plain", "types", "links", "layers", "hgt"])
def test_a_seed_leaves_torch_s_generator_alone(real_device, name):
    loader = LOADERS[name](device=real_device, seed=3, **SHUFFLED)
    before = torch.get_rng_state()

    epochs = [describe(loader), describe(loader)]

    assert torch.equal(torch.get_rng_state(), before)
    assert epochs[0] != epochs[1]


class ForeignSampler(BaseSampler):
    """A program's own sampler, which notes the threads that call it."""

    sample_from_edges = None

    def __init__(self, draw):
        self.draw, self.threads = draw, []

    def sample_from_nodes(self, index):
        self.threads.append(threading.current_thread())
        self.draw()
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(index.node, none, none, none, metadata=(index.input_id, None))


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand, lambda: None],
                         ids=["torch", "Python", "NumPy", "nothing"])  # fmt: skip
def test_a_sampler_of_the_program_that_draws_does_so_in_the_program_s_thread(draw):
    sampler = ForeignSampler(draw)

    batches = list(NodeLoader(DATA, sampler, batch_size=16, device="cpu"))

    assert len(batches) == len(sampler.threads) == 5
    assert [thread is threading.current_thread() for thread in sampler.threads] == [True, *[draw() is not None] * 4]


class TestStates:
    """An epoch goes on where a state was taken; the next ones follow torch's generator."""

    @pytest.mark.parametrize("batch", [0, 2])
    def test_an_epoch_goes_on(self, real_device, batch):
        torch.manual_seed(1)
        loader = make_loader(real_device)
        expected = [describe(loader), describe(loader)]
        torch.manual_seed(1)
        loader = make_loader(real_device)
        list(itertools.islice(iter(loader), batch))
        state, numbers = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()

        torch.manual_seed(9)
        other = make_loader(real_device, seed=4)
        other.load_state_dict(state)
        torch.set_rng_state(numbers)

        assert other.state_dict() == state
        assert describe(other) == expected[0][batch:]
        assert describe(other) == expected[1]

    def test_between_epochs_the_generator_says_how_it_goes_on(self):
        loader = make_loader()
        list(loader)
        state = loader.state_dict()
        torch.manual_seed(1)
        expected = describe(loader)

        other = make_loader()
        other.load_state_dict(state)
        torch.manual_seed(1)

        assert (state["seed"], state["epoch"], state["batch"], state["drawn"]) == (None, 1, 0, None)
        assert describe(other) == expected

    def test_a_sampler_of_the_user_draws_its_order_again(self):
        def make():
            return make_loader(shuffle=None, sampler=SubsetRandomSampler(range(50)))

        torch.manual_seed(1)
        loader = make()
        expected = describe(loader)
        torch.manual_seed(1)
        next(iter(loader))
        other = make()
        other.load_state_dict(loader.state_dict())

        torch.manual_seed(1)
        assert describe(other) == expected[1:]

    def test_a_loader_with_a_seed_takes_a_state_without(self):
        loader, other = make_loader(seed=3), make_loader()
        torch.manual_seed(1)
        expected = [describe(other), describe(other)]
        torch.manual_seed(1)
        next(iter(other))

        loader.load_state_dict(other.state_dict())

        assert [describe(loader), describe(loader)] == [expected[0][1:], expected[1]]

    @pytest.mark.parametrize("state", [{"batch": 2}, {"batch": 2, "drawn": None}, {"drawn": -1}, {"drawn": "1"}])
    def test_what_is_none_is_named(self, state):
        with pytest.raises(ArgumentError, match="state must hold 'drawn' as an integer"):
            make_loader().load_state_dict({"seed": None, "epoch": 0, "batch": 0, **state})


def draw_a_row(batch):
    """A transform with numbers of three libraries."""
    batch.drawn = [torch.rand(2).tolist(), random.random(), float(np.random.rand())]
    return batch


@pytest.mark.slow
def test_producers_repeat_an_epoch_and_what_a_transform_draws(quick_starts):
    loader = make_loader(shuffle=None, sampler=SubsetRandomSampler(range(50)))
    torch.manual_seed(1)
    expected, numbers = describe(loader), torch.get_rng_state()
    loader.transform = draw_a_row
    producers, epochs, states = Producers(loader, ["cpu", "cpu"], device="cpu"), [], []

    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        epochs.append(list(producers))
        states.append(torch.get_rng_state())
        # Left early, with batches under way.
        next(iter(producers))
    producers.close()

    first, again, other = map(describe, epochs)
    assert first == again != other
    assert torch.equal(states[0], numbers)
    for batch in epochs[0]:
        del batch.drawn
    assert describe(epochs[0]) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_workers_make_the_batches_and_take_the_numbers_of_one_process():
    torch.manual_seed(1)
    expected, numbers = describe(make_loader()), torch.get_rng_state()

    torch.manual_seed(1)
    got = describe(make_loader(num_workers=1, multiprocessing_context="spawn"))

    assert got == expected
    assert torch.equal(torch.get_rng_state(), numbers)

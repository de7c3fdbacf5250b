"""Epochs: which graphs come in which batch, with samplers and seeds, as PyG's loader has them."""

import pickle
import warnings
from itertools import islice

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as PygDataLoader, DynamicBatchSampler, ImbalancedSampler

from pyg_direct.errors import ArgumentError, IdError, LoaderWarning
from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal_batches, make_molecules

GRAPHS = make_molecules(23, y=lambda i, n, e: torch.tensor([i]))
LABELED = make_molecules(23, y=lambda i, n, e: torch.tensor([int(i % 5 == 0)]))
KINDS = {"list": lambda: GRAPHS, "memory": lambda: InMemory(GRAPHS)}


def order_of(loader):
    return [batch.y.tolist() for batch in loader]


def assert_equal_epochs(dataset, num_epochs=2, **options):
    """Equal batches of the same draws, which leave torch's generator alike."""
    ours, theirs = DataLoader(dataset, device="cpu", **options), PygDataLoader(dataset, **options)
    for _ in range(num_epochs):
        state = torch.get_rng_state()
        # Not every loader has a length.
        got = list(islice(ours, None))
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        expected = list(islice(theirs, None))
        assert torch.equal(torch.get_rng_state(), after)
        for own, other in zip(got, expected, strict=True):
            assert_equal_batches(own, other)


@pytest.mark.parametrize("prefetch", [None, 0, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_graphs_come_in_the_order_of_torch(kind, drop_last, prefetch):
    torch.manual_seed(5)
    dataset, options = KINDS[kind](), {"batch_size": 4, "shuffle": True, "drop_last": drop_last}
    ours, theirs = DataLoader(dataset, device="cpu", prefetch=prefetch, **options), PygDataLoader(dataset, **options)

    torch.manual_seed(5)
    got = [order_of(ours), order_of(ours), torch.rand(1).item()]
    torch.manual_seed(5)
    expected = [order_of(theirs), order_of(theirs), torch.rand(1).item()]

    assert got == expected
    assert len(ours) == len(theirs) == len(got[0])


SAMPLERS = {
    "sequential": lambda data: {"sampler": SequentialSampler(data)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=31)},
    "part": lambda data: {"sampler": SubsetRandomSampler(range(3, 14))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0] * 20 + [9.0] * 3, 17)},
    "imbalanced": lambda data: {"sampler": ImbalancedSampler(data)},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 2, 1, shuffle=True, seed=3)},
    "list": lambda data: {"sampler": [4, 4, 2, 19]},
    "tensors": lambda data: {"sampler": torch.tensor([4, 4, 2, 19])},
    "batches": lambda data: {"batch_sampler": [[1, 2], [0], [22, 3, 3]]},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, True)},
    "dynamic by nodes": lambda data: {"batch_sampler": DynamicBatchSampler(data, 20, shuffle=True)},
    "dynamic by edges": lambda data: {"batch_sampler": DynamicBatchSampler(data, 30, "edge", num_steps=3)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_choose_the_graphs(name, kind):
    torch.manual_seed(1)
    dataset = LABELED if kind == "list" else InMemory(LABELED)
    options = SAMPLERS[name](dataset)

    assert_equal_epochs(dataset, **options, **({} if "batch_sampler" in options else {"batch_size": 3}))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_generator_draws_what_it_draws_for_pyg(shuffle):
    options = {"batch_size": 4, "shuffle": shuffle}
    ours = DataLoader(GRAPHS, device="cpu", generator=torch.Generator().manual_seed(3), **options)
    theirs = PygDataLoader(GRAPHS, generator=torch.Generator().manual_seed(3), **options)

    for _ in range(3):
        assert order_of(ours) == order_of(theirs)
    assert torch.equal(ours.generator.get_state(), theirs.generator.get_state())


def test_an_empty_batch_and_a_graph_that_is_none_are_errors_as_in_pyg():
    for positions in ([[0, 1], []], [[0, 23]]):
        with pytest.raises(IndexError):
            list(PygDataLoader(GRAPHS, batch_sampler=positions))
        with pytest.raises(IdError):
            list(DataLoader(GRAPHS, device="cpu", batch_sampler=positions))


@pytest.mark.parametrize("dataset", [[], InMemory(GRAPHS)[[]]], ids=["list", "memory"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_empty_data_set_has_no_batches(dataset, shuffle):
    loader = DataLoader(dataset, 4, shuffle, device="cpu")

    assert list(loader) == []
    assert len(loader) == 0


class TestSeeds:
    def make(self, **options):
        return DataLoader(GRAPHS, **{"batch_size": 4, "shuffle": True, "seed": 7, "device": "cpu", **options})

    def test_the_order_follows_from_seed_and_epoch(self):
        loader = self.make()
        epochs = [order_of(loader) for _ in range(3)]

        again = self.make()

        assert [order_of(again) for _ in range(3)] == epochs
        assert epochs[0] != epochs[1]
        assert order_of(self.make(seed=8)) != epochs[0]
        assert sorted(number for batch in epochs[2] for number in batch) == list(range(23))

    def test_nothing_is_drawn_from_torch(self):
        state = torch.get_rng_state()

        list(self.make())

        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("seed", [7, None])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_an_epoch_is_resumed(self, seed, prefetch):
        torch.manual_seed(2)
        loader = self.make(seed=seed, prefetch=prefetch)
        order_of(loader)
        running = iter(loader)
        first = [next(running).y.tolist() for _ in range(2)]
        state = loader.state_dict()
        rest = [batch.y.tolist() for batch in running]

        other = self.make(seed=seed, prefetch=prefetch)
        other.load_state_dict(pickle.loads(pickle.dumps(state)))

        assert order_of(other) == rest
        assert len(first) + len(rest) == 6

    def test_processes_share_the_batches(self):
        whole = order_of(self.make())

        parts = [order_of(self.make(ranks=(rank, 2))) for rank in range(2)]

        assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole

    def test_a_sent_loader_makes_the_same_batches(self):
        loader = self.make()
        sent = pickle.loads(pickle.dumps(loader))

        assert order_of(sent) == order_of(loader)


def test_workers_have_no_use_and_that_is_said():
    with pytest.warns(LoaderWarning, match="num_workers=2.*not needed"):
        loader = DataLoader(GRAPHS, 4, num_workers=2, persistent_workers=True, worker_init_fn=print, pin_memory=True,
                            device="cpu")  # fmt: skip

    assert order_of(loader) == order_of(PygDataLoader(GRAPHS, 4))


def test_collate_fn_is_pygs_as_in_pyg():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoaderWarning)
        loader = DataLoader(GRAPHS, 4, collate_fn=list, device="cpu")

    assert_equal_batches(next(iter(loader)), loader.collate_fn(GRAPHS[:4]))
    assert loader.dataset is GRAPHS


def test_a_class_with_a_collation_of_its_own_is_refused():
    class Mine(DataLoader):
        def collate_fn(self, graphs):
            return graphs

    with pytest.raises(NotImplementedError, match=r"collate_fn of .*Mine"):
        Mine(GRAPHS, 4, device="cpu")


@pytest.mark.parametrize(("options", "words"), [
    ({"batch_size": 0}, "batch_size"), ({"shuffle": "yes"}, "shuffle must be"),
    ({"follow_batch": "x"}, "follow_batch must"), ({"follow_batch": 1}, "follow_batch must"),
    ({"exclude_keys": [1]}, "exclude_keys must"), ({"placement": "disk"}, "placement must"),
    ({"prefetch": -1}, "prefetch must"), ({"seed": "a"}, "seed must"), ({"batchsize": 3}, "no option batchsize"),
    ({"uneven": "drop"}, "needs ranks"), ({"num_workers": -1}, "num_workers must")])  # fmt: skip
def test_options_that_make_no_sense_are_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        DataLoader(GRAPHS, device="cpu", **options)


def test_samplers_of_the_program_need_one_process():
    loader = DataLoader(GRAPHS, 4, sampler=[1, 2], ranks=(0, 2), seed=1, device="cpu")

    with pytest.raises(ArgumentError, match="ranks needs"):
        iter(loader)


def test_a_loader_says_where_its_graphs_are():
    loader = DataLoader(GRAPHS, 4, device="cpu")

    list(loader)

    assert loader.report().places[0].startswith("graphs: 23, ")
    assert repr(loader).startswith("DataLoader(23 graphs, batch_size=4, 6 batches, cpu; graphs ")


def test_times_of_batches_are_recorded():
    loader = DataLoader(GRAPHS, 4, device="cpu")
    loader.record()

    list(loader)

    assert loader.report().num_batches == 6


def test_one_graph_may_be_a_tuple_of_graphs():
    loader = DataLoader(tuple(GRAPHS), 4, device="cpu")

    assert order_of(loader) == order_of(DataLoader(GRAPHS, 4, device="cpu"))
    assert isinstance(GRAPHS[0], Data)

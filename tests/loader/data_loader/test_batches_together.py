"""Batches that a GPU makes together equal PyG's, one by one; a program cannot see that they come ahead."""

import copy
import pickle
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader as PygDataLoader, DynamicBatchSampler, ImbalancedSampler

from pyg_direct.errors import IdError, LoaderWarning
from pyg_direct.loader import DataLoader
from pyg_direct.loader.collate import graph_batches
from pyg_direct.loader.collate.graph_batches import BatchesTogether, GraphCollection
from pyg_direct.ops.rows import graph_rows
from tests import cuda_on_cpu
from tests.loader.data_loader.small_graphs import InMemory, assert_equal_batches, make_molecules, make_pairs, make_typed

GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *GPU])
def device(request, monkeypatch):
    """Device of the batches; on a CPU the kernel runs too."""
    if request.param == "cpu":
        library = request.getfixturevalue("narrow_library")
        monkeypatch.setattr(graph_batches, "_TOGETHER_ON", ("cpu",))
        monkeypatch.setattr(graph_rows, "grid_for", lambda *args: 1)
        monkeypatch.setattr(graph_rows, "run_gpu", lambda kernel, grid, *args: cuda_on_cpu.run(library, kernel, args))
    return request.param


@pytest.fixture
def groups(monkeypatch):
    """Numbers of batches that were made together."""
    made, make = [], BatchesTogether.make

    def count(self, *args):
        ready = make(self, *args)
        made.append(len(ready))
        return ready

    monkeypatch.setattr(BatchesTogether, "make", count)
    return made


def make_in_two_orders(count):
    """Each second graph has its attributes in another order."""
    graphs = make_molecules(count)
    return [Data(**dict(reversed(list(graph.to_dict().items())))) if i % 2 else graph for i, graph in enumerate(graphs)]


def make_steps(count):
    """Increments by numbers of each graph and line, and by none."""

    class Stepping(Data):
        def __inc__(self, key, value, *args, **kwargs):
            return {"index_a": 3, "index_b": torch.tensor([[1], [self.num_nodes]]), "edge_index": 0}.get(key, 0)

    return [Stepping(x=torch.rand(1 + i % 3, 2), index_a=torch.arange(i % 4), edge_index=torch.zeros(2, 3, dtype=int),
                     index_b=torch.arange(2 * (i % 5)).view(2, -1)) for i in range(count)]  # fmt: skip


GRAPHS = {
    "molecules": lambda: make_molecules(23),
    "named": lambda: make_molecules(23, name=lambda i, n, e: str(i), size=lambda i, n, e: i, pos=lambda i, n, e:
                                    torch.rand(n, 3), mask=lambda i, n, e: torch.rand(n) > 0.5),
    "counted": lambda: [Data(edge_index=torch.zeros(2, i % 3, dtype=torch.long), num_nodes=2 + i % 2) for i in
                        range(23)],
    "pairs": lambda: make_pairs(23),
    "orders": lambda: make_in_two_orders(23),
    "steps": lambda: make_steps(23),
    "typed": lambda: make_typed(23),
}  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("form", [list, InMemory])
@pytest.mark.parametrize("name", GRAPHS)
def test_batches_are_pygs(device, name, form, batch_size, groups):
    graphs = form(GRAPHS[name]())
    options = {"batch_size": batch_size, "shuffle": True, "follow_batch": ["x", "edge_index", "y", "whole"]}
    loader = DataLoader(graphs, device=device, prefetch=1, **options)

    torch.manual_seed(3)
    got = [list(loader), list(loader)]

    torch.manual_seed(3)
    theirs = PygDataLoader(graphs, **options)
    for epoch in got:
        for own, expected in zip(epoch, theirs, strict=True):
            assert_equal_batches(own, expected.to(device))
    if name != "typed":
        assert groups == 2 * ([1, 4, 16, 2] if batch_size == 1 else [1, 4, 1])


def test_typed_graphs_are_made_together(device, groups):
    graphs = make_typed(9)
    for graph in graphs:
        del graph["paper", "cites", "paper"]

    got = list(DataLoader(graphs, 2, device=device, prefetch=1, follow_batch=["id"]))

    for own, expected in zip(got, PygDataLoader(graphs, 2, follow_batch=["id"]), strict=True):
        assert_equal_batches(own, expected.to(device))
    assert groups == [1, 4]


def test_prefetch_of_none_makes_each_batch_when_it_is_asked_for(device, groups):
    loader = DataLoader(make_molecules(9), 2, device=device, prefetch=0)

    assert len(list(loader)) == 5
    assert groups == []


def test_batches_are_functions_of_seed_epoch_and_number(device):
    graphs = make_molecules(23)

    def list_epochs(**more):
        loader = DataLoader(graphs, 2, shuffle=True, seed=5, device=device, **more)
        return [batch.cpu() for _ in range(2) for batch in loader]

    for own, alone in zip(list_epochs(prefetch=1), list_epochs(prefetch=0), strict=True):
        assert_equal_batches(own, alone)


def test_an_epoch_continues_where_it_was_left(device):
    loaders = [DataLoader(make_molecules(23), 2, shuffle=True, seed=5, device=device, prefetch=1) for _ in range(2)]
    first = iter(loaders[0])
    for _ in range(4):
        next(first)

    loaders[1].load_state_dict(loaders[0].state_dict())

    for own, expected in zip(loaders[1], first, strict=True):
        assert_equal_batches(own, expected)
    assert loaders[0].state_dict()["epoch"] == 1


def test_a_write_to_a_batch_reaches_no_other_and_not_the_data_set(device):
    graphs = make_molecules(23)
    kept = copy.deepcopy(graphs)

    for own, expected in zip(DataLoader(graphs, 2, device=device, prefetch=1), PygDataLoader(kept, 2), strict=True):
        assert_equal_batches(own, expected.to(device))
        for value in (*own.to_dict().values(), *own._slice_dict.values(), *own._inc_dict.values()):
            if isinstance(value, torch.Tensor):
                value.fill_(77)

    for graph, before in zip(graphs, kept, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in graph)


def test_attributes_count_writes_alone_and_may_need_a_gradient(device):
    graphs = make_molecules(8, pos=lambda i, n, e: torch.rand(n, 3), weight=lambda i, n, e: torch.rand(e))

    for batch in DataLoader(graphs, 4, device=device, prefetch=1):
        batch.pos.requires_grad_()
        out = (batch.pos * batch.pos).sum() + (batch.weight * batch.pos.sum()).sum()
        # Of the memory of the weights, but no write to them.
        batch.x.add_(1)
        out.backward()
        assert torch.allclose(batch.pos.grad, 2 * batch.pos + batch.weight.sum())


def test_a_batch_that_is_kept_keeps_no_other(device):
    batches = list(DataLoader(make_molecules(20), 2, device=device, prefetch=1))

    held = [{value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in batch.to_dict().values()}
            for batch in batches]  # fmt: skip

    for batch, own in zip(batches, held, strict=True):
        # Attributes begin at multiples of 16 bytes.
        assert sum(own.values()) <= sum(value.nbytes + 15 for value in batch.to_dict().values())
    assert sum(map(len, held)) == len(set().union(*held))
    # Labels of many batches do not keep their edges.
    assert all(batch.y.untyped_storage().nbytes() <= 32 for batch in batches)


def test_batches_are_saved_alone(device):
    batches = list(DataLoader(make_molecules(23), 2, device=device, prefetch=1))

    sizes = [len(pickle.dumps(batch)) for batch in batches]
    alone = [len(pickle.dumps(Batch.from_data_list(batch.to_data_list()))) for batch in batches]

    assert_equal_batches(pickle.loads(pickle.dumps(batches[3])), batches[3])
    assert max(sizes) < 2 * max(alone)


class TestSamplers:
    @pytest.mark.parametrize("name", ["subset", "weighted", "again", "imbalanced", "dynamic", "batches"])
    def test_torchs_are_drawn_from_at_once(self, device, name, groups):
        graphs = make_molecules(23, y=lambda i, n, e: torch.tensor([int(i % 5 == 0)]))
        options = {
            "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler(range(3, 20))},
            "weighted": lambda: {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 23, 20)},
            "again": lambda: {"batch_size": 2, "sampler": RandomSampler(graphs, replacement=True, num_samples=70)},
            "imbalanced": lambda: {"batch_size": 2, "sampler": ImbalancedSampler(graphs)},
            "dynamic": lambda: {"batch_sampler": DynamicBatchSampler(graphs, 20, shuffle=True)},
            "batches": lambda: {"batch_sampler": BatchSampler(SequentialSampler(graphs), 2, drop_last=False)},
        }[name]
        ours = DataLoader(graphs, device=device, prefetch=1, **options())
        state = torch.get_rng_state()

        # The program draws between batches.
        got = [(batch, torch.rand(1)) for batch in ours]

        torch.set_rng_state(state)
        expected = [(batch, torch.rand(1)) for batch in PygDataLoader(graphs, **options())]
        for (own, drawn), (other, number) in zip(got, expected, strict=True):
            assert_equal_batches(own, other.to(device))
            assert torch.equal(drawn, number)
        assert max(groups) > 2

    def test_those_of_a_program_are_not_drawn_from_further_ahead(self, device, groups):
        given = []

        class Sampler:
            def __iter__(self):
                for number in range(12):
                    given.append(number)
                    yield [number]

        ahead = []
        for number, batch in enumerate(DataLoader(make_molecules(12), device=device, batch_sampler=Sampler(),
                                                  prefetch=1), 1):  # fmt: skip
            assert batch.num_graphs == 1
            ahead.append(len(given) - number)

        assert max(ahead) <= 3
        assert groups == []

    def test_nor_are_those_that_draw_from_a_generator_of_the_program(self, device, groups):
        graphs, generator = make_molecules(40), torch.Generator().manual_seed(1)
        sampler = RandomSampler(graphs, replacement=True, num_samples=200, generator=generator)

        assert len(list(DataLoader(graphs, 10, device=device, sampler=sampler, prefetch=1))) == 20
        assert groups == []

    def test_an_error_comes_at_its_batch(self, device):
        """Batches before it are handed over."""
        batches = iter(
            DataLoader(make_molecules(9), 2, device=device, sampler=SequentialSampler(range(11)), prefetch=1)
        )

        got = [next(batches).num_graphs for _ in range(4)]

        assert got == [2] * 4
        with pytest.raises(IdError, match=r"\[0, 9\), got 9"):
            next(batches)
        assert next(batches, None) is None

    def test_an_empty_batch_is_refused_at_its_turn(self, device):
        graphs = make_molecules(9)
        collection = DataLoader(graphs, 2, device=device, prefetch=1)
        next(iter(collection))
        numbers = [torch.tensor([1, 2]), torch.tensor([3]), torch.zeros(0, dtype=torch.int64), torch.tensor([4])]

        made = collection._graphs.collate_group(numbers, 1 << 30)

        assert [batch.num_graphs for batch, _ in made] == [2, 1]
        with pytest.raises(IdError, match="at least one graph"):
            collection._graphs.collate_group(numbers[2:], 1 << 30)


@pytest.mark.parametrize("form", [list, InMemory])
def test_graphs_written_during_an_epoch_are_joined_when_asked_for(device, form):
    graphs = make_molecules(40)
    dataset = form(graphs)
    table = dataset._data.x if form is InMemory else None
    theirs = iter(PygDataLoader(dataset, 2))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, own in enumerate(DataLoader(dataset, 2, device=device, prefetch=1)):
            assert_equal_batches(own, next(theirs).to(device))
            if number == 6:
                for value in [table] if form is InMemory else [graph.x for graph in graphs]:
                    value.add_(1)

    assert len([one for one in told if isinstance(one.message, LoaderWarning)]) == 1


def test_writes_that_torch_does_not_count_are_found_at_the_next_epoch(device):
    dataset = InMemory(make_molecules(23))
    loader = DataLoader(dataset, 4, device=device, prefetch=1)
    list(loader)

    dataset._data.x.numpy()[3] = 99

    for own, expected in zip(loader, PygDataLoader(InMemory([dataset[i] for i in range(23)]), 4), strict=True):
        assert_equal_batches(own, expected.to(device))


def test_times_of_a_group_count_for_its_first_batch(device):
    loader = DataLoader(make_molecules(23), 2, device=device, prefetch=1)
    loader.record()

    batches = list(loader)

    assert len(batches) == 12
    assert loader.tell().num_batches == 12


def test_what_a_kernel_cannot_add_is_made_alone(device, groups):
    """Integers of 32 bits, and nested values."""
    for graphs in (make_typed(9), make_molecules(9, parts=lambda i, n, e: {"a": torch.rand(n)})):
        for own, expected in zip(DataLoader(graphs, 2, device=device, prefetch=1), PygDataLoader(graphs, 2),
                                 strict=True):  # fmt: skip
            assert_equal_batches(own, expected.to(device))
    assert groups == []


def test_tables_that_need_a_gradient_are_joined_by_torch(device, groups):
    graphs = make_molecules(9, pos=lambda i, n, e: torch.rand(n, 3))
    collection = DataLoader(graphs, 2, device=device, prefetch=1)
    list(collection)
    assert groups

    columns = collection._graphs._stores[None].columns
    columns["pos"].table.requires_grad_()

    assert isinstance(collection._graphs, GraphCollection)
    assert not collection._graphs.makes_groups


@pytest.mark.gpu
def test_batches_are_ready_on_another_stream():
    graphs = make_molecules(200)
    batches = iter(DataLoader(graphs, 8, device="cuda", prefetch=1))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]

    got = []
    for number in range(25):
        with torch.cuda.stream(streams[number % 3]):
            got.append(next(batches).x.clone())
    torch.cuda.synchronize()

    for own, expected in zip(got, PygDataLoader(graphs, 8), strict=True):
        assert torch.equal(own.cpu(), expected.x)


@pytest.mark.gpu
def test_memory_is_reused_while_an_epoch_runs():
    graphs = [Data(x=torch.rand(1000, 64), edge_index=torch.zeros(2, 10, dtype=torch.long)) for _ in range(64)]
    loader = DataLoader(graphs, 2, device="cuda", prefetch=1)
    list(loader)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    for _ in range(3):
        for batch in loader:
            batch.x.mul_(2)

    # A group, and the batch before it.
    assert torch.cuda.max_memory_allocated() - before <= 18 * 2 * 1000 * 64 * 4
    assert np.isfinite(batch.x.sum().item())
    assert len(list(islice(loader, 3))) == 3

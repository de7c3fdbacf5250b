"""Stacked graphs: PyG's batches in everything, of lists, data sets in memory and what Python makes."""

import logging
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torch_geometric.data import Data
from torch_geometric.loader import DenseDataLoader as PygDenseDataLoader

from pyg_direct import progress
from pyg_direct.errors import ArgumentError, ArgumentTypeError, IdError, LoaderWarning
from pyg_direct.loader import DenseDataLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal, make_molecules, make_typed

Pair = namedtuple("Pair", ["a", "b"])


def make_dense(count, nodes=5, **more):
    """Graphs as after PyG's transform `ToDense`."""
    generator = torch.Generator().manual_seed(1)
    graphs = []
    for number in range(count):
        graphs.append(Data(x=torch.rand(nodes, 3, generator=generator), y=torch.tensor([number]),
                           adj=torch.rand(nodes, nodes, generator=generator),
                           mask=torch.rand(nodes, generator=generator) > 0.5))  # fmt: skip
        for name, make in more.items():
            graphs[-1][name] = make(number)
    return graphs


class Sided(Data):
    """Joined along its last dimension, and along a new one."""

    def __cat_dim__(self, key, value, *args, **kwargs):
        return {"wide": -1, "whole": None}.get(key, super().__cat_dim__(key, value, *args, **kwargs))


def with_orders(graphs):
    for graph in graphs[::3]:
        values = dict(graph._store._mapping)
        graph._store._mapping.clear()
        for key in reversed(values):
            graph[key] = values[key]
    return graphs


DATA_SETS = {
    "dense": lambda: make_dense(13),
    "one graph": lambda: make_dense(1),
    "scalars": lambda: make_dense(13, z=lambda i: torch.tensor(i / 2), level_index=lambda i: torch.tensor(i)),
    "numbers": lambda: make_dense(13, size=lambda i: i, weight=lambda i: i / 2, num_nodes=lambda i: 5 + i % 2,
                                  is_even=lambda i: i % 2 == 0),
    "strings": lambda: make_dense(13, name=lambda i: f"g{i}"),
    "edges": lambda: make_dense(13, edge_index=lambda i: torch.arange(8).view(2, 4) % (i + 1),
                                face=lambda i: torch.arange(6).view(3, 2) + i),
    "nested": lambda: make_dense(13, parts=lambda i: {"a": torch.ones(2) * i, "b": i}),
    "lists": lambda: make_dense(13, parts=lambda i: [torch.ones(2) * i, torch.ones(3) * i]),
    "no rows": lambda: make_dense(13, none=lambda i: torch.empty(0, 3)),
    "orders": lambda: with_orders(make_dense(13)),
    "sides": lambda: [Sided(x=torch.rand(2, 2), wide=torch.rand(2, 3, 4), whole=torch.rand(3)) for _ in range(9)],
    "gradients": lambda: make_dense(9, w=lambda i: torch.full((2,), i / 2, requires_grad=True)),
    "empty": lambda: [Data() for _ in range(5)],
}  # fmt: skip
LISTS = {
    **DATA_SETS,
    "arrays": lambda: make_dense(9, array=lambda i: np.arange(3) + i, pair=lambda i: Pair(torch.ones(2), i)),
}  # fmt: skip
OPTIONS = [{"batch_size": 4}, {"batch_size": 4, "shuffle": True, "drop_last": True}, {"batch_size": 1},
           {"batch_sampler": [[3, 0, 0], [1]]}]  # fmt: skip


def assert_equal_epochs(dataset, **options):
    """Equal batches of two epochs, which leave torch's generator alike."""
    if "batch_sampler" in options and len(dataset) < 4:
        options = {"batch_size": 2}
    ours, theirs = DenseDataLoader(dataset, device="cpu", **options), PygDenseDataLoader(dataset, **options)
    for _ in range(2):
        torch.manual_seed(3)
        got, after = list(ours), torch.rand(1)
        torch.manual_seed(3)
        expected, then = list(theirs), torch.rand(1)
        assert_equal(got, expected)
        assert torch.equal(after, then)
    assert len(ours) == len(theirs)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shuffled", "alone", "batch sampler"])
@pytest.mark.parametrize("name", LISTS)
def test_batches_of_lists_are_those_of_pyg(name, options):
    assert_equal_epochs(LISTS[name](), **options)


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shuffled", "alone", "batch sampler"])
@pytest.mark.parametrize("name", [name for name in DATA_SETS if name != "empty"])
def test_batches_of_data_sets_in_memory_are_those_of_pyg(name, options):
    assert_equal_epochs(InMemory(DATA_SETS[name]()), **options)


@pytest.mark.parametrize("form", [list, InMemory])
def test_parts_of_a_data_set_need_alone_fit(form):
    graphs = [*make_dense(4, nodes=3), *make_dense(6), *make_dense(3, nodes=4)]
    for graph in graphs:
        # PyG's data sets cannot join it.
        del graph.adj
    dataset = form(graphs)
    part = Subset(dataset, [9, 4, 4, 6])

    assert_equal_epochs(part, batch_size=3)
    if form is InMemory:
        assert_equal_epochs(dataset[10:], batch_size=2)
    with pytest.raises(ArgumentError, match="x of one width"):
        DenseDataLoader(dataset, 2, device="cpu")


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_set_may_be_empty_or_of_one_graph(count, shuffle):
    loader = DenseDataLoader(make_dense(count), 2, shuffle, device="cpu")

    assert [batch.x.shape for batch in loader] == [(1, 5, 3)] * count


def test_tables_of_a_data_set_in_memory_are_used_as_they_are():
    dataset = InMemory(make_dense(13))
    loader = DenseDataLoader(dataset, 4, device="cpu")
    list(loader)

    tables = [stack._table for stack in loader._graphs._stacks.values()]

    assert {id(table) for table in tables} == {id(value) for value in dataset._data._store._mapping.values()}


def test_what_is_written_is_in_the_next_epoch():
    graphs = make_dense(6)
    loader = DenseDataLoader(graphs, 6, device="cpu")
    list(loader)

    graphs[3].x.zero_()
    graphs[4].y = torch.tensor([99])

    (batch,) = loader
    assert batch.x[3].eq(0).all()
    assert batch.y.view(-1).tolist() == [0, 1, 2, 3, 99, 5]


def test_what_is_done_to_a_batch_stays_in_it():
    graphs = make_dense(6)
    loader = DenseDataLoader(graphs, 6, device="cpu")
    (batch,) = loader

    for value in batch._store._mapping.values():
        value.zero_()

    (again,) = loader
    assert_equal(again, next(iter(PygDenseDataLoader(graphs, 6))))


class TestSeeds:
    def make(self, **options):
        return DenseDataLoader(make_dense(23), **{"batch_size": 4, "shuffle": True, "seed": 7, "device": "cpu",
                                                  **options})  # fmt: skip

    def order_of(self, loader):
        return [batch.y.view(-1).tolist() for batch in loader]

    def test_the_order_follows_from_seed_and_epoch(self):
        loader, state = self.make(), torch.get_rng_state()
        epochs = [self.order_of(loader) for _ in range(2)]
        again = self.make(prefetch=2)

        assert [self.order_of(again) for _ in range(2)] == epochs
        assert epochs[0] != epochs[1]
        assert self.order_of(self.make(seed=8)) != epochs[0]
        assert torch.equal(torch.get_rng_state(), state)

    def test_an_epoch_is_resumed(self):
        loader = self.make()
        running = iter(loader)
        next(running), next(running)
        state, rest = loader.state_dict(), self.order_of(running)
        other = self.make()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))

        assert self.order_of(other) == rest
        assert len(rest) == 4

    def test_processes_share_the_batches(self):
        whole = self.order_of(self.make())

        parts = [self.order_of(self.make(ranks=(rank, 2))) for rank in range(2)]

        assert [batch for pair in zip(*parts, strict=True) for batch in pair] == whole

    def test_a_sent_loader_makes_the_same_batches(self):
        loader = self.make()

        assert self.order_of(pickle.loads(pickle.dumps(loader))) == self.order_of(loader)


def spoil(name, value, number=5):
    graphs = make_dense(8, size=lambda i: i)
    if value is None:
        del graphs[number][name]
    else:
        graphs[number][name] = value
    return graphs


BAD = {
    "absent": (lambda: spoil("y", None), ArgumentError, "graph 0 has y, graph 5 has not; add it there, or delete it"),
    "more": (lambda: spoil("extra", 1), ArgumentError, "graph 5 has extra, graph 0 has not; add"),
    "width": (lambda: spoil("x", torch.rand(4, 3)), ArgumentError, r"x of one width.*\(5, 3\).*\(4, 3\) of graph 5"),
    "dimensions": (lambda: spoil("x", torch.rand(5)), ArgumentError, r"x of one width.*\(5,\) of graph 5"),
    "none": (lambda: spoil("x", torch.rand(0)), ArgumentError, r"x of one width.*\(0,\) of graph 5"),
    "dtype": (lambda: spoil("x", torch.rand(5, 3).double()), ArgumentTypeError, "x of one dtype.*64 of graph 5"),
    "kind": (lambda: spoil("y", 1.0), ArgumentTypeError, "y of one kind, Tensor as graph 0, got float of graph 5"),
    "object": (lambda: make_dense(3, odd=lambda i: object()), ArgumentTypeError,
               "odd that can be stacked.*got object of graph 0"),
    "sparse": (lambda: make_dense(3, adj_t=lambda i: torch.eye(3).to_sparse_coo()), ArgumentTypeError,
               "adj_t that can be stacked"),
    "types": (lambda: make_typed(3), ArgumentTypeError, "must hold Data to be stacked, got HeteroData: take"),
    "no graph": (lambda: [*make_dense(3), 5], ArgumentTypeError, "got a int as graph 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_graph_that_does_not_fit_is_named(name):
    make, kind, words = BAD[name]

    with pytest.raises(kind, match=words):
        DenseDataLoader(make(), 2, device="cpu")


def test_slices_that_contradict_are_named():
    for change, words in (
        (lambda data: data.slices["x"].__setitem__(8, 9999), "slices of x must stay within.*for graph 7"),
        (lambda data: data.slices["x"].__setitem__(3, 14), "x of one width.*as graph 0, got .*of graph 2"),
        (lambda data: data._data.name.pop(), "one name for each of its 8 graphs, got 7"),
    ):
        dataset = InMemory(make_dense(8, name=lambda i: str(i)))
        change(dataset)
        with pytest.raises(ArgumentError, match=words):
            DenseDataLoader(dataset, 2, device="cpu")


def test_one_graph_a_batch_has_none_to_fit():
    assert_equal_epochs(make_molecules(8), batch_size=1)


def add_noise(data):
    data.noise = torch.rand(2)
    return data


def test_graphs_that_python_makes_are_stacked_by_pygs_own_code(caplog, monkeypatch):
    monkeypatch.setattr(progress, "_SAID", set())
    caplog.set_level(logging.INFO, "pyg_direct")

    assert_equal_epochs(InMemory(make_dense(11), add_noise), batch_size=3, shuffle=True)

    (line,) = caplog.messages
    assert line.startswith("the data set of a DenseDataLoader is not collated once, as it has a transform")


def test_an_empty_batch_is_an_error():
    with pytest.raises(IdError, match="at least one graph"):
        list(DenseDataLoader(make_dense(3), batch_sampler=[[0], []], device="cpu"))


def test_what_has_no_batches_is_pygs():
    with pytest.raises(NotImplementedError, match=r"torch_geometric\.loader\.DenseDataLoader"):
        DenseDataLoader(make_dense(3), batch_size=None, device="cpu")


def test_workers_and_collate_fn_have_no_use_and_that_is_said():
    with pytest.warns(LoaderWarning) as said:
        loader = DenseDataLoader(make_dense(5), 2, num_workers=2, collate_fn=list, device="cpu")

    assert len(said) == 2
    assert_equal(list(loader), list(PygDenseDataLoader(make_dense(5), 2)))
    assert loader.report().places[0].startswith("graphs: 5, ")
    assert repr(loader).startswith("DenseDataLoader(5 graphs, batch_size=2, 3 batches, cpu; graphs ")


PLACES = [("cpu", "auto"), *(pytest.param("cuda", placement, marks=pytest.mark.gpu)
                             for placement in ("auto", "cuda", "unified", "pinned"))]  # fmt: skip


@pytest.mark.parametrize("form", [list, InMemory])
@pytest.mark.parametrize(("device", "placement"), PLACES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_pygs_moved(device, placement, prefetch, form):
    dataset = form(make_dense(13, size=lambda i: i, edge_index=lambda i: torch.arange(8).view(2, 4)))
    loader = DenseDataLoader(dataset, 4, device=device, placement=placement, prefetch=prefetch)

    for got, expected in zip(loader, PygDenseDataLoader(dataset, 4), strict=True):
        assert_equal(got, expected.to(device))


@pytest.mark.parametrize("form", [list, InMemory])
def test_all_of_a_batch_is_made_where_the_store_is(form):
    # A device without numbers, which every machine has.
    loader = DenseDataLoader(form(make_dense(13, size=lambda i: i, name=lambda i: "s")), 4, device="cpu")
    loader._graphs.place(torch.device("meta"))

    batch = loader._graphs.collate(torch.tensor([3, 0, 7]))

    assert batch.x.shape == (3, 5, 3)
    assert {value.device.type for value in batch._store._mapping.values() if isinstance(value, torch.Tensor)} == {
        "meta"
    }
    assert batch.name == ["s"] * 3

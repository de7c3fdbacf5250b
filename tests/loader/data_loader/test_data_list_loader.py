"""Lists of graphs: those of PyG's loader, the very objects, in its order."""

import pickle

import pytest
import torch
from torch.utils.data import Subset, WeightedRandomSampler
from torch_geometric.data import Dataset
from torch_geometric.loader import DataListLoader as PygDataListLoader

from pyg_direct.errors import ArgumentError, LoaderWarning
from pyg_direct.loader import DataListLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal, make_molecules, make_typed

GRAPHS = make_molecules(23, y=lambda i, n, e: torch.tensor([i]))


class Made(Dataset):
    def len(self):
        return 11

    def get(self, idx):
        return GRAPHS[idx].clone()


DATA_SETS = {
    "list": lambda: GRAPHS,
    "typed": lambda: make_typed(23),
    "memory": lambda: InMemory(GRAPHS),
    "transform": lambda: InMemory(GRAPHS, lambda data: setattr(data, "noise", torch.rand(2)) or data),
    "subset": lambda: Subset(InMemory(GRAPHS), [7, 1, 1, 12, 3]),
    "made": Made,
    "numbers": lambda: list(range(9)),
}
OPTIONS = [{"batch_size": 4}, {"batch_size": 4, "shuffle": True}, {"batch_size": 3, "drop_last": True}, {},
           {"batch_sampler": [[3, 0, 0], [1]]}]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "shuffled", "drop last", "alone", "batch sampler"])
@pytest.mark.parametrize("name", DATA_SETS)
def test_lists_are_those_of_pyg(name, options):
    dataset = DATA_SETS[name]()
    ours, theirs = DataListLoader(dataset, **options), PygDataListLoader(dataset, **options)

    for _ in range(2):
        torch.manual_seed(3)
        got, after = list(ours), torch.rand(1)
        torch.manual_seed(3)
        expected, then = list(theirs), torch.rand(1)
        assert_equal(got, expected)
        assert torch.equal(after, then)
    assert len(ours) == len(theirs)


def test_graphs_are_the_programs_own():
    loader = DataListLoader(GRAPHS, 4, shuffle=True)

    assert all(graph is GRAPHS[int(graph.y)] for graphs in loader for graph in graphs)


def test_a_sampler_chooses_the_graphs():
    sampler = WeightedRandomSampler([1.0] * 20 + [9.0] * 3, 17)
    orders = []
    for kind in (DataListLoader, PygDataListLoader):
        torch.manual_seed(5)
        orders.append([[int(graph.y) for graph in graphs] for graphs in kind(GRAPHS, 4, sampler=sampler)])

    assert orders[0] == orders[1]


def order_of(loader):
    return [[int(graph.y) for graph in graphs] for graphs in loader]


def make_seeded(**options):
    return DataListLoader(GRAPHS, 4, shuffle=True, **{"seed": 7, **options})


def test_the_order_follows_from_seed_and_epoch():
    loader = make_seeded()
    epochs = [order_of(loader) for _ in range(2)]

    again = pickle.loads(pickle.dumps(make_seeded()))

    assert [order_of(again) for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    assert order_of(make_seeded(seed=8)) != epochs[0]


def test_an_epoch_is_resumed():
    loader = make_seeded()
    running = iter(loader)
    next(running), next(running)
    state, rest = loader.state_dict(), order_of(running)

    other = make_seeded()
    other.load_state_dict(state)

    assert order_of(other) == rest


def test_processes_share_the_lists():
    whole = order_of(make_seeded())

    parts = [order_of(make_seeded(ranks=(rank, 2))) for rank in range(2)]

    assert [graphs for pair in zip(*parts, strict=True) for graphs in pair] == whole


def test_workers_make_what_python_makes():
    loader = DataListLoader(Made(), 4, num_workers=2)

    assert_equal(list(loader), list(PygDataListLoader(Made(), 4)))


@pytest.mark.parametrize("name", ["list", "memory", "subset"])
def test_workers_have_no_use_for_graphs_in_memory(name):
    with pytest.warns(LoaderWarning, match="num_workers=2.*not needed"):
        loader = DataListLoader(DATA_SETS[name](), 4, num_workers=2)

    assert loader.num_workers == 0
    assert loader.report().places == [f"graphs: {len(loader.dataset)}, as they are"]


def test_options_that_make_no_sense_are_refused():
    for options, words in (({"shuffle": "yes"}, "shuffle must be"), ({"batchsize": 3}, "no option batchsize"),
                           ({"uneven": "drop"}, "needs ranks"), ({"device": "cpu"}, "no option device")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=words):
            DataListLoader(GRAPHS, **options)
    with pytest.raises(TypeError, match="dataset must have items and a length, got int"):
        DataListLoader(3)
    with pytest.raises(NotImplementedError, match=r"torch_geometric\.loader\.DataListLoader"):
        DataListLoader(GRAPHS, None)
    with pytest.raises(ArgumentError, match="ranks needs"):
        iter(DataListLoader(GRAPHS, 4, sampler=[1, 2], ranks=(0, 2), seed=1))

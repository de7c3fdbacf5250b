"""Data sets whose graphs are made one by one: PyG's own collation, in its order, which is said once."""

import copy
import logging

import pytest
import torch
from torch.utils.data import IterableDataset, Subset
from torch_geometric.data import Batch, Data, Dataset, OnDiskDataset, TemporalData
from torch_geometric.loader import DataLoader as PygDataLoader

from pyg_direct import progress
from pyg_direct.errors import ArgumentError
from pyg_direct.loader import DataLoader
from tests.loader.data_loader.small_graphs import InMemory, assert_equal, assert_equal_batches, make_molecules

GRAPHS = make_molecules(11)


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch):
    """What the logger said, each line once for a test."""
    monkeypatch.setattr(progress, "_SAID", set())
    caplog.set_level(logging.INFO, "pyg_direct")
    return caplog


class Made(Dataset):
    def __init__(self, transform=None):
        super().__init__(None, transform)

    def len(self):
        return 11

    def get(self, idx):
        return copy.copy(GRAPHS[idx])


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, item):
        return {"graph": GRAPHS[item], "number": item, "pair": (torch.ones(2), "s")}


class Fetched(Items):
    def __getitems__(self, items):
        return [GRAPHS[item] for item in items]


class OnDisk(OnDiskDataset):
    def process(self):
        self.extend(GRAPHS)


class OwnGet(InMemory):
    def get(self, idx):
        data = super().get(idx)
        data.own = torch.tensor([idx])
        return data


class OwnList(list):
    def __getitem__(self, item):
        data = copy.copy(super().__getitem__(item))
        data.own = torch.tensor([item])
        return data


def put_get_on(dataset):
    """A data set whose `get` a program has replaced."""
    real = dataset.get
    dataset.get = lambda idx: add_own(real(idx), idx)
    return dataset


def add_own(data, idx):
    data.own = torch.tensor([idx])
    return data


class Other(Data):
    pass


def add_noise(data):
    data.noise = torch.rand(data.num_nodes)
    return data


def list_events():
    return [TemporalData(src=torch.arange(i + 1), dst=torch.arange(i + 1), t=torch.arange(i + 1)) for i in range(5)]


DATA_SETS = {
    "transform": (lambda path: InMemory(GRAPHS, add_noise), "it has a transform"),
    "selection with a transform": (lambda path: InMemory(GRAPHS, add_noise)[3:9], "it has a transform"),
    "data set": (lambda path: Made(), "a Made is neither a list"),
    "data set with a transform": (lambda path: Made(add_noise), "a Made is neither a list"),
    "own get": (lambda path: OwnGet(GRAPHS), "OwnGet.get is code of its own"),
    "get put on it": (lambda path: put_get_on(InMemory(GRAPHS)), "InMemory.get is code of its own"),
    "own list": (lambda path: OwnList(GRAPHS), "OwnList.__getitem__ is code of its own"),
    "part of an own list": (lambda path: Subset(OwnList(GRAPHS), range(2, 9)), "OwnList.__getitem__ is code"),
    "items": (lambda path: Items(), "an? Items is neither a list"),
    "fetched": (lambda path: Fetched(), "a Fetched is neither a list"),
    "on disk": (lambda path: OnDisk(path), "a OnDisk is neither a list"),
    "events": (lambda path: list_events(), "its items are no Data or HeteroData, but of TemporalData"),
    "batches": (lambda path: [Batch.from_data_list(GRAPHS[i : i + 2]) for i in range(5)], "are batches themselves"),
    "tuples": (lambda path: [(graph, i) for i, graph in enumerate(GRAPHS)], "its items are no Data"),
    "tensors": (lambda path: [torch.ones(2) * i for i in range(5)], "its items are no Data"),
    "classes": (lambda path: [*GRAPHS[:3], Other(x=GRAPHS[3].x, edge_index=GRAPHS[3].edge_index,
                                                 edge_attr=GRAPHS[3].edge_attr, y=GRAPHS[3].y)], "several classes"),
}  # fmt: skip


def draw(loader):
    torch.manual_seed(4)
    epochs = [list(loader) for _ in range(2)]
    return epochs, torch.rand(1).item()


@pytest.mark.parametrize("name", DATA_SETS)
def test_batches_are_pygs(name, tmp_path, said):
    make, why = DATA_SETS[name]
    dataset = make(str(tmp_path))
    options = {"batch_size": 3, "shuffle": True}

    got, after = draw(DataLoader(dataset, device="cpu", **options))
    expected, then = draw(PygDataLoader(dataset, **options))

    assert after == then
    assert_equal(got, expected)
    (line,) = said.messages
    assert "its graphs are made one by one" in line
    assert why.removeprefix("an? ") in line


def test_the_line_is_said_once(said):
    dataset = InMemory(GRAPHS, add_noise)

    for _ in range(2):
        list(DataLoader(dataset, 4, device="cpu"))

    assert len(said.messages) == 1


def test_a_transform_may_come_and_go(said):
    dataset = InMemory(GRAPHS)
    loader = DataLoader(dataset, 11, device="cpu")
    assert said.messages == []

    dataset.transform = add_noise
    (batch,) = loader
    dataset.transform = None
    (plain,) = loader

    assert "noise" in batch
    assert_equal_batches(plain, Batch.from_data_list(GRAPHS))


@pytest.mark.parametrize("seed", [None, 3])
def test_workers_make_them(seed):
    loader = DataLoader(Made(), 4, shuffle=True, seed=seed, num_workers=2, device="cpu")

    torch.manual_seed(1)
    got = list(loader)

    torch.manual_seed(1)
    expected = list(PygDataLoader(Made(), 4, shuffle=True) if seed is None else
                    DataLoader(Made(), 4, shuffle=True, seed=seed, device="cpu"))  # fmt: skip
    assert_equal(got, expected)


def test_a_state_between_epochs_of_workers_is_one_and_within_one_is_refused():
    loader = DataLoader(Made(), 4, num_workers=1, device="cpu")
    running = iter(loader)
    next(running)

    within = loader.state_dict()
    list(running)

    with pytest.raises(ArgumentError, match="drawn"):
        loader.load_state_dict(within)
    assert loader.state_dict()["epoch"] == 1
    loader.load_state_dict(loader.state_dict())


def test_a_seed_orders_them_too():
    orders = [[batch.x.tolist() for batch in DataLoader(data, 4, shuffle=True, seed=5, device="cpu")]
              for data in (Made(), GRAPHS)]  # fmt: skip

    assert orders[0] == orders[1]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(GRAPHS)


@pytest.mark.parametrize(("dataset", "options"), [(Endless(), {}), (GRAPHS, {"batch_size": None})])
def test_what_has_no_batches_is_pygs(dataset, options):
    with pytest.raises(NotImplementedError, match=r"torch_geometric\.loader\.DataLoader"):
        DataLoader(dataset, device="cpu", **options)


def test_what_is_no_data_set_is_refused():
    with pytest.raises(TypeError, match="dataset must have items and a length, got int"):
        DataLoader(3, device="cpu")


def test_a_list_longer_than_memory_is_joined_batch_by_batch(said, monkeypatch):
    monkeypatch.setattr("pyg_direct.loader.collate.graph_collation.available_bytes", lambda: 1000)

    (batch,) = DataLoader(GRAPHS, 11, device="cpu")

    assert_equal_batches(batch, Batch.from_data_list(GRAPHS))
    assert "joined, its graphs take" in said.text

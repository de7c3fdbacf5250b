"""Batches that are made once and kept: PyG's, for whole epochs."""

from collections import namedtuple

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import CachedLoader as PygCachedLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.loader import CachedLoader, NeighborLoader
from tests.batches import make_data
from tests.loader.data_loader.small_graphs import assert_equal, make_molecules, make_typed

DEVICES = [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Pair = namedtuple("Pair", ["a", "b"])


class Counted:
    """Gives batches that say when they were made."""

    def __init__(self, count=4):
        self.count, self.made = count, 0

    def __iter__(self):
        for _ in range(self.count):
            self.made += 1
            yield Data(x=torch.tensor([self.made]))

    def __len__(self):
        return self.count


def numbers_of(batches):
    return [int(batch.x) for batch in batches]


@pytest.mark.parametrize("kind", [CachedLoader, PygCachedLoader])
def test_batches_are_made_in_the_first_epoch_as_by_pyg(kind):
    inner = Counted()
    loader = kind(inner, transform=lambda batch: Data(x=batch.x * 10))

    first, second = list(loader), list(loader)

    assert numbers_of(first) == numbers_of(second) == [10, 20, 30, 40]
    assert all(own is other for own, other in zip(first, second, strict=True))
    assert inner.made == 4
    assert len(loader) == len(loader._cache) == 4
    loader.clear()
    assert loader._cache == []
    assert numbers_of(loader) == [50, 60, 70, 80]


def test_an_epoch_that_was_left_early_is_made_anew():
    loader = CachedLoader(Counted())
    running = iter(loader)
    next(running), next(running)

    assert numbers_of(loader) == [3, 4, 5, 6]
    assert numbers_of(loader) == [3, 4, 5, 6]


def test_what_is_cleared_within_an_epoch_is_not_kept():
    loader = CachedLoader(Counted())
    running = iter(loader)
    next(running)
    loader.clear()
    list(running)

    assert numbers_of(loader) == [5, 6, 7, 8]


def test_epochs_beside_each_other_are_whole():
    loader = CachedLoader(Counted())

    pairs = [(int(one.x), int(other.x)) for one, other in zip(loader, loader, strict=True)]

    assert sorted(number for pair in pairs for number in pair) == list(range(1, 9))
    assert len(numbers_of(loader)) == 4


@pytest.mark.parametrize("device", DEVICES)
def test_what_batches_hold_is_moved(device):
    tensors = [torch.ones(2), torch.ones(3)]
    batches = [make_molecules(1)[0], make_typed(3)[2], (tensors[0], 3), {"a": tensors}, Pair(*tensors), "text", None]

    got = list(CachedLoader(batches, device))

    where = torch.device(device or "cpu")
    if where.type == "cpu":
        assert_equal(got, batches)
    assert got[0].x.device.type == got[1]["paper"].x.device.type == got[2][0].device.type == where.type
    assert got[3]["a"][1].device.type == got[4].b.device.type == where.type
    assert got[2][1:] == (3,)
    assert type(got[4]) is Pair
    assert got[5:] == ["text", None]
    # What the loader holds stays as it was.
    assert batches[0].x.device.type == tensors[0].device.type == "cpu"


def test_moved_batches_are_others_on_another_device():
    # A device without numbers, which every machine has.
    loader = CachedLoader([Data(x=torch.ones(2)), (torch.ones(1), [torch.ones(1)])], "cpu")
    loader.device = torch.device("meta")

    graph, (tensor, (nested,)) = loader

    assert {graph.x.device.type, tensor.device.type, nested.device.type} == {"meta"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_batches_of_neighbors_are_kept(device):
    inner = NeighborLoader(make_data(), [3, 2], batch_size=16, shuffle=True, seed=1, device=device)
    loader = CachedLoader(inner)
    fresh = NeighborLoader(make_data(), [3, 2], batch_size=16, shuffle=True, seed=1, device=device)

    expected = list(fresh)

    for _ in range(2):
        assert [batch.n_id.tolist() for batch in loader] == [batch.n_id.tolist() for batch in expected]
    assert repr(loader) == f"CachedLoader({inner!r}, {len(expected)} batches kept)"


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"loader must give batches.*got int"):
        CachedLoader(3)
    with pytest.raises(ArgumentTypeError, match="transform must be callable or None, got int"):
        CachedLoader([], transform=3)
    with pytest.raises(ArgumentError, match="device must"):
        CachedLoader([], "tpux")

"""Batches one ahead on a device: PyG's, moved, whatever a loader gives."""

from collections import namedtuple

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import PrefetchLoader as PygPrefetchLoader

from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError
from pyg_direct.loader import DataLoader, PrefetchLoader
from tests.loader.data_loader.small_graphs import assert_equal, make_molecules, make_typed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Pair = namedtuple("Pair", ["a", "b"])


def make_batches():
    torch.manual_seed(1)
    return {
        "tensors": [torch.full((3,), i) for i in range(5)],
        "graphs": make_molecules(5),
        "typed": make_typed(5),
        "lists": [[torch.full((3,), i), Data(x=torch.full((2,), i))] for i in range(5)],
        "tuples": [(torch.full((3,), i), torch.full((2,), i)) for i in range(5)],
        "dicts": [{"a": torch.full((3,), i), "b": [torch.full((2,), i)]} for i in range(5)],
        "one": [torch.ones(2)],
        "sparse": [Data(adj_t=torch.eye(3).to_sparse_csr()) for _ in range(3)],
    }


def to_device(value, device):
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_device(part, device) for part in value]
    return value.clone().to(device)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*invariant checks")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", make_batches())
def test_batches_are_the_loaders_moved(name, device):
    batches = make_batches()[name]
    loader = PrefetchLoader(batches, device)

    for _ in range(2):
        got = list(loader)
        if device == "cpu":
            assert all(own is given for own, given in zip(got, batches, strict=True))
            assert_equal(got, list(PygPrefetchLoader(batches, device)))
        else:
            assert_equal(got, [to_device(batch, loader.device) for batch in batches])
    # What the loader holds stays as it was.
    assert_equal(batches, make_batches()[name])
    assert len(loader) == len(batches)
    count = f"{len(batches)} batch{'es' if len(batches) > 1 else ''}"
    assert repr(loader) == f"PrefetchLoader(list of {count}, {loader.device})"


def test_one_batch_is_taken_ahead_as_by_pyg():
    orders = []
    for kind in (PrefetchLoader, PygPrefetchLoader):
        seen = []
        loader = kind((seen.append(f"made {i}") or torch.ones(1) for i in range(4)), "cpu")
        for i, _ in enumerate(loader):
            seen.append(f"used {i}")
        orders.append(seen)

    assert orders[0] == orders[1]
    assert orders[0][:3] == ["made 0", "made 1", "used 0"]


def test_a_loader_without_batches_has_none():
    # Where PyG's hands out None.
    assert list(PrefetchLoader([], "cpu")) == []


def test_batches_that_are_made_on_the_device_are_handed_on():
    inner = DataLoader(make_molecules(9), 2, seed=3, shuffle=True, device="cpu")
    loader = PrefetchLoader(inner, "cpu")
    running = iter(loader)

    first = next(running)
    state = inner.state_dict()

    assert state["batch"] == 1
    other = DataLoader(make_molecules(9), 2, seed=3, shuffle=True, device="cpu")
    assert_equal([first, *running], list(other))


def test_a_value_that_is_none_is_handed_on():
    assert list(PrefetchLoader([None, 3], "cpu")) == [None, 3]


def test_all_that_a_batch_holds_is_transferred(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda value: pinned.append(1) or value)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda value: False)
    loader = PrefetchLoader([], "cpu")
    # A device without numbers, which every machine has.
    loader.device = torch.device("meta")
    graph, there = Data(x=torch.ones(2), name="g"), torch.ones(1, device="meta")

    got = loader.non_blocking_transfer(
        {"a": graph, "b": [torch.ones(1), 3], "c": Pair(torch.ones(1), "s"), "d": (there,)}
    )

    assert got["a"].x.device.type == got["b"][0].device.type == got["c"].a.device.type == "meta"
    assert (got["a"].name, got["b"][1], got["c"].b) == ("g", 3, "s")
    assert got["d"][0] is there
    assert graph.x.device.type == "cpu"
    assert len(pinned) == 3


@pytest.mark.gpu
def test_what_is_on_the_gpu_already_is_taken_as_it_is():
    batch = Data(x=torch.ones(3, device="cuda"), y=torch.ones(2))

    (got,) = PrefetchLoader([batch])

    assert got.x is batch.x
    assert got.y.is_cuda
    assert not batch.y.is_cuda


@pytest.mark.gpu
def test_batches_of_streams_hold_their_memory():
    batches = [torch.full((1 << 20,), i, dtype=torch.float32) for i in range(20)]
    sums = []

    for batch in PrefetchLoader(batches):
        # Work on the current stream that still reads it when it is dropped.
        sums.append(sum(batch.sum() for _ in range(10)))

    assert [int(total) for total in sums] == [10 * i << 20 for i in range(20)]


def test_without_a_gpu_the_cpu_is_taken_with_a_warning_as_by_pyg(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="'cuda' is not available, falling back to CPU"):
        loader = PrefetchLoader([torch.ones(2)], "cuda")

    assert loader.device == torch.device("cpu")
    assert len(list(loader)) == 1


@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(DeviceError, match="GPU 99"):
        PrefetchLoader([torch.ones(2)], "cuda:99")


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"loader must give batches.*got int"):
        PrefetchLoader(3, "cpu")
    with pytest.raises(ArgumentError, match="device must name"):
        PrefetchLoader([], "tpux")
    with pytest.raises(NotImplementedError, match="neither a CPU nor a CUDA"):
        PrefetchLoader([], "xpu")

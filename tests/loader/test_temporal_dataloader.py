"""`TemporalDataLoader` makes PyG's batches, from the same generators, and can be resumed."""

import pickle

import pytest
import torch
from torch_geometric.data import Data, TemporalData
from torch_geometric.loader import TemporalDataLoader as PygTemporalDataLoader

from pyg_direct import TemporalDataLoader
from pyg_direct.errors import ArgumentError, ArgumentTypeError, LoaderWarning


def make_events(count=103, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    data = TemporalData(src=torch.randint(20, (count,), generator=generator),
                        dst=torch.randint(20, 50, (count,), generator=generator), t=torch.arange(count).flip(0),
                        msg=torch.rand(count, 3, generator=generator), y=torch.arange(count) % 2,
                        level=torch.ones(2))  # fmt: skip
    return data.to(device)


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert list(batch.keys()) == list(other.keys())
        for key, value in other.to_dict().items():
            assert torch.equal(batch[key].cpu(), value.cpu()), key
            assert batch[key].dtype == value.dtype


@pytest.mark.parametrize("options", [{}, {"neg_sampling_ratio": 1.0}, {"neg_sampling_ratio": 0.3, "drop_last": True},
                                     {"batch_size": 200, "neg_sampling_ratio": 2}, {"batch_size": 103}])  # fmt: skip
def test_batches_and_later_numbers_are_pygs(real_device, options):
    options, made = {"batch_size": 10, **options}, []

    for kind, more in ((TemporalDataLoader, {"device": real_device}), (PygTemporalDataLoader, {})):
        torch.manual_seed(7)
        loader = kind(make_events(), **options, **more)
        made.append(([[*loader], [*loader]], torch.rand(1), len(loader)))

    (ours, number, count), (theirs, expected, expected_count) = made
    for epoch in range(2):
        assert_same(ours[epoch], theirs[epoch])
    assert (number, count) == (expected, expected_count)
    assert all(value.device.type == real_device.type for value in ours[0][0].to_dict().values())


@pytest.mark.gpu
@pytest.mark.parametrize("placement", ["auto", "cuda", "pinned"])
@pytest.mark.parametrize("seed", [None, 3])
def test_where_events_lie_makes_no_difference(placement, seed):
    torch.manual_seed(7)
    expected = [*TemporalDataLoader(make_events(), 10, 1.0, device="cpu", seed=seed)]

    torch.manual_seed(7)
    assert_same([*TemporalDataLoader(make_events(), 10, 1.0, device="cuda", placement=placement, seed=seed)], expected)


@pytest.mark.gpu
def test_events_on_a_gpu_draw_from_its_generator_as_pygs():
    torch.manual_seed(7)
    expected = [*PygTemporalDataLoader(make_events(device="cuda"), 10, 1.0)]

    torch.manual_seed(7)
    assert_same([*TemporalDataLoader(make_events(device="cuda"), 10, 1.0)], expected)


def test_with_a_seed_prefetch_and_torchs_generator_make_no_difference(real_device):
    expected = [*TemporalDataLoader(make_events(), 10, 1.0, device="cpu", seed=3)]

    torch.manual_seed(99)
    batches = [*TemporalDataLoader(make_events(), 10, 1.0, device=real_device, seed=3, prefetch=2)]

    assert_same(batches, expected)
    negatives = torch.cat([batch.neg_dst for batch in batches])
    assert set(negatives.tolist()) <= set(range(20, 50))
    assert len(set(negatives.tolist())) > 20


def test_an_epoch_is_resumed(real_device):
    loader = TemporalDataLoader(make_events(), 10, 1.0, device=real_device, seed=3)
    expected = [[*loader] for _ in range(2)][1][4:]
    stopped = TemporalDataLoader(make_events(), 10, 1.0, device=real_device, seed=3)
    _, batches = [*stopped], iter(stopped)
    for _ in range(4):
        next(batches)

    resumed = TemporalDataLoader(make_events(), 10, 1.0, device=real_device, seed=3)
    resumed.load_state_dict(stopped.state_dict())

    assert_same([*resumed], expected)


def test_a_state_of_other_batches_is_refused():
    state = TemporalDataLoader(make_events(100), 51, device="cpu", seed=3).state_dict()

    with pytest.raises(ArgumentError, match="batch_size=50, got 51"):
        TemporalDataLoader(make_events(100), 50, device="cpu", seed=3).load_state_dict(state)


def test_events_that_are_assigned_since_are_read(real_device):
    data = make_events()
    loader = TemporalDataLoader(data, 103, device=real_device)
    assert len([*loader]) == 1

    data.y = data.y + 5

    assert next(iter(loader)).y.min() == 5


def test_a_sent_loader_makes_the_same_batches():
    loader = TemporalDataLoader(make_events(), 10, 1.0, device="cpu", seed=3)

    assert_same([*pickle.loads(pickle.dumps(loader))], [*loader])


def test_its_own_collate_fn_makes_a_batch():
    loader = TemporalDataLoader(make_events(), 10, device="cpu")

    assert_same([loader.collate_fn([20])], [[*loader][2]])


def test_the_text_tells_events_and_options():
    loader = TemporalDataLoader(make_events(), 10, 1.0, device="cpu")

    assert repr(loader) == (
        "TemporalDataLoader(103 events, batch_size=10, neg_sampling_ratio=1.0, 11 batches, cpu; not placed yet)"
    )


def test_shuffle_is_said_to_have_no_use():
    with pytest.warns(LoaderWarning, match="shuffle=True: not used, as events come in their order"):
        TemporalDataLoader(make_events(), 10, device="cpu", shuffle=True)


def without(name):
    data = make_events()
    del data[name]
    return data


def with_dst(values):
    data = make_events()
    data.dst = values
    return data


@pytest.mark.parametrize(("data", "options", "error", "words"), [
    (Data(), {}, ArgumentTypeError, "data must be TemporalData, got Data"),
    (without("dst"), {}, ArgumentTypeError, "data.dst must be a tensor of one dimension, got NoneType"),
    (with_dst(torch.zeros(5).long()), {}, ArgumentError, "an end for each of the 103 events of data.src, got 5"),
    (make_events(), {"batch_size": 0}, ArgumentError, "batch_size must be an integer of at least 1, got 0"),
    (make_events(), {"neg_sampling_ratio": -1}, ArgumentError, "neg_sampling_ratio must be finite and at least 0"),
    (make_events(), {"neg_sampling_ratio": "1"}, ArgumentTypeError, "neg_sampling_ratio must be a number, got '1'"),
    (make_events(0), {"neg_sampling_ratio": 1}, ArgumentError, "data must have events for neg_sampling_ratio > 0"),
    (make_events(), {"negs": 1}, ArgumentTypeError, "TemporalDataLoader has no option negs"),
])  # fmt: skip
def test_wrong_arguments_are_named(data, options, error, words):
    with pytest.raises(error, match=words):
        TemporalDataLoader(data, **{"device": "cpu", **options})


def test_without_events_there_is_no_batch():
    assert [*TemporalDataLoader(make_events(0), 10, device="cpu")] == []

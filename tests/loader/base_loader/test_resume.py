"""A loader continues where another one stood, exactly."""

import itertools
import json

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.errors import ArgumentError
from tests.batches import assert_equal_epochs, make_data

NUM_BATCHES = 5
# Of the loader below: what its batches are, beside its seed.
BATCHES = {"num_seeds": 70, "batch_size": 16, "shuffle": True, "drop_last": False}


def make_loader(device="cpu", **options):
    return NeighborLoader(make_data(), [3, 2], **{"batch_size": 16, "shuffle": True, "seed": 1, "device": device,
                                                  **options})  # fmt: skip


@pytest.fixture
def epochs(real_device):
    """The first three epochs of a loader that nobody interrupts."""
    loader = make_loader(real_device)
    return [list(loader) for _ in range(3)]


@pytest.mark.parametrize("position", range(NUM_BATCHES))
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_fresh_loader_continues_after_any_batch(real_device, epochs, epoch, position):
    loader = make_loader(real_device)
    for _ in range(epoch):
        list(loader)
    for number, _ in enumerate(loader):
        if number == position:
            state = loader.state_dict()
            break

    # Neither its own seed nor its own past matter.
    other = make_loader(real_device, seed=99)
    list(other)
    other.load_state_dict(state)

    assert state == {"seed": 1, "epoch": epoch, "batch": position + 1, **BATCHES}
    assert_equal_epochs(other, epochs[epoch][position + 1 :])
    assert_equal_epochs(other, epochs[epoch + 1])


def test_a_state_before_the_first_batch_starts_the_epoch(real_device, epochs):
    state = make_loader(real_device).state_dict()

    other = make_loader(real_device, seed=99)
    other.load_state_dict(state)

    assert_equal_epochs(other, epochs[0])


def test_a_state_between_epochs_starts_the_next(real_device, epochs):
    loader = make_loader(real_device)
    list(loader)
    state = loader.state_dict()

    other = make_loader(real_device)
    other.load_state_dict(state)

    assert state == {"seed": 1, "epoch": 1, "batch": 0, **BATCHES}
    assert_equal_epochs(other, epochs[1])


def test_a_state_taken_after_leaving_continues_the_epoch(real_device, epochs):
    loader = make_loader(real_device)
    first = list(itertools.islice(loader, 2))

    loader.load_state_dict(loader.state_dict())

    assert_equal_epochs([*first, *loader], epochs[0])
    assert_equal_epochs(loader, epochs[1])


def test_a_resumed_epoch_can_be_resumed_again(real_device, epochs):
    loader = make_loader(real_device)
    got = []

    for _ in range(NUM_BATCHES):
        other = make_loader(real_device)
        other.load_state_dict(loader.state_dict())
        got += itertools.islice(other, 1)
        loader = other

    assert_equal_epochs(got, epochs[0])


def test_batches_made_ahead_do_not_count(real_device, epochs):
    loader = make_loader(real_device, prefetch=3)
    next(iter(loader))

    other = make_loader(real_device, prefetch=0)
    other.load_state_dict(loader.state_dict())

    assert_equal_epochs(other, epochs[0][1:])


def test_a_batch_whose_transform_fails_is_made_again(real_device, epochs):
    def fail_at_the_third(batch):
        if next(calls) == 2:
            raise KeyError("third")
        return batch

    calls = itertools.count()
    loader = make_loader(real_device, transform=fail_at_the_third)
    with pytest.raises(KeyError):
        list(loader)

    loader.load_state_dict(loader.state_dict())

    assert_equal_epochs(loader, epochs[0][2:])


def test_calls_are_no_part_of_the_state(real_device):
    loader = make_loader(real_device)
    before = loader.state_dict()

    loader([0, 1])

    assert loader.state_dict() == before


def test_a_state_is_what_any_file_holds():
    loader = make_loader(seed=2**64 - 1)

    state = json.loads(json.dumps(loader.state_dict()))

    assert state == {"seed": 2**64 - 1, "epoch": 0, "batch": 0, **BATCHES}
    make_loader().load_state_dict(state)


def test_a_sampler_of_the_user_is_skipped_forward():
    order = torch.randperm(70).tolist()
    expected = list(make_loader(shuffle=None, sampler=order))

    other = make_loader(shuffle=None, sampler=order)
    other.load_state_dict({"seed": 1, "epoch": 0, "batch": 3})

    assert_equal_epochs(other, expected[3:])


@pytest.mark.parametrize("batch", [NUM_BATCHES, NUM_BATCHES + 1])
def test_after_the_last_batch_nothing_is_left(epochs, batch):
    loader = make_loader()

    loader.load_state_dict({"seed": 1, "epoch": 0, "batch": batch})

    assert list(loader) == []
    assert_equal_epochs(loader, epochs[1])


@pytest.mark.parametrize(
    "state",
    [{}, None, [1, 0, 0], {"seed": 1, "epoch": 0}, {"seed": 1, "epoch": -1, "batch": 0},
     {"seed": 1, "epoch": 0, "batch": 1.5}, {"seed": 1, "epoch": True, "batch": 0},
     {"seed": "1", "epoch": 0, "batch": 0}, {"seed": 2**64, "epoch": 0, "batch": 0},
     {"seed": 1, "epoch": None, "batch": 0}],
    ids=str,
)  # fmt: skip
def test_anything_else_is_refused_and_changes_nothing(state):
    loader = make_loader()
    before = loader.state_dict()

    with pytest.raises(ArgumentError, match=r"state must hold '(seed|epoch|batch)' as an integer"):
        loader.load_state_dict(state)

    assert loader.state_dict() == before


def test_a_checkpoint_that_holds_the_state_is_said():
    loader = make_loader()

    with pytest.raises(ArgumentError, match=r"got None: give state\['loader'\]$"):
        loader.load_state_dict({"model": {"weight": 1}, "loader": loader.state_dict()})


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": 32}, "batch_size=32, got 16"),
    ({"shuffle": False}, "shuffle=False, got True"),
    ({"shuffle": None, "sampler": range(70)}, "shuffle='by a sampler or generator', got True"),
    ({"drop_last": True}, "drop_last=True, got False"),
    ({"input_nodes": torch.arange(60)}, "num_seeds=60, got 70"),
])  # fmt: skip
def test_a_state_of_a_loader_of_other_batches_is_refused_and_changes_nothing(options, message):
    state, loader = make_loader().state_dict(), make_loader(seed=5, **options)
    before = loader.state_dict()

    with pytest.raises(ArgumentError, match=f"state must be of a loader of equal batches, with {message}"):
        loader.load_state_dict(state)

    assert loader.state_dict() == before


def test_what_a_state_leaves_out_is_not_compared():
    state = {name: value for name, value in make_loader().state_dict().items() if name not in BATCHES}
    loader = make_loader(batch_size=32)

    loader.load_state_dict(state)

    assert loader.state_dict() == {**state, **BATCHES, "batch_size": 32}

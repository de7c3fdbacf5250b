"""Leaving, nesting, keeping and failing: what happens around the batches of an epoch."""

import gc
import itertools
import threading
import weakref

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.loader.collate.data import Attributes
from tests.batches import assert_equal_batches, assert_equal_epochs, make_data

PREFETCH = [0, 1, 3]


def make_loader(device, **options):
    return NeighborLoader(make_data(), [3, 2], **{"batch_size": 16, "shuffle": True, "seed": 1, "device": device,
                                                  **options})  # fmt: skip


def clone(batch):
    """Its contents as they are now, on the CPU."""
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    return batch.clone().cpu()


@pytest.fixture
def epochs(real_device):
    """The first three epochs, each batch made when it is asked for."""
    loader = make_loader(real_device, prefetch=0)
    return [[clone(batch) for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_that_are_kept_stay_as_they_were(real_device, epochs, prefetch):
    loader = make_loader(real_device, prefetch=prefetch)

    kept = []
    for batch in loader:
        kept.append(batch)
        # New tensors would take memory that was freed too early.
        torch.full((200, 50), -1.0, device=real_device)

    assert_equal_epochs(kept, epochs[0])


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_a_batch_may_be_overwritten(real_device, epochs, prefetch):
    loader = make_loader(real_device, prefetch=prefetch)

    for batch, expected in zip(loader, epochs[0], strict=True):
        assert_equal_batches(batch, expected)
        for value in batch.to_dict().values():
            if isinstance(value, torch.Tensor):
                value.fill_(-1)

    assert_equal_epochs(loader, epochs[1])


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_an_epoch_left_early_is_over(real_device, epochs, prefetch):
    loader = make_loader(real_device, prefetch=prefetch)

    first = list(itertools.islice(loader, 2))

    assert_equal_epochs(first, epochs[0][:2])
    assert_equal_epochs(loader, epochs[1])
    assert_equal_epochs(loader, epochs[2])


@pytest.mark.parametrize("kept", [False, True], ids=["", "its iterator is held"])
def test_an_epoch_left_early_ends_what_makes_its_batches(monkeypatch, kept):
    made, work = [], NeighborLoader._work_here
    monkeypatch.setattr(NeighborLoader, "_work_here", lambda *args: made.append(work(*args)) or made[-1])
    batches = iter(make_loader("cpu"))
    next(batches)
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("pyg_direct_batch")}

    ended = weakref.ref(made[0])
    if not kept:
        made.clear()
    batches.close()

    assert made[0].gi_frame is None if kept else ended() is None
    assert not any(thread.is_alive() for thread in threads)


def test_an_epoch_left_at_once_is_over(real_device, epochs):
    loader = make_loader(real_device)

    iter(loader)

    assert_equal_epochs(loader, epochs[1])


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_iterators_side_by_side_do_not_disturb_each_other(real_device, epochs, prefetch):
    loader = make_loader(real_device, prefetch=prefetch)

    pairs = [(clone(batch), clone(other)) for batch, other in zip(loader, loader, strict=True)]

    assert_equal_epochs([batch for batch, _ in pairs], epochs[0])
    assert_equal_epochs([other for _, other in pairs], epochs[1])


def test_an_epoch_inside_an_epoch_gives_both(real_device, epochs):
    loader = make_loader(real_device)
    outer = iter(loader)
    first = next(outer)

    inner = list(loader)

    assert_equal_epochs(inner, epochs[1])
    assert_equal_epochs([first, *outer], epochs[0])


def test_calls_in_between_disturb_no_epoch(real_device, epochs):
    loader = make_loader(real_device)

    batches = [(clone(batch), loader([0, 1]))[0] for batch in loader]

    assert_equal_epochs(batches, epochs[0])


@pytest.mark.parametrize("where", ["transform", "transform_sampler_output"])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_an_error_of_a_transform_is_raised_for_its_batch(real_device, epochs, prefetch, where):
    def fail_at_the_third(given):
        if next(calls) == 2:
            raise KeyError("third")
        return given

    calls = itertools.count()
    loader = make_loader(real_device, prefetch=prefetch, **{where: fail_at_the_third})
    iterator = iter(loader)

    got = [next(iterator), next(iterator)]
    with pytest.raises(KeyError, match="third"):
        next(iterator)

    assert list(iterator) == []
    assert_equal_epochs(got, epochs[0][:2])
    assert_equal_epochs(loader, epochs[1])


def test_an_error_of_a_sampler_is_raised_for_its_batch(real_device):
    def positions():
        yield from [3, 1, 4, 1]
        raise KeyError("sampler")

    class Sampler:
        def __iter__(self):
            return positions()

    iterator = iter(make_loader(real_device, shuffle=None, sampler=Sampler(), batch_size=2))

    got = [next(iterator).input_id.tolist() for _ in range(2)]
    with pytest.raises(KeyError, match="sampler"):
        next(iterator)

    assert got == [[3, 1], [4, 1]]


def test_leaving_an_epoch_frees_what_was_made_ahead(real_device, monkeypatch):
    build, made = Attributes.build, []

    def build_and_note(*args, **options):
        batch = build(*args, **options)
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(Attributes, "build", build_and_note)
    iterator = iter(make_loader(real_device, prefetch=3))
    next(iterator)

    del iterator
    gc.collect()

    assert len(made) >= (4 if real_device.type == "cuda" else 1)
    assert all(batch() is None for batch in made)

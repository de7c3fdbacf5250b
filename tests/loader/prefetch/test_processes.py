"""Batches made by other processes are those of the loader, in its order; whatever ends, ends with a word."""

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pyg_direct import NeighborLoader, Producers
from pyg_direct.errors import ArgumentError, ArgumentTypeError, DeviceError, PygDirectError
from pyg_direct.loader.batch_sampler import Share
from pyg_direct.loader.prefetch import processes as producers_module
from pyg_direct.loader.prefetch.processes import Lane
from pyg_direct.sampling.random_key import EpochKey
from tests.batches import hash_batches, make_data
from tests.hetero_data import make_hetero

pytestmark = pytest.mark.slow


def make_loader(**options):
    return NeighborLoader(make_data(), [3, 2], **{"batch_size": 16, "shuffle": True, "seed": 1, "device": "cpu",
                                                  **options})  # fmt: skip


def hashes(batches):
    return [hash_batches([batch]) for batch in batches]


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("share", [Share(0, 1), Share(1, 2), Share(1, 2, "keep"), Share(2, 3, "drop")])
@pytest.mark.parametrize("num_batches", [0, 1, 5, 12])
def test_lanes_make_every_batch_of_a_share_once(width, share, num_batches):
    expected = [share.number_of(step) for step in range(share.count_steps(num_batches))]

    lanes = [Lane(share.rank, share.count, share.uneven, lane, width) for lane in range(width)]
    got = [[lane.number_of(step) for step in range(lane.count_steps(num_batches))] for lane in lanes]

    assert [got[step % width][step // width] for step in range(len(expected))] == expected
    assert sum(map(len, got)) == len(expected)


@pytest.mark.usefixtures("quick_starts")
def test_two_producers_make_the_epochs_of_the_loader():
    expected = make_loader(ranks=(1, 2))
    producers = Producers(make_loader(ranks=(1, 2)), ["cpu", "cpu"], device="cpu")
    producers.record()

    for _ in range(2):
        assert hashes(producers) == hashes(expected)
    assert len(producers) == len(expected)
    report = producers.report()
    assert str(report).startswith("producers: cpu, cpu\n")
    assert len(report.seconds("wait")) == report.num_batches == 2 * len(expected)
    # Left in the middle: the next epoch is the next.
    next(iter(producers))
    next(iter(expected))
    assert hashes(producers) == hashes(expected)
    # Resumed: batch 2 of all is the second of this process.
    for loader in (producers, expected):
        loader.load_state_dict({"seed": 1, "epoch": 0, "batch": 2})
    assert hashes(producers) == hashes(expected)
    state = producers.state_dict()
    assert (state["seed"], state["epoch"], state["batch"]) == (1, 1, 0)
    producers.close()
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("quick_starts")
def test_types_are_sent():
    data = make_hetero()
    loader = NeighborLoader(data, [3], data.node_types[0], batch_size=200, seed=1, device="cpu")
    expected = [str(batch.to_dict()) for batch in loader]
    loader.load_state_dict({"seed": 1, "epoch": 0, "batch": 0})

    producers = Producers(loader, device="cpu")

    assert [str(batch.to_dict()) for batch in producers] == expected
    # Dropped without a word, they end.
    next(iter(producers))
    del producers
    gc.collect()
    assert not multiprocessing.active_children()


def refuse(batch):
    raise ValueError(f"no batch of {batch.batch_size} seeds today")


@pytest.mark.usefixtures("quick_starts")
def test_an_error_in_a_producer_comes_with_its_traceback():
    producers = Producers(make_loader(transform=refuse), device="cpu")

    with pytest.raises(ValueError, match=r"in the producer on cpu[\s\S]*no batch of 16 seeds today"):
        list(producers)

    assert not multiprocessing.active_children()


def hide(batch):
    batch.hidden = lambda: None
    return batch


def refuse_in_private(batch):
    class PrivateError(Exception):
        pass

    raise PrivateError("nobody knows my class")


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize(("transform", "error", "words"), [
    (hide, Exception, "in the producer on cpu[\\s\\S]*hide"),
    (refuse_in_private, PygDirectError, "in the producer on cpu[\\s\\S]*nobody knows my class"),
])  # fmt: skip
def test_what_cannot_be_sent_is_told(transform, error, words):
    producers = Producers(make_loader(transform=transform), device="cpu")

    with pytest.raises(error, match=words):
        list(producers)

    assert not multiprocessing.active_children()


def end(batch):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("quick_starts")
def test_a_producer_that_is_killed_is_named():
    producers = Producers(make_loader(transform=end), device="cpu")

    with pytest.raises(PygDirectError, match=r"producer 0 on cpu \(process \d+\) ended with exit code -9"):
        list(producers)

    assert not multiprocessing.active_children()


def wait_or_end(batch):
    if batch.input_id[0] == 0:
        # Longer than a test may take.
        time.sleep(3600)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("quick_starts")
def test_a_producer_that_is_killed_is_named_before_its_turn():
    loader = make_loader(transform=wait_or_end, shuffle=False)
    producers = Producers(loader, ["cpu", "cpu"], device="cpu")

    with pytest.raises(PygDirectError, match=r"producer 1 on cpu \(process \d+\) ended with exit code -9"):
        next(iter(producers))

    assert not multiprocessing.active_children()


def fill(batch):
    # Far more than a pipe holds.
    batch.words = b"w" * (32 << 20)
    return batch


@pytest.mark.usefixtures("quick_starts")
def test_a_producer_that_is_killed_in_a_large_message_is_named():
    producers = Producers(make_loader(transform=fill), device="cpu")
    batches = iter(producers)
    before = next(batches)
    process, reader = producers._processes[0], producers._channels[0]._reader
    # Half of a message is written, and stays so.
    while not reader.poll(0.1):
        pass
    os.kill(process.pid, signal.SIGSTOP)

    def kill():
        # The message was begun here: what the pipe held is gone.
        while reader.poll():
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(PygDirectError, match=r"producer 0 on cpu \(process \d+\) ended with exit code -9"):
        next(batches)
    thread.join()

    assert len(before.words) == 32 << 20
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("quick_starts")
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_producer_that_is_killed_while_its_batch_is_opened_is_named(monkeypatch, is_killed):
    producers = Producers(make_loader(), device="cpu")

    def refuse_memory(message):
        if is_killed:
            os.kill(producers._processes[0].pid, signal.SIGKILL)
        raise ConnectionRefusedError("nobody has the memory")

    monkeypatch.setattr(producers_module, "ForkingPickler", SimpleNamespace(loads=refuse_memory))

    error = (PygDirectError, "producer 0 .* exit code -9") if is_killed else (ConnectionRefusedError, "nobody has")
    with pytest.raises(error[0], match=error[1]):
        next(iter(producers))
    producers.close()


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    ((make_loader(), "cpu"), {}, ArgumentTypeError, "devices must be a list of devices, at least one, got 'cpu'"),
    ((make_loader(), []), {}, ArgumentTypeError, "devices must be a list"),
    ((make_loader(),), {"ahead": 0}, ArgumentError, "ahead must be an integer of at least 1, got 0"),
    (([1, 2],), {}, ArgumentTypeError, "loader must be one of pyg_direct's, got list"),
])  # fmt: skip
def test_bad_arguments_are_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        Producers(*arguments, device="cpu", **options)


def test_expandable_segments_are_refused(monkeypatch):
    # Before anything is asked of a GPU.
    monkeypatch.setattr(producers_module, "resolve_device", lambda device: torch.device(device or "cpu"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments: True")

    with pytest.raises(DeviceError, match="only without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        Producers(make_loader(), ["cpu", "cuda:0"])


def test_expandable_segments_that_the_program_asked_for_are_refused(monkeypatch):
    orders, sent = iter([(1, EpochKey(0, 0), 0, 0, Lane(0, 1), None)]), []
    channel = SimpleNamespace(put=lambda message, timeout: sent.append(pickle.loads(message)))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:True",
                        raising=False)  # fmt: skip

    with pytest.raises(StopIteration):
        producers_module._produce(make_loader(), torch.device("cuda", 0), 1,
                                  SimpleNamespace(get=lambda: next(orders)), channel)  # fmt: skip

    ((_, kind, error),) = sent
    assert kind == producers_module._ERROR
    with pytest.raises(DeviceError, match="only without PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        error.reraise()


@pytest.mark.gpu
def test_batches_come_from_a_gpu():
    producers = Producers(make_loader(device=None), ["cuda:0", "cpu"], device="cuda:0")

    batches = list(producers)

    assert all(batch.x.device == torch.device("cuda", 0) for batch in batches)
    assert hashes(batches) == hashes(make_loader())
    producers.close()

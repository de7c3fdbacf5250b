"""Memory that processes share: visible to all, without copies or leftovers."""

import gc
import os
import pickle
import signal

import pytest
import torch
import torch.multiprocessing as mp

from pyg_direct.errors import ArgumentError, ArgumentTypeError, MemoryLimitError
from pyg_direct.runtime.host import shared_memory
from pyg_direct.runtime.host.shared_memory import SharedMemory, find_shared, open_shared, pin, share


def test_a_tensor_becomes_a_view_with_the_same_contents():
    tensor = torch.arange(12.0).view(4, 3)

    memory = share(tensor)

    assert tensor.data_ptr() == memory.bytes.data_ptr()
    assert tensor.tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert find_shared(tensor) is memory


def test_sharing_twice_moves_once():
    tensor = torch.arange(5)

    assert share(tensor) is share(tensor)


@pytest.mark.gpu
def test_memory_that_was_page_locked_is_unlocked_with_its_last_user():
    memory, device = share(torch.arange(1 << 20)), torch.device("cuda", 0)
    locked = pin(memory, device)
    assert pin(memory, device) is locked

    del locked
    gc.collect()

    # The driver refuses memory that is still locked.
    again = pin(memory, device).view_on_gpu(torch.int64, (1 << 20,))
    assert torch.equal(again.cpu(), torch.arange(1 << 20))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1,), (3, 0)])
def test_odd_shapes(shape):
    assert share(torch.ones(shape)).view(torch.float32, shape).tolist() == torch.ones(shape).tolist()


def test_memory_of_a_process_is_opened_by_its_number():
    memory = share(torch.arange(5))

    found = open_shared(os.getpid(), memory.descriptor, 40).view(torch.int64, (5,))
    found[0] = 7

    assert memory.view(torch.int64, (5,)).tolist() == [7, 1, 2, 3, 4]
    with pytest.raises(OSError, match="must have 41 bytes, it has fewer"):
        open_shared(os.getpid(), memory.descriptor, 41)


def test_a_strided_tensor_is_refused():
    with pytest.raises(ArgumentError, match="tensor must be contiguous"):
        share(torch.arange(12).view(4, 3).t())


def test_too_much_is_refused():
    with pytest.raises(MemoryLimitError, match="num_bytes must fit host memory"):
        SharedMemory(2**62)


@pytest.mark.parametrize("num_bytes", [0, 100])
def test_systems_without_nameless_memory_take_a_file(monkeypatch, num_bytes):
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory(num_bytes)

    memory.bytes.fill_(7)

    assert memory.view(torch.uint8, (num_bytes,)).tolist() == [7] * num_bytes


def test_sizes_below_nothing_are_refused():
    with pytest.raises(ArgumentError, match="num_bytes must be at least 0, got -1"):
        SharedMemory(-1)


def test_memory_is_found_by_its_bytes_when_its_object_is_gone():
    tensor = torch.arange(10)
    share(tensor)
    gc.collect()
    assert tensor.data_ptr() not in shared_memory._OBJECTS

    memory = find_shared(tensor)

    assert torch.equal(memory.view(torch.int64, (10,)), tensor)
    assert find_shared(tensor) is memory
    assert find_shared(tensor[::2]) is None


def test_systems_that_cannot_send_memory_say_so(monkeypatch):
    monkeypatch.delattr(shared_memory.reduction, "DupFd")

    with pytest.raises(ArgumentTypeError, match="on Linux and macOS only"):
        pickle.dumps(SharedMemory(8))


def test_a_view_must_fit():
    with pytest.raises(ArgumentError, match="shape must fit the 8 bytes"):
        SharedMemory(8).view(torch.float64, (2,))


def count_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_open():
    share(torch.arange(10))
    before = count_descriptors()

    for _ in range(20):
        share(torch.arange(10))

    assert count_descriptors() <= before


def test_what_is_gone_is_not_found():
    tensor = torch.arange(10)
    share(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()

    assert address not in shared_memory._KNOWN


def test_a_view_outlives_the_tensor_it_was_made_from():
    tensor = torch.arange(1000)
    share(tensor)
    view = tensor[10:20]
    del tensor
    gc.collect()

    assert view.tolist() == list(range(10, 20))


def write_and_read(rank, memory, queue):
    view = memory.view(torch.int64, (10,))
    queue.put(view.tolist())
    view[rank] = 100 + rank


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_spawned_processes_see_the_same_bytes():
    tensor = torch.arange(10)
    queue = mp.get_context("spawn").SimpleQueue()

    mp.spawn(write_and_read, args=(share(tensor), queue), nprocs=2)

    for _ in range(2):
        assert queue.get()[2:] == list(range(2, 10))
    # Their writing is seen here: there is one copy.
    assert tensor.tolist() == [100, 101, *range(2, 10)]


def pass_on(queue, answers):
    memory = queue.get()
    os.kill(os.getppid(), 0)
    answers.put(int(memory.view(torch.int64, (10,)).sum()))


@pytest.mark.slow
def test_it_can_be_sent_after_a_process_has_started():
    context = mp.get_context("spawn")
    queue, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=pass_on, args=(queue, answers))
    process.start()

    queue.put(share(torch.arange(10)))

    assert answers.get() == 45
    process.join()


def own(connection):
    connection.send(share(torch.arange(10)))
    connection.recv()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_starts")
def test_the_memory_of_a_killed_owner_stays_whole():
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs,))
    process.start()
    memory = mine.recv()

    os.kill(process.pid, signal.SIGKILL)
    process.join()

    assert memory.view(torch.int64, (10,)).tolist() == list(range(10))


def test_bytes_for_another_process_are_few():
    tensor = torch.zeros(1 << 20)

    assert len(pickle.dumps(share(tensor))) < 1000

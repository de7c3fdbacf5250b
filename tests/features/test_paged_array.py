"""Numbers of an array in a file, read by position."""

import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest
import torch

from pyg_direct import save_rows
from pyg_direct.errors import FileError, IdError
from pyg_direct.features import paged_array, range_reader
from pyg_direct.features.paged_array import PagedArray
from pyg_direct.features.row_files import RowFile

PAGE = range_reader.PAGE
COUNT = 50_000


def make_numbers(dtype=torch.int32):
    return torch.randint(2**31 - 1, (COUNT,), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def array_of(tmp_path, monkeypatch):
    # Numbers that were just written are cached.
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: False)

    def make(numbers, num_pages=None, name="numbers.npy", offset=0):
        path = tmp_path / name
        if offset:
            path.write_bytes(bytes(offset) + numbers.numpy().tobytes())
            file = RowFile(path, dtype=numbers.dtype, shape=numbers.shape, offset=offset, is_bare=True)
        else:
            file = RowFile(save_rows(path, numbers))
        return PagedArray(file, None if num_pages is None else num_pages * PAGE)

    return make


def draw(count, most=COUNT, seed=0):
    return np.random.default_rng(seed).integers(0, most, count)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("offset", [0, 8, 4088, 4096, 5000])
@pytest.mark.parametrize("num_pages", [None, 1, 7])
def test_numbers_come_as_they_lie_in_the_file(array_of, dtype, offset, num_pages):
    numbers = make_numbers(dtype)
    array = array_of(numbers, num_pages, offset=offset)

    for seed in range(3):
        positions = draw(3000, seed=seed)
        got = array.take(positions)
        assert np.array_equal(got, numbers.numpy()[positions])
    assert array.take(np.array([COUNT - 1, 0])).tolist() == numbers[[-1, 0]].tolist()


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025])
def test_arrays_of_a_page_and_its_neighbors(array_of, count):
    numbers = make_numbers()[:count].clone()

    assert np.array_equal(array_of(numbers, offset=4096).take(np.arange(count)), numbers.numpy())


def test_no_positions_read_nothing(array_of):
    array = array_of(make_numbers())

    assert array.take(np.empty(0, np.int64)).shape == (0,)
    assert array.num_bytes == 0


def test_each_page_of_a_call_is_read_once(array_of):
    array = array_of(make_numbers())

    array.take(draw(20_000))

    reads, pages = array.tell(), -(-array.file.path.stat().st_size // PAGE)
    assert reads.num_pages <= pages
    assert reads.num_again == 0
    assert reads.num_asked == 20_000
    array.take(draw(20_000, seed=1))
    assert array.tell().num_pages <= pages


def test_pages_that_are_read_most_stay(array_of):
    array = array_of(make_numbers(), num_pages=8)
    hot = np.arange(0, 6 * 1024, 100)
    for seed in range(4):
        array.take(np.concatenate([hot, draw(10, seed=seed)]))
    before = array.tell().num_rows

    array.take(draw(5000, seed=9))
    array.take(hot)

    assert array.tell().num_rows - before <= -(-COUNT // 1024) - 6


def test_memory_is_what_was_asked_for(array_of):
    array = array_of(make_numbers(), num_pages=12)
    array.take(draw(5000))

    # One page more for the last of the file, and tables.
    assert array.num_bytes <= 13 * PAGE + 10 * (array._num_pages + 12)


@pytest.mark.parametrize(("count", "num_pages"), [(1, 24), (2, 12), (100, 1)])
def test_processes_divide_an_eighth_of_the_free_memory(array_of, monkeypatch, count, num_pages):
    monkeypatch.setattr(paged_array, "available_bytes", lambda: 24 * 8 * PAGE)
    array = array_of(make_numbers())
    array.num_processes = count

    array.take(draw(5000))

    assert len(array._held) == num_pages


def test_counts_of_pages_do_not_overflow(array_of):
    array = array_of(make_numbers(), num_pages=4)

    for _ in range(600):
        array.take(np.arange(2000))

    assert 100 < array._counts.max() < 256
    assert np.array_equal(array.take(np.arange(2000)), make_numbers().numpy()[:2000])


def test_cached_files_are_read_in_place(array_of, monkeypatch):
    array, positions = array_of(make_numbers()), draw(500)
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: True)

    assert np.array_equal(array.take(positions), make_numbers().numpy()[positions])
    assert array.tell().num_requests == 0
    assert array.is_cached()


@pytest.mark.parametrize("position", [-1, COUNT])
def test_positions_outside_the_array_are_refused(array_of, position):
    with pytest.raises(IdError, match=rf"positions must lie in \[0, {COUNT}\), got {position}"):
        array_of(make_numbers()).take(np.array([0, position, 5]))


def test_numbers_between_their_multiples_are_refused(array_of):
    with pytest.raises(FileError, match="must begin its numbers at a multiple of 8 bytes, got byte 12"):
        array_of(make_numbers(torch.int64), offset=12)


@pytest.mark.parametrize("change", ["touched", "cut short", "replaced", "taken away"])
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_file_that_changed_is_an_error(array_of, change, is_begun, is_cached, monkeypatch):
    array = array_of(make_numbers())
    if is_begun:
        array.take(draw(3))
    monkeypatch.setattr(RowFile, "is_cached", lambda file, rows: is_cached)
    path = array.file.path
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "cut short":
        os.truncate(path, 300)
    elif change == "replaced":
        save_rows(path, make_numbers() + 1)
    else:
        path.unlink()

    with pytest.raises(FileError, match="taken away" if change == "taken away" else "changed while it was read"):
        array.take(draw(500))


def test_a_disk_that_hangs_is_an_error_and_later_reads_take_new_memory(array_of, monkeypatch):
    array, go_on = array_of(make_numbers()), threading.Event()
    monkeypatch.setattr(range_reader, "_LEAVE", 0.1)
    monkeypatch.setenv("PYG_DIRECT_DISK_TIMEOUT", "0.3")
    with monkeypatch.context() as patch:
        patch.setattr(range_reader, "read_file_ranges_cpu", lambda *args: go_on.wait() and 0)
        with pytest.raises(FileError, match=r"numbers\.npy gave no bytes for 0\.3 seconds, at byte \d+"):
            array.take(draw(500))
    before = array._bytes

    try:
        assert np.array_equal(array.take(draw(500)), make_numbers().numpy()[draw(500)])
        assert array._bytes is not before
    finally:
        go_on.set()


def test_threads_read_one_array(array_of):
    array, numbers, wrong = array_of(make_numbers(), num_pages=5), make_numbers().numpy(), []

    def read(seed):
        for turn in range(20):
            positions = draw(400, seed=100 * seed + turn)
            if not np.array_equal(array.take(positions), numbers[positions]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_process_reads_with_its_own_memory(array_of):
    array, positions = array_of(make_numbers(), num_pages=5), draw(400)
    array.take(positions)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    child = context.Process(target=lambda: queue.put(array.take(positions).tolist()))
    child.start()
    got = queue.get()
    child.join()

    assert got == make_numbers()[positions].tolist()


def test_a_copy_in_another_process_opens_the_file_itself(array_of):
    array = array_of(make_numbers(), num_pages=5)

    other = pickle.loads(pickle.dumps(array))

    assert np.array_equal(other.take(draw(50)), array.take(draw(50)))

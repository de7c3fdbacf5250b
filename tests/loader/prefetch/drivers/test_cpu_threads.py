"""Items made ahead by a thread."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from pyg_direct import NeighborLoader
from pyg_direct.compiler.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.errors import ForkedProcessError
from pyg_direct.loader.prefetch.drivers import Background
from tests.batches import hash_batches, make_data
from tests.processes import start_method

DEPTHS = [1, 3]


def count_threads():
    return sum(thread.name.startswith("pyg_direct_batch") for thread in threading.enumerate())


def wait_until(holds):
    """Whether it holds within a minute, which a busy machine may take."""
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert wait_until(lambda: count_threads() == 0)


class Maker:
    """Makes n * n of the numbers 0 .. count-1, and notes how many it made and in how many threads at once."""

    def __init__(self, count=10, error=None, at=None):
        self.made, self.most, self._now = 0, 0, 0
        self._count, self._error, self._at = count, error, at
        self._lock = threading.Lock()

    def work(self):
        return ((number, number) for number in range(self._count))

    def __call__(self, number, item):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.01)
        with self._lock:
            self._now -= 1
            self.made += 1
        if number == self._at:
            raise self._error
        return item * item


def open_background(ahead, maker=None, **options):
    maker = maker or Maker()
    return Background(maker.work(), maker, ahead, **options), maker


@pytest.mark.parametrize("ahead", DEPTHS)
def test_items_come_in_order(ahead):
    background, _ = open_background(ahead)

    assert list(background) == [(n, n * n) for n in range(10)]


@pytest.mark.parametrize("ahead", DEPTHS)
def test_no_more_are_made_ahead_than_was_asked_for(ahead):
    background, maker = open_background(ahead)

    next(background)

    assert wait_until(lambda: maker.made == ahead + 1)
    time.sleep(0.05)
    assert maker.made == ahead + 1
    background.close()


def test_each_batch_has_a_thread_unless_told_otherwise():
    # Three threads are there at once, or this breaks.
    meeting = threading.Barrier(3, timeout=60)
    several = Background(((n, n) for n in range(9)), lambda number, item: meeting.wait() in range(3), 3)
    single, with_one = open_background(3, num_threads=1)

    assert list(several) == [(n, True) for n in range(9)]
    assert list(single) == [(n, n * n) for n in range(10)]
    assert with_one.most == 1


def test_nothing_starts_before_it_is_asked_for():
    _, maker = open_background(2)

    assert (maker.made, count_threads()) == (0, 0)


def test_an_error_comes_at_its_turn():
    background, _ = open_background(2, Maker(error=KeyError("broken"), at=3))

    got = [next(background)[0] for _ in range(3)]
    with pytest.raises(KeyError, match="broken"):
        next(background)

    assert got == [0, 1, 2]
    assert list(background) == []


def test_an_error_of_the_order_comes_after_the_batches_before_it():
    def work():
        yield 0, 0
        yield 1, 1
        raise KeyError("no more")

    background = Background(work(), Maker(), 3)

    got = [next(background)[0] for _ in range(2)]
    with pytest.raises(KeyError, match="no more"):
        next(background)

    assert got == [0, 1]


def test_closing_ends_the_thread_at_once():
    background, _ = open_background(1)
    next(background)

    background.close()
    background.close()

    assert count_threads() == 0
    assert list(background) == []


def test_dropping_ends_the_thread():
    background, _ = open_background(1)
    next(background)

    del background

    assert wait_until(lambda: count_threads() == 0)


@pytest.mark.parametrize(("cores", "ahead", "expected"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (1, 4, 1)])
def test_threads_share_the_cores_of_their_user(cores, ahead, expected):
    before = set_cpu_threads(cores)
    try:
        # A machine of a single core has no more.
        expected = min(expected, get_cpu_threads())
        background = Background(((n, n) for n in range(4)), lambda number, item: get_cpu_threads(), ahead)
        inside = {cores for _, cores in background}
    finally:
        set_cpu_threads(before)

    assert inside == {expected}


def run_in_fork(work):
    """What `work` says in a forked child, as its exit status."""
    child = os.fork()
    if child == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
class TestForks:
    """Children have no thread of ours, and no lock that one held."""

    def test_an_iterator_of_the_parent_is_refused(self):
        background, _ = open_background(1)
        next(background)

        def use():
            try:
                next(background)
            except ForkedProcessError:
                return 7
            return 1

        assert run_in_fork(use) == 7
        background.close()

    def test_a_child_makes_batches_of_its_own(self):
        loader = NeighborLoader(make_data(), [3, 2], batch_size=4, seed=1, device="cpu", prefetch=2)
        expected = hash_batches(loader)
        iterator = iter(loader)
        next(iterator)

        def iterate():
            loader.load_state_dict({"seed": 1, "epoch": 0, "batch": 0})
            return 7 if hash_batches(loader) == expected else 1

        # The thread may stand anywhere.
        assert [run_in_fork(iterate) for _ in range(3)] == [7, 7, 7]
        iterator.close()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_on_the_cpu_are_equal_at_any_pace(prefetch):
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "device": "cpu"}

    got = hash_batches(NeighborLoader(make_data(), [3, 2], **options, prefetch=prefetch))

    assert got == hash_batches(NeighborLoader(make_data(), [3, 2], **options, prefetch=0))


def test_two_epochs_at_once_take_turns():
    loaders = [NeighborLoader(make_data(), [3, 2], batch_size=8, seed=3, device="cpu", prefetch=2) for _ in range(2)]
    expected = hash_batches(loaders[0])
    loaders[0].load_state_dict({"seed": 3, "epoch": 0, "batch": 0})

    pairs = list(zip(*loaders, strict=True))

    assert [hash_batches(batches) for batches in zip(*pairs, strict=True)] == [expected] * 2


def find_resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_freed():
    """Bytes that a process keeps of those that a thread of it has freed."""

    def make(number, item):
        pieces = [torch.ones(15_000) for _ in range(1000)]
        # The last stays, before which no memory goes back by itself.
        return pieces[-1]

    torch.ones(15_000)
    before = find_resident()
    kept = list(Background(iter([(0, 0), (1, 1)]), make, 1))
    assert len(kept) == 2
    return find_resident() - before


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""),
                    reason="needs glibc")  # fmt: skip
@pytest.mark.full
def test_memory_that_threads_freed_goes_back_with_their_end():
    # A process of its own, whose memory nothing else has used.
    with multiprocessing.get_context(start_method()).Pool(1) as pool:
        assert pool.apply(measure_freed) < 20_000_000


def test_iterators_are_collected_in_a_thread_that_makes_their_batches(monkeypatch):
    troubles, dropped = [], threading.Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda trouble: troubles.append(repr(trouble.exc_value)))

    def make(number, item):
        if number == 1:
            dropped.wait(60)
            gc.collect()
        return item

    def walk():
        background = Background(Maker().work(), make, 1)
        try:
            for _, item in background:
                yield item
        finally:
            background.close()

    gc.disable()
    try:
        cycle = [walk()]
        cycle.append(cycle)
        next(cycle[0])
        del cycle
        dropped.set()
        ended = wait_until(lambda: count_threads() == 0)
    finally:
        gc.enable()

    assert ended
    assert troubles == []


# What works on threads, in a thread of the program that goes on when the main one has ended, then in a handler.
PROGRAM = """
import atexit, sys, threading, time
import torch
from torch_geometric.data import Data
from pyg_direct import (CSRTopo, Feature, LinkNeighborLoader, MixedGraphSageSampler, NeighborLoader, SampleJob,
                        save_rows)

data = Data(x=torch.randn(500, 4), edge_index=torch.randint(500, (2, 5000)))
path = save_rows(sys.argv[1], data.x)
options = {"batch_size": 100, "device": "cpu", "prefetch": 2}
held = NeighborLoader(data, [5, 5], **options)
iterator = iter(held)

class Job(SampleJob):
    def __getitem__(self, index):
        return torch.arange(50)
    def __len__(self):
        return 3

def train(where):
    time.sleep(0.2)
    from pyg_direct.features.row_files import RowFile
    RowFile.is_cached = lambda file, rows: False
    rows = Feature(device="cpu").from_file(path)[torch.arange(0, 500, 3)]
    counts = [len(list(loader)) for loader in (
        NeighborLoader(data, [5, 5], **options),
        LinkNeighborLoader(data, [5], edge_label_index=data.edge_index[:, :500], neg_sampling="binary", **options),
        MixedGraphSageSampler(Job(), 2, CSRTopo(data.edge_index), [3], mode="CPU_ONLY"))]
    next(iterator)
    print(where, counts, torch.equal(rows, data.x[::3]), flush=True)

atexit.register(train, "at exit")
next(iterator)
threading.Thread(target=train, args=["in a thread"]).start()
"""


@pytest.mark.slow
def test_threads_and_handlers_work_on_when_the_main_thread_has_ended(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)

    done = subprocess.run([sys.executable, str(tmp_path / "train.py"), str(tmp_path / "rows.npy")],
                          capture_output=True, text=True, timeout=300)  # fmt: skip

    assert done.stdout.splitlines() == ["in a thread [5, 5, 3] True", "at exit [5, 5, 3] True"], done.stderr
    assert done.returncode == 0

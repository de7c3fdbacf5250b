"""Items made ahead by a thread."""

import gc
import os
import threading
import time

import pytest

from pyg_direct import NeighborLoader
from pyg_direct.errors import ForkedProcessError
from pyg_direct.kernels.jit import get_cpu_threads, set_cpu_threads
from pyg_direct.loader.background import Background
from tests.batches import hash_batches, make_data

DEPTHS = [1, 3]


def count_threads():
    return sum(thread.name == "pyg_direct" for thread in threading.enumerate())


def wait_until(holds):
    """Whether it holds within some seconds."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert wait_until(lambda: count_threads() == 0)


class Source:
    """Gives 0 .. count-1, and fails after them if it was told to."""

    def __init__(self, count=10, error=None):
        self.made, self._count, self._error = 0, count, error

    def __iter__(self):
        return self

    def __next__(self):
        if self.made == self._count:
            raise self._error or StopIteration
        self.made += 1
        return self.made - 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_items_come_in_order(depth):
    assert list(Background(Source(10), depth)) == list(range(10))


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_more_are_made_ahead_than_was_asked_for(depth):
    source = Source()
    background = Background(source, depth)

    next(background)

    # One was taken, `depth` wait, and one is in the hands of the thread.
    assert wait_until(lambda: source.made == depth + 2)
    time.sleep(0.05)
    assert source.made == depth + 2
    background.close()


def test_nothing_starts_before_it_is_asked_for():
    source = Source()

    Background(source, 2)

    assert (source.made, count_threads()) == (0, 0)


@pytest.mark.parametrize("error", [KeyError("broken"), KeyboardInterrupt()])
def test_an_error_comes_after_the_items_before_it(error):
    background = Background(Source(3, error), 2)

    got = [next(background) for _ in range(3)]
    with pytest.raises(type(error)):
        next(background)

    assert got == [0, 1, 2]
    assert list(background) == []


def test_closing_ends_the_thread_at_once():
    background = Background(Source(), 1)
    next(background)

    background.close()
    background.close()

    assert count_threads() == 0
    assert list(background) == []


def test_dropping_ends_the_thread():
    background = Background(Source(), 1)
    next(background)

    del background

    assert wait_until(lambda: count_threads() == 0)


def test_the_thread_uses_as_many_cores_as_its_user():
    before = set_cpu_threads(1)

    inside = next(Background(iter(get_cpu_threads, None), 1))
    set_cpu_threads(before)

    assert inside == 1


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
        background = Background(Source(), 1)
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

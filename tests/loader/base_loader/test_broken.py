"""A kernel, an allocation or a thread that fails anywhere in a batch: it is told, and later batches are right."""

import ctypes
import threading
import time
from itertools import count

import pytest
import torch

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    Feature,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    LinkNeighborLoader,
    NeighborLoader,
    RandomNodeLoader,
    ShaDowKHopSampler,
    save_rows,
)
from pyg_direct.compiler.jit import CpuKernel
from pyg_direct.loader.prefetch.drivers import Background
from tests.batches import make_data
from tests.graphs import make_random_graph
from tests.hetero_data import make_hetero

DATA = make_data(make_random_graph(30, 200))
HETERO = make_hetero()
OPTIONS = {"batch_size": 8, "seed": 3, "device": "cpu", "prefetch": 0}
LOADERS = {
    "plain": lambda: NeighborLoader(DATA, [3, 2], **OPTIONS),
    "labor": lambda: NeighborLoader(DATA, [3, 2], sampling="labor", **OPTIONS),
    "disjoint": lambda: NeighborLoader(DATA, [3, 2], disjoint=True, **OPTIONS),
    "induced": lambda: NeighborLoader(DATA, [3], subgraph_type="induced", **OPTIONS),
    "types": lambda: NeighborLoader(HETERO, [3, 2], "paper", **OPTIONS),
    "links": lambda: LinkNeighborLoader(DATA, [2], DATA.edge_index[:, :30], neg_sampling="binary", **OPTIONS),
    "hgt": lambda: HGTLoader(HETERO, [4, 3], "paper", **OPTIONS),
    "shadow": lambda: ShaDowKHopSampler(DATA, 2, 2, **OPTIONS),
    "clusters": lambda: ClusterLoader(ClusterData(DATA, 9, log=False), **{**OPTIONS, "batch_size": 2}),
    "parts": lambda: RandomNodeLoader(DATA, 4, seed=3, device="cpu", prefetch=0),
    "walks": lambda: GraphSAINTRandomWalkSampler(DATA, walk_length=2, num_steps=4, **OPTIONS),
}


def describe(batches):
    """Everything that batches hold."""
    return [[[(str(key), value.tolist() if isinstance(value, torch.Tensor) else value) for key, value in store.items()]
             for store in batch.stores] for batch in batches]  # fmt: skip


class BrokenError(Exception):
    """What a kernel or an allocation ends with."""


def break_call(monkeypatch, places, number):
    """Call `number` of these functions fails; returns a function that says whether it came to that."""
    calls, broken = count(), []

    def wrap(real):
        def call(*args, **options):
            if next(calls) == number:
                broken.append(number)
                raise BrokenError
            return real(*args, **options)

        return call

    for owner, name in places:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: bool(broken)


# Where tensors are made.
ALLOCATIONS = [(torch, "empty"), (torch, "zeros"), (torch, "cat"), (torch.Tensor, "index_select")]
KINDS = {"kernel": [(CpuKernel, "__call__")], "allocation": ALLOCATIONS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOADERS)
def test_a_failure_anywhere_is_told_and_changes_no_later_batch(monkeypatch, name, kind):
    expected = describe(LOADERS[name]())
    loader = LOADERS[name]()
    first = iter(loader)
    next(first)
    number = 0

    for number in count():
        # From the second batch on, when all that is kept between batches is there.
        with monkeypatch.context() as patch:
            is_broken = break_call(patch, KINDS[kind], number)
            try:
                next(first)
            except BrokenError:
                pass
            else:
                assert not is_broken(), "the failure was not told"
                break
        loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})
        assert describe(loader) == expected, f"after {kind} call {number} failed"
        loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 1})
        first = iter(loader)

    assert number > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_failure_in_a_thread_comes_at_its_turn(monkeypatch, kind, prefetch):
    expected = describe(LOADERS["plain"]())
    loader = NeighborLoader(DATA, [3, 2], **{**OPTIONS, "prefetch": prefetch})
    next(iter(loader))
    loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})

    with monkeypatch.context() as patch:
        iterator = iter(loader)
        break_call(patch, KINDS[kind], 3)
        with pytest.raises(BrokenError):
            list(iterator)
    loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})

    assert describe(loader) == expected


@pytest.mark.parametrize("prefetch", [1, 3])
def test_threads_that_cannot_start_are_told(monkeypatch, prefetch):
    expected = describe(LOADERS["plain"]())
    loader = NeighborLoader(DATA, [3, 2], **{**OPTIONS, "prefetch": prefetch})

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(iter(loader))
    loader.load_state_dict({"seed": 3, "epoch": 0, "batch": 0})

    assert describe(loader) == expected


def refuse_to_start(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_thread_that_is_ended_from_outside_is_told(ahead, error):
    started, makers = threading.Event(), []

    def make(number, item):
        if number == 1:
            makers.append(threading.get_ident())
            started.set()
            while True:
                time.sleep(0.001)
        return item

    background = Background(((n, n) for n in range(6)), make, ahead)
    got = [next(background)[0]]
    assert started.wait(60)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(makers[0]), ctypes.py_object(error))

    with pytest.raises(error):
        got += [number for number, _ in background]

    assert got == [0]
    assert next(background, None) is None
    assert not any(thread.name.startswith("pyg_direct_batch") for thread in threading.enumerate())


class TestReaders:
    """The threads that read rows of a file."""

    @pytest.fixture(autouse=True)
    def _not_cached(self, monkeypatch):
        monkeypatch.setattr("pyg_direct.features.row_files.RowFile.is_cached", lambda file, rows: False)

    def make(self, tmp_path):
        rows = torch.arange(4000).view(1000, 4).float()
        return rows, Feature(device="cpu").from_file(save_rows(tmp_path / "rows.npy", rows))

    def test_a_reader_that_dies_is_told_and_the_next_read_is_right(self, tmp_path, monkeypatch):
        rows, feature = self.make(tmp_path)
        ids = torch.arange(1000)

        for error in (SystemExit, OSError, MemoryError):
            with monkeypatch.context() as patch:
                patch.setattr("pyg_direct.features.row_files.RowFile.read_rows", raises(error))
                with pytest.raises(error):
                    feature[ids]
            assert torch.equal(feature[ids], rows)

    def test_readers_that_cannot_start_are_told(self, tmp_path, monkeypatch):
        rows, feature = self.make(tmp_path)
        ids = torch.arange(1000)
        monkeypatch.setattr("pyg_direct.features.tiers.disk._pool", make_pool := fresh_pool())

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse_to_start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                feature[ids]

        assert torch.equal(feature[ids], rows)
        make_pool(0).close()

    def test_memory_that_runs_out_while_rows_are_read_is_told(self, tmp_path, monkeypatch):
        rows, feature = self.make(tmp_path)
        ids = torch.arange(1000)
        feature[ids]

        for number in count():
            with monkeypatch.context() as patch:
                is_broken = break_call(patch, KINDS["allocation"], number)
                try:
                    feature[ids]
                except BrokenError:
                    pass
                else:
                    assert not is_broken()
                    break
            assert torch.equal(feature[ids], rows)
        assert number > 0


def raises(error):
    """A function that fails."""

    def fail(*args):
        raise error

    return fail


def fresh_pool():
    """A pool whose threads have not started."""
    from pyg_direct.features.tiers import disk

    pool = disk._pool.__wrapped__(0)
    return lambda process: pool

"""A loader is iterated, left, failed, saved and resumed in any order, and gives the batches of the reference."""

import gc
import threading
import time

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pyg_direct import NeighborLoader
from tests.batches import make_data
from tests.conftest import DEVICES
from tests.graphs import make_random_graph
from tests.reference.draw import batch_key
from tests.reference.epoch import list_batches
from tests.reference.sample import sample

SEED, FANOUTS, COUNT, SIZE = 5, [2, 2], 17, 4
NUM_BATCHES = -(-COUNT // SIZE)
GRAPH = make_random_graph(COUNT, 60)
ROWS = GRAPH.in_rows()
DATA = make_data(GRAPH)
_EXPECTED = {}


def expect(epoch, number):
    """(n_id, e_id) of a batch, by the reference."""
    if (epoch, number) not in _EXPECTED:
        positions = dict(list_batches(COUNT, SIZE, SEED, epoch, shuffle=True))[number]
        batch = sample(ROWS, positions, FANOUTS, batch_key(SEED, epoch, number))
        _EXPECTED[epoch, number] = batch.n_id, batch.e_id
    return _EXPECTED[epoch, number]


class Iteration:
    """An iterator of the loader, and the batch that comes next."""

    def __init__(self, iterator, epoch, number):
        self.iterator, self.epoch, self.number = iterator, epoch, number


class FailureError(Exception):
    pass


class LoaderMachine(RuleBasedStateMachine):
    """Runs beside three integers."""

    device = "cpu"

    @initialize(prefetch=st.sampled_from([0, 1, 3]), hooked=st.booleans())
    def open(self, prefetch, hooked):
        self.is_failing, self.prefetch = False, prefetch
        self.loader = NeighborLoader(DATA, FANOUTS, batch_size=SIZE, shuffle=True, seed=SEED, device=self.device,
                                     prefetch=prefetch, transform=self.transform,
                                     transform_sampler_output=(lambda out: out) if hooked else None)  # fmt: skip
        self.open_iterations, self.next_epoch, self.first, self.standing = [], 0, 0, (0, 0)

    def transform(self, batch):
        if self.is_failing:
            raise FailureError
        return batch

    @rule()
    def start(self):
        iteration = Iteration(iter(self.loader), self.next_epoch, self.first)
        self.open_iterations = [*self.open_iterations[-2:], iteration]
        self.standing = self.next_epoch, self.first
        self.next_epoch, self.first = self.next_epoch + 1, 0

    @precondition(lambda self: self.open_iterations)
    @rule(which=st.integers(0, 2), count=st.integers(1, NUM_BATCHES + 1))
    def step(self, which, count):
        iteration = self.open_iterations[which % len(self.open_iterations)]
        for _ in range(count):
            batch = next(iteration.iterator, None)
            if iteration.number >= NUM_BATCHES:
                assert batch is None
                self.open_iterations.remove(iteration)
                if self.standing[0] == iteration.epoch:
                    self.standing = iteration.epoch + 1, 0
                return
            n_id, e_id = expect(iteration.epoch, iteration.number)
            assert batch.n_id.tolist() == n_id
            assert batch.e_id.tolist() == e_id
            assert torch.equal(batch.x.cpu(), DATA.x[n_id])
            iteration.number += 1
            self.standing = iteration.epoch, iteration.number

    @precondition(lambda self: any(i.number < NUM_BATCHES for i in self.open_iterations))
    @rule()
    def fail(self):
        iteration = next(i for i in self.open_iterations if i.number < NUM_BATCHES)
        self.is_failing = True
        with pytest.raises(FailureError):
            next(iteration.iterator)
        self.is_failing = False
        assert next(iteration.iterator, None) is None
        self.open_iterations.remove(iteration)

    @precondition(lambda self: self.open_iterations)
    @rule(closes=st.booleans())
    def leave(self, closes):
        iteration = self.open_iterations.pop()
        if closes:
            iteration.iterator.close()

    @rule()
    def save(self):
        assert self.loader.state_dict() == {"seed": SEED, "epoch": self.standing[0], "batch": self.standing[1],
                                            "num_seeds": COUNT, "batch_size": SIZE, "shuffle": True,
                                            "drop_last": False}  # fmt: skip

    @rule(epoch=st.integers(0, 5), batch=st.integers(0, NUM_BATCHES))
    def resume(self, epoch, batch):
        self.loader.load_state_dict({"seed": SEED, "epoch": epoch, "batch": batch})
        self.next_epoch, self.first, self.standing = epoch, batch, (epoch, batch)

    @rule(positions=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=5))
    def ask(self, positions):
        batch = self.loader(positions)

        assert batch.input_id.tolist() == positions
        assert batch.n_id[: len(positions)].tolist() == positions

    def teardown(self):
        if hasattr(self, "loader"):
            self.open_iterations.clear()
            self.loader = None
            if self.prefetch:
                gc.collect()
            end = time.monotonic() + 60
            while any(t.name.startswith("pyg_direct_batch") for t in threading.enumerate()):
                assert time.monotonic() < end, "threads of iterators that were dropped live on"
                time.sleep(0.002)


@pytest.mark.parametrize("device", [d for d in DEVICES if d.id != "sim"])
def test_any_order_of_calls(device):
    machine = type("Machine", (LoaderMachine,), {"device": device})

    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
    machine.TestCase().runTest()

"""Groups of batches in lockstep: all ranks make equally many in a step, as many as fit into memory."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.loader.prefetch import lockstep_ranks
from pyg_direct.loader.prefetch.lockstep_ranks import GroupSize, Overlap, Steps


class HereCommunicator:
    """A communicator that runs each task at once, beside a rank whose largest batch has so many bytes."""

    device = torch.device("cpu")

    def __init__(self, other_bytes):
        self.other_bytes = other_bytes

    def agree(self, value):
        return [value, self.other_bytes * lockstep_ranks._COUNTS + 1 if value else 0]

    def submit(self, fn: Callable, *args):
        done: Future = Future()
        done.set_result(fn(*args))
        return done

    def follow(self, steps):
        pass


def make_batches(sizes):
    def make(work, most):
        assert most == len(work)
        sizes.append(len(work))
        return [Data(x=torch.full((100,), float(number))) for number, _ in work]

    return make


@pytest.mark.parametrize(
    ("most", "other_bytes", "expected"),
    [(8, 0, [1, 1, 1, 5, 2]), (3, 0, [1, 1, 1, 3, 3, 1]), (8, 900, [1, 1, 2, 2, 2, 2]), (8, 2000, [1] * 10)],
)
def test_a_group_has_what_fits_into_the_memory_of_all_ranks(most, other_bytes, expected):
    sizes: list[int] = []
    work = iter([(number, None) for number in range(10)])

    steps = Steps(
        HereCommunicator(other_bytes), work, make_batches(sizes), lambda count: None, 3, GroupSize(most, 2000)
    )
    numbers = [int(batch.x[0]) for batch in steps]

    assert numbers == list(range(10))
    assert sizes == expected


def test_a_later_epoch_knows_the_size_of_batches():
    sizes: list[int] = []
    group = GroupSize(8, 2000)

    for _ in range(2):
        list(Steps(HereCommunicator(0), iter([(n, None) for n in range(8)]), make_batches(sizes), lambda count: None, 1,
                   group))  # fmt: skip

    assert sizes == [1, 1, 1, 5, 1, 1, 5, 1]


class QueueCommunicator(HereCommunicator):
    """A communicator that runs tasks when it is told to; ranks beside this one have batches in `others` steps."""

    def __init__(self, log, others=0):
        super().__init__(0)
        self.log, self.others, self.tasks = log, others, []

    def agree(self, value):
        self.log.append("meet")
        self.others -= 1
        return [value, 1 if self.others >= 0 else 0]

    def submit(self, fn: Callable, *args):
        done: Future = Future()
        self.tasks.append((done, fn, args))
        return done

    def run_one(self):
        done, fn, args = self.tasks.pop(0)
        try:
            done.set_result(fn(*args))
        except Exception as error:
            done.set_exception(error)


def make_overlap(log, *, failing=None):
    def note(what, work):
        log.append(f"{what} {'-' if work is None else work[0]}")

    def begin(work):
        if work is not None and work[0] == failing:
            raise ZeroDivisionError("on purpose")
        note("begin", work)
        return work

    def finish(pending, work):
        note("finish", work)
        return work

    def build(sample, work):
        note("build", work)
        return None if work is None else Data(x=torch.full((100,), float(work[0])))

    return Overlap(begin, finish, build)


def open_steps(log, count, sizes=None, others=0, **options):
    communicator, sizes = QueueCommunicator(log, others), sizes or GroupSize(8, 1200)
    work = iter([(number, None) for number in range(count)])
    return communicator, Steps(communicator, work, make_overlap(log, **options), lambda count: None, 2, sizes)


def test_batches_are_on_their_way_while_ranks_meet_and_the_next_is_begun_before_one_is_built():
    log: list[str] = []
    communicator, steps = open_steps(log, 9, GroupSize(3, 1 << 20))
    steps._size = 3
    steps._start(3)
    for _ in range(3):
        communicator.run_one()

    # The first step is made after the meeting of the second one, and so on.
    assert log == [
        "meet", "begin 0", "begin 1", "begin 2",
        "meet", "finish 0", "begin 3", "build 0", "finish 1", "begin 4", "build 1", "finish 2", "begin 5", "build 2",
        "meet", "finish 3", "begin 6", "build 3", "finish 4", "begin 7", "build 4", "finish 5", "begin 8", "build 5",
    ]  # fmt: skip
    assert len(steps._batches[0].result()[0]) == len(steps._batches[1].result()[0]) == 3
    assert not steps._batches[2].done()
    # The last ones are made when all ranks have come to the end.
    assert [int(batch.x[0]) for batch in run_all(communicator, steps)] == list(range(9))
    assert log[-1] == "build 8"


def run_all(communicator, steps):
    """Batches of steps, whose tasks are run when they are waited for."""
    while True:
        steps._start(1 + steps._ahead)
        while communicator.tasks:
            communicator.run_one()
        try:
            yield next(steps)
        except StopIteration:
            return


def test_a_rank_without_batches_takes_part_in_others():
    log: list[str] = []
    communicator, steps = open_steps(log, 2, others=4)

    assert [int(batch.x[0]) for batch in run_all(communicator, steps)] == [0, 1]

    assert log == ["meet", "begin 0", "meet", "begin 1", "finish 0", "build 0", "meet", "begin -", "finish 1",
                   "build 1", "meet", "begin -", "finish -", "build -", "meet", "finish -", "build -"]  # fmt: skip


def test_batches_that_were_begun_before_an_error_are_handed_over():
    log: list[str] = []
    communicator, steps = open_steps(log, 4, failing=2)
    found = []

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        found.extend(run_all(communicator, steps))

    assert [int(batch.x[0]) for batch in found] == [0, 1]
    # Graphs of batches that are on their way would keep their exchange.
    assert not steps._overlap._begun

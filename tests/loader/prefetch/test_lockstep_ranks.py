"""Groups of batches in lockstep: all ranks make equally many in a step, as many as fit into memory."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.loader.prefetch import lockstep_ranks
from pyg_direct.loader.prefetch.lockstep_ranks import GroupSize, Steps


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

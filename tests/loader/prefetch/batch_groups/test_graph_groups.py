"""Groups of batches of graphs: how many are made at a time, and what happens if memory does not hold them."""

import pytest
import torch

from pyg_direct.errors import PlacementWarning
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.prefetch import batch_groups
from pyg_direct.loader.prefetch.batch_groups import GraphGroups

CPU = torch.device("cpu")


class Maker:
    """Makes batches that are their numbers, each of `size` bytes; GPU memory holds `room` of them."""

    def __init__(self, size=1, room=100):
        self.size, self.room, self.groups = size, room, []

    def __call__(self, work, most_bytes):
        fitting = max(1, min(len(work), most_bytes // self.size))
        if fitting > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.groups.append(fitting)
        return [(f"batch {number}", []) for number, _ in work[:fitting]]


def list_work(count, drawn=None):
    for number in range(count):
        if drawn is not None:
            drawn.append(number)
        yield number, Seeds(torch.tensor([number]), torch.tensor([number]))


def test_groups_grow_and_batches_come_in_order():
    make, drawn, ahead = Maker(), [], []

    for number, seeds, batch in GraphGroups(list_work(40, drawn), make, CPU):
        ahead.append(len(drawn) - number - 1)
        assert (seeds.nodes.tolist(), batch) == ([number], f"batch {number}")

    assert make.groups == [1, 4, 16, 16, 3]
    assert len(ahead) == 40
    assert max(ahead) == 15


def test_groups_take_so_many_bytes(monkeypatch):
    monkeypatch.setattr(batch_groups, "_ROOM", 10)
    make = Maker(size=3)

    assert [number for number, *_ in GraphGroups(list_work(9), make, CPU)] == list(range(9))
    assert make.groups == [1, 3, 3, 2]


def test_smaller_groups_are_made_after_memory_ran_out():
    make = Maker(room=3)

    with pytest.warns(PlacementWarning, match="4 batches of graphs together: at most 2"):
        numbers = [number for number, *_ in GraphGroups(list_work(9), make, CPU)]

    assert numbers == list(range(9))
    assert max(make.groups) == 2


def test_a_batch_that_memory_does_not_hold_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        next(GraphGroups(list_work(9), Maker(room=0), CPU))


def test_other_errors_are_raised():
    def fail(work, most_bytes):
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        next(GraphGroups(list_work(9), fail, CPU))


def test_an_error_of_the_sampler_comes_after_the_batches_before_it():
    def draw():
        yield from list_work(3)
        raise ValueError("no more")

    groups = GraphGroups(draw(), Maker(), CPU)
    got = [next(groups)[0] for _ in range(3)]

    assert got == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(groups)
    assert list(groups) == []


def test_an_epoch_without_batches_ends():
    assert list(GraphGroups(iter(()), Maker(), CPU)) == []


def test_the_driver_tells_free_memory_once_a_second(monkeypatch):
    asked, now = [], [5.0]
    monkeypatch.setattr(batch_groups, "_ROOMS", {})
    monkeypatch.setattr(batch_groups, "free_bytes", lambda index: asked.append(index) or 160 << 20)
    monkeypatch.setattr(batch_groups.time, "monotonic", lambda: now[0])

    rooms = [batch_groups._find_room_on(0) for _ in range(3)] + [batch_groups._find_room_on(1)]
    now[0] = 6.5
    rooms.append(batch_groups._find_room_on(0))

    assert rooms == [10 << 20] * 5
    assert asked == [0, 1, 0]

"""Reads over the link take fewer blocks while they are early, and more where training waited."""

from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct import NeighborLoader
from pyg_direct.features.link import limit_link
from pyg_direct.loader import pace as module
from pyg_direct.loader.pace import Pace

EARLY, HELD, SHARES = module._EARLY, module._HELD, module._SHARES


class Event:
    """An event at a time in milliseconds; None while it is not known."""

    def __init__(self, time):
        self.time = time

    def query(self):
        return self.time is not None

    def elapsed_time(self, end):
        return end.time - self.time


class Epoch:
    """Batches asked for once a millisecond, ready as long before that as is told."""

    def __init__(self, level=0):
        self.shares, self.time = [], 0.0
        self.pace = Pace(self.shares.append, level)

    def run(self, early, count):
        for _ in range(count):
            self.time += 1.0
            self.pace.note(Event(self.time), Event(self.time - early))
        return self.shares


def test_fewer_blocks_read_once_batches_are_early():
    epoch = Epoch()

    # The first one has none before it, by which a turn is known.
    assert epoch.run(0.5, EARLY) == []
    assert epoch.run(0.5, 1) == [SHARES[1]]
    assert epoch.run(0.5, 100)[-1] == SHARES[-1] == min(SHARES)
    assert epoch.shares == list(SHARES[1:])


def test_blocks_stay_where_batches_are_just_in_time():
    assert Epoch().run(0.1, 100) == []
    # One in between that is late begins the count anew.
    epoch = Epoch()
    for _ in range(20):
        epoch.run(0.5, EARLY - 1)
        epoch.run(0.0, 1)
    assert epoch.shares == []


def test_more_blocks_read_where_training_waited_and_fewer_are_tried_later():
    epoch = Epoch(level=2)
    epoch.run(0.5, 1)

    assert epoch.run(-0.1, 1) == [SHARES[2], SHARES[1]]
    assert epoch.run(0.5, HELD - 1) == [SHARES[2], SHARES[1]]
    assert epoch.run(0.5, EARLY) == [SHARES[2], SHARES[1], SHARES[2]]
    epoch.run(-0.1, 20)
    assert epoch.shares[-1] == 1.0
    assert epoch.pace.level == 0


def test_batches_that_the_gpu_has_not_reached_are_waited_for_by_nobody():
    epoch = Epoch()
    waiting = [(Event(None), Event(None)) for _ in range(module._MOST_OPEN)]
    assert all(epoch.pace.note(*events) == [] for events in waiting)
    more = Event(None), Event(None)

    assert epoch.pace.note(*more) == list(more)
    for number, (asked, ready) in enumerate(waiting):
        asked.time, ready.time = float(number), number - 0.5
    free = epoch.pace.note(Event(None), Event(None))

    assert len(set(map(id, free))) == len(free) == 2 * len(waiting) - 1
    assert epoch.shares[:1] == [SHARES[1]]


def test_events_come_back_once_each():
    pace, free = Pace(lambda share: None), []
    events = [(Event(float(number)), Event(number - 0.5)) for number in range(10)]
    for asked, ready in events:
        free += pace.note(asked, ready)

    # The last that was asked for is what the next turn is counted from.
    assert {id(event) for event in free} == {id(e) for pair in events for e in pair} - {id(events[-1][0])}
    assert len(free) == 19


def test_all_blocks_read_after_an_epoch_and_the_next_begins_where_it_stood():
    epoch = Epoch()
    epoch.run(0.5, 2 * EARLY + 1)
    level = epoch.pace.level
    epoch.pace.close()

    assert epoch.shares[-1] == 1.0
    assert epoch.pace.level == level > 0
    assert Epoch(level).shares == [SHARES[level]]
    plain = Epoch()
    plain.pace.close()
    assert plain.shares == []


@pytest.mark.parametrize(("chosen", "expected"), [(None, 11), (40, 40)])
def test_blocks_that_a_user_chose_stay(chosen, expected):
    feature = SimpleNamespace(
        link_blocks=chosen, _all_blocks=42 if chosen is None else 40, _max_blocks=40, _reader="reader"
    )

    limit_link(feature, 0.25)

    assert feature._max_blocks == expected
    assert feature._reader == (None if chosen is None else "reader")


@pytest.mark.gpu
def test_batches_are_equal_at_any_pace(monkeypatch):
    data = Data(x=torch.rand(5000, 64), edge_index=torch.randint(0, 5000, (2, 50000)))
    shares = []

    def run(early):
        monkeypatch.setattr(Pace, "_look", lambda self, *_: (shares.append(self.level), early and self._go(
            min(self.level + 1, len(SHARES) - 1))))  # fmt: skip
        loader = NeighborLoader(data.clone(), [5, 5], batch_size=100, placement="unified", feature_cache="20%", seed=0)
        seen = []
        for batch in loader:
            torch.cuda.synchronize()
            seen.append((batch.n_id.cpu(), batch.x.cpu()))
        feature = loader._list_places()[1]["x"]
        assert feature._max_blocks == feature._all_blocks
        return seen

    for (ids, rows), (own_ids, own_rows) in zip(run(False), run(True), strict=True):
        assert torch.equal(ids, own_ids)
        assert torch.equal(rows, own_rows)
        assert torch.equal(rows, data.x[ids])
    assert max(shares) == len(SHARES) - 1

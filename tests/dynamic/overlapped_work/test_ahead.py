"""Snapshots are sliced on a thread before they are requested; results stay equal."""

import threading
import time

import pytest
import torch
from torch_geometric.data import Data

from pyg_direct.dynamic import overlapped_work, sequence_edges, snapshot_plan, stream
from pyg_direct.dynamic.device_caches import Budget
from pyg_direct.dynamic.nn import TGCN
from pyg_direct.dynamic.overlapped_work import Ahead
from pyg_direct.dynamic.sequence_edges import Parts, SequenceEdges
from pyg_direct.errors import IdError
from tests.snapshots import make_snapshots

NODES, CHANNELS = 12, 3


@pytest.fixture(autouse=True)
def a_thread(monkeypatch):
    """As if a thread paid."""
    monkeypatch.setattr(overlapped_work, "count_cores", lambda: 2)
    monkeypatch.setattr(SequenceEdges, "are_for_thread", lambda *args: True)


@pytest.mark.parametrize(("device", "limit", "most", "expected"), [
    ("cuda", 10**9, 80, True),
    # Few edges, and those that training itself has to wait for.
    ("cuda", 10**9, 81, False), ("cpu", 10**9, 80, False), ("cpu", None, 80, False),
])  # fmt: skip
def test_a_thread_slices_many_edges_for_a_gpu(monkeypatch, device, limit, most, expected):
    monkeypatch.undo()
    monkeypatch.setattr(sequence_edges, "FEW_AT_ONCE", most)
    parts = [Parts(None, torch.zeros(2, 40, dtype=torch.int64), None, NODES)] * 3
    known = sequence_edges.SequenceEdges(parts, NODES, torch.device(device), Budget(limit), Ahead())

    assert known.are_for_thread(1, 3) is expected
    assert known.in_one_thread(1, 3).is_on is (most == 81)


def make_list(count=8):
    return [Data(x=torch.randn(NODES, CHANNELS), edge_index=torch.from_numpy(edges))
            for edges, _ in make_snapshots(NODES, 40, count)]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_following_groups_are_sliced_on_a_thread(monkeypatch, size):
    sliced = []
    real = snapshot_plan.build_group

    def build(group, *rest, **options):
        sliced.append((len(group), threading.current_thread().name.startswith("pyg_direct-snapshots")))
        return real(group, *rest, **options)

    monkeypatch.setattr(snapshot_plan, "build_group", build)
    snapshots, layer = make_list(20), TGCN(CHANNELS, 4)

    for given, plain in zip(stream(snapshots, "cpu", group_size=size), snapshots, strict=True):
        got = layer(given.x, given.edge_index)

        torch.testing.assert_close(got, layer(plain.x, plain.edge_index), rtol=1e-4, atol=1e-5)
    # All but the first block of snapshots, which may be several groups of any size if the size is chosen; each once.
    block = 8 if size == "auto" else size
    assert sum(length for length, is_apart in sliced if is_apart) == 20 - block
    assert sum(length for length, is_apart in sliced if not is_apart) == block


def test_bad_edges_are_told_at_the_turn_of_their_snapshot():
    snapshots, layer = make_list(4), TGCN(CHANNELS, 4)
    snapshots[2].edge_index[0, 0] = NODES
    given = stream(snapshots, "cpu", group_size=1)

    for t in (0, 1):
        layer(given[t].x, given[t].edge_index)

    for _ in range(2):
        with pytest.raises(IdError, match=f"got {NODES}"):
            layer(given[2].x, given[2].edge_index)


def test_work_is_begun_once_and_finished_once():
    sliced, calls = Ahead(), []

    for _ in range(2):
        sliced.begin("a", lambda: calls.append(1) or 5)

    assert (sliced.finish("a"), sliced.finish("a"), sliced.finish("b"), calls) == (5, None, None, [1])


def test_no_thread_stays_when_its_work_is_done():
    # A thread that has begun torch's loops would make the program's threads wait asleep.
    sliced = Ahead()

    sliced.begin("a", lambda: torch.randn(1000, 100).sort())
    sliced.begin("b", lambda: threading.current_thread())
    sliced.finish("b").join(60)
    sliced.finish("a")

    deadline = time.monotonic() + 60
    while any(t.name.startswith("pyg_direct-snapshots") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_single_core_gets_no_thread(monkeypatch):
    monkeypatch.setattr(overlapped_work, "count_cores", lambda: 1)
    alone = Ahead()

    alone.begin("a", lambda: 5)

    assert alone.finish("a") is None

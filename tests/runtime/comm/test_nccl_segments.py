"""A wait for exchanges on a GPU ends when a rank failed or is gone; graphs are released before their group ends."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from pyg_direct.errors import RankError
from pyg_direct.runtime.comm import nccl_segments
from pyg_direct.runtime.comm.nccl_segments import NcclSegments, _Lane


class Group:
    """A group, the exchanges of which wait until it is aborted; it cannot end before its graphs are released."""

    def __init__(self):
        self.aborted, self.calls = threading.Event(), []

    def abort(self):
        self.calls.append("abort")
        self.aborted.set()

    def shutdown(self):
        self.calls.append("shutdown")

    def alltoall_base(self, *args):
        self.calls.append("exchange")

    def query(self):
        return self.aborted.is_set()

    def synchronize(self):
        # As of an event behind an exchange.
        assert self.aborted.wait(60)


class Plan:
    def __init__(self, group):
        self.group, self.is_busy = group, 1

    def release(self):
        self.group.calls.append("release")
        self.is_busy -= 1
        return self.is_busy < 0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(nccl_segments, "_LOOK", 0.05)


def open_segments(group, **options):
    return NcclSegments(group, 2, torch.device("cpu"), **{"timeout": 1000, **options})


def test_a_wait_ends_with_the_reason_why_a_rank_is_gone():
    group, begun = Group(), time.monotonic()
    segments = open_segments(group, find_reason=lambda: "rank 1 is gone" if time.monotonic() > begun + 0.3 else None)

    with pytest.raises(RankError, match="rank 1 is gone"):
        segments.wait(group)

    segments.close(failed=True)
    assert group.calls == ["abort"]


def test_exchanges_end_while_the_host_waits_for_other_work_behind_them(monkeypatch):
    monkeypatch.setattr(nccl_segments, "tolerate_captures", nullcontext)
    group, begun, over = Group(), time.monotonic(), Group()
    over.aborted.set()
    segments = open_segments(group, find_reason=lambda: "rank 1 is gone" if time.monotonic() > begun + 0.3 else None)
    segments.follow(over)
    segments.follow(group)

    group.synchronize()

    assert group.calls == ["abort"]
    with pytest.raises(RankError, match="rank 1 is gone"):
        segments.wait(over)


def test_an_aborted_group_refuses_exchanges(monkeypatch):
    monkeypatch.setattr(nccl_segments, "on_raw_stream", lambda *args: nullcontext())
    group, other = Group(), Group()
    segments = open_segments(group, find_reason=lambda: "rank 1 is gone")
    segments.beside = _Lane(other, 2, torch.device("cpu"))
    words = torch.zeros(2, 2)
    segments.exchange(words[0], words[1], 0)

    with pytest.raises(RankError, match="rank 1 is gone"):
        segments.wait(group)

    # A group of NCCL would wait for all ranks to connect anew.
    for lane in (segments, segments.beside):
        with pytest.raises(RankError, match="rank 1 is gone"):
            lane.exchange(words[0], words[1], 0)
    assert (group.calls, other.calls) == (["exchange", "abort"], ["abort"])


def test_exchanges_that_are_over_need_no_other_rank(monkeypatch):
    monkeypatch.setattr(nccl_segments, "tolerate_captures", nullcontext)
    group, asked = Group(), threading.Event()
    segments = open_segments(group, find_reason=asked.set)
    segments.follow(group)
    assert asked.wait(60)

    group.aborted.set()
    while segments._followed:
        time.sleep(0.01)
    asked.clear()
    time.sleep(0.3)

    assert not asked.is_set()
    assert group.calls == []


def test_a_rank_that_failed_is_heard_after_the_wait():
    def hear():
        raise RankError("rank 1 failed: ValueError")

    group = Group()
    segments = open_segments(group, find_reason=lambda: "another rank failed", hear=hear)

    with pytest.raises(RankError, match="rank 1 failed: ValueError"):
        segments.wait(group)


def test_a_wait_ends_at_the_timeout():
    group = Group()
    segments = open_segments(group, timeout=0.2, hear=lambda: pytest.fail("no rank has failed"))

    with pytest.raises(RankError, match=r"took more than 0\.2 seconds"):
        segments.wait(group)


def test_graphs_are_released_before_the_group_ends():
    group = Group()
    segments, plan = open_segments(group), Plan(group)
    segments.hold(plan)

    segments.close()

    # The plan had a batch on its way at first.
    assert group.calls == ["release", "release", "shutdown"]


def test_after_a_failure_the_group_is_aborted_so_that_batches_on_their_way_end():
    group = Group()
    segments, plan = open_segments(group), Plan(group)
    segments.hold(plan)

    segments.close(failed=True)

    assert group.calls == ["abort", "release", "release"]


def test_an_abort_that_waits_for_graphs_is_over_when_the_group_is_closed():
    group, released = Group(), threading.Event()

    class Graphs:
        def release(self):
            released.set()
            return True

    def abort():
        group.aborted.set()
        assert released.wait(60)
        time.sleep(0.2)
        group.calls.append("abort")

    group.abort, graphs = abort, Graphs()
    segments = open_segments(group, find_reason=lambda: "rank 1 is gone")
    segments.hold(graphs)
    with pytest.raises(RankError, match="rank 1 is gone"):
        segments.wait(group)

    segments.close(failed=True)

    assert group.calls == ["abort"]


def test_groups_are_aborted_at_the_same_time():
    group, other = Group(), Group()
    # A group is over when its graphs are, which wait for kernels of the other group too.
    for own, partner in ((group, other), (other, group)):

        def abort(own=own, partner=partner):
            own.aborted.set()
            assert partner.aborted.wait(60)
            own.calls.append("abort")

        own.abort = abort
    segments = open_segments(group, timeout=0.2)
    segments.beside = _Lane(other, 2, torch.device("cpu"))

    with pytest.raises(RankError, match="took more than"):
        segments.wait(other)

    segments.close(failed=True)
    assert group.calls == other.calls == ["abort"]

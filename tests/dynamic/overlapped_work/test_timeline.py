"""A timeline holds a span for each stage that ran, in order and inside the epoch."""

import time

import pytest
import torch

from benchmarks.dynamic.memory_caps import find_hidden_share
from pyg_direct.dynamic.overlapped_work import LANES, CopyStream, Timeline
from pyg_direct.profiling import trace


def test_spans_are_in_order(device):
    begin = time.perf_counter()
    timeline = Timeline(device)

    for lane in ("move", "passes", "step"):
        with trace(timeline, lane):
            torch.rand(1000, device=device).sum().item()
    with trace(timeline, "slice", on_host=True):
        time.sleep(0.01)

    spans = timeline.spans()
    assert [lane for lane, _, _ in spans] == ["move", "passes", "step", "slice"]
    assert all(0 <= first <= last <= 1e-3 + time.perf_counter() - begin for _, first, last in spans)
    assert timeline.seconds()["slice"] >= 0.01
    assert list(timeline.seconds()) == list(LANES)
    assert str(timeline).startswith("slice: ")


def test_spans_are_drawn(tmp_path):
    timeline = Timeline(torch.device("cpu"))
    with trace(timeline, "step"):
        pass

    assert timeline.draw(tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("copy", 0, 4), ("wait", 3, 4), ("passes", 4, 10)], 0.75),
        ([("copy", 0, 4), ("copy", 4, 6), ("wait", 1, 4), ("wait", 5, 6), ("passes", 0, 2)], 1 / 3),
        ([("copy", 0, 1), ("passes", 1, 2)], 1.0),
        ([("copy", 0, 1), ("wait", 0, 2)], 0.0),
        # The host's time to queue a wait, after the copy.
        ([("copy", 0, 4), ("wait", 3, 5)], 0.75),
        ([("copy", 0, 4), ("wait", 9, 9.5)], 1.0),
        ([("passes", 0, 1)], None),
    ],
)
def test_copies_that_nobody_waits_for_are_hidden(spans, expected):
    got = find_hidden_share(spans)

    assert got == (None if expected is None else pytest.approx(expected))


# Some 0.2 s of a GPU, so that a host that is late by a part of it has no effect.
LONG = 400_000_000


@pytest.mark.gpu
@pytest.mark.parametrize(("pause", "least", "most"), [(0.0, 0.0, 0.4), (1.0, 0.9, 1.0)])
def test_a_copy_is_hidden_unless_it_is_asked_for_at_once(pause, least, most):
    where, host = torch.device("cuda", 0), torch.zeros(1 << 20).pin_memory()
    copies, timeline = CopyStream(where), Timeline(where)

    def copy():
        torch.cuda._sleep(LONG)
        return host.to(where, non_blocking=True)

    # The first takes memory from the driver.
    copies.begin(copy).take(where)
    torch.cuda.synchronize()
    coming = copies.begin(copy, timeline)
    time.sleep(pause)
    coming.take(where)

    assert least <= find_hidden_share(timeline.spans()) <= most

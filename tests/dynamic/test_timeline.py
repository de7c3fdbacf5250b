"""A timeline holds a span for each stage that ran, in order and inside the epoch."""

import time

import pytest
import torch

from pyg_direct.dynamic.timeline import LANES, Timeline, trace


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


def test_nothing_is_traced_without_a_timeline():
    with trace(None, "move"):
        pass


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([("copy", 0, 4), ("passes", 2, 10)], 0.5),
        ([("copy", 0, 4), ("copy", 3, 6), ("move", 0, 1), ("passes", 0, 2), ("step", 5, 9)], 0.5),
        ([("copy", 0, 8), ("passes", 1, 2), ("step", 2, 3)], 1.0),
        ([("copy", 0, 1), ("slice", 0, 1), ("passes", 1, 2)], 0.0),
        ([("passes", 0, 1)], None),
    ],
)
def test_copies_beside_work_are_hidden(spans, expected):
    timeline = Timeline(torch.device("cpu"))
    timeline._spans = [(lane, timeline._begin + first, timeline._begin + last) for lane, first, last in spans]

    got = timeline.hidden_share()

    assert got == (None if expected is None else pytest.approx(expected))

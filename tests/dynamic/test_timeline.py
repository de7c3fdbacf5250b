"""A timeline holds a span for each stage that ran, in order and inside the epoch."""

import time

import torch

from pyg_direct.dynamic.timeline import LANES, Timeline, trace


def test_spans_are_in_order(device):
    timeline = Timeline(device)
    begin = time.perf_counter()

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

"""Clocks, spans, quantiles, numbers in words and pictures that rooms share."""

import subprocess
import sys
import time

import pytest
import torch

from pyg_direct.profiling import (
    LaneSpans,
    Origin,
    draw_shares,
    draw_spans,
    open_picture,
    quantile,
    show_bytes,
    show_seconds,
    sum_lanes,
    time_call,
    time_on_stream,
    trace,
)

CPU = torch.device("cpu")


class Mark:
    """An event of a GPU, so many milliseconds after another."""

    def __init__(self, at):
        self.at = at

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_call_is_timed_once(device):
    calls = []

    seconds = time_call(lambda: (calls.append(0), time.sleep(0.01)), device)

    assert calls == [0]
    assert seconds >= 0.01


@pytest.mark.gpu
def test_calls_on_a_stream_are_timed_where_they_run():
    # Some 0.2 ms of a GPU each.
    seconds = time_on_stream(lambda: torch.cuda._sleep(400_000), 8)

    assert 1e-4 < seconds < 1e-2


def test_moments_of_a_gpu_are_placed_on_the_clock_of_the_host():
    origin = Origin(Mark(2.0), 1_000)

    assert origin.locate(Mark(2.5)) == 501_000
    assert origin.locate(7) == 7


def test_spans_of_a_gpu_and_of_the_host_are_told_from_one_beginning():
    recorder = LaneSpans(CPU, {"copy": "red", "slice": "blue"})
    recorder._origin = Origin(Mark(0), 1_000_000)
    recorder._spans = [("copy", Mark(1), Mark(3)), ("slice", 2_000_000, 2_500_000)]

    assert recorder.spans() == [("copy", pytest.approx(1e-3), pytest.approx(3e-3)),
                                ("slice", pytest.approx(1e-3), pytest.approx(1.5e-3))]  # fmt: skip
    assert str(recorder) == "copy: 2.000 ms\nslice: 0.500 ms"


def test_a_block_that_fails_has_a_span():
    recorder = LaneSpans(CPU, {"step": "red"})

    with pytest.raises(KeyError), trace(recorder, "step"):
        raise KeyError

    assert recorder.count == 1


def test_nothing_is_traced_without_a_recorder():
    with trace(None, "move"):
        pass


def test_seconds_of_lanes_are_added_up():
    assert sum_lanes([("a", 0.0, 1.0), ("a", 3.0, 5.0)], ["a", "b"]) == {"a": 3.0, "b": 0.0}


@pytest.mark.parametrize(("share", "expected"), [(0, 1), (0.2, 2), (0.5, 3), (0.8, 4), (1, 5)])
def test_quantiles_are_values_by_rank(share, expected):
    assert quantile([3, 1, 5, 4, 2], share) == expected
    assert quantile([7.5], share) == 7.5


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (999, "999 B"), (171.4285, "171.4 B"), (1500, "1.5 KB"), (2_000_000, "2.0 MB"),
     (9_540_000_000, "9.5 GB"), (3.25e15, "3250.0 TB")],
)  # fmt: skip
def test_bytes_are_shown_in_words(num_bytes, words):
    assert show_bytes(num_bytes) == words


@pytest.mark.parametrize(("seconds", "words"), [(12.345, "12.3 s"), (0.0025, "2.5 ms"), (0.0005, "500 us")])
def test_seconds_are_shown_in_words(seconds, words):
    assert show_seconds(seconds) == words


def test_rows_of_spans_are_drawn_from_top_to_bottom(tmp_path):
    with open_picture(tmp_path / "spans.png") as (_, axes):
        draw_spans(axes, {"host": ("red", [(0.0, 0.002), (0.003, 0.004)]), "GPU": ("blue", [])})
        bars = axes.collections[0].get_paths()
        labels = [label.get_text() for label in axes.get_yticklabels()]
        bottom, top = axes.get_ylim()

    assert [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars] == [
        pytest.approx((0, 2)), pytest.approx((3, 4))]  # fmt: skip
    assert labels == ["host", "GPU"]
    assert bottom > top
    assert (tmp_path / "spans.png").read_bytes().startswith(b"\x89PNG")


def test_shares_are_of_each_bar_and_named_once(tmp_path):
    with open_picture(tmp_path / "shares.png") as (_, axes):
        draw_shares(axes, {"held": [("fast", 1), ("slow", 3)], "read": [("fast", 0), ("slow", 0)]},
                    {"fast": "red", "slow": "blue"})  # fmt: skip
        widths = [bar.get_width() for bar in axes.patches]
        names = [text.get_text() for text in axes.get_legend().get_texts()]

    assert widths == [0.25, 0.75, 0, 0]
    assert names == ["fast", "slow"]


def test_a_picture_that_fails_is_not_saved(tmp_path):
    path = tmp_path / "none.png"

    with pytest.raises(KeyError), open_picture(path):
        raise KeyError

    assert not path.exists()


def test_a_figure_that_is_not_saved_is_returned_for_notebooks():
    spans = LaneSpans(CPU, {"step": "red"})
    with spans.span("step"):
        pass

    figure = spans.draw()

    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["step"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_picture_leaves_the_figures_of_a_program_alone(tmp_path):
    program = f"""
import sys, torch
from pyg_direct.profiling import LaneSpans
LaneSpans(torch.device("cpu"), {{"step": "red"}}).draw({str(tmp_path / "spans.png")!r})
print("matplotlib.pyplot" in sys.modules)
"""

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)

    assert done.stdout.strip() == "False", done.stderr


def test_matplotlib_is_named_with_its_extra_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ModuleNotFoundError, match=r'a picture needs the package matplotlib: pip install "\.\[bench\]"'):
        LaneSpans(CPU, {"step": "red"}).draw(tmp_path / "none.png")

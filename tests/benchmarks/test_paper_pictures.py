"""What PyTorch-Direct publishes stands beside the ratios of rows."""

import pytest

from benchmarks.paper_pictures import draw_beside_paper, read_figure_6, read_figure_7, read_training

BASELINE, OURS = "baseline: torch on the CPU, then a copy", "pyg_direct: unified[ids]"


def make_row(case, metric, p50, **others):
    return {"case": case, "metric": metric, "p50": p50, "limit": None, "at": None, "gpu": "none", "cpu": "any",
            "commit": "1234567", "date": "2026-01-01", **others}  # fmt: skip


ROWS = [
    make_row("fig6/64 K rows of 256 B", OURS, 3.0, limit=2.0),
    make_row("fig6/8 K rows of 256 B", OURS, 1.0, limit=0.8),
    make_row("fig6/8 K rows of 256 B", BASELINE, 8.0, limit=0.8),
    make_row("fig6/8 K rows of 1024 B", OURS, 2.0, limit=1.6),
    make_row("fig7/2052 B", f"rate of {OURS}", 9.0, at=2052),
    make_row("fig7/2048 B", f"rate of {OURS}", 10.0, at=2048),
    make_row("fig7/2048 B", f"rate of {BASELINE}", 2.0, at=2048),
    make_row("fig7/2052 B", f"rate of {BASELINE}", 3.0, at=2052),
    make_row("training/tiny/GAT", "baseline: torch on the CPU", 6.0),
    make_row("training/tiny/GAT", "unified", 4.0),
    make_row("training/tiny/GAT", "CPU cores busy, baseline: torch on the CPU", 8.0),
    make_row("training/tiny/GAT", "CPU cores busy, unified", 2.0),
    make_row("training/tiny/GAT", "GPU power, unified", 2.0),
]


def test_times_of_figure_6_are_over_the_ideal():
    panels = read_figure_6(ROWS)

    assert list(panels) == [256, 1024]
    assert [(line.way, line.at, line.values) for line in panels[256]] == [
        (OURS, [8, 64], pytest.approx([1.25, 1.5])), (BASELINE, [8], pytest.approx([10]))]  # fmt: skip


def test_rates_of_figure_7_are_over_aligned_rows_and_over_the_baseline():
    beside_aligned, over_baseline = read_figure_7(ROWS)

    assert {line.way: line.values for line in beside_aligned} == {OURS: [1, 0.9], BASELINE: [1, 1.5]}
    assert [(line.way, line.at, line.values) for line in over_baseline] == [(OURS, [2048, 2052], [5, 3])]


def test_training_is_over_the_baseline():
    # Of the power, the baseline's is not known.
    assert read_training(ROWS) == {"speed": {"GAT": {"unified": 1.5}}, "cores": {"GAT": {"unified": 0.25}}}


def test_a_picture_is_drawn_of_each_experiment_that_there_is(tmp_path):
    pictures = draw_beside_paper(ROWS, tmp_path / "unified_any.json")

    assert [path.name for path in pictures] == [
        "unified_any_figure_6.png", "unified_any_figure_7.png", "unified_any_training.png"]  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    assert draw_beside_paper([make_row("gather/512 B", "rate", 1.0)], tmp_path / "gather_any.json") == []

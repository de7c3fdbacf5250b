"""Rows of benchmarks: percentiles of repeats, files in which newer rows take the place of older, and pictures."""

import json
import math

import matplotlib.figure
import pytest

from benchmarks.dynamic.epochs import mean_ratios
from benchmarks.pictures import draw_file, read_ways
from pyg_direct.bench import result_row as row_module
from pyg_direct.bench.result_row import Machine, Row, save_rows

HERE = Machine("GPU", "2 cores", {"torch": "2.13"}, "abc1234", "2026-11-22")


@pytest.fixture
def drawn(monkeypatch):
    """What figures show when they are saved: bars, lines and texts, by the name of the file."""
    found = {}

    def note(figure, path, **options):
        (axes,) = figure.axes
        found[path.name] = ([bar.get_width() for bar in axes.patches], [list(line.get_ydata()) for line in axes.lines],
                            axes.get_title() or figure.get_suptitle(), axes.get_xlabel())  # fmt: skip
        path.write_bytes(b"")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", note)
    return found


def test_a_row_has_percentiles_of_its_repeats():
    row = Row.of("rows/64", "copy", "GB/s", [5, 1, 4, 2, 3, 9], 7.0, "device copy")

    assert (row.p20, row.p50, row.p80, row.ratio) == (2, 3.5, 5, 0.5)
    assert str(row).split() == ["rows/64", "copy", "3.5", "GB/s", "0.50", "of", "7", "(device", "copy)"]
    assert Row.of("rows/64", "copy", "s", [1]).ratio is None


def test_newer_rows_take_the_place_of_older(tmp_path):
    path = tmp_path / "out" / "rows.json"
    save_rows(path, [Row.of("a", "time", "ms", [1]), Row.of("b", "time", "ms", [2])], HERE)

    save_rows(path, [Row.of("a", "time", "ms", [3]), Row.of("c", "time", "ms", [4])], HERE)
    save_rows(path, [Row.of("a", "time", "ms", [5])], Machine("none", "2 cores", {}, "abc1234", "2026-11-22"))

    entries = json.loads(path.read_text())
    assert [(entry["case"], entry["gpu"], entry["p50"]) for entry in entries] == [
        ("a", "GPU", 3), ("b", "GPU", 2), ("c", "GPU", 4), ("a", "none", 5),
    ]  # fmt: skip
    assert entries[0]["commit"] == "abc1234"


def test_a_commit_is_that_of_the_environment_or_of_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PYG_DIRECT_COMMIT", "1a2b3c4")
    assert Machine().commit == "1a2b3c4"
    monkeypatch.delenv("PYG_DIRECT_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))

    assert row_module.read_commit() == "unknown"


def test_bars_are_medians_beside_their_limits(tmp_path, drawn):
    rows = [Row.of("rows/64", "ours", "GB/s", [1, 2, 3], 4.0, "device copy"),
            Row.of("rows/64", "torch.index_select", "GB/s", [1.5]), Row.of("rows/64", "time", "ms", [7]),
            Row.of("rows/64", "hits", "share", [0.5])]  # fmt: skip
    save_rows(tmp_path / "gather_gpu.json", rows, HERE)

    pictures = draw_file(tmp_path / "gather_gpu.json")

    assert [path.name for path in pictures] == ["gather_gpu_GB_per_s.png", "gather_gpu_ms.png"]
    bars, lines, title, label = drawn["gather_gpu_GB_per_s.png"]
    assert bars == [2, 1.5]
    # The limit stands at the height of its bar.
    assert lines == [[1.62, 2.38]]
    assert title == "gather\nGPU, commit abc1234, 2026-11-22"
    assert label == "GB/s   (red, same run: device copy)"
    assert drawn["gather_gpu_ms.png"][0] == [7]


def test_a_curve_has_a_line_for_each_metric(tmp_path, drawn):
    points = [Row.of("growth", metric, "GB/s", [value], 9.0, "a copy", curve="cold tables", at=at, at_name="GiB")
              for metric, value, at in (("ours", 3, 16), ("ours", 2, 4), ("torch", 1, 4))]  # fmt: skip
    save_rows(tmp_path / "growth_gpu.json", points, HERE)

    (path,) = draw_file(tmp_path / "growth_gpu.json")

    assert path.name == "growth_gpu_cold_tables.png"
    _, lines, title, label = drawn[path.name]
    assert title.startswith("cold tables")
    assert label == "GiB"
    assert lines[-1][0] == 9.0


@pytest.fixture
def epochs(tmp_path):
    """A file of epochs of dynamic graph networks, of which a way failed at one."""
    rows = [Row.of("dynamic/a/T-GCN", "PyGT", "ms", [8]), Row.of("dynamic/a/T-GCN", "ours, stream", "ms", [3]),
            Row.of("dynamic/a/T-GCN", "ours, FrameTrainer", "ms", [2]),
            Row.of("dynamic/a/T-GCN", "PyGT over ours", "x", [4]),
            Row.of("dynamic/a/T-GCN", "PyGT over ours, stream", "x", [2.5]),
            Row.of("dynamic/all", "PyGT over ours", "x", [4, 5, 6]),
            Row.of("dynamic/b/T-GCN", "PyGT over ours", "x", [6]),
            Row.of("dynamic/b/T-GCN", "resident PyGT over ours", "x", [0.5])]  # fmt: skip
    path = tmp_path / "dynamic_gpu.json"
    save_rows(path, rows, HERE)
    return path


def test_epochs_of_all_ways_are_one_table(epochs):
    ways, cells = read_ways(json.loads(epochs.read_text()))

    assert ways == ["PyGT", "resident PyGT", "ours, stream"]
    assert list(cells.items()) == [
        ("a/T-GCN", {"PyGT": 4, "ours, stream": 1.5}),
        ("b/T-GCN", {"PyGT": 6, "resident PyGT": 0.5}),
        ("all", {"PyGT": 5, "ours, stream": 1.5}),
    ]


def test_a_table_takes_the_place_of_bars(epochs, drawn, monkeypatch):
    texts = []
    monkeypatch.setattr(matplotlib.axes.Axes, "text", lambda axes, x, y, text, **style: texts.append((x, y, text)))

    (path,) = draw_file(epochs)

    assert path.name == "dynamic_gpu_ways.png"
    assert drawn[path.name][2].endswith("dynamic, GPU, commit abc1234, 2026-11-22")
    assert texts == [(0, 0, "4"), (1, 0, "-"), (2, 0, "1.5"), (0, 1, "6"), (1, 1, "0.5"), (2, 1, "-"), (0, 2, "5"),
                     (1, 2, "-"), (2, 2, "1.5")]  # fmt: skip


@pytest.mark.parametrize(("case", "metric", "is_other"), [
    ("dynamic/a/T-GCN", "resident PyGT, CUDA graphs", True), ("dynamic/a/T-GCN", "ours, stream", False),
    ("snapshots/a", "cuSPARSE, one by one", True), ("snapshots/a", "GE-SpMM, one by one", True),
    ("snapshots/a", "one by one", False), ("whole/a", "step, PyG", True), ("whole/a", "step, accelerated", False),
    ("unified/a", "naive: torch reads page-locked rows", True), ("hetero/a", "pyg_direct, 1 thread", False),
    ("hetero/a", "pyg-lib, 1 thread", True), ("peers/a", "Quiver 0.1.0", True), ("peers/a", "pyg_direct", False),
])  # fmt: skip
def test_ways_that_are_not_ours_are_gray(case, metric, is_other):
    assert row_module._is_of_others({"case": case, "metric": metric}) == is_other


def test_ratios_are_averaged_over_cases():
    rows = [
        Row.of("a", "PyGT over ours", "x", [2]),
        Row.of("b", "PyGT over ours", "x", [8]),
        Row.of("a", "time", "s", [5]),
    ]

    (mean,) = mean_ratios(rows)

    assert (mean.case, mean.metric, mean.p20, mean.p80) == ("dynamic/all", "PyGT over ours", 2, 8)
    assert math.isclose(mean.p50, 4)


@pytest.mark.parametrize(("gpu", "name"), [
    ("none", "cpu"), ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
])  # fmt: skip
def test_a_machine_is_named_after_its_gpu(gpu, name):
    assert Machine(gpu, "2 cores", {}, "abc", "2026-11-24").name == name

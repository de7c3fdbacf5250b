"""`pyg-direct bench` measures at the size of the machine, and leaves one file and one picture."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from pyg_direct.bench import measurements, result_row
from pyg_direct.bench.gather import measure_cpu_rows
from pyg_direct.bench.measurements import Size, choose_size
from pyg_direct.bench.result_row import Machine, Row
from pyg_direct.cli import bench as bench_module
from pyg_direct.cli.app import app
from pyg_direct.datasets import synthetic_graph

GIB = 1 << 30


@pytest.mark.parametrize(
    ("host", "gpu", "quick", "scale"),
    [(64, None, True, 0.01), (64, None, False, 0.1), (1, None, False, 0.04), (0.01, None, False, 0.01),
     (500, 140, False, 1.0), (500, 140, True, 0.1), (500, 12, False, 0.5), (6, 140, False, 0.25)],
)  # fmt: skip
def test_the_graph_fits_the_machine(host, gpu, quick, scale):
    size = choose_size(8, int(host * GIB), None if gpu is None else gpu * GIB, quick=quick)

    assert size.scale == scale
    assert size.table_bytes <= min(host, gpu or host) * GIB or gpu is None
    assert bool(size.workers) is not quick


@pytest.fixture
def parts(monkeypatch):
    """One part that measures, and one that fails."""

    def fail(graph, name):
        raise RuntimeError("no such thing")

    made = {"rows": lambda graph, name: measure_cpu_rows((64,), 1 << 16, 1 << 12), "more": fail}
    for name in ("_list_cpu_parts", "_list_gpu_parts"):
        monkeypatch.setattr(measurements, name, lambda size: made)
    return made


def invoke(folder, *arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, ["bench", "--scale", "0.001", "--out", folder, *arguments])


def test_rows_are_kept_and_drawn_and_what_failed_is_told(parts, tmp_path):
    done = invoke(str(tmp_path / "out"), "--json")

    told = json.loads(done.stdout)
    assert done.exit_code == 1
    assert f"made the folder {tmp_path / 'out'}" in done.stderr
    assert told["failed"] == ["more: no such thing"]
    assert [row["metric"] for row in told["rows"]] == ["rows, one way", "torch.index_select"]
    assert all(0 < row["p20"] <= row["p50"] <= row["p80"] and row["limit"] > 0 for row in told["rows"])
    assert told["rows"][0]["commit"].startswith("of version ")
    files = {path.suffix: path for path in (tmp_path / "out").iterdir()}
    assert json.loads(files[".json"].read_text()) == told["rows"]
    assert files[".png"].read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_keeps_what_it_has(parts, tmp_path):
    def interrupt(graph, name):
        raise KeyboardInterrupt

    parts |= {"more": interrupt, "never": lambda graph, name: pytest.fail("went on")}

    done = invoke(str(tmp_path))

    assert done.exit_code == 1
    assert "not measured: more: KeyboardInterrupt" in done.stdout
    assert len(json.loads(next(tmp_path.glob("*.json")).read_text())) == 2


def test_a_file_that_was_not_written_is_not_named(monkeypatch, tmp_path):
    monkeypatch.setattr(measurements, "measure", lambda *args: ([], ["sampling: KeyboardInterrupt"]))
    # Otherwise remarks depend on the samplers that are installed.
    monkeypatch.setattr(measurements, "SAMPLER", None)

    done = invoke(str(tmp_path), "--json")

    told = json.loads(done.stdout)
    assert told.pop("remarks") == measurements.list_missing(Size(1, 1, 1, 1, ()))
    assert told == {"rows": [], "file": None, "picture": None, "failed": ["sampling: KeyboardInterrupt"]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(measurements, "measure", lambda *args: pytest.fail("measured"))

    done = invoke(str(tmp_path / folder))

    assert done.exit_code == 2
    assert "--out" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_every_part_is_measured_on_a_cpu():
    rows, failed = measurements.measure(Size(0.001, 64, 2, 1 << 20, ()), on_gpu=False)

    assert failed == []
    metrics = {row.metric for row in rows}
    assert {"rows, one way", "torch.index_select"} < metrics
    assert any("train" in metric or "step" in metric for metric in metrics), metrics


def test_workers_of_pygs_loader_make_a_part_of_their_own():
    assert [*measurements._list_peers(Size(0.001, 64, 2, 1 << 20, (0, 2)))] == ["loader beside PyG's"]


def test_without_matplotlib_there_is_no_picture(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "find_spec", lambda name: None)
    del parts["more"]

    done = invoke(str(tmp_path))

    assert done.exit_code == 0
    assert f"rows: {tmp_path}/pyg_direct_bench_" in done.stdout
    assert "made the folder" not in done.stderr
    assert 'picture: none; pip install ".[bench]"' in done.stdout
    assert "torch.index_select" in done.stdout
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_files_are_named_after_the_model_of_the_gpu(monkeypatch, tmp_path):
    here = Machine("NVIDIA H100 80GB HBM3", "8 cores", {}, "abc1234", "2026-11-26")
    monkeypatch.setattr(result_row, "Machine", lambda commit: here)
    monkeypatch.setattr(measurements, "measure", lambda *args: ([Row.of("rows", "ours", "GB/s", [1, 2])], []))

    done = invoke(str(tmp_path))

    assert done.exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"pyg_direct_bench_h100.{e}" for e in ("json", "png")]


def test_rows_of_units_that_are_not_drawn_are_kept_without_a_picture(monkeypatch, tmp_path):
    monkeypatch.setattr(measurements, "measure", lambda *args: ([Row.of("launch", "time", "us", [5])], ["rows: none"]))

    done = invoke(str(tmp_path))

    assert done.exit_code == 1
    assert "picture: none; no row is of a unit that is drawn" in done.stdout
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.gpu
def test_every_part_is_measured_on_a_gpu():
    rows, failed = measurements.measure(Size(0.01, 64, 6, 1 << 27, ()), on_gpu=True)

    assert failed == []
    assert {row.case.split("/")[0] for row in rows} >= {"launch", "sampling", "gather", "loader"}


def test_the_loader_is_measured_beside_its_step():
    size = Size(0.001, 8, 6, 1 << 16, ())
    graph = synthetic_graph("products", scale=size.scale)
    placement = "cuda" if torch.cuda.is_available() else "cpu"

    rows = list(measurements._measure_training(size, graph, "products", placement))

    assert {row.metric for row in rows} >= {"Data to first batch", "step, loader and compute", "step, loader alone"}
    assert all(row.p50 > 0 for row in rows)


@pytest.mark.parametrize(
    ("unit", "median", "limit", "is_beaten"),
    [("GB/s", 11, 10, True), ("GB/s", 9, 10, False), ("M/s", 2, 1, True), ("x", 2, 1, True), ("ms", 9, 10, True),
     ("ms", 11, 10, False), ("us", 1, 2, True), ("GB/s", 10, 10, False), ("GB/s", 11, None, False),
     ("ms", 1, 0.0, False)],
)  # fmt: skip
def test_better_than_a_limit_is_more_of_a_rate_and_less_of_a_time(unit, median, limit, is_beaten):
    assert Row.of("rows", "ours", unit, [median], limit).beats_limit is is_beaten


@pytest.mark.parametrize(
    ("load", "words"),
    [(6.04, r"the machine was busy as the run began \(load 6.0 a core\), so that the limit was measured too low"),
     (0.1, "other programs used the machine while the limit was measured, or the data fit into a cache"),
     (None, "other programs used the machine while the limit was measured, or the data fit into a cache")],
)  # fmt: skip
def test_a_row_that_beats_its_limit_is_told_with_the_reason(load, words):
    rows = [Row.of("rows", "ours", "GB/s", [12], 10, "a copy"), Row.of("rows", "theirs", "GB/s", [9], 10, "a copy")]

    (sentence,) = measurements.explain_limits(rows, load)

    assert re.fullmatch(f"rows, ours: 12 GB/s is better than its limit of 10; {words}. Measure again on an idle "
                        "machine", sentence)  # fmt: skip


def test_rows_that_beat_their_limits_are_marked(monkeypatch, tmp_path):
    rows = [Row.of("rows", "ours", "GB/s", [12], 10, "a copy"), Row.of("rows", "theirs", "GB/s", [9], 10, "a copy")]
    monkeypatch.setattr(measurements, "measure", lambda *args: (rows, []))
    monkeypatch.setattr(measurements.os, "getloadavg", lambda: (1e6, 0.0, 0.0))

    shown, as_json = invoke(str(tmp_path)), invoke(str(tmp_path), "--json")

    assert (shown.exit_code, as_json.exit_code) == (0, 0)
    assert shown.stdout.count("10 (!), a copy") == 1
    assert "note: rows, ours: 12 GB/s is better than its limit of 10; the machine was busy" in shown.stdout
    assert any("better than its limit" in remark for remark in json.loads(as_json.stdout)["remarks"])


@pytest.mark.parametrize(
    ("sampler", "workers", "words"),
    [(None, (0, 2), ['pip install ".[sparse]"']), (None, (), ['pip install ".[sparse]"']),
     ("pyg-lib", (), ["--quick leaves it out"]), ("torch-sparse", (0, 2), [])],
)  # fmt: skip
def test_what_is_not_compared_with_is_told(monkeypatch, sampler, workers, words):
    monkeypatch.setattr(measurements, "SAMPLER", sampler)

    found = measurements.list_missing(Size(1, 1, 1, 1, workers))

    assert len(found) == len(words)
    assert all(sentence.startswith("PyG's loader") and word in sentence
               for sentence, word in zip(found, words, strict=True))  # fmt: skip


def test_a_system_without_a_load_says_none(monkeypatch):
    def refuse():
        raise OSError

    monkeypatch.setattr(measurements.os, "getloadavg", refuse)

    assert measurements.read_load() is None

"""`benchmarks/run.py` measures what this machine can, and refuses what it cannot keep before it begins."""

import importlib.util
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pyg_direct.bench.result_row import Row
from pyg_direct.errors import DeviceError

FILE = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.fixture
def measured(monkeypatch):
    """The program, whose cases are one that is measured anywhere, and one that is measured on a GPU."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def refuse(scale):
        raise DeviceError("there is none")
        yield

    cases = {"fast": refuse, "slow": lambda scale: iter([Row.of("slow", "time", "ms", [scale])])}
    monkeypatch.setattr(module, "SHORT_CASES", cases)
    monkeypatch.setattr(module, "CASES", cases)
    return module


def invoke(module, *arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(module.main)
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, arguments)


def test_of_all_cases_those_are_measured_that_can_be(measured, tmp_path):
    done = invoke(measured, "--out", str(tmp_path / "new"), "--scale", "2")

    assert done.exit_code == 0
    assert "fast is measured on a GPU: there is none" in done.stderr
    (file,) = (tmp_path / "new").glob("*.json")
    assert [row["p50"] for row in json.loads(file.read_text())] == [2]


def test_a_case_that_was_asked_for_must_be_measured(measured, tmp_path):
    done = invoke(measured, "fast", "slow", "--out", str(tmp_path))

    assert done.exit_code == 2
    assert "fast is measured on a GPU" in done.stderr


@pytest.mark.parametrize(("arguments", "words"), [
    (["slow", "--scale", "0"], "--scale must be a finite number above 0, got 0.0"),
    (["slow", "--scale", "nan"], "--scale must be a finite number above 0, got nan"),
    (["none"], "names must be of fast, slow, got none"), (["--out", str(FILE)], "--out must be a folder"),
])  # fmt: skip
def test_bad_usage_is_told(measured, tmp_path, arguments, words):
    done = invoke(measured, "--out", str(tmp_path), *arguments)

    assert done.exit_code == 2
    assert words in done.stderr


@pytest.mark.parametrize("text", ["{", "3", "[3]", "[{}]"])
def test_a_damaged_file_of_rows_is_told_before_anything_is_measured(measured, tmp_path, text):
    (tmp_path / f"slow_{measured.Machine().name}.json").write_text(text)
    measured.CASES["slow"] = lambda scale: pytest.fail("measured")

    done = invoke(measured, "slow", "--out", str(tmp_path))

    assert done.exit_code == 2
    assert "path must be a file of rows, got" in done.stderr

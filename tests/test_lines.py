"""Lines that `.ci/lines.py` leaves out of the required coverage are code for GPUs."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def lines():
    spec = importlib.util.spec_from_file_location("lines", ROOT / ".ci" / "lines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAM = """\
def choose(x, wide):
    if not x.is_cuda:
        return 1
    y = 2
    return y

def either(x, wide):
    if x.is_cuda or wide:
        return 1
    if wide and x.device.type == "cuda":
        return _only(x)
    else:
        return 3

def _only(x):
    return x

@gpu_kernel("i8")
def grid(x):
    x[0] = 1

def both(x):
    if x.device.type != "cpu":
        y = 1
    run_gpu(grid, x)
    return y
"""


@pytest.mark.parametrize(
    ("reached", "expected"),
    [(set(), {4, 5, 11, 16, 20, 24, 25}), ({5, 16}, {11, 20, 24, 25}), ({11}, {4, 5, 20, 24, 25})],
)
def test_what_a_cpu_cannot_reach_is_left_out(lines, tmp_path, reached, expected):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)

    assert lines.find_left_out(str(file), ast.parse(PROGRAM), reached) == expected


def test_what_is_listed_is_left_out_up_to_the_end_of_its_block(lines, tmp_path, monkeypatch):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(lines, "LISTED", [(f"{file} choose", "y = 2"), (f"{file} both", "")])

    found = lines.find_left_out(str(file), ast.parse(PROGRAM), {5})

    assert found == {11, 16, 20, 23, 24, 25, 26}


def test_what_is_listed_but_gone_is_told(lines, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    listed = "pyg_direct/runtime/cuda/peer_memory.py"
    # The last is imported by the file, not defined there.
    names = ("*", "Spread", "Spread.fly", "Tensor")
    monkeypatch.setattr(lines, "LISTED", [(f"{listed} {name}", "") for name in names])

    assert lines.list_gone() == [f"{listed} Spread.fly", f"{listed} Tensor"]

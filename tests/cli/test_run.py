"""`python -m pyg_direct run` runs a program as it is."""

import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from pyg_direct.cli.app import app

PROGRAM = """
import pathlib, sys
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
import beside

class Batches:
    pass

assert sys.modules["__main__"].Batches is Batches and __name__ == "__main__" and __file__ == sys.argv[0]
data = Data(x=torch.randn(9, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]))
loader = NeighborLoader(data, [2], batch_size=3)
batch = next(iter(loader)).to("cpu")
print(type(loader).__module__, batch.batch_size, beside.NAME, sys.argv[1:])
sys.exit(3)
"""

LASTING = """
import atexit, os, sys

class Lasting:
    def __del__(self, write=os.write, is_finalizing=sys.is_finalizing):
        write(1, b"finalizing %r\\n" % is_finalizing())

lasting = Lasting()
atexit.register(lambda: os.write(1, b"%s at exit\\n" % sys.modules["__main__"].Lasting.__name__.encode()))
{end}
"""


def run(*arguments, cwd=None):
    # Messages are broken to the width of the terminal.
    environment = {**os.environ, "COLUMNS": "300", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pyg_direct", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_program_sees_its_own_arguments_and_makes_our_loaders(program):
    done = run("run", "--device", "cpu", program, "--device", "3", "-v", "x")

    assert done.stdout == "pyg_direct.loader.neighbor 3 beside ['--device', '3', '-v', 'x']\n", done.stderr
    # A machine that is busy tells of compiling, too.
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("pyg_direct: ") and "so far" not in line)
    assert said.startswith("pyg_direct: replaced loader.NeighborLoader, ")
    assert done.returncode == 3


def test_every_loader_is_told_when_asked(program):
    done = run("run", "--verbose", "--device", "cpu", program)

    assert "pyg_direct: NeighborLoader of pyg_direct.loader.neighbor on cpu\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["--placement", "nowhere"], "placement"), (["--device", "tpu"], "device"), (["--speed", "9"], "speed")],
)
def test_bad_options_are_told_before_the_program_starts(program, arguments, word):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["run", *arguments, str(program)])

    assert done.exit_code == 2
    assert word in done.stderr
    assert done.stdout == ""


def test_a_program_that_is_not_there_is_told(tmp_path):
    done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["run", str(tmp_path / "nothing.py")])

    assert done.exit_code == 2
    assert "nothing.py" in done.stderr


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise ValueError"])
def test_what_a_program_made_stays_until_the_interpreter_ends(tmp_path, end):
    path = tmp_path / "program.py"
    path.write_text(LASTING.format(end=end))

    done = run("run", "--device", "cpu", path)

    assert done.stdout == "Lasting at exit\nfinalizing True\n", done.stderr


@pytest.mark.parametrize(
    "text",
    ["def fail():\n    {}['key']\n\nfail()\n", "x = (\n", "raise KeyboardInterrupt\n"],
    ids=["error", "syntax", "interrupt"],
)
def test_an_error_is_shown_as_python_shows_it(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)

    done = run("run", "--device", "cpu", path)

    expected = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("pyg_direct: ")]
    assert said == expected.stderr.splitlines()
    # As a shell says of a process that an interrupt ended.
    assert done.returncode == (1 if expected.returncode == 1 else 128 + signal.SIGINT)


def test_a_program_that_is_named_from_its_folder_knows_where_it_lies(tmp_path):
    (tmp_path / "program.py").write_text("import sys\nprint(__file__, sys.argv[0], sys.path[0])\n{}['key']\n")

    done = run("run", "--device", "cpu", "program.py", cwd=tmp_path)

    expected = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if not line.startswith("pyg_direct: ")]
    assert done.stdout == expected.stdout
    assert said == expected.stderr.splitlines()

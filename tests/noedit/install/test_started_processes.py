"""Processes that a program under `run` starts find the start-up file, whatever environment the program gives them."""

import os
import shlex
import subprocess
import sys
from multiprocessing import util

import pytest

from pyg_direct.noedit import install, program_record

# The first finder of modules waits for the import of PyG; a folder of the program stays on the path.
ASK = "import sys; print(type(sys.meta_path[0]).__name__, any('/own' in path for path in sys.path))"


@pytest.fixture
def spawned(monkeypatch):
    """Paths of the processes that multiprocessing spawns, which are not started."""
    paths = []
    monkeypatch.setattr(util, "spawnv_passfds", lambda *_: (paths.append(os.environ["PYTHONPATH"]), 7)[1])
    monkeypatch.setattr(subprocess.Popen, "__init__", subprocess.Popen.__init__)
    for name in (*install._INHERITING, *install._GIVING):
        monkeypatch.setattr(os, name, getattr(os, name, None))
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(program_record, "_starters", set())
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.setenv("PYG_DIRECT_RUN", "")
    install.hand_down(device="cpu")
    return paths


def ask(env=None):
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=env)
    return done.stdout.split()


def test_an_environment_of_the_program_keeps_the_start_up_file(spawned, monkeypatch):
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYG_DIRECT_RUN")}

    found = [ask(), ask(plain | {"PYTHONPATH": "/own"}), ask({b"PYTHONPATH": b"/own"}), ask(plain)]
    monkeypatch.setenv("PYTHONPATH", "/own")
    found.append(ask())

    assert found == [*[["_Watch", "True"]] * 3, ["_Watch", "False"], ["_Watch", "True"]]
    assert os.environ["PYTHONPATH"] == "/own"


def test_spawned_processes_keep_it_too(spawned, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own")

    process = util.spawnv_passfds(sys.executable, ["python", "-c", "..."], ())

    startup = os.path.join(os.path.dirname(install.__file__), "startup")
    assert (process, spawned, os.environ["PYTHONPATH"]) == (7, [os.pathsep.join([startup, "/own"])], "/own")


@pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="needs posix_spawn")
def test_programs_that_os_starts_keep_it_too(spawned, monkeypatch, tmp_path):
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": "/own"}
    words = [sys.executable, "-c", ASK.replace("print(", f"print(file=open({str(tmp_path / 'said')!r}, 'a'), *(") + ")"]
    monkeypatch.setenv("PYTHONPATH", "/own")

    for start in (lambda: os.system(shlex.join(words)), lambda: os.spawnv(os.P_WAIT, sys.executable, words),
                  lambda: os.spawnve(os.P_WAIT, sys.executable, words, plain),
                  lambda: os.waitpid(os.posix_spawn(sys.executable, words, plain), 0)):  # fmt: skip
        start()

    assert (tmp_path / "said").read_text() == "_Watch True\n" * 4
    assert os.environ["PYTHONPATH"] == "/own"


def test_a_process_may_be_left_to_pyg(spawned):
    assert ask({**os.environ, "PYG_DIRECT_RUN": ""})[0] != "_Watch"


def test_the_lines_at_the_end_say_that_other_processes_are_not_counted(spawned):
    util.spawnv_passfds(sys.executable, ["python", "-c", "from multiprocessing.resource_tracker import main"], ())
    subprocess.run(["true"], check=True)
    alone = program_record.describe_program()[0]

    ask()

    assert "not counted" not in alone
    assert "this process; those that it started are not counted" in program_record.describe_program()[0]

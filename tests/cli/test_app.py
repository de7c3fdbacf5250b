"""All commands are one program, whose help tells all of it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import pyg_direct
from pyg_direct.cli.app import app, main

COMMANDS = ("run", "doctor", "bench", "cache", "warm", "partition", "pack")
ROOT = Path(__file__).parents[2]


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_the_help_lists_every_command():
    done = invoke("--help")

    listed = re.findall(r"^[│|]\s+([a-z]+)\s", done.output, re.M)
    assert tuple(name for name in listed if name in COMMANDS) == COMMANDS
    assert sorted(typer.main.get_command(app).commands) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_tells_its_exit_codes_and_options(name):
    done = invoke(name, "--help")

    assert done.exit_code == 0
    assert re.search(r"Exit codes?: ", done.output)
    for parameter in typer.main.get_command(app).commands[name].params:
        assert getattr(parameter, "help", None), parameter.name
    # Lines of the source would be lines at any width of the terminal.
    paragraphs = typer.main.get_command(app).commands[name].help.split("\n\n")
    assert [text for text in paragraphs if "\n" in text.strip()] == []


@pytest.mark.parametrize("arguments", [("no-such-command",), ("doctor", "--no-such-option"), ("run",), ("partition",)])
def test_bad_usage_ends_with_2(arguments):
    assert invoke(*arguments).exit_code == 2


def test_the_version_is_told():
    assert invoke("--version").output == f"{pyg_direct.__version__}\n"


def test_the_script_and_the_module_are_this_program():
    target = re.search(r'^pyg-direct = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)

    assert getattr(importlib.import_module(target[1]), target[2]) is main
    assert importlib.import_module("pyg_direct.__main__").main is main


def test_patterns_are_not_replaced_by_names_of_files(monkeypatch, tmp_path, capsys):
    (tmp_path / "program.py").write_text("")
    monkeypatch.setenv("COLUMNS", "300")
    # Where Typer would.
    monkeypatch.setattr(typer.core, "os", SimpleNamespace(**{**vars(os), "name": "nt"}))
    monkeypatch.setattr(sys, "argv", ["pyg-direct", "run", f"{tmp_path}/*.py"])

    with pytest.raises(SystemExit, match="2"):
        main()

    assert "*.py' does not exist" in capsys.readouterr().err


# All in one process, as each import of the command takes a while on a busy machine.
LIGHT = """
import sys
from pyg_direct.cli.app import main

for arguments in {calls!r}:
    sys.argv = ["pyg-direct", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert ended.code in (0, None, 2), (arguments, ended.code)
loaded = {{"numba", "numpy", "pandas", "torch", "torch_geometric"}} & set(sys.modules)
assert not loaded, loaded
"""


def run_light(calls, **environment):
    program = LIGHT.format(calls=calls)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment}, check=False)  # fmt: skip


def test_version_and_help_import_neither_torch_nor_numpy():
    done = run_light([["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)])

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{pyg_direct.__version__}\n")
    assert done.stdout.count("Usage: ") == 1 + len(COMMANDS)


def test_bad_usage_is_told_without_torch():
    lines = ("doctor --no-such-option", "bench --scale 9", "warm --arch hopper", "warm --only cpu", "partition",
             "run no_such_file.py", "cache burn")  # fmt: skip

    done = run_light([line.split() for line in lines])

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Usage: ") == len(lines)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_words_are_completed_without_torch(shell):
    words = {"bash": {"COMP_WORDS": "pyg-direct par", "COMP_CWORD": "1"},
             "zsh": {"_TYPER_COMPLETE_ARGS": "pyg-direct par"},
             "fish": {"_TYPER_COMPLETE_ARGS": "pyg-direct par", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}}  # fmt: skip

    done = run_light([[]], _PYG_DIRECT_COMPLETE=f"complete_{shell}", **words[shell])

    assert done.returncode == 0, done.stderr
    assert re.findall("partition|doctor|warm", done.stdout) == ["partition"]


@pytest.mark.parametrize(
    ("line", "found"),
    [("run --placement un", ["unified"]), ("partition --method st", ["streaming"]), ("warm --only typed", ["typed-l"])],
)
def test_values_of_options_are_completed(line, found):
    words = f"pyg-direct {line}"

    done = run_light([[]], _PYG_DIRECT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))

    assert done.returncode == 0, done.stderr
    assert [word for word in done.stdout.split() if word.startswith(tuple(found))] == done.stdout.split() != []


@pytest.mark.parametrize("program", ["pyg-direct", "/lib/pyg_direct/__main__.py"])
def test_completion_is_of_the_command_also_where_the_module_was_started(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--show-completion", "bash"])
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))

    with pytest.raises(SystemExit):
        main()

    told = capsys.readouterr().out
    assert "_PYG_DIRECT_COMPLETE=complete_bash" in told
    assert "pyg-direct" in told.splitlines()[-1]


@pytest.mark.parametrize(("package", "words"), [
    ("torch_geometric", "torch_geometric is not installed: pip install '"),
    ("torch", "https://pytorch.org/get-started/locally"), ("numba", "numba is not installed: pip install 'numba"),
])  # fmt: skip
def test_a_package_that_all_needs_is_named(package, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pyg-direct", "doctor", "--no-measure"])

    def refuse(*args, **kwargs):
        raise ModuleNotFoundError(f"No module named '{package}.nn'", name=f"{package}.nn")

    monkeypatch.setattr("pyg_direct.cli.machine_report.examine", refuse)

    with pytest.raises(SystemExit) as ended:
        main()

    assert words in str(ended.value.code)

"""All commands are one program, whose help tells all of it."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import pyg_direct
from pyg_direct.cli.app import app, main

COMMANDS = ("run", "doctor", "bench", "cache", "partition")
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

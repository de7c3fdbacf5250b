"""All commands as one program."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import pyg_direct
from pyg_direct.cli.bench import bench
from pyg_direct.cli.cache import cache
from pyg_direct.cli.doctor import doctor
from pyg_direct.cli.failures import explain_missing
from pyg_direct.cli.pack import pack
from pyg_direct.cli.partition import partition
from pyg_direct.cli.run import ProgramError, run
from pyg_direct.cli.warm import warm

app = typer.Typer(pretty_exceptions_enable=False, no_args_is_help=True)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(pyg_direct.__version__)
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True,
                                          help="Print the version.")] = False,
) -> None:  # fmt: skip
    """Neighbor sampling and feature collection on the GPU for PyTorch Geometric.

    Exit codes: 0 fine; 1 it failed, or (doctor) there is something to fix; 2 bad usage. `run` ends as the program does.
    """


app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})(run)
for command in (doctor, bench, cache, warm, partition, pack):
    app.command()(command)


def main() -> None:
    """Run the command `pyg-direct`."""
    try:
        # On Windows Typer would put names of files for patterns, which are meant for a program behind `run`.
        app(prog_name=_choose_name(sys.argv), windows_expand_args=False)
    except ProgramError as ended:
        error = ended.error
    except ModuleNotFoundError as missing:
        sentence = explain_missing(missing)
        if sentence is None:
            raise
        sys.exit(f"pyg_direct: {sentence}")
    # Python ends as it does without us; if all went well, Typer has ended it.
    raise error


def _choose_name(arguments: list[str]) -> str:
    """Return the name that help shows; started as a module, the program has none of its own."""
    # Shells complete the words of a command, not of a module.
    is_completion = any(word.endswith("-completion") for word in arguments[1:2])
    return "python -m pyg_direct" if arguments[0].endswith("__main__.py") and not is_completion else "pyg-direct"

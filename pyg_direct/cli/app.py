"""All commands as one program."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import pyg_direct
from pyg_direct.cli.bench import bench
from pyg_direct.cli.cache import cache
from pyg_direct.cli.doctor import doctor
from pyg_direct.cli.run import ProgramError, run
from pyg_direct.distributed.partitioning.command import partition

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


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
for command in (doctor, bench, cache, partition):
    app.command()(command)


def main() -> None:
    """The command `pyg-direct`."""
    try:
        # Started as a module, the program has no name of its own. On Windows Typer would put names of files for
        # patterns, which are meant for a program behind `run`.
        app(prog_name="python -m pyg_direct" if sys.argv[0].endswith("__main__.py") else "pyg-direct",
            windows_expand_args=False)  # fmt: skip
    except ProgramError as ended:
        error = ended.error
    # Python ends as it does without us; where all went well, Typer has ended it.
    raise error

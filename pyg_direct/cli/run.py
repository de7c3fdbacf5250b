"""`pyg-direct run script.py args...`: a program written for PyG, with its loaders replaced."""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any, Optional

import typer

from pyg_direct.errors import PygDirectError
from pyg_direct.noedit.install import install


def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The program.")],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,  # noqa: UP045
    device: Annotated[Optional[str], typer.Option(help="Where batches are: cpu, cuda, cuda:1, data.")] = None,  # noqa: UP045
    placement: Annotated[str, typer.Option(help="Where the graph lives: auto, cuda, unified, pinned, cpu.")] = "auto",
    feature_cache: Annotated[Optional[str], typer.Option(help="GPU memory for hot rows: 2G or 20%.")] = None,  # noqa: UP045
    accelerate: Annotated[bool, typer.Option(help="Let PyG's convolutions aggregate through our operators.")] = True,
    verbose: Annotated[bool, typer.Option(help="Say which loaders are made.")] = False,
) -> None:
    """Run a program written for PyG, unedited, with PyG's loaders replaced and its models accelerated.

    Options go before the program. Exit code: the program's; 2 for options that cannot be taken.
    """
    try:
        install(device=device, placement=placement, feature_cache=feature_cache, accelerate=accelerate,
                verbose=verbose)  # fmt: skip
    except PygDirectError as error:
        raise typer.BadParameter(str(error)) from error
    # As `python script.py` has it.
    sys.argv = [str(script), *(arguments or [])]
    sys.path[0] = str(script.resolve().parent)
    path = os.path.abspath(script)
    sys.excepthook = partial(_show_error, path, sys.excepthook)
    try:
        _execute(path)
    except KeyboardInterrupt as error:
        # Typer would end without a word of where the program was.
        sys.excepthook(type(error), error, error.__traceback__)
        raise


def _execute(path: str) -> None:
    """Do as `python script.py` does: what the program made stays until the interpreter ends.

    With `runpy` it would go before, and a process group of Gloo then waits for threads that wait for the interpreter.
    """
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update(__file__=path, __cached__=None)
    exec(code, module.__dict__)


def _show_error(path: str, show: Any, kind: type[BaseException], error: BaseException,
                trace: TracebackType | None) -> None:  # fmt: skip
    """Show an error that ended the program, from the program's own lines on, as `python script.py` does."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != path:
        first = first.tb_next
    if first is None and not (isinstance(error, SyntaxError) and error.filename == path):
        first = trace
    show(kind, error.with_traceback(first), first)

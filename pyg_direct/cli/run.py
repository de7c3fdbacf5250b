"""`pyg-direct run script.py args...`, `pyg-direct run -m module args...`: a program written for PyG, with its loaders
replaced.
"""

from __future__ import annotations

import atexit
import builtins
import io
import os
import runpy
import sys
from functools import partial
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Annotated, Any, Optional

import typer

from pyg_direct.cli.failures import said_in_options
from pyg_direct.noedit.program_record import describe_program
from pyg_direct.progress import announce

# Words of options that shells complete.
_DEVICES, _PLACEMENTS = ("cpu", "cuda", "data"), ("auto", "cuda", "unified", "pinned", "cpu")


def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="The program: a file, or with -m a module.")],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="Its arguments.")] = None,  # noqa: UP045
    module: Annotated[bool, typer.Option("--module", "-m", help="The program is a module, or a package with "
                                         "__main__.py, as of `python -m`.")] = False,
    device: Annotated[Optional[str], typer.Option(help="Where batches are: cpu, cuda, cuda:1, data.", autocompletion=lambda: _DEVICES)] = None,  # noqa: E501, UP045
    placement: Annotated[str, typer.Option(help="Where the graph lives: auto, cuda, unified, pinned, cpu.", autocompletion=lambda: _PLACEMENTS)] = "auto",  # noqa: E501
    feature_cache: Annotated[Optional[str], typer.Option(help="GPU memory for hot rows: 2G or 20%.")] = None,  # noqa: UP045
    accelerate: Annotated[bool, typer.Option(help="Let PyG's convolutions aggregate through our operators.")] = True,
    replay: Annotated[Optional[bool], typer.Option(help="Replay passes of models as CUDA graphs; default: on a GPU.")] = None,  # noqa: E501, UP045
    verbose: Annotated[bool, typer.Option(help="Say what is replaced by name, and all reasons.")] = False,
) -> None:  # fmt: skip
    """Run a program for PyG, unedited, with loaders replaced and models accelerated, in processes that it starts too.

    As `python train.py --epochs 10` or `python -m package.train --epochs 10`:

        run train.py --epochs 10

        run -m package.train --epochs 10

    Options go before the program; all that follows it are its own arguments, also `--`.

    When the program ends, lines on stderr list what was replaced in it, and what was left to PyG.

    Exit code: the program's; 2 for options that cannot be taken.
    """
    is_folder = os.path.isdir(program)
    # Also pipes, as of a shell's `<(...)`.
    if not module and (is_folder or not os.path.exists(program)):
        why = "is a folder; a package is run by its name, with -m." if is_folder else "does not exist."
        raise typer.BadParameter(f"File '{program}' {why}", param_hint="'PROGRAM'")
    options = {"device": device, "placement": placement, "feature_cache": feature_cache, "accelerate": accelerate,
               "replay": replay, "verbose": verbose}  # fmt: skip
    # torch is not imported before the options are read.
    from pyg_direct.noedit.install import hand_down, install

    with said_in_options(context):
        install(**options)  # type: ignore[arg-type]
    hand_down(**options)
    atexit.register(_tell_program, os.getpid(), verbose)
    show = sys.excepthook
    sys.excepthook = partial(_show_error, None, show)
    try:
        code, names = (_find_module if module else _find_file)(program, arguments or [])
        sys.excepthook = partial(_show_error, names["__file__"], show)
        _execute(code, names)
    except SystemExit:
        raise
    except _NotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="'PROGRAM'") from error
    except BaseException as error:
        raise ProgramError(error) from None


def _tell_program(process: int, verbose: bool) -> None:
    """List at the end of the program the parts that were replaced in it, and the parts left to PyG."""
    if os.getpid() == process:
        for line in describe_program(verbose=verbose):
            announce(line)


class ProgramError(BaseException):
    """Error that ended the program. It passes Typer, which would report some errors without their place."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _find_file(script: str, arguments: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """Find the code of a file and the names it begins with, as `python script.py` has them."""
    sys.argv = [script, *arguments]
    _begin_path(os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    with io.open_code(path) as file:
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return code, {"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)}


def _find_module(name: str, arguments: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """Find the code of a module and the names it begins with, as `python -m name` has them."""
    # Packages around it see this name as they are imported.
    sys.argv = ["-m", *arguments]
    _begin_path(os.getcwd())
    # As Python itself, and its debugger, find it.
    _, spec, code = runpy._get_module_details(name, _NotFoundError)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    return code, {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader,
                  "__package__": spec.parent, "__spec__": spec}  # fmt: skip


class _NotFoundError(Exception):
    """A module that cannot be run."""


def _begin_path(folder: str) -> None:
    """Let modules be looked for in a folder first, in the place of ours, unless Python was told not to (`-P`)."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    """Run code as `python` does: objects of the program stay until the interpreter ends.

    With `runpy` they would go before, and a process group of Gloo then waits for threads that wait for the interpreter.
    """
    # Processes that multiprocessing spawned know it by the second name.
    module = sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    # As the first module has them; `exec` alone would put their names there.
    module.__dict__.update(names, __builtins__=builtins)
    exec(code, module.__dict__)


def _show_error(path: str | None, show: Any, kind: type[BaseException], error: BaseException,
                trace: TracebackType | None) -> None:  # fmt: skip
    """Show an error that ended the program, from the program's own lines on, as `python script.py` does.

    An error of code that runs before the program begins is shown from that code on.
    """
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != path:
        first = first.tb_next
    if first is None:
        # If none of it is ours it is shown whole, as a program may show errors that it has caught elsewhere.
        first = ours = trace
        while ours is not None:
            if ours.tb_frame.f_code.co_filename == __file__:
                first = ours.tb_next
            ours = ours.tb_next
    show(kind, error.with_traceback(first), first)

"""`pyg-direct warm`: compile ahead the code that programs compile at first use, for images and login nodes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console

from pyg_direct.cache_folder import cache_root
from pyg_direct.cli.failures import explain_write
from pyg_direct.compiler.shipped_loops import read_parts

if TYPE_CHECKING:
    from pyg_direct.cli.compile_ahead import Outcome

_ARCHITECTURE = re.compile(r"(?:sm_?)?(\d+?)\.?(\d)[af]?")
PARTS = tuple(read_parts())


def read_architecture(text: str | tuple[int, int]) -> tuple[int, int]:
    """Read a compute capability such as `9.0`, `90` or `sm_90`."""
    if isinstance(text, tuple):
        return text
    match = _ARCHITECTURE.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"it must look like 9.0 or sm_90, the compute capability of a GPU, got {text!r}")
    return int(match[1]), int(match[2])


def read_part(name: str) -> str:
    """Check the name of a part of the CPU loops."""
    if name not in PARTS:
        raise typer.BadParameter(f"it must be one of {', '.join(PARTS)}, got {name!r}")
    return name


def warm(
    arch: Annotated[Optional[list[str]], typer.Option(parser=read_architecture, metavar="N.N", help="Compute capability of GPUs that are not here, such as 9.0 for an H100; any number of times. By default the GPUs of this machine.")] = None,  # noqa: E501, UP045
    cpu: Annotated[bool, typer.Option(help="Compile the loops of the CPU.")] = True,
    gpu: Annotated[bool, typer.Option(help="Compile the kernels of GPUs.")] = True,
    only: Annotated[Optional[list[str]], typer.Option(parser=read_part, metavar="PART", autocompletion=lambda: PARTS, help=f"Compile these parts of the CPU loops alone: {', '.join(PARTS)}.")] = None,  # noqa: E501, UP045
    jobs: Annotated[Optional[int], typer.Option(min=1, help="Processes that compile; by default one a core.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Compile ahead the code that programs compile at first use, and keep it on disk: for images and login nodes.

    Loops are compiled for this kind of CPU; for an image that others run, set NUMBA_CPU_NAME=generic here and there.

    Kernels need no GPU: name those of the nodes with --arch. Most wheels hold them already.

    Compiled code lies in ~/.cache/pyg_direct, or in the folder that PYG_DIRECT_CACHE names.

    Exit codes: 0 compiled and kept, 1 something could not be compiled or kept, 2 bad usage.
    """
    if not cpu and not gpu:
        raise typer.BadParameter("--no-cpu and --no-gpu together leave nothing to compile")
    if arch and not gpu:
        raise typer.BadParameter("--arch must come without --no-gpu")
    if only and not cpu:
        raise typer.BadParameter("--only names parts of the CPU loops, and must come without --no-cpu")
    # torch is not imported before the options are read.
    from pyg_direct.cli import compile_ahead

    try:
        compile_ahead.check_folder(cache_root())
        # Annotated for Typer, which makes of each what its parser returns.
        capabilities: Any = arch
        outcome = compile_ahead.compile_ahead(only or PARTS if cpu else (), capabilities, on_gpu=gpu, jobs=jobs)
        compile_ahead.check_folder(cache_root())
    except OSError as error:
        typer.echo(explain_write(error, cache_root(), "PYG_DIRECT_CACHE"), err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"folder": str(cache_root()), **outcome._asdict()}, indent=1))
    else:
        _print(outcome)
    raise typer.Exit(int(bool(outcome.failed)))


def _print(outcome: Outcome) -> None:
    from pyg_direct.profiling import show_bytes

    console = Console(highlight=False, markup=False)
    for sentence in [*outcome.notes, *(f"not compiled: {sentence}" for sentence in outcome.failed)]:
        console.print(sentence)
    console.print(f"compiled {outcome.compiled} in {outcome.seconds:.0f} s; {cache_root()} keeps "
                  f"{outcome.kept} files of this version, {show_bytes(outcome.kept_bytes)}")  # fmt: skip

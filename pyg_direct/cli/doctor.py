"""`pyg-direct doctor`: parts of this machine, the rate of its link, the choices of `auto`, and faults to fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from pyg_direct.cli.failures import explain_write, said_in_options

if TYPE_CHECKING:
    from pyg_direct.cli.machine_report import Graph


# A GPU has more; a smaller number means another unit.
_LEAST_BYTES = 1 << 20


def _read_count(text: str | int) -> int:
    """Read a number of the command line; text that is no number is shown in the message."""
    digits = str(text)
    # 64-bit, as ids are; Python itself reads no more than some thousand digits.
    if not digits.isdecimal() or len(digits) > 1000 or int(digits) >= 2**63:
        shown = digits if len(digits) <= 40 else f"{digits[:40]}..."
        raise typer.BadParameter(f"it must be an integer from 0 on, below 2^63, in digits, got {shown!r}")
    return int(digits)


def doctor(
    context: typer.Context,
    nodes: Annotated[Optional[int], typer.Option(parser=_read_count, metavar="INTEGER", help="Nodes of a graph, to tell what auto chooses.")] = None,  # noqa: E501, UP045
    edges: Annotated[Optional[int], typer.Option(parser=_read_count, metavar="INTEGER", help="Its edges.")] = None,  # noqa: UP045
    features: Annotated[int, typer.Option(parser=_read_count, metavar="INTEGER", help="Its float32 features of a node.")] = 0,  # noqa: E501
    gpu_memory: Annotated[Optional[str], typer.Option(help="Choose for a GPU with so much free: 80G.")] = None,  # noqa: UP045
    measure: Annotated[bool, typer.Option(help="Measure the link to host memory (GPU only, at most 10 s).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Optional[Path], typer.Option(help="Write the same as JSON to this file too.")] = None,  # noqa: UP045
) -> None:  # fmt: skip
    """Look at this machine: GPUs, versions, link, memory, what `placement="auto"` would choose, what to fix.

    Exit codes: 0 fine, 1 something to fix, 2 bad usage.
    """
    graph, free = _read_graph(context, nodes, edges, features, gpu_memory)
    if out is not None and not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out must be a file in a folder that is there, got {out}")
    # torch is not imported before the options are read.
    from pyg_direct.cli import machine_report

    facts = machine_report.examine(graph, free, measure=measure)
    told = json.dumps(facts, indent=1)
    if out is not None:
        try:
            out.write_text(f"{told}\n")
        except OSError as error:
            sentence = explain_write(error, out, "--out")
            raise typer.BadParameter(f"--out must be a file that can be written: {sentence}") from error
    if as_json:
        typer.echo(told)
    else:
        machine_report.print_report(facts)
    raise typer.Exit(int(any(finding["level"] == "fix" for finding in facts["findings"])))


def _read_graph(context: typer.Context, nodes: int | None, edges: int | None, features: int, gpu_memory: str | None
                ) -> tuple[Graph | None, int | None]:  # fmt: skip
    if (nodes is None) != (edges is None):
        raise typer.BadParameter("--nodes and --edges must be given together")
    if nodes is None or edges is None:
        if features or gpu_memory is not None:
            raise typer.BadParameter("--features and --gpu-memory must come with --nodes and --edges")
        return None, None
    from pyg_direct.cli.machine_report import Graph
    from pyg_direct.runtime.host.host_memory import parse_size

    if gpu_memory is not None and gpu_memory.strip().isdecimal() and int(gpu_memory) < _LEAST_BYTES:
        number = gpu_memory.strip()
        raise typer.BadParameter(f"--gpu-memory must have a unit, such as {number}G, got {gpu_memory!r}")
    with said_in_options(context):
        free = None if gpu_memory is None else parse_size(gpu_memory, name="gpu_memory")
    return Graph(nodes, edges, features), free

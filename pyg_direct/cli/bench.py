"""`pyg-direct bench`: the standard rows at the size of this machine, one picture and one file to share."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

import pyg_direct
from pyg_direct.cache_folder import write_whole
from pyg_direct.cli.failures import explain_write

if TYPE_CHECKING:
    from pyg_direct.bench.result_row import Row


def bench(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the picture and the file.")] = Path(),
    quick: Annotated[bool, typer.Option(help="Half a minute, on a small graph.")] = False,
    scale: Annotated[Optional[float], typer.Option(min=0.001, max=4, help="Factor on the graph's size (1: 2.4 M nodes and 124 M edges).")] = None,  # noqa: E501, UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:  # fmt: skip
    """Measure sampling, rows and the loader on this machine, beside PyG's where its sampler is installed.

    Rows go to pyg_direct_bench_<cpu or GPU>.json, and a picture beside it (extra `bench`).

    They tell the model of the GPU, the number of cores and versions, but no names of hosts or users.

    Exit codes: 0 measured, 1 a part could not be measured, 2 bad usage.
    """
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # The measured rows are to be kept.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        sentence = explain_write(error, out, "--out")
        raise typer.BadParameter(f"--out must be a folder that can be written: {sentence}") from error
    if is_new:
        typer.echo(f"pyg_direct: made the folder {out.absolute()}", err=True)
    # torch is not imported before the options are read.
    import torch

    from pyg_direct.bench import measurements
    from pyg_direct.bench.result_row import Machine, to_json

    size = measurements.size_of_machine(quick=quick)
    size = size if scale is None else size._replace(scale=scale)
    # The user's folder may be a checkout of another project, whose commit does not count.
    machine = Machine(commit=f"of version {pyg_direct.__version__}")
    load = measurements.read_load()
    rows, failed = measurements.measure(size, torch.cuda.is_available())
    entries = [to_json(row, machine) for row in rows]
    path = out / f"pyg_direct_bench_{machine.name}.json"
    picture, file, unwritten = path.with_suffix(".png"), None, []
    drawn = None
    try:
        if entries:
            write_whole(path, json.dumps(entries, indent=1) + "\n")
            file = path
        drawn = _draw(entries, picture)
    except OSError as error:
        # Rows measured so far are shown all the same.
        unwritten.append(explain_write(error, path if file is None else picture, "--out"))
    remarks = measurements.explain_limits(rows, load) + measurements.list_missing(size)
    if as_json:
        typer.echo(json.dumps({"rows": entries, "file": file and str(file), "picture": drawn and str(drawn),
                               "failed": failed + unwritten, "remarks": remarks}, indent=1))  # fmt: skip
    else:
        remarks = [*(f"not measured: {sentence}" for sentence in failed),
                   *(f"not written: {sentence}" for sentence in unwritten),
                   *(f"note: {sentence}" for sentence in remarks)]  # fmt: skip
        _print(rows, remarks, file, drawn)
    raise typer.Exit(int(bool(failed or unwritten)))


def _draw(entries: list[dict[str, Any]], path: Path) -> Path | None:
    """Draw the picture; return None if there are no rows for it, or no package that draws."""
    from pyg_direct.bench.result_row import UNITS, draw_panels

    if find_spec("matplotlib") is None or not any(entry["unit"] in UNITS for entry in entries):
        return None
    draw_panels(entries, path, "pyg_direct bench")
    return path


def _print(rows: list[Row], remarks: list[str], path: Path | None, picture: Path | None) -> None:
    console = Console(highlight=False)
    table = Table()
    for column in ("case", "metric", "median", "unit", "limit of the same run"):
        table.add_column(column, justify="right" if column == "median" else "left", overflow="fold")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.4g}{' (!)' if row.beats_limit else ''}, {row.limit_name}"
        table.add_row(row.case, row.metric, f"{row.p50:.4g}", row.unit, limit)
    console.print(table)
    for sentence in remarks:
        console.print(sentence, markup=False)
    if path is not None:
        console.print(f"rows: {path.absolute()}", markup=False)
        is_missing = find_spec("matplotlib") is None
        why = 'pip install ".[bench]" in the clone' if is_missing else "no row is of a unit that is drawn"
        console.print(f"picture: {picture.absolute() if picture else f'none; {why}'}", markup=False)

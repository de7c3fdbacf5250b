"""Measure the standard rows on this machine: `python benchmarks/run.py sampling gather loader`.

Rows go to `benchmarks/results/<name>.json` (one file for a GPU, one for a CPU) with a picture each.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

# A script finds modules in its own folder, but not the package of this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import LONG_CASES, SHORT_CASES
from benchmarks.paper_pictures import draw_beside_paper
from benchmarks.pictures import draw_file
from pyg_direct.bench.result_row import Machine, read_rows, save_rows
from pyg_direct.errors import ArgumentError, DeviceError

RESULTS = Path(__file__).parent / "results"
CASES = {**SHORT_CASES, **LONG_CASES}


def _draw(file: Path) -> list[Path]:
    return [*draw_file(file), *draw_beside_paper(json.loads(file.read_text()), file)]


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join(SHORT_CASES)} (all of these by default), {', '.join(LONG_CASES)}"),
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor on the nodes and edges of the products-shaped graph.")] = 1.0,
    draw: Annotated[bool, typer.Option(help="Only draw the pictures of the rows that are there.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the rows and pictures.")] = RESULTS,
) -> None:
    if draw:
        print(*(picture for file in sorted(out.glob("*.json")) for picture in _draw(file)), sep="\n")
        return
    machine = Machine()
    for name, file in _choose_files(names or list(SHORT_CASES), scale, out, machine.name).items():
        try:
            for row in CASES[name](scale):
                print(row, flush=True)
                # At once: a case that is ended early keeps what it has measured.
                save_rows(file, [row], machine)
        except DeviceError as error:
            sentence = f"{name} is measured on a GPU: {error}"
            if names:
                raise typer.BadParameter(sentence) from error
            # With all cases, continue with those that this machine can measure.
            print(sentence, file=sys.stderr, flush=True)
            continue
        _draw(file)


def _choose_files(names: list[str], scale: float, out: Path, machine: str) -> dict[str, Path]:
    """Choose the file of each case's rows, and check first that it can be written: some cases take many minutes."""
    if not 0 < scale < math.inf:
        raise typer.BadParameter(f"--scale must be a finite number above 0, got {scale}")
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"names must be of {', '.join(CASES)}, got {name}")
    files = {name: out / f"{name}_{machine}.json" for name in names}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        for file in files.values():
            read_rows(file)
    except (OSError, ArgumentError) as error:
        raise typer.BadParameter(f"--out must be a folder that rows can be written to: {error}") from error
    return files


if __name__ == "__main__":
    typer.run(main)

"""Measure the standard rows on this machine: `python benchmarks/run.py sampling gather loader`.

Rows go to `benchmarks/results/<name>.json` (one file for a GPU, one for a CPU) with a picture each.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from pyg_direct.bench.cases import LONG_CASES, SHORT_CASES
from pyg_direct.bench.paper import draw_beside_paper
from pyg_direct.bench.picture import draw_file
from pyg_direct.bench.row import Machine, save_rows
from pyg_direct.errors import DeviceError

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
    for name in names or SHORT_CASES:
        if name not in CASES:
            raise typer.BadParameter(f"names must be of {', '.join(CASES)}, got {name}")
    machine = Machine()
    for name in names or SHORT_CASES:
        rows = []
        try:
            for row in CASES[name](scale):
                print(row, flush=True)
                rows.append(row)
        except DeviceError as error:
            raise typer.BadParameter(f"{name} is measured on a GPU: {error}") from error
        finally:
            # Also of a run that Ctrl-C ends.
            if rows:
                save_rows(out / f"{name}_{machine.name}.json", rows, machine)
        _draw(out / f"{name}_{machine.name}.json")


if __name__ == "__main__":
    typer.run(main)

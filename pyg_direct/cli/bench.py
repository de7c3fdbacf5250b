"""`pyg-direct bench`: the standard rows at the size of this machine, one picture and one file to share."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import pyg_direct
from pyg_direct.bench.beside import measure_loaders
from pyg_direct.bench.gather import measure_cached_rows, measure_cold_rows, measure_cpu_rows, measure_hot_rows
from pyg_direct.bench.launch import measure_launch
from pyg_direct.bench.loader import measure_loader
from pyg_direct.bench.picture import UNITS, draw_panels
from pyg_direct.bench.result_row import Machine, Row, to_json
from pyg_direct.bench.sampling import measure_cpu_sampling, measure_gpu_sampling
from pyg_direct.cache_folder import write_whole
from pyg_direct.datasets import NodeDataset, synthetic_graph
from pyg_direct.errors import PygDirectError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.memory import available_bytes, count_cores

# Bytes that the graph of ogbn-products' shape, with its copies, takes of the host at most.
_GRAPH_BYTES = 12 << 30
_SMALLEST = 0.01


class Size(NamedTuple):
    """How much is measured.

    Attributes:
        scale: Factor on the products-shaped graph.
        batch_size: Seeds of a batch of the loader.
        batches: Batches of each loader.
        table_bytes: Size of the tables that rows are read from.
        workers: Numbers of workers that PyG's loader gets; none where it is not measured without features.
    """

    scale: float
    batch_size: int
    batches: int
    table_bytes: int
    workers: tuple[int, ...]


def choose_size(num_cores: int, free_on_host: int, free_on_gpu: int | None, *, quick: bool) -> Size:
    """What a machine measures within half a minute, or else some minutes.

    Args:
        num_cores: Cores of the host.
        free_on_host: Its free memory in bytes.
        free_on_gpu: That of the GPU; None for none.
        quick: Half a minute.
    """
    fits = free_on_host / 2 / _GRAPH_BYTES
    if free_on_gpu is None:
        wanted, batches = (_SMALLEST, 6) if quick else (0.1, 12)
        table = 1 << 28
    else:
        fits = min(fits, free_on_gpu / 2 / _GRAPH_BYTES)
        wanted, batches = (0.1, 24) if quick else (1.0, 60)
        table = min(1 << 30 if quick else 8 << 30, free_on_host // 4, free_on_gpu // 4)
    workers = () if quick else tuple(sorted({0, min(8, num_cores)}))
    batch_size = 32 if quick and free_on_gpu is None else 1024
    return Size(max(_SMALLEST, min(wanted, round(fits, 2))), batch_size, batches, table, workers)


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
    try:
        is_new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        # What is measured is to be kept.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise typer.BadParameter(f"--out must be a folder that can be written: {error}") from error
    if is_new:
        typer.echo(f"pyg_direct: made the folder {out.absolute()}", err=True)
    on_gpu = torch.cuda.is_available()
    size = choose_size(count_cores(), available_bytes(), free_bytes(torch.cuda.current_device()) if on_gpu else None,
                       quick=quick)  # fmt: skip
    size = size if scale is None else size._replace(scale=scale)
    # Not the commit of whatever the user's folder is a checkout of.
    machine = Machine(commit=f"of version {pyg_direct.__version__}")
    rows, failed = _measure(size, on_gpu)
    entries = [to_json(row, machine) for row in rows]
    path = out / f"pyg_direct_bench_{machine.name}.json"
    if entries:
        write_whole(path, json.dumps(entries, indent=1) + "\n")
    picture = _draw(entries, path.with_suffix(".png"))
    if as_json:
        typer.echo(json.dumps({"rows": entries, "file": str(path) if rows else None,
                               "picture": picture and str(picture), "failed": failed}, indent=1))  # fmt: skip
    else:
        _print(rows, failed, path, picture)
    raise typer.Exit(int(bool(failed)))


def _measure(size: Size, on_gpu: bool) -> tuple[list[Row], list[str]]:
    """The rows, and a sentence for each part that could not be measured."""
    rows: list[Row] = []
    failed: list[str] = []
    parts = (_list_gpu_parts if on_gpu else _list_cpu_parts)(size)
    name = f"products x {size.scale:g}"
    with Bar(len(parts) + 1, "measuring", "part") as bar:
        graph = synthetic_graph("products", scale=size.scale, device="cuda" if on_gpu else "cpu").to("cpu")
        for what, measure in parts.items():
            bar.update(1)
            tqdm.write(f"measuring {what}", file=sys.stderr)
            try:
                with warnings.catch_warnings():
                    # Of PyG's loader, about packages that it would like to have.
                    warnings.simplefilter("ignore", UserWarning)
                    rows.extend(measure(graph, name))
            except (PygDirectError, RuntimeError, OSError, ImportError, KeyboardInterrupt) as error:
                failed.append(f"{what}: {str(error) or type(error).__name__}")
                if isinstance(error, KeyboardInterrupt):
                    break
        bar.update(1)
    return rows, failed


Part = Callable[[NodeDataset, str], Iterator[Row]]


def _list_cpu_parts(size: Size) -> dict[str, Part]:
    threads = sorted({1, count_cores()})
    parts: dict[str, Part] = {
        "sampling": lambda graph, name: measure_cpu_sampling(graph.edge_index, graph.num_nodes, name, threads),
        "rows": lambda graph, name: measure_cpu_rows(table_bytes=size.table_bytes),
        "loader and training": lambda graph, name: _measure_training(size, graph, name, "cpu"),
    }
    return parts | _list_peers(size)


def _list_gpu_parts(size: Size) -> dict[str, Part]:
    parts: dict[str, Part] = {
        "launches of kernels": lambda graph, name: measure_launch(),
        "sampling": lambda graph, name: measure_gpu_sampling(graph.edge_index.cuda(), graph.num_nodes, name),
        "rows in GPU memory": lambda graph, name: measure_hot_rows((128, 512, 2048), size.table_bytes),
        "rows in host memory": lambda graph, name: measure_cold_rows(size.table_bytes),
        "hot rows in GPU memory": lambda graph, name: measure_cached_rows(size.table_bytes // 1024),
        "loader, all on the GPU": lambda graph, name: _measure_training(size, graph, name, "cuda"),
        "loader, all on the host": lambda graph, name: _measure_training(size, graph, name, "unified"),
    }
    return parts | _list_peers(size)


def _measure_training(size: Size, graph: NodeDataset, name: str, placement: str) -> Iterator[Row]:
    yield from measure_loader(graph.to_data(), graph.train_idx, graph.num_classes, name, placement,
                              batches=size.batches, batch_size=size.batch_size)  # fmt: skip


def _list_peers(size: Size) -> dict[str, Part]:
    def measure(graph: NodeDataset, name: str) -> Iterator[Row]:
        topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
        yield from measure_loaders(topology, name, size.workers, size.batch_size, min(16, size.batches))

    return {"loader beside PyG's": measure} if size.workers else {}


def _draw(entries: list[dict[str, Any]], path: Path) -> Path | None:
    """The picture; None where there is nothing to draw, or nothing to draw with."""
    if find_spec("matplotlib") is None or not any(entry["unit"] in UNITS for entry in entries):
        return None
    draw_panels(entries, path, "pyg_direct bench")
    return path


def _print(rows: list[Row], failed: list[str], path: Path, picture: Path | None) -> None:
    console = Console(highlight=False)
    table = Table()
    for column in ("case", "metric", "median", "unit", "limit of the same run"):
        table.add_column(column, justify="right" if column == "median" else "left", overflow="fold")
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.4g}, {row.limit_name}"
        table.add_row(row.case, row.metric, f"{row.p50:.4g}", row.unit, limit)
    console.print(table)
    for sentence in failed:
        console.print(f"not measured: {sentence}", markup=False)
    if rows:
        console.print(f"rows: {path.absolute()}", markup=False)
        is_missing = find_spec("matplotlib") is None
        why = 'pip install ".[bench]" in the clone' if is_missing else "no row is of a unit that is drawn"
        console.print(f"picture: {picture.absolute() if picture else f'none; {why}'}", markup=False)

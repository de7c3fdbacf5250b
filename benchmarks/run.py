"""Measure the standard rows on this machine: `python benchmarks/run.py sampling gather loader`.

Rows go to `benchmarks/results/<name>.json` (one file for a GPU, one for a CPU) with a picture each.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from pyg_direct.bench.beside import (
    measure_loaders,
    measure_samplers_on_cpu,
    measure_samplers_on_gpu,
    measure_tables,
)
from pyg_direct.bench.gather import measure_cold_rows, measure_hot_rows
from pyg_direct.bench.loader import measure_loader
from pyg_direct.bench.memory import measure_host_memory
from pyg_direct.bench.picture import draw_file
from pyg_direct.bench.row import Machine, Row, save_rows
from pyg_direct.bench.sampling import measure_cpu_sampling, measure_gpu_sampling
from pyg_direct.datasets import synthetic_graph
from pyg_direct.graph.topology import CSRTopo

RESULTS = Path(__file__).parent / "results"


def sampling(scale: float) -> Iterator[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = synthetic_graph("products", scale=scale, topology_only=True, device=device)
    measure = measure_gpu_sampling if device == "cuda" else measure_cpu_sampling
    yield from measure(graph.edge_index, graph.num_nodes, "products" if scale == 1 else f"products x {scale:g}")


def gather(scale: float) -> Iterator[Row]:
    if not torch.cuda.is_available():
        raise typer.BadParameter("gather is measured on a GPU, and there is none here")
    yield from measure_hot_rows()
    yield from measure_cold_rows()


def loader(scale: float) -> Iterator[Row]:
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, device="cuda" if on_gpu else "cpu").to("cpu")
    name = "products" if scale == 1 else f"products x {scale:g}"
    for placement, cache in [("cuda", None), ("unified", None), ("unified", "20%")] if on_gpu else [("cpu", None)]:
        data = graph.to_data()
        yield from measure_loader(data, graph.train_idx, graph.num_classes, name, placement, cache,
                                  batches=60 if on_gpu else 6)  # fmt: skip


def memory(scale: float) -> Iterator[Row]:
    yield from measure_host_memory(int(8_000_000 * scale), 256, int(64_000_000 * scale))


def peers(scale: float) -> Iterator[Row]:
    on_gpu = torch.cuda.is_available()
    graph = synthetic_graph("products", scale=scale, topology_only=True, device="cuda" if on_gpu else "cpu")
    name = "products" if scale == 1 else f"products x {scale:g}"
    topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
    del graph
    if on_gpu:
        yield from measure_samplers_on_gpu(topology, name)
        yield from measure_tables()
    yield from measure_samplers_on_cpu(topology, name)
    yield from measure_loaders(topology, name, workers=(8, 16) if on_gpu else (0, 2), batches=16 if on_gpu else 8)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="memory, sampling, gather, loader, peers; all by default")
    ] = None,
    scale: Annotated[float, typer.Option(help="Factor on the nodes and edges of the products-shaped graph.")] = 1.0,
    draw: Annotated[bool, typer.Option(help="Only draw the pictures of the rows that are there.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the rows and pictures.")] = RESULTS,
) -> None:
    if draw:
        print(*(picture for file in sorted(out.glob("*.json")) for picture in draw_file(file)), sep="\n")
        return
    machine = Machine()
    suffix = "cpu" if machine.gpu == "none" else machine.gpu.split()[-1].lower()
    for name in names or CASES:
        rows: list[Row] = []
        try:
            for row in CASES[name](scale):
                print(row, flush=True)
                rows.append(row)
        finally:
            # What was measured before an error is kept.
            save_rows(out / f"{name}_{suffix}.json", rows, machine)
        draw_file(out / f"{name}_{suffix}.json")


CASES = {"memory": memory, "sampling": sampling, "gather": gather, "loader": loader, "peers": peers}

if __name__ == "__main__":
    typer.run(main)

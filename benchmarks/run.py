"""Measure the standard rows on this machine: `python benchmarks/run.py sampling gather loader`.

Rows go to `benchmarks/results/<name>.json` (one file for a GPU, one for a CPU) with a picture each.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pyg_direct.bench.accuracy import measure_accuracy
from pyg_direct.bench.gather import measure_cold_rows, measure_hot_rows
from pyg_direct.bench.labor import (
    SAMPLINGS,
    measure_fetched_bytes,
    measure_hubs,
    measure_sampling,
    measure_steps,
)
from pyg_direct.bench.loader import measure_loader, measure_python_time
from pyg_direct.bench.memory import measure_host_memory
from pyg_direct.bench.picture import draw_file
from pyg_direct.bench.row import Machine, Row, save_rows
from pyg_direct.bench.sampling import measure_cpu_sampling, measure_gpu_sampling
from pyg_direct.datasets import load_folder, synthetic_graph

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
    # Attributes, topology and cache.
    cases = [("cuda", None, None), ("unified", "cuda", None), ("unified", None, None), ("unified", None, "20%"),
             ("auto", None, None)] if on_gpu else [("cpu", None, None)]  # fmt: skip
    for placement, topology, cache in cases:
        data = graph.to_data()
        yield from measure_loader(data, graph.train_idx, graph.num_classes, name, placement, cache,
                                  batches=60 if on_gpu else 6, topology_placement=topology)  # fmt: skip
    if on_gpu:
        yield from measure_python_time(graph.to_data(), graph.train_idx, name)


def memory(scale: float) -> Iterator[Row]:
    yield from measure_host_memory(int(8_000_000 * scale), 256, int(64_000_000 * scale))


def labor(scale: float) -> Iterator[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    graph = synthetic_graph("products", scale=scale, device=device)
    name = "products" if scale == 1 else f"products x {scale:g}"
    train_idx = graph.train_idx.cpu()
    yield from measure_fetched_bytes(graph.edge_index, graph.num_nodes, graph.num_features, train_idx, name)
    if device == "cuda":
        yield from measure_sampling(graph.edge_index, graph.num_nodes, train_idx, name)
        yield from measure_hubs()
        yield from measure_steps(graph.to("cpu").to_data(), train_idx, graph.num_classes, name)


def accuracy(scale: float) -> Iterator[Row]:
    kinds: dict[str, dict[str, Any]] = {"uniform, fp32": {}}
    for name in ("labor", "labor, dependent layers"):
        kinds[f"{name}, bf16"] = {"dtype": torch.bfloat16, **SAMPLINGS[name]}
    folder = os.environ.get("PYG_DIRECT_DATA")
    if folder:
        yield from measure_accuracy(load_folder(folder), kinds)
    yield from measure_accuracy(synthetic_graph("products", scale=scale), kinds, epochs=4)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Names of the rows; all by default.")] = None,
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
        rows = []
        for row in CASES[name](scale):
            print(row, flush=True)
            rows.append(row)
        save_rows(out / f"{name}_{suffix}.json", rows, machine)
        draw_file(out / f"{name}_{suffix}.json")


CASES = {"memory": memory, "sampling": sampling, "gather": gather, "loader": loader, "labor": labor,
         "accuracy": accuracy}  # fmt: skip

if __name__ == "__main__":
    typer.run(main)

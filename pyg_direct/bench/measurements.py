"""Parts that `pyg-direct bench` measures at the size of this machine."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from tqdm import tqdm

from pyg_direct.bench.beside import SAMPLER, measure_loaders
from pyg_direct.bench.gather import measure_cached_rows, measure_cold_rows, measure_cpu_rows, measure_hot_rows
from pyg_direct.bench.launch import measure_launch
from pyg_direct.bench.loader import measure_loader
from pyg_direct.bench.result_row import Row
from pyg_direct.bench.sampling import measure_cpu_sampling, measure_gpu_sampling
from pyg_direct.datasets import NodeDataset, synthetic_graph
from pyg_direct.errors import PygDirectError
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.host.host_memory import available_bytes, count_cores

# Bytes that the graph of ogbn-products' shape, with its copies, takes of the host at most.
_GRAPH_BYTES = 12 << 30
_SMALLEST = 0.01
# Load over cores from which on other programs are in the way.
_BUSY = 0.5


class Size(NamedTuple):
    """Extent of the measurements.

    Attributes:
        batch_size: Seeds of a batch of the loader.
        table_bytes: Size of the tables that rows are read from.
        workers: Numbers of workers that PyG's loader gets; none if it is not measured without features.
    """

    scale: float
    batch_size: int
    batches: int
    table_bytes: int
    workers: tuple[int, ...]


def choose_size(num_cores: int, free_on_host: int, free_on_gpu: int | None, *, quick: bool) -> Size:
    """Choose what a machine measures within half a minute, otherwise within some minutes.

    Args:
        free_on_host: Its free memory in bytes.
        free_on_gpu: Free memory of the GPU in bytes; None for no GPU.
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


def size_of_machine(*, quick: bool) -> Size:
    """Choose by the cores and the free memory that this machine has now."""
    on_gpu = torch.cuda.is_available()
    free = free_bytes(torch.cuda.current_device()) if on_gpu else None
    return choose_size(count_cores(), available_bytes(), free, quick=quick)


def read_load() -> float | None:
    """Read the load of the last minute over the cores of this process; None if the system does not count it."""
    try:
        return os.getloadavg()[0] / count_cores()
    except (AttributeError, OSError):
        return None


def list_missing(size: Size) -> list[str]:
    """List the projects that are left out of the comparison, and why, a sentence each."""
    if SAMPLER is None:
        return ["PyG's loader: neither pyg-lib nor torch_sparse, which it samples with, is installed: "
                'pip install ".[sparse]" in the clone of pyg_direct']  # fmt: skip
    return [] if size.workers else ["PyG's loader with workers: --quick leaves it out"]


def explain_limits(rows: list[Row], load: float | None) -> list[str]:
    """Name rows that are better than the limit of the same run, and why that can be, a sentence each.

    Args:
        load: The load over the cores as the run began, as of `read_load`.
    """
    beaten = [row for row in rows if row.beats_limit]
    if not beaten:
        return []
    busy = load is not None and load > _BUSY
    why = (
        f"the machine was busy as the run began (load {load:.1f} a core), so that the limit was measured too low"
        if busy
        else "other programs used the machine while the limit was measured, or the data fit into a cache"
    )
    return [f"{row.case}, {row.metric}: {row.p50:.4g} {row.unit} is better than its limit of {row.limit:.4g}; {why}. "
            "Measure again on an idle machine" for row in beaten]  # fmt: skip


def measure(size: Size, on_gpu: bool) -> tuple[list[Row], list[str]]:
    """Measure all parts.

    Args:
        on_gpu: Whether the parts of a GPU are measured, or those of a CPU.

    Returns:
        The rows, and a sentence for each part that could not be measured.
    """
    rows: list[Row] = []
    failed: list[str] = []
    parts = (_list_gpu_parts if on_gpu else _list_cpu_parts)(size)
    name = f"products x {size.scale:g}"
    with Bar(len(parts) + 1, "measuring", "part") as bar:
        graph = synthetic_graph("products", scale=size.scale, device="cuda" if on_gpu else "cpu").to("cpu")
        for what, measure_part in parts.items():
            bar.update(1)
            tqdm.write(f"measuring {what}", file=sys.stderr)
            try:
                with warnings.catch_warnings():
                    # Of PyG's loader, about packages that it would like to have.
                    warnings.simplefilter("ignore", UserWarning)
                    rows.extend(measure_part(graph, name))
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
    def measure_peers(graph: NodeDataset, name: str) -> Iterator[Row]:
        topology = CSRTopo(graph.edge_index, num_nodes=graph.num_nodes)
        yield from measure_loaders(topology, name, size.workers, size.batch_size, min(16, size.batches))

    return {"loader beside PyG's": measure_peers} if size.workers else {}

"""Training by DDP on a graph in parts, one part in each process, beside the same with the whole graph in each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from benchmarks.distributed.exchange import FANOUTS, run_processes
from pyg_direct import accelerate
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.distributed import DistGraph, DistNeighborLoader, partition_graph
from pyg_direct.loader.neighbor_loader import NeighborLoader

# Steps of an epoch, and epochs with each loader in turns, of which the first only warms up.
_STEPS, _EPOCHS = 120, 4
_SEEDS, _HIDDEN, _LAYERS = 1024, 256, 3


def measure_training_in_parts(graph: NodeDataset, name: str, device: str, counts: Sequence[int]) -> Iterator[Row]:
    """Measure steps of GraphSAGE by DDP, with batches exchanged between parts and with the whole graph in each process.

    Args:
        graph: A graph with features, on the CPU.
        name: Name of the rows.
        device: `cpu` or `cuda`.
        counts: Numbers of processes, above 1; on GPUs each has its own GPU.
    """
    assert graph.x is not None
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pt"
        torch.save({"x": graph.x, "y": graph.y, "edge_index": graph.edge_index}, whole)
        for count in counts:
            path, case = Path(folder) / str(count), f"distributed/{name}/{device}/{count}/SAGE by DDP"
            partition_graph(path, graph.edge_index, count, num_nodes=graph.num_nodes,
                            node_rows={"x": graph.x, "y": graph.y})  # fmt: skip
            found = run_processes(_train, count, device, str(path), str(whole), graph.num_classes)
            yield Row.of(case, "step, one part in each process", "ms", [1e3 * t for t in found["parts"]],
                         1e3 * min(found["whole"]), "the whole graph in each process",
                         note=f"{_SEEDS} seeds a process, {FANOUTS}, hidden {_HIDDEN}, accelerated; batches exchanged "
                              "between the parts")  # fmt: skip
            yield Row.of(case, "step with parts over step with the whole graph", "x",
                         [own / whole for own, whole in zip(found["parts"], found["whole"], strict=True)])  # fmt: skip


def _train(rank: int, count: int, device: torch.device, folder: str, whole: str, num_classes: int) -> dict[str, Any]:
    data = Data(**torch.load(whole, mmap=True))
    assert data.num_nodes is not None
    seeds = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(0))[: _SEEDS * _STEPS * count]
    torch.manual_seed(0)
    # The group for gradients; rows and edges travel by groups of their own.
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    model = GraphSAGE(data.num_features, _HIDDEN, _LAYERS, num_classes).to(device)
    accelerate(model)
    parallel = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(parallel.parameters(), fused=device.type == "cuda")
    with DistGraph(folder, device=device, device_cache_size="100%", share_graph=False) as graph:
        common: dict[str, Any] = {"batch_size": _SEEDS, "seed": 1, "prefetch": 2}
        loaders = {
            "parts": DistNeighborLoader(graph, FANOUTS, seeds, **common),
            "whole": NeighborLoader(data, FANOUTS, seeds, device=device, ranks=(rank, count), **common),
        }
        found: dict[str, list[float]] = {name: [] for name in loaders}
        for epoch in range(_EPOCHS):
            for name, loader in loaders.items():
                dist.barrier(group)
                seconds = _run_epoch(parallel, optimizer, loader)
                if epoch > 0:
                    found[name].append(seconds)
        del loaders
    return found


def _run_epoch(model: Any, optimizer: Any, loader: Any) -> float:
    """Train one epoch; return the seconds of a step."""
    count, begin = 0, time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        cross_entropy(out, batch.y[: batch.batch_size].view(-1)).backward()
        optimizer.step()
        count += 1
    if batch.x.is_cuda:
        torch.cuda.synchronize(batch.x.device)
    return (time.perf_counter() - begin) / count

"""Accuracy of a GraphSAGE trained in several processes, in either mode, beside one process; and the bytes of each."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from benchmarks.distributed.clients import open_mode
from benchmarks.distributed.exchange import run_processes
from benchmarks.loader.accuracy import predict
from pyg_direct.bench.loader import train
from pyg_direct.bench.result_row import Row
from pyg_direct.datasets import NodeDataset
from pyg_direct.distributed import DistNeighborLoader, partition_graph
from pyg_direct.distributed.graph_part import GraphPart
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader

_COUNT, _FANOUTS, _HIDDEN, _BATCH = 2, [5, 5], 64, 512


def measure_dist_accuracy(dataset: NodeDataset, epochs: int = 4, seeds: int = 2) -> Iterator[Row]:
    """Measure test accuracy of one process, of two ranks and of two clients of servers, with equal seeds per step.

    Args:
        dataset: A graph with features and classes, on the CPU.
        epochs: Passes over the training nodes.
        seeds: Runs of each mode.
    """
    modes = ["alone", "worker", *(["client"] if importlib.util.find_spec("ray") else [])]
    names = {"alone": "one process", "worker": "two ranks with a part each", "client": "two clients of two servers"}
    rows = {"x": dataset.x, "y": dataset.y}
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, _COUNT):
            partition_graph(Path(folder) / str(count), dataset.edge_index, count, num_nodes=dataset.num_nodes,
                            node_rows=rows)  # fmt: skip
        whole = GraphPart(Path(folder) / "1", 0, device=torch.device("cpu"))
        whole.place()
        limit = None
        for mode in modes:
            parts = str(Path(folder) / str(_COUNT))
            found = run_processes(_train, 1 if mode == "alone" else _COUNT, "cpu", dataset, parts, mode, epochs, seeds)
            scores = [100 * score for score in found["scores"]]
            mean = sum(scores) / len(scores)
            limit = mean if limit is None else limit
            yield Row.of(f"distributed/{dataset.name}/{mode}", f"test accuracy, {epochs} epochs", "%", scores, limit,
                         "mean of one process", f"{names[mode]}: mean {mean:.2f}, runs "
                         f"{', '.join(f'{s:.2f}' for s in scores)}; {_BATCH} seeds a step, {_FANOUTS}, "
                         f"hidden {_HIDDEN}")  # fmt: skip
            if mode == "worker":
                yield Row.of(f"distributed/{dataset.name}/{mode}", "bytes of the graph that a rank holds", "MB",
                             [n / 1e6 for n in found["bytes"]], whole.num_bytes / 1e6, "the whole graph",
                             "ids, rows, neighbors, and copies of rows of the other part as many as 10 % of its own; "
                             f"memory of the process grew by {found['grown'] / 1e6:.0f} MB")  # fmt: skip


def _train(rank: int, count: int, device: torch.device, dataset: NodeDataset, folder: str, mode: str, epochs: int,
           seeds: int) -> dict[str, Any]:  # fmt: skip
    found: dict[str, Any] = {"scores": []}
    graph: Any = None
    before, servers = _resident(), None
    if mode != "alone":
        graph, servers = open_mode(mode, rank, count, folder, **({"replicas": "10%"} if mode == "worker" else {}))
    if mode == "worker":
        graph.part.place()
        held = graph.part.num_bytes + graph.rows.kept_bytes
        found |= {"bytes": graph.communicator.run(graph.communicator.agree, held), "grown": _resident() - before}
    data = dataset.to_data()
    for seed in range(seeds):
        common: dict[str, Any] = {"batch_size": _BATCH // count, "shuffle": True, "seed": seed, "uneven": "pad"}
        if graph is None:
            loader: Any = NeighborLoader(data, _FANOUTS, dataset.train_idx, device="cpu", **common)
        else:
            loader = DistNeighborLoader(graph, _FANOUTS, dataset.train_idx, prefetch=2, **common)
        torch.manual_seed(seed)
        model = GraphSAGE(dataset.num_features, _HIDDEN, 2, dataset.num_classes, dropout=0.3)
        parallel = DistributedDataParallel(model) if count > 1 else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        for _ in range(epochs):
            model.train()
            for batch in loader:
                train(parallel, optimizer, batch)
        if rank == 0:
            assert dataset.x is not None
            topology = CSRTopo(dataset.edge_index, num_nodes=dataset.num_nodes)
            right = predict(model, topology, dataset.x)[dataset.test_idx] == dataset.y[dataset.test_idx]
            found["scores"].append(float(right.float().mean()))
    if graph is not None:
        graph.close()
        torch.distributed.barrier()
    if servers is not None:
        servers.close()
    return found


def _resident() -> int:
    """Count the bytes of memory that only this process uses."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")

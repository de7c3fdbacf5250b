"""Batches of sets of nodes with the edges among them, and random walks, in turns with PyG's if these run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any

import torch
import torch_geometric.loader as pyg_loader
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MetaPath2Vec as PygMetaPath2Vec
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from pyg_direct.bench.limits import time_on_clock, wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.cluster_loader import ClusterData, ClusterLoader, RandomNodeLoader
from pyg_direct.loader.graph_saint import GraphSAINTEdgeSampler, GraphSAINTNodeSampler, GraphSAINTRandomWalkSampler
from pyg_direct.loader.walk_models import MetaPath2Vec
from pyg_direct.profiling import time_call
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import count_cores
from pyg_direct.sampling.random_walks import random_walk

# Turns of ours and PyG's, and batches per turn. Ours are made ahead in groups of up to 16, which few batches would not
# show; PyG's take up to 100 ms each.
_TURNS, _BATCHES, _BATCHES_OF_PYG = 5, 96, 24
_STEPS = 20
# Bytes of random numbers that a batch of PyG's may draw.
_MOST_DRAWN = 2 << 30


def measure_sets(data: Data, name: str) -> Iterator[Row]:
    """Measure milliseconds per batch of each loader of sets of nodes.

    Args:
        data: The graph, on the CPU.
        name: Name of the graph.
    """
    num_nodes = int(data.num_nodes or 0)
    clusters = ClusterData(data, max(2, num_nodes // 100), log=False)
    some: dict[str, Any] = {"batch_size": max(1, num_nodes // 20), "num_steps": _BATCHES + 1}
    yield from _compare(f"sets/{name}/clusters of 100 nodes, 20 a batch",
                        lambda: ClusterLoader(clusters, batch_size=20, shuffle=True),
                        lambda: pyg_loader.ClusterLoader(clusters, batch_size=20, shuffle=True))  # fmt: skip
    yield from _compare(f"sets/{name}/a hundredth of the nodes", lambda: RandomNodeLoader(data, 100, shuffle=True),
                        lambda: pyg_loader.RandomNodeLoader(data, 100, shuffle=True))  # fmt: skip
    for ours, options in ((GraphSAINTNodeSampler, some), (GraphSAINTEdgeSampler, some),
                          (GraphSAINTRandomWalkSampler, {**some, "walk_length": 2})):  # fmt: skip
        theirs = getattr(pyg_loader, ours.__name__)
        # PyG's draws a float32 for each edge of the graph and each edge of the batch.
        drawn = 4 * data.num_edges * some["batch_size"] if ours is GraphSAINTEdgeSampler else 0
        is_possible = WITH_TORCH_SPARSE and drawn <= _MOST_DRAWN
        yield from _compare(f"sets/{name}/{ours.__name__}", lambda: ours(data, **options),  # noqa: B023
                            (lambda: theirs(data, **options)) if is_possible else None,  # noqa: B023
                            f"a batch of PyG's draws {drawn / 1e9:.0f} GB of numbers" if drawn > _MOST_DRAWN else ""
                            )  # fmt: skip


def measure_walks(edge_index: Tensor, num_nodes: int, name: str) -> Iterator[Row]:
    """Measure steps a second of uniform walks and node2vec's from all nodes, and milliseconds per batch of
    MetaPath2Vec.

    A step waits for the offsets of its row, then for a neighbor in it. The limit is as many reads of neighbors at
    random places of the same array: one for a step, which waits for no other. Both are whole calls by the wall clock.
    If pyg-lib is there, its uniform walks from the same nodes run on all cores of the CPU.

    Args:
        edge_index: int64 `[2, E]`, on the CPU.
        num_nodes: Number of nodes N.
        name: Name of the graph.
    """
    device = resolve_device(None)
    topology = CSRTopo(edge_index, num_nodes=num_nodes, direction="out")
    start = torch.arange(num_nodes, device=device)
    places = torch.randint(max(1, edge_index.shape[1]), (start.numel() * _STEPS,), device=device)
    neighbors = topology.place("auto", device).indices
    read = time_on_clock(lambda: neighbors[places], 5)
    for p, q in ((1.0, 1.0), (1.0, 0.5)):
        seconds = time_on_clock(lambda: random_walk(topology, start, _STEPS, p, q, seed=1, device=device), 5)  # noqa: B023
        rates = [start.numel() * _STEPS / 1e6 / one for one in seconds]
        limit = start.numel() * _STEPS / 1e6 / sorted(read)[len(read) // 2]
        yield Row.of(f"walks/{name}/p={p:g}, q={q:g}", "steps", "M/s", rates, limit, "random reads of neighbors")
        if WITH_PYG_LIB and p == q == 1:
            yield from _compare_with_pyg_lib(f"walks/{name}/p={p:g}, q={q:g}", topology, rates)
    kind = ("node", "to", "node")
    options: dict[str, Any] = {"edge_index_dict": {kind: edge_index}, "embedding_dim": 8, "metapath": [kind],
                               "walk_length": 50, "context_size": 7, "walks_per_node": 5, "num_negative_samples": 5,
                               "num_nodes_dict": {"node": num_nodes}}  # fmt: skip
    yield from _compare(f"walks/{name}/MetaPath2Vec, 128 nodes",
                        lambda: MetaPath2Vec(**options).loader(batch_size=128, shuffle=True),
                        lambda: PygMetaPath2Vec(**options).loader(batch_size=128, shuffle=True))  # fmt: skip


def _compare_with_pyg_lib(case: str, topology: CSRTopo, rates: list[float]) -> Iterator[Row]:
    """Yield steps a second of pyg-lib's uniform walks on all cores, and by how much ours are faster."""
    walk, cores, before = import_module("pyg_lib").sampler.random_walk, count_cores(), torch.get_num_threads()
    indptr, indices = topology.indptr.cpu(), topology.indices.cpu().long()
    start = torch.arange(indptr.numel() - 1)
    torch.set_num_threads(cores)
    try:
        # The first call wakes the threads.
        seconds = [time_call(lambda: walk(indptr, indices, start, _STEPS)) for _ in range(1 + len(rates))][1:]
    finally:
        torch.set_num_threads(before)
    theirs = [start.numel() * _STEPS / 1e6 / one for one in seconds]
    yield Row.of(case, f"steps, pyg-lib, {cores} cores", "M/s", theirs)
    yield Row.of(case, "pyg_direct over pyg-lib", "x", [own / other for own, other in zip(rates, theirs, strict=True)])


def _compare(case: str, ours: Callable[[], Any], theirs: Callable[[], Any] | None, note: str = "") -> Iterator[Row]:
    """Yield rows of two loaders that take turns, with a note if PyG's cannot."""
    made = {"pyg_direct": ours()} | ({} if theirs is None else {"PyG": theirs()})
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(1 + _TURNS):
        for name, loader in made.items():
            times[name].append(_time_batches(loader, _BATCHES if name == "pyg_direct" else _BATCHES_OF_PYG))
    # The first turn compiles.
    times = {name: own[1:] for name, own in times.items()}
    for name, own in times.items():
        yield Row.of(case, name, "ms", own, note=note)
    if theirs is not None:
        ratios = [other / own for own, other in zip(times["pyg_direct"], times["PyG"], strict=True)]
        yield Row.of(case, "PyG over pyg_direct", "x", ratios)


def _time_batches(loader: Any, most: int) -> float:
    """Measure milliseconds per batch of an epoch, at most so many, without the first."""
    batches = iter(loader)
    next(batches)
    wait_for_gpu()
    begin, count = time.perf_counter(), 0
    for _ in islice(batches, most):
        count += 1
    wait_for_gpu()
    return (time.perf_counter() - begin) * 1e3 / max(1, count)

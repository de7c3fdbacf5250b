"""Time of Python for a batch, by every option, when the GPU has finished all batches made ahead."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.loader import without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.hgt_loader import HGTLoader
from pyg_direct.loader.link_loader import LinkNeighborLoader
from pyg_direct.loader.neighbor_loader import NeighborLoader

_FANOUTS = [15, 10, 5]
# Batches of a window: the most of a group, which the host makes together.
_WINDOW = 16


def measure_python_time(data: Data, train_idx: Tensor, name: str, batch_sizes: tuple[int, ...] = (1024, 8192),
                        placement: str = "auto") -> Iterator[Row]:  # fmt: skip
    """Time that `next()` takes of the host when the GPU has finished all batches made ahead."""
    for batch_size in sorted({min(size, len(train_idx)) for size in batch_sizes}):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
        loader = NeighborLoader(data, _FANOUTS, train_idx, seed=0, placement=placement, **options)
        bare = NodeLoader(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=data.num_nodes), _NoSampler(),
                          input_nodes=train_idx, **options)  # fmt: skip
        case = f"loader/{name}/{placement}/{batch_size}"
        yield Row.of(case, "Python time per batch", "us", _time_next(loader), median(_time_next(bare)),
                     "PyG's NodeLoader, no sampling")  # fmt: skip


def measure_option_times(mag: HeteroData, batch_size: int = 256) -> Iterator[Row]:
    """Time that `next()` takes of the host for batches of a graph like ogbn-mag, for each option of the loaders.

    Args:
        mag: Node types "paper" and "author" with features; attributes are added to a copy.
    """
    for name, loader in _open_loaders(_add_attributes(mag), batch_size):
        times = _time_next(loader, 8 * _WINDOW, 2 * _WINDOW)
        windows = [sum(times[at : at + _WINDOW]) / _WINDOW for at in range(0, len(times), _WINDOW)]
        yield Row.of(f"loader_python/mag/{batch_size}", name, "us", windows, note="host time of next()")


def _add_attributes(mag: HeteroData) -> HeteroData:
    """Add times of nodes, and weights and times of edges."""
    data, generator = mag.clone(), torch.Generator().manual_seed(2)
    for store in data.node_stores:
        store.time = torch.randint(1000, (store.num_nodes,), generator=generator)
    for store in data.edge_stores:
        store.edge_weight = torch.rand(store.edge_index.shape[1], generator=generator)
        store.edge_time = torch.randint(1000, (store.edge_index.shape[1],), generator=generator)
    return data


def _open_loaders(data: HeteroData, batch_size: int) -> Iterator[tuple[str, Any]]:
    """Open (option, loader) of nodes and of links, with types and without."""
    cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
    # Epochs longer than a measurement: at its start an epoch compares the contents of the graph.
    paper, num_seeds = data["paper"], 400 * batch_size
    plain = Data(edge_index=data[cites].edge_index, x=paper.x, time=paper.time, edge_weight=data[cites].edge_weight,
                 edge_time=data[cites].edge_time, num_nodes=paper.num_nodes)  # fmt: skip
    nodes = torch.randint(paper.num_nodes, (num_seeds,))
    late = torch.randint(500, 1000, nodes.shape)
    common: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "drop_last": True, "seed": 0}
    timed = {"time_attr": "time", "input_time": late}
    of_nodes: dict[str, dict[str, Any]] = {
        "uniform": {}, "replace": {"replace": True}, "disjoint": {"disjoint": True},
        "bidirectional": {"subgraph_type": "bidirectional"}, "induced": {"subgraph_type": "induced"},
        "weights": {"weight_attr": "edge_weight"}, "node times": timed,
        "node times, last": {**timed, "temporal_strategy": "last"},
        "edge times": {"time_attr": "edge_time", "input_time": late},
        "a window per seed": {**timed, "input_start_time": late - 400, "input_end_time": late, "input_time": None},
        "labor": {"sampling": "labor"},
    }  # fmt: skip
    of_links: dict[str, dict[str, Any]] = {
        "links": {}, "links, negatives": {"neg_sampling": "binary"}, "links, triplets": {"neg_sampling": "triplet"},
        "links without target edges": {"exclude_target_edges": True},
        "links by time": {"time_attr": "time", "edge_label_time": late},
    }  # fmt: skip
    for kind, graph, seeds, links in (
        ("one type", plain, nodes, _choose_links(plain.edge_index, num_seeds)),
        ("types", data, ("paper", nodes), (writes, _choose_links(data[writes].edge_index, num_seeds))),
    ):
        for name, own in of_nodes.items():
            yield f"{name}, {kind}", NeighborLoader(graph, _FANOUTS, seeds, **own, **common)
        for name, own in of_links.items():
            yield f"{name}, {kind}", LinkNeighborLoader(graph, _FANOUTS, links, **own, **common)
    yield "HGT", HGTLoader(data, [512] * 3, ("paper", nodes), **common)


def _choose_links(edge_index: Tensor, count: int) -> Tensor:
    return edge_index[:, torch.randint(edge_index.shape[1], (count,))]


class _NoSampler(BaseSampler):  # type: ignore[misc]
    """Sampler that returns the seeds, so that only the cost of the loader itself is left."""

    edge_permutation = None

    def sample_from_nodes(self, index: NodeSamplerInput) -> SamplerOutput:
        """Return the seeds without edges."""
        none = torch.empty(0, dtype=torch.int64)
        return SamplerOutput(index.node, none, none, none, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any) -> Any:
        """Not asked for."""
        raise NotImplementedError


def _time_next(batches: Iterable[Any], count: int = 60, warm_up: int = 10) -> list[float]:
    """Microseconds of each `next()`."""
    source, times = without_end(batches), []
    for _ in range(warm_up + count):
        wait_for_gpu()
        begin = time.perf_counter()
        next(source)
        times.append(1e6 * (time.perf_counter() - begin))
    return times[warm_up:]

"""Fewer bytes: rows that batches need with LABOR and super-batches, and the time of a step with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.bench.limits import time_on_gpu
from pyg_direct.bench.loader import make_step, run_steps, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.graph.csr_topo import CSRTopo
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.ops.local_ids.relabel_nodes import unite
from pyg_direct.ops.sampling.sample_uniform import sample_neighbors
from pyg_direct.sampling.sampling_options import Recipe
from pyg_direct.sampling.uniform_plan import Plan, open_plan

_FANOUTS = (15, 10, 5)
_BATCH_SIZE = 1024
_GROUPS = (1, 4, 8)
_BATCHES = 24
SAMPLINGS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "labor": {"sampling": "labor"},
    "labor, dependent layers": {"sampling": "labor", "layer_dependency": True},
}


def measure_fetched_bytes(edge_index: Tensor, num_nodes: int, num_features: int, seeds: Tensor,
                          name: str) -> Iterator[Row]:  # fmt: skip
    """Measure bytes of rows per batch, each row once in a super-batch, beside uniform batches in float32.

    Args:
        edge_index: int64 or int32 `[2, E]`, on the device that samples.
        num_nodes, num_features: N and F.
        seeds: Nodes to sample around, int64 on the CPU.
    """
    topology = CSRTopo(edge_index, num_nodes=num_nodes).place("auto", edge_index.device)
    order = seeds[torch.randperm(seeds.numel(), generator=torch.Generator().manual_seed(0))]
    batches = order[: _BATCHES * _BATCH_SIZE].split(_BATCH_SIZE)
    limit = None
    for sampling, options in SAMPLINGS.items():
        plan = open_plan(topology, Recipe(_FANOUTS, **options))
        lists = [plan.sample(batch, number).n_id for number, batch in enumerate(batches)]
        for group in _GROUPS:
            parts = [lists[at : at + group] for at in range(0, len(lists), group)]
            num_rows = [unite(part, num_nodes).ids.numel() / len(part) for part in parts]
            for dtype, size in [("fp32", 4), ("bf16", 2)]:
                megabytes = [rows * num_features * size / 1e6 for rows in num_rows]
                limit = median(megabytes) if limit is None else limit
                yield Row.of(f"fetched bytes/{name}/{sampling}, {dtype}, super-batch {group}", "rows a batch", "MB",
                             megabytes, limit, "uniform, fp32")  # fmt: skip


def measure_sampling(edge_index: Tensor, num_nodes: int, seeds: Tensor, name: str) -> Iterator[Row]:
    """Measure the time to sample a batch on a GPU, which LABOR does in O(degree) per node."""
    topology = CSRTopo(edge_index, num_nodes=num_nodes)
    batches = seeds[: 8 * _BATCH_SIZE].split(_BATCH_SIZE)
    for placement in ("cuda", "unified"):
        limit = None
        for sampling, options in SAMPLINGS.items():
            plan = open_plan(topology.place(placement, edge_index.device), Recipe(_FANOUTS, **options))
            times = _time_batches(plan, batches)
            limit = median(times) if limit is None else limit
            case = f"sampling/{name}/{placement}/{_BATCH_SIZE}/{sampling}"
            yield Row.of(case, "batch", "ms", times, limit, "uniform")


def _time_batches(plan: Plan, batches: Sequence[Tensor]) -> list[float]:
    """Measure milliseconds per batch."""
    numbers = count()

    def sample() -> None:
        number = next(numbers)
        plan.sample(batches[number % len(batches)], number)

    return [1e3 * seconds for seconds in time_on_gpu(sample)]


def measure_hubs(degrees: tuple[int, ...] = (10**2, 10**4, 10**6)) -> Iterator[Row]:
    """Measure the time to pick 10 neighbors of one node, by its degree."""
    for degree in degrees:
        indptr = torch.tensor([0, degree], device="cuda")
        indices = torch.arange(degree, dtype=torch.int32, device="cuda")
        node = torch.zeros(1, dtype=torch.int64, device="cuda")
        pick = partial(sample_neighbors, indptr, indices, node, fanout=10, key=1, sampling="labor")
        times = [1e3 * seconds for seconds in time_on_gpu(pick)]
        yield Row.of(f"hub/labor/degree {degree}", "one node, waits included", "ms", times)


def measure_steps(data: Data, train_idx: Tensor, num_classes: int, name: str, batches: int = 96) -> Iterator[Row]:
    """Measure the time of a step with all features in unified host memory, the loader alone and with a training
    GraphSAGE.
    """
    wide, narrow = data.x, data.x.bfloat16()
    cases = [("uniform", "fp32", 1, "cuda"), ("uniform", "fp32", 4, "cuda"), ("uniform", "fp32", 8, "cuda"),
             ("labor", "fp32", 1, "cuda"), ("labor", "bf16", 1, "cuda"), ("labor, dependent layers", "bf16", 1, "cuda"),
             ("labor", "bf16", 8, "cuda"), ("labor, dependent layers", "bf16", 8, "cuda"),
             ("uniform", "fp32", 1, "unified"), ("labor", "fp32", 1, "unified")]  # fmt: skip
    limits: dict[str, list[float]] = {}
    for sampling, dtype, group, topology in cases:
        data.x = wide if dtype == "fp32" else narrow
        loader = NeighborLoader(data, list(_FANOUTS), train_idx, batch_size=_BATCH_SIZE, shuffle=True, seed=0,
                                drop_last=True, placement="unified", topology_placement=topology,
                                feature_cache=0, super_batch=group, **SAMPLINGS[sampling])  # fmt: skip
        step = make_step(next(iter(loader)), num_classes)
        alone = run_steps(without_end(loader), lambda batch: None, batches)
        both = run_steps(without_end(loader), step, batches)
        compute = run_steps(repeat(next(iter(loader))), step, batches)
        limits.setdefault(topology, [median(alone), median(both)])
        case = f"steps/{name}/{sampling}, {dtype}, super-batch {group}, topology {topology}"
        yield Row.of(case, "loader alone", "ms", alone, limits[topology][0], "uniform, fp32, alone")
        yield Row.of(case, "loader and compute", "ms", both, limits[topology][1], "uniform, fp32",
                     f"compute on one such batch: {median(compute):.2f} ms")  # fmt: skip

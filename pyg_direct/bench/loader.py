"""The loader under a training GraphSAGE: an epoch with it beside the same steps on a batch that is already there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader as PygNeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from pyg_direct.bench.limits import wait_for_gpu
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.runtime.cuda.device import resolve_device


def find_loss(model: torch.nn.Module, batch: Any) -> Tensor:
    """Find the loss of a trimmed model on a batch; with torch-sparse, PyG's loader does not report sizes to trim to."""
    out = model(batch.x.float(), batch.edge_index, num_sampled_nodes_per_hop=getattr(batch, "num_sampled_nodes", None),
                num_sampled_edges_per_hop=getattr(batch, "num_sampled_edges", None))[: batch.batch_size]  # fmt: skip
    return F.cross_entropy(out, batch.y[: batch.batch_size].long())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One step on a batch."""
    optimizer.zero_grad(set_to_none=True)
    find_loss(model, batch).backward()
    optimizer.step()


def make_step(batch: Any, num_classes: int) -> Callable[[Any], None]:
    """Make a training step of a trimmed 3-layer GraphSAGE, hidden 256, on batches like that one."""
    model = GraphSAGE(batch.x.shape[1], 256, 3, num_classes).to(batch.x.device)
    return partial(train, model, torch.optim.Adam(model.parameters()))


def without_end(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loader


def run_steps(batches: Iterable[Any], step: Callable[[Any], None], count: int, windows: int = 6) -> list[float]:
    """Milliseconds a step in each window of `count` steps; the first window warms up."""
    size = max(1, count // windows)
    times = []
    source = iter(batches)
    for _ in range(windows):
        begin = time.perf_counter()
        for _ in range(size):
            step(next(source))
        wait_for_gpu()
        times.append(1e3 * (time.perf_counter() - begin) / size)
    return times[1:]


_FANOUTS = [15, 10, 5]


def measure_loader(data: Data, train_idx: Tensor, num_classes: int, name: str, placement: str = "auto",
                   feature_cache: int | str | None = None, batches: int = 60, prefetch: int = 1,
                   batch_size: int = 1024, topology_placement: str | None = None) -> Iterator[Row]:  # fmt: skip
    """Time of a training step with the loader and without, and host time of the loader."""
    device = resolve_device(None)
    # Otherwise a small graph would give no batch at all, as the last one is dropped.
    batch_size = min(batch_size, len(train_idx))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()

    def make(**options: Any) -> NeighborLoader:
        return NeighborLoader(data, _FANOUTS, input_nodes=train_idx, shuffle=True, seed=0, drop_last=True,
                              placement=placement, topology_placement=topology_placement, feature_cache=feature_cache,
                              **{"batch_size": batch_size, "prefetch": prefetch, **options})  # fmt: skip

    loader = make()
    first = next(iter(loader))
    wait_for_gpu()
    cache = "" if feature_cache is None else f" + {feature_cache} cached"
    topology = "" if topology_placement is None else f", topology {topology_placement}"
    case = f"loader/{name}/{placement}{cache}{topology}/{batch_size}"
    yield Row.of(case, "Data to first batch", "s", [time.perf_counter() - begin])
    step = make_step(first, num_classes)
    compute = run_steps(repeat(first), step, batches)
    alone = run_steps(without_end(loader), lambda batch: None, batches)
    both = run_steps(without_end(loader), step, batches)
    # Once more, as the two are compared to a few hundredths.
    compute += run_steps(repeat(first), step, batches)
    yield Row.of(case, "step, loader and compute", "ms", both, median(compute), "compute on one batch")
    yield Row.of(case, "step, loader alone", "ms", alone)
    if device.type == "cpu":
        in_turn = run_steps(without_end(make(prefetch=0)), step, batches)
        yield Row.of(case, "step, batches in turn", "ms", in_turn, median(compute), "compute on one batch",
                     "prefetch=0: no thread makes them ahead")  # fmt: skip
    if device.type == "cpu" and (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        peer = PygNeighborLoader(data, _FANOUTS, input_nodes=train_idx, batch_size=batch_size, shuffle=True,
                                 drop_last=True)  # fmt: skip
        alone = run_steps(without_end(peer), lambda batch: None, batches)
        yield Row.of(case, "PyG's NeighborLoader alone", "ms", alone,
                     note="no workers, " + ("pyg-lib" if WITH_PYG_LIB else "torch-sparse"))  # fmt: skip
    if device.type == "cuda":
        yield Row.of(case, "peak GPU memory, model included", "GB", [torch.cuda.max_memory_allocated() / 1e9])

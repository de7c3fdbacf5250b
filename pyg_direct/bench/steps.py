"""Steps of training on batches, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphSAGE

from pyg_direct.bench.timing import wait_for_gpu


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

"""Training over types: epochs of HeteroConv models, plain, accelerated, and replayed as CUDA graphs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv

from pyg_direct.bench.loader import run_steps, without_end
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate
from pyg_direct.nn.replay.graphed_step import GraphedStep

_FANOUTS = [10, 5]
_HIDDEN = 128
_WARM_UP = 8
# Convolutions of each relation, from rows of a width, by the name of rows.
_KINDS: dict[str, Callable[[int], torch.nn.Module]] = {
    "HeteroConv": lambda size: SAGEConv((size, size), _HIDDEN),
    "HeteroConv of GAT": lambda size: GATConv((size, size), _HIDDEN // 4, heads=4, add_self_loops=False),
}
_REPLAYED, _MODEL_REPLAYED = "accelerated, replayed", "accelerated, model replayed"


class _Model(torch.nn.Module):
    """Two layers of a convolution over all relations."""

    def __init__(self, data: HeteroData, width: int, make: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # PyG warns about types that no relation leads to.
            warnings.simplefilter("ignore", UserWarning)
            self.layers = torch.nn.ModuleList(
                HeteroConv({kind: make(size) for kind in data.edge_types}) for size in (width, _HIDDEN)
            )

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> dict[str, Tensor]:
        """Compute rows of each type that relations lead to."""
        for layer in self.layers:
            x = {kind: rows.relu() for kind, rows in layer(x, edges).items()}
            edges = {kind: ids for kind, ids in edges.items() if kind[0] in x and kind[-1] in x}
        return x


def measure_typed_steps(data: HeteroData, node_type: str, name: str, batches: int = 48) -> Iterator[Row]:
    """Measure a training step with our loader over a graph with types; every type has rows of one width.

    Args:
        data: The graph.
        node_type: Type of the seeds; relations lead to it.
        name: Name of the graph.
        batches: Steps measured for each way.
    """
    size = min(1024, int(data[node_type].num_nodes))
    loader = NeighborLoader(data, _FANOUTS, node_type, batch_size=size, shuffle=True, drop_last=True, seed=0)
    first = next(iter(loader))
    width, device = first[node_type].x.shape[1], first[node_type].x.device
    ways = ("PyG's kernels", "accelerated", *((_REPLAYED, _MODEL_REPLAYED) if torch.cuda.is_available() else ()))
    for kind, make in _KINDS.items():
        plain, case = _Model(data, width, make).to(device), f"models/{name}/{kind} epoch"
        times: dict[str, list[float]] = {}
        for way in ways:
            model = copy.deepcopy(plain)
            if way != ways[0]:
                accelerate(model, replay="auto" if way == _MODEL_REPLAYED else False)
            step = _make_step(model, node_type, is_replayed=way == _REPLAYED)
            run_steps(without_end(loader), step, 2 * _WARM_UP * (1 + (way == _MODEL_REPLAYED)), 2)
            compute = sorted(run_steps(repeat(first), step, batches))
            times[way] = run_steps(without_end(loader), step, batches)
            note = f"{step.replayed} steps were replayed" if isinstance(step, GraphedStep) else ""
            yield Row.of(case, f"step with loader, {way}", "ms", times[way], compute[len(compute) // 2],
                         "compute on one batch", note)  # fmt: skip
        middle = {way: median(values) for way, values in times.items()}
        for way in list(middle)[1:]:
            yield Row.of(case, f"PyG's kernels over {way}", "x", [middle[ways[0]] / middle[way]])


def _make_step(model: torch.nn.Module, node_type: str, is_replayed: bool) -> Callable[[Any], Any]:
    optimizer = torch.optim.Adam(model.parameters(), fused=next(model.parameters()).is_cuda)

    def compute(batch: HeteroData) -> Tensor:
        out: Tensor = model(batch.x_dict, batch.edge_index_dict)[node_type]
        return out[: batch[node_type].batch_size].square().mean()

    if is_replayed:
        return GraphedStep(model, compute, optimizer, names=["x"], warm_up=_WARM_UP)

    def step(batch: HeteroData) -> None:
        optimizer.zero_grad(set_to_none=True)
        compute(batch).backward()
        optimizer.step()

    return step

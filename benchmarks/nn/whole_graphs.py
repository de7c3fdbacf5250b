"""Training and inference on whole graphs, without batches, of PyG's models, plain and accelerated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

from benchmarks.nn.models import MODELS
from pyg_direct.bench.limits import time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.nn.accelerate import accelerate

_LAYERS = 2
# Calls until edges are sorted, and a few more.
_WARM_UP = 40
# Calls take turns one by one, on a small graph for as many seconds: a host's speed varies.
_MOST_TURNS, _SECONDS = 600, 3.0


def measure_whole_graphs(edge_index: Tensor, num_nodes: int, width: int, name: str, hidden: int = 64,
                         repeats: int = 20) -> Iterator[Row]:  # fmt: skip
    """Measure wall time of steps (forward and backward) and of inference, equal in both ways within rounding.

    Args:
        edge_index: (source, target), `[2, E]`, in any order; every layer is given this tensor.
        num_nodes: Number of nodes N.
        width: Width of a row of features.
        name: Name of the graph.
        hidden: Channels of the models.
    """
    x = torch.rand(num_nodes, width, device=edge_index.device)
    for kind, model_class in MODELS.items():
        plain = model_class(width, hidden, _LAYERS, hidden).to(x.device)
        fast = copy.deepcopy(plain)
        accelerate(fast, replay=False)
        for metric, make in (("step", _make_step), ("inference", _make_inference)):
            works = {"PyG": make(plain, x, edge_index), "accelerated": make(fast, x, edge_index)}
            times: dict[str, list[float]] = {way: [] for way in works}
            for work in works.values():
                time_on_clock(work, 0, _WARM_UP)
            for turn in range(_MOST_TURNS):
                if turn >= repeats and sum(map(sum, times.values())) > _SECONDS:
                    break
                # The first way takes turns too.
                for way in list(works) if turn % 2 else reversed(works):
                    times[way] += time_on_clock(works[way], 1, 0)
            ratio = median(times["PyG"]) / median(times["accelerated"])
            for way, seconds in times.items():
                yield Row.of(f"whole/{name}/{kind}", f"{metric}, {way}", "ms", [1e3 * one for one in seconds])
            yield Row.of(f"whole/{name}/{kind}", f"{metric}, PyG over accelerated", "x", [ratio])


def _make_step(model: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x, edge_index).square().mean().backward()

    return step


def _make_inference(model: torch.nn.Module, x: Tensor, edge_index: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def infer() -> None:
        model(x, edge_index)

    return infer

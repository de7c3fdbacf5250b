"""Layers over relations: plain PyG, with and without pyg-lib's products of segments, and accelerated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch_geometric
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, GINConv, HeteroConv, HGTConv, RGCNConv, SAGEConv

from pyg_direct.bench.limits import time_on_clock
from pyg_direct.bench.result_row import Row
from pyg_direct.loader.neighbor_loader import NeighborLoader
from pyg_direct.nn.accelerate import accelerate

_RELATIONS, _HEADS, _WIDTH = 8, 4, 128
_OURS, _PLAIN, _SEGMENTS = "accelerated", "PyG", "PyG, products of segments"
# Layers wait for the host, whose speed varies: they take turns.
_TURNS = 5


def measure_relations(batch: Data, data: HeteroData, node_type: str, name: str) -> Iterator[Row]:
    """Measure forward and backward of one layer in wall time.

    RGCNConv runs on a batch with one of eight relations per edge, HGTConv and HeteroConv on a batch of a graph with
    types. If pyg-lib has its products of segments, PyG is measured with them too. It then takes means over other edges,
    so RGCNConv adds up.
    """
    device, width = batch.x.device, batch.x.shape[1]
    edge_type = torch.randint(_RELATIONS, (batch.num_edges,), device=device)
    typed = next(iter(NeighborLoader(data, [10, 5], node_type, batch_size=1024, seed=0)))
    given: dict[str, tuple[torch.nn.Module, tuple[Any, ...]]] = {
        "RGCN": (RGCNConv(width, _WIDTH, _RELATIONS, aggr="sum"), (batch.x, batch.edge_index, edge_type)),
        "HGT": (HGTConv(width, _WIDTH, data.metadata(), _HEADS), (typed.x_dict, typed.edge_index_dict)),
    }
    for kind, make in _ONES.items():
        layer = HeteroConv({relation: make(width) for relation in data.edge_types})
        given[f"HeteroConv of {kind}"] = layer, (typed.x_dict, typed.edge_index_dict)
    for kind, (layer, args) in given.items():
        yield from _compare(f"models/{name}/{kind} layer", layer.to(device), args)


# Convolutions of one relation each.
_ONES: dict[str, Callable[[int], torch.nn.Module]] = {
    "SAGE": lambda width: SAGEConv((width, width), _WIDTH),
    "GIN": lambda width: GINConv(torch.nn.Linear(width, _WIDTH)),
    "GAT": lambda width: GATConv((width, width), _WIDTH // _HEADS, _HEADS, add_self_loops=False),
    "GATv2": lambda width: GATv2Conv((width, width), _WIDTH // _HEADS, _HEADS, add_self_loops=False),
}


def _compare(case: str, plain: torch.nn.Module, args: tuple[Any, ...]) -> Iterator[Row]:
    fast = copy.deepcopy(plain)
    accelerate(fast, replay=False)
    ways = {_PLAIN: (plain, False), _OURS: (fast, False)}
    if torch_geometric.typing.WITH_SEGMM and isinstance(plain, (RGCNConv, HGTConv)):
        ways[_SEGMENTS] = copy.deepcopy(plain), True
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(_TURNS):
        for way, (module, takes_segments) in ways.items():
            with _segments(takes_segments):
                times[way] += time_on_clock(partial(_step, module, args), 4, 1 if turn else 5)
    for way, seconds in times.items():
        yield Row.of(case, f"{way}, wall", "ms", [1e3 * one for one in seconds])
    middle = {way: median(seconds) for way, seconds in times.items()}
    best = min((way for way in middle if way != _OURS), key=middle.__getitem__)
    yield Row.of(case, "PyG over accelerated, wall", "x", [middle[best] / middle[_OURS]], note=f"the fastest: {best}")


@contextmanager
def _segments(asked: bool) -> Iterator[None]:
    """Set PyG's own switch."""
    before = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = asked
    try:
        yield
    finally:
        torch_geometric.backend.use_segment_matmul = before


def _step(module: Any, args: tuple[Any, ...]) -> None:
    module.zero_grad(set_to_none=True)
    out = module(*args)
    sum(rows.sum() for rows in (out.values() if isinstance(out, dict) else [out])).backward()

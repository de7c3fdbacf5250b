"""Generated dynamic graphs: edges of skewed degrees, a share of which is replaced from each snapshot to the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_direct.datasets.dataset import check_fraction, check_int


class DynamicShape(NamedTuple):
    """Size of a generated dynamic graph: nodes, edges of a snapshot, snapshots, share of edges replaced a step."""

    num_nodes: int
    num_edges: int
    num_snapshots: int = 16
    change: float = 0.1


# Sizes of the graphs that dynamic GNNs are usually measured on; only the sizes are taken from them.
PRESETS = {
    "epinions-like": DynamicShape(876_252, 13_668_320),
    "youtube-like": DynamicShape(3_223_589, 9_375_374),
    "flickr-like": DynamicShape(2_302_925, 33_140_017),
}


def draw_snapshots(shape: DynamicShape, seed: int = 0, device: str | torch.device = "cpu",
                   skew: float = 2.0) -> list[Tensor]:  # fmt: skip
    """Return `edge_index` int64 `[2, E]` of each snapshot.

    Args:
        shape: How many nodes, edges and snapshots, and how much changes.
        seed: Equal seeds give equal graphs on one kind of device.
        device: The device that draws them and holds them.
        skew: Sources and targets are drawn as N * u**skew of uniform u, so that few nodes have many edges.

    Raises:
        ArgumentError: a size below 1, or a share outside [0, 1].
        ArgumentTypeError: one that is no number.
    """
    for name in ("num_nodes", "num_edges", "num_snapshots"):
        check_int(f"shape.{name}", getattr(shape, name), least=1)
    check_fraction("shape.change", shape.change)
    generator = torch.Generator(device).manual_seed(seed)
    place = torch.randperm(shape.num_nodes, generator=generator, device=device)

    def draw(count: int) -> Tensor:
        uniform = torch.rand(2, count, generator=generator, device=device, dtype=torch.float64)
        slots = (uniform**skew * shape.num_nodes).long().clamp_(max=shape.num_nodes - 1)
        return place[slots]

    edges = draw(shape.num_edges)
    snapshots = [edges]
    replaced = int(shape.change * shape.num_edges)
    for _ in range(shape.num_snapshots - 1):
        edges = edges.clone()
        chosen = torch.randperm(shape.num_edges, generator=generator, device=device)[:replaced]
        edges[:, chosen] = draw(replaced)
        snapshots.append(edges)
    return snapshots


def synthetic_dtdg(num_nodes: int = 1000, num_edges: int = 10_000, num_snapshots: int = 16, change: float = 0.1,
                   num_features: int = 4, seed: int = 0, weighted: bool = False) -> list[Data]:  # fmt: skip
    """Generate a dynamic graph with something to learn: the target of a node is the mean of its neighbors' signal.

    Args:
        num_nodes, num_edges, num_snapshots, change: As in `DynamicShape`.
        num_features: F, at least 1: the last feature is the signal.
        seed: Equal seeds give equal graphs.
        weighted: Add weights of edges.

    Returns:
        For each snapshot `x` fp32 `[N, F]`, `edge_index` `[2, E]`, `edge_attr` fp32 `[E]` if `weighted`, and
        `y` fp32 `[N]`, on the CPU.
    """
    check_int("num_features", num_features, least=1)
    edges = draw_snapshots(DynamicShape(num_nodes, num_edges, num_snapshots, change), seed)
    # Whatever torch's default device is.
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    phase = torch.rand(num_nodes, generator=generator, device="cpu")
    out = []
    for t, edge_index in enumerate(edges):
        lags = torch.arange(num_features, device="cpu") / (2.0 * num_features)
        noise = torch.randn(num_nodes, num_features, generator=generator, device="cpu")
        x = torch.sin(6.28 * (phase.unsqueeze(1) + t / 8 + lags)) + 0.1 * noise
        degree = phase.new_zeros(num_nodes).index_add_(0, edge_index[1], phase.new_ones(num_edges))
        y = phase.new_zeros(num_nodes).index_add_(0, edge_index[1], x[edge_index[0], -1]) / degree.clamp(min=1)
        weight = torch.rand(num_edges, generator=generator, device="cpu") + 0.5 if weighted else None
        out.append(Data(x=x, edge_index=edge_index, edge_attr=weight, y=y))
    return out

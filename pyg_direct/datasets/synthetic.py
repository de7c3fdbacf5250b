"""Random graphs shaped like the graphs that papers report on, with classes that a graph network can learn."""

from __future__ import annotations

from typing import Any

import torch

from pyg_direct.datasets.arguments import (
    check_device,
    check_float_dtype,
    check_fraction,
    check_int,
    check_not_negative,
    check_positive,
    make_generator,
)
from pyg_direct.datasets.dataset import NodeDataset
from pyg_direct.datasets.edges import fill_edges
from pyg_direct.datasets.features import fill_features
from pyg_direct.datasets.nodes import draw_classes, draw_split
from pyg_direct.datasets.presets import PRESETS, Preset
from pyg_direct.errors import ArgumentError
from pyg_direct.runtime.pages import use_large_pages


def synthetic_graph(
    preset: str = "products",
    *,
    scale: float = 1.0,
    num_nodes: int | None = None,
    num_edges: int | None = None,
    num_features: int | None = None,
    num_classes: int | None = None,
    seed: int = 0,
    device: str | int | torch.device | None = "cpu",
    homophily: float | None = None,
    feature_signal: float | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    topology_only: bool = False,
) -> NodeDataset:
    """Draw a graph shaped like ogbn-products, reddit or ogbn-papers100M, whole or `scale` times its size.

    The degrees are skewed (the top 1 % of the nodes hold 15-20 % of the edge ends; some nodes have none), the
    class sizes unequal, and ids say nothing about degree or class. Features alone identify the class of about
    half the nodes; a network that averages neighbors gets most. "products" and "reddit" hold every edge in
    both directions, "papers100M" in one. There are no self loops; parallel edges occur, often in a small
    graph.

    Everything follows from `seed`: equal arguments on one device type give equal graphs, whether or not
    features are drawn. Random numbers are drawn on `device`, and torch draws others on a GPU than on a CPU;
    for one graph on both, draw it on the CPU and move it with `.to(device)`.

    Args:
        preset: "products", "reddit" or "papers100M"; says what an argument left out is.
        scale: Factor on nodes and edges, above 0.
        num_nodes: N instead of the scaled number; edges then follow the preset's mean degree.
        num_edges: E instead of the scaled number, both directions counted; even where the preset is
            undirected.
        num_features: F.
        num_classes: Number of classes; a class may be empty in a very small graph.
        seed: Any integer of at least 0.
        device: Where to draw the graph; None is the current GPU if there is one, else the CPU.
        homophily: Probability in [0, 1] that an edge is drawn inside a class; else its target is drawn from
            all nodes.
        feature_signal: Distance of a class's centroid from the origin, in standard deviations of the noise.
        dtype: Dtype of the features.
        index_dtype: torch.int64 or torch.int32, dtype of `edge_index`.
        topology_only: Leave `x` None; `fill_features` with the same seed can write it later, elsewhere.

    Returns:
        The graph; `y` holds the class of every node, the split has the preset's proportions. While it is
        drawn, memory beside the result is about 40 bytes a node and a chunk of edges.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument lies outside its rule.
        DeviceError: `device` is a GPU that this machine lacks.
    """
    if preset not in list(PRESETS):
        raise ArgumentError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    shape = PRESETS[preset]
    num_nodes, num_edges = choose_sizes(shape, scale, num_nodes, num_edges)
    num_features = check_int("num_features", choose(num_features, shape.num_features), least=1)
    num_classes = check_int("num_classes", choose(num_classes, shape.num_classes), least=1)
    homophily = check_fraction("homophily", choose(homophily, shape.homophily))
    feature_signal = check_not_negative("feature_signal", choose(feature_signal, shape.feature_signal))
    seed = check_int("seed", seed, least=0)
    device = check_device("device", device)
    dtype = check_float_dtype("dtype", dtype)
    if index_dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"index_dtype must be torch.int32 or torch.int64, got {index_dtype}")
    if num_nodes > torch.iinfo(index_dtype).max:
        raise ArgumentError(f"index_dtype must hold ids below {num_nodes}, got {index_dtype}")

    starts, node_of_slot, y = draw_classes(num_nodes, num_classes, make_generator(seed, "classes", device))
    edge_index = use_large_pages(torch.empty(2, num_edges, dtype=index_dtype, device=device))
    fill_edges(
        edge_index,
        starts,
        node_of_slot,
        homophily=homophily,
        hub=shape.hub,
        directed=shape.directed,
        generator=make_generator(seed, "edges", device),
    )
    del node_of_slot
    shares = [count / shape.num_nodes for count in (shape.num_train, shape.num_val, shape.num_test)]
    split = draw_split(num_nodes, shares, make_generator(seed, "split", device))
    x = None
    if not topology_only:
        x = use_large_pages(torch.empty(num_nodes, num_features, dtype=dtype, device=device))
        fill_features(x, y, seed=seed, num_classes=num_classes, feature_signal=feature_signal)
    return NodeDataset(preset, num_nodes, num_classes, edge_index, x, y, *split)


def choose(value: Any, default: Any) -> Any:
    """`value`, or `default` in place of None."""
    return default if value is None else value


def choose_sizes(
    shape: Preset,
    scale: float,
    num_nodes: int | None,
    num_edges: int | None,
) -> tuple[int, int]:
    """N and E: what the caller says, else the preset's times `scale`; E is even where edges come in pairs."""
    scale = check_positive("scale", scale)
    step = 1 if shape.directed else 2
    if num_edges is not None:
        num_edges = check_int("num_edges", num_edges, least=0)
        if num_edges % step:
            raise ArgumentError(f"num_edges must be even in an undirected graph, got {num_edges}")
    if num_nodes is not None:
        num_nodes = check_int("num_nodes", num_nodes, least=1)
        scale = num_nodes / shape.num_nodes
    if num_edges is None:
        num_edges = int(shape.num_edges * scale) // step * step
    return num_nodes or max(1, int(shape.num_nodes * scale)), num_edges

"""Random graphs shaped like the graphs of papers, with classes that a graph network can learn.

`PRESETS` holds the shapes of those graphs. Each node has a class, a position in the order of the most connected
nodes of the class, and a split. Edges are random with planted classes and skewed degrees. If a graph has one
direction, reverse edges can be added. Features are random around one centroid per class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.datasets.dataset import (
    NodeDataset,
    check_float_dtype,
    check_fraction,
    check_int,
    check_not_negative,
    check_positive,
    make_generator,
)
from pyg_direct.errors import ArgumentError, ArgumentTypeError
from pyg_direct.progress import Bar
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.host.host_memory import use_large_pages

# small enough for the CPU's caches, large enough for a GPU; the draws depend on it, so it is no argument
CHUNK_EDGES = {"cpu": 1 << 18, "cuda": 1 << 24}


def fill_edges(
    out: Tensor,
    class_starts: Tensor,
    node_of_slot: Tensor,
    *,
    homophily: float,
    hub: float,
    directed: bool,
    generator: torch.Generator,
) -> None:
    """Write random edges into `out` in O(E) time, chunk by chunk, so that memory beside `out` is a chunk's.

    Nodes are drawn as slots: the slots of a class are consecutive, the busiest first, and `node_of_slot`
    spreads them over the node ids. No edge joins a node to itself (unless it is the only node); parallel
    edges occur.

    Args:
        out: Receives source and target, int64 or int32 `[2, E]`; E is even unless `directed`.
        class_starts: First slot of every class, then N, float64 `[C + 1]`.
        node_of_slot: A permutation of the nodes, int64 `[N]`.
        homophily: Probability that an edge is drawn inside its source's class; otherwise its target is drawn from all
            nodes.
        hub: Largest expected degree, in mean degrees, above 2.
        directed: Write an edge once; otherwise also write its reverse into the second half of `out`.
        generator: Generator of the device that all tensors live on.
    """
    num_drawn = out.shape[1] if directed else out.shape[1] // 2
    # a class without nodes would be a range without slots
    starts = class_starts.unique_consecutive()
    chunk = CHUNK_EDGES["cpu" if out.device.type == "cpu" else "cuda"]
    with Bar(num_drawn, "drawing edges", "edges") as bar:
        for begin in range(0, num_drawn, chunk):
            end = min(begin + chunk, num_drawn)
            source, target = draw_slots(
                end - begin, len(node_of_slot), starts, homophily=homophily, hub=hub, generator=generator
            )
            out[0, begin:end] = node_of_slot[source]
            out[1, begin:end] = node_of_slot[target]
            bar.update(end - begin)
    if not directed:
        out[0, num_drawn:] = out[1, :num_drawn]
        out[1, num_drawn:] = out[0, :num_drawn]


def draw_slots(
    num_edges: int,
    num_nodes: int,
    starts: Tensor,
    *,
    homophily: float,
    hub: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw source and target slots, int64 `[num_edges]` each; `starts` is float64 and strictly ascending."""
    device = starts.device
    # float64: float32 has too few digits to distinguish the 1.1e8 nodes of papers100M
    position, other = torch.rand(2, num_edges, dtype=torch.float64, generator=generator, device=device)
    stay = torch.rand(num_edges, generator=generator, device=device) < homophily

    position.mul_(num_nodes)
    begin, end = find_class(position, starts)
    source = skew_position(position, begin, end, hub)

    position = torch.where(stay, begin + other * (end - begin), other * num_nodes)
    begin, end = find_class(position, starts)
    target = skew_position(position, begin, end, hub)
    return source, torch.where(source == target, (target + 1) % num_nodes, target)


def find_class(position: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first slot and end slot, float64, of the class that each position in [0, N] falls into."""
    index = torch.bucketize(position, starts[1:-1], right=True)
    return starts[index], starts[index + 1]


def skew_position(position: Tensor, begin: Tensor, end: Tensor, hub: float) -> Tensor:
    """Return slots, int64, for uniform positions in [begin, end): each is hit in proportion to its expected degree.

    At the fraction f of a class the expected degree is proportional to f**-0.5 - 1. This is a power law with exponent 3
    towards the busy end, and reaches degree 0 at the other end. If it is cut off at the degree `hub`, it has a closed
    inverse.
    """
    cut = 1 / (hub - 1)
    root = 1 - (1 - cut) * ((position - begin) / (end - begin)).sqrt_()
    fraction = (root * root - cut * cut) / (1 - cut * cut)
    # rounding may carry a position to its end and the fraction slightly below 0 or to 1
    slot = begin + (fraction * (end - begin)).floor_()
    return torch.minimum(torch.maximum(slot, begin), end - 1).long()


def add_reverse_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return both directions of every edge, each once, sorted; self loops stay, parallel edges merge.

    Args:
        edge_index: Source and target, int64 or int32 `[2, E]`.
        num_nodes: N, at most 3.0e9.
    Returns:
        Edges of the undirected graph, dtype of `edge_index`, `[2, E']`.
    """
    source, target = edge_index.long()
    key = torch.cat([source * num_nodes + target, target * num_nodes + source]).unique()
    return torch.stack([key // num_nodes, key % num_nodes]).to(edge_index.dtype)


# values of one chunk; the draws depend on it, so it is no argument
CHUNK_VALUES = 1 << 23


def fill_features(out: Tensor, y: Tensor, *, seed: int, num_classes: int, feature_signal: float) -> Tensor:
    """Write `feature_signal * centroid[y] + noise` into `out`, chunk by chunk, and return `out`.

    Centroids are random directions of length 1; the noise is normal with variance 1 in every feature. So
    `feature_signal` is a class's distance from the origin in standard deviations of the noise. The noise is drawn on
    the device of `y`: equal arguments give equal features on one device type, whatever memory `out` lies in.
    `synthetic_graph` with the same seed, classes and signal fills its `x` with the same values.

    Args:
        out: Receives the features, floating point `[N, F]`, on any device.
        y: Class of every node, int64 `[N]`, values in [0, num_classes).
        seed: Any integer of at least 0.
        num_classes: Number of classes.
        feature_signal: Length of the centroids, at least 0.

    Returns:
        `out`, floating point `[N, F]`.

    Raises:
        ArgumentTypeError: `out` or `y` is no tensor, or `y` is not int64.
        ArgumentError: A shape, dtype or value is outside its rule.

    Example:
        >>> y = torch.tensor([0, 1, 1])
        >>> x = fill_features(torch.empty(3, 2), y, seed=0, num_classes=2, feature_signal=1.0)
        >>> torch.equal(x, fill_features(torch.empty(3, 2), y, seed=0, num_classes=2, feature_signal=1.0)), x.shape
        (True, torch.Size([3, 2]))
    """
    seed = check_int("seed", seed, least=0)
    num_classes = check_int("num_classes", num_classes, least=1)
    feature_signal = check_not_negative("feature_signal", feature_signal)
    check_shapes(out, y, num_classes)

    num_nodes, num_features = out.shape
    # drawn on the CPU: the same centroids for every device
    generator = make_generator(seed, "centroids", torch.device("cpu"))
    centroid = torch.randn(num_classes, num_features, generator=generator, device="cpu")
    centroid = (feature_signal * centroid / centroid.norm(dim=1, keepdim=True)).to(y.device)
    generator = make_generator(seed, "features", y.device)
    num_rows = max(1, CHUNK_VALUES // max(1, num_features))
    with Bar(num_nodes, "drawing features", "nodes") as bar:
        for begin in range(0, num_nodes, num_rows):
            label = y[begin : begin + num_rows]
            noise = torch.randn(len(label), num_features, generator=generator, device=y.device)
            out[begin : begin + num_rows] = noise.add_(centroid[label]).to(out.dtype)
            bar.update(len(label))
    return out


def check_shapes(out: Tensor, y: Tensor, num_classes: int) -> None:
    """Raise unless `out` `[N, F]` can hold the features of the classes `y` `[N]`."""
    for name, value in (("out", out), ("y", y)):
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(value).__name__}")
    check_float_dtype("out.dtype", out.dtype)
    if y.dtype != torch.int64:
        raise ArgumentTypeError(f"y must be int64, got {y.dtype}")
    if out.dim() != 2 or y.shape != out.shape[:1]:
        raise ArgumentError(f"out must be [N, F] and y [N], got {list(out.shape)} and {list(y.shape)}")
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ArgumentError(f"y must lie in [0, {num_classes}), got {int(y.min())} to {int(y.max())}")


class Preset(NamedTuple):
    """Shape of a graph at scale 1, with parameters that make its classes learnable.

    Attributes:
        num_nodes, num_features, num_classes: As published.
        num_edges: As published, both directions counted unless `directed`.
        num_train, num_val, num_test: Nodes of the official split.
        directed: Edges are stored in one direction.
        hub: Largest expected degree, in mean degrees.
        homophily, feature_signal: Defaults of `synthetic_graph`. They are calibrated so that features alone identify
            about half the classes and neighborhoods identify most, never all.

    Example:
        >>> PRESETS["reddit"].num_nodes, PRESETS["reddit"].num_classes
        (232965, 41)
    """

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_train: int
    num_val: int
    num_test: int
    directed: bool
    hub: float
    homophily: float
    feature_signal: float


PRESETS = {
    "products": Preset(
        num_nodes=2_449_029,
        num_edges=123_718_280,
        num_features=100,
        num_classes=47,
        num_train=196_615,
        num_val=39_323,
        num_test=2_213_091,
        directed=False,
        hub=350.0,
        homophily=0.4,
        feature_signal=2.5,
    ),
    "reddit": Preset(
        num_nodes=232_965,
        num_edges=114_615_892,
        num_features=602,
        num_classes=41,
        num_train=153_431,
        num_val=23_831,
        num_test=55_703,
        directed=False,
        hub=45.0,
        homophily=0.1,
        feature_signal=2.4,
    ),
    "papers100M": Preset(
        num_nodes=111_059_956,
        num_edges=1_615_685_872,
        num_features=128,
        num_classes=172,
        num_train=1_207_179,
        num_val=125_265,
        num_test=214_338,
        directed=True,
        hub=2000.0,
        homophily=0.5,
        feature_signal=2.7,
    ),
}


def divide_slots(num_nodes: int, num_classes: int) -> Tensor:
    """Return the first slot of every class, then N, float64 `[C + 1]` on the CPU.

    Class c holds a share proportional to 1 / (c + 3): of 47 classes the largest 11 %, the smallest 0.7 % of the nodes.
    """
    share = 1 / (torch.arange(num_classes, dtype=torch.float64, device="cpu") + 3)
    starts = share.new_zeros(num_classes + 1)
    starts[1:] = (num_nodes * share.cumsum(0) / share.sum()).round()
    starts[-1] = num_nodes
    return starts


def draw_classes(
    num_nodes: int,
    num_classes: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first slot of every class (float64 `[C + 1]`), node of every slot, class of every node (int64 `[N]`).

    Classes have the shares of `divide_slots`.
    """
    starts = divide_slots(num_nodes, num_classes).to(generator.device)
    # shuffled ids: a sampler must gain nothing from them
    node_of_slot = torch.randperm(num_nodes, generator=generator, device=generator.device)
    y = torch.empty_like(node_of_slot)
    y[node_of_slot] = torch.arange(num_classes, device=y.device).repeat_interleave(starts.diff().long())
    return starts, node_of_slot, y


def draw_split(
    num_nodes: int,
    shares: Sequence[float],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ascending ids of the train, validation and test nodes, int64, from their shares of all nodes."""
    order = torch.randperm(num_nodes, generator=generator, device=generator.device)
    num_train, num_val, num_test = (round(share * num_nodes) for share in shares)
    train_end, val_end = num_train, num_train + num_val
    test_end = min(val_end + num_test, num_nodes)
    return order[:train_end].msort(), order[train_end:val_end].msort(), order[val_end:test_end].msort()


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
        preset: "products", "reddit" or "papers100M"; gives the default of each argument that is None.
        scale: Factor on nodes and edges, above 0.
        num_nodes: N instead of the scaled number; edges then follow the preset's mean degree.
        num_edges: E instead of the scaled number, both directions counted, even if the preset is undirected.
        num_features: F.
        num_classes: Number of classes; a class may be empty in a very small graph.
        seed: Any integer of at least 0.
        device: The device that draws the graph; None is the current GPU, or the CPU if there is no GPU.
        homophily: Probability in [0, 1] that an edge is drawn inside a class; otherwise its target is drawn from all
            nodes.
        feature_signal: Distance of a class's centroid from the origin, in standard deviations of the noise.
        dtype: Dtype of the features.
        index_dtype: torch.int64 or torch.int32, dtype of `edge_index`.
        topology_only: Leave `x` None; `fill_features` with the same seed can write it later, in other memory.

    Returns:
        The graph; `y` holds the class of every node, the split has the preset's proportions. While it is
        drawn, memory beside the result is about 40 bytes a node and a chunk of edges.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        ArgumentError: An argument lies outside its rule.
        DeviceError: `device` is a GPU that this machine lacks.

    Example:
        >>> synthetic_graph("products", num_nodes=100, num_edges=400, num_features=4, num_classes=3)
        NodeDataset(name='products', num_nodes=100, num_edges=400, num_features=4, num_classes=3)
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
    device = resolve_device(device)
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
    """Return `value`, or `default` in place of None."""
    return default if value is None else value


def choose_sizes(
    shape: Preset,
    scale: float,
    num_nodes: int | None,
    num_edges: int | None,
) -> tuple[int, int]:
    """Return N and E: the caller's numbers, or the preset's times `scale`; E is even if edges come in pairs."""
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

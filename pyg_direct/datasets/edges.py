"""Random edges with planted classes and skewed degrees; reverse edges for a graph that has one direction."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_direct.progress import Bar

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
        homophily: Probability that an edge is drawn inside its source's class; else its target is drawn from
            all nodes.
        hub: Largest expected degree, in mean degrees, above 2.
        directed: Whether an edge is written once, or also reversed into the second half of `out`.
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
    # float64: float32 has too few digits to tell the 1.1e8 nodes of papers100M apart
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
    """First slot and end slot, float64, of the class that each position in [0, N] falls into."""
    index = torch.bucketize(position, starts[1:-1], right=True)
    return starts[index], starts[index + 1]


def skew_position(position: Tensor, begin: Tensor, end: Tensor, hub: float) -> Tensor:
    """Slots, int64, for uniform positions in [begin, end): each is hit in proportion to its expected degree.

    At the fraction f of a class the expected degree is proportional to f**-0.5 - 1: a power law with exponent
    3 towards the busy end, and towards the other end a degree of 0. Cut off at the degree `hub`, it has a
    closed inverse.
    """
    cut = 1 / (hub - 1)
    root = 1 - (1 - cut) * ((position - begin) / (end - begin)).sqrt_()
    fraction = (root * root - cut * cut) / (1 - cut * cut)
    # rounding may carry a position to its end and the fraction slightly below 0 or to 1
    slot = begin + (fraction * (end - begin)).floor_()
    return torch.minimum(torch.maximum(slot, begin), end - 1).long()


def add_reverse_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Both directions of every edge, each once, sorted; self loops stay, parallel edges merge.

    Args:
        edge_index: Source and target, int64 or int32 `[2, E]`.
        num_nodes: N, at most 3.0e9.
    Returns:
        Edges of the undirected graph, dtype of `edge_index`, `[2, E']`.
    """
    source, target = edge_index.long()
    key = torch.cat([source * num_nodes + target, target * num_nodes + source]).unique()
    return torch.stack([key // num_nodes, key % num_nodes]).to(edge_index.dtype)

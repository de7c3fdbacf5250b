"""Small odd graphs of several node types and relations, with times and weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from pyg_direct.graph.hetero_topo import HeteroTopo
from tests.reference.general import Parts

WEIGHTS = [0.0, 0.0, 0.25, 1.0, 3.5, 100.0]
# Of which float32 holds none, and float64 no product.
WIDE_WEIGHTS = [0.0, 5e-324, 3e-300, 1e-50, 0.1, 1e300, 1.7e308]


def make_topo(graph: Parts, is_sorted: bool = False) -> HeteroTopo:
    """The graph as a topology."""

    def tensors(parts, dtype):
        return {kind: torch.tensor(values, dtype=dtype) for kind, values in parts.items()} or None

    edges = {t: torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t() for t, pairs in graph.edges.items()}
    return HeteroTopo(graph.num_nodes, edges, node_time=tensors(graph.node_time, torch.int64),
                      edge_time=tensors(graph.edge_time, torch.int64),
                      edge_weight=tensors(graph.edge_weight, torch.float64), direction=graph.direction,
                      is_sorted=is_sorted)  # fmt: skip


def make_parts(
    seed: int = 0, times: str = "", weighted: bool = False, direction: str = "in", weights: Sequence[float] = WEIGHTS
) -> Parts:
    """Three types, one of them of a single node and one isolated; five relations, one of them without edges."""
    rng = random.Random(seed)
    num_nodes = {"paper": 40, "author": 25, "venue": 1, "nobody": 3}
    counts = {("author", "writes", "paper"): 150, ("paper", "rev_writes", "author"): 150,
              ("paper", "cites", "paper"): 120, ("paper", "in", "venue"): 60,
              ("author", "knows", "author"): 0}  # fmt: skip
    edges = {(s, r, t): [(rng.randrange(num_nodes[s]), int(rng.random() ** 2 * num_nodes[t])) for _ in range(count)]
             for (s, r, t), count in counts.items()}  # fmt: skip
    graph = Parts(num_nodes, edges, direction=direction)
    if times == "node":
        graph.node_time = {kind: [rng.randrange(12) for _ in range(num_nodes[kind])] for kind in ("paper", "venue")}
    if times == "edge":
        graph.edge_time = {t: [rng.randrange(-5, 12) for _ in pairs] for t, pairs in list(edges.items())[:3]}
    if weighted:
        graph.edge_weight = {t: [rng.choice(weights) for _ in pairs] for t, pairs in list(edges.items())[:3]}
    return graph


@st.composite
def odd_parts(draw: st.DrawFn, weighted: bool = False) -> Parts:
    """Up to three types and four relations, parallel edges and loops as they come; with or without times."""
    kinds = ["a", "b", "c"][: draw(st.integers(1, 3))]
    num_nodes = {kind: draw(st.integers(0, 6)) for kind in kinds}
    kind = st.sampled_from(kinds)
    edges = {}
    for number in range(draw(st.integers(0, 4))):
        source, target = draw(kind), draw(kind)
        pair = st.tuples(st.integers(0, max(num_nodes[source] - 1, 0)), st.integers(0, max(num_nodes[target] - 1, 0)))
        can_have = num_nodes[source] and num_nodes[target]
        edges[source, f"r{number}", target] = draw(st.lists(pair, max_size=12)) if can_have else []
    graph = Parts(num_nodes, edges, direction=draw(st.sampled_from(["in", "out"])))
    time = st.integers(-3, 4) | st.sampled_from([-(2**63), 2**63 - 1])
    times = draw(st.sampled_from(["", "node", "edge"]))
    if times == "node":
        graph.node_time = {k: draw(st.lists(time, min_size=n, max_size=n))
                           for k, n in num_nodes.items() if draw(st.booleans())}  # fmt: skip
    elif times == "edge":
        graph.edge_time = {t: draw(st.lists(time, min_size=len(e), max_size=len(e)))
                           for t, e in edges.items() if draw(st.booleans())}  # fmt: skip
    if weighted:
        weights = draw(st.sampled_from([WEIGHTS, WIDE_WEIGHTS]))
        graph.edge_weight = {t: draw(st.lists(st.sampled_from(weights), min_size=len(e), max_size=len(e)))
                             for t, e in edges.items() if draw(st.booleans())}  # fmt: skip
    return graph


@st.composite
def odd_requests(draw: st.DrawFn, graph: Parts):
    """(seeds, their times, fanouts) for a graph."""
    seeds = {}
    for kind in draw(st.permutations(list(graph.num_nodes))):
        if graph.num_nodes[kind] and draw(st.booleans()):
            seeds[kind] = draw(st.lists(st.integers(0, graph.num_nodes[kind] - 1), max_size=4))
    time = st.integers(-3, 4) | st.sampled_from([-(2**63), 2**63 - 1])
    seed_time = {kind: [draw(time) for _ in ids] for kind, ids in seeds.items()}
    hops = draw(st.integers(0, 3))
    fanouts = {t: draw(st.lists(st.integers(-1, 4), min_size=hops, max_size=hops)) for t in graph.edges}
    return seeds, seed_time, fanouts

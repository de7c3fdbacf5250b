"""Tiny graphs from a number: lists for the reference, and the same as PyG's data."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from tests.reference.general import Parts

NODES, LINKS = "node", ("node", "to", "node")
WEIGHTS = (0.0, 0.25, 1.0, 3.5, 100.0)
# Numbers that every stored dtype holds exactly.
EXACT = (-8.0, -6.0, -3.5, -1.0, -0.25, 0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 7.0)


def make_edges(random: Random, num_sources: int, num_targets: int, most: int) -> list[tuple[int, int]]:
    """Edges with parallel ones, loops, isolated nodes and a hub, as they come."""
    if not num_sources or not num_targets:
        return []
    power = random.choice([1, 1, 3])
    return [(random.randrange(num_sources), int(random.random() ** power * num_targets))
            for _ in range(random.randint(0, most))]  # fmt: skip


def add_times(random: Random, graph: Parts, times: str, always: bool) -> None:
    """Times of nodes or edges; of some types only, unless `always`."""
    if times == "node":
        graph.node_time = {kind: [random.randrange(8) for _ in range(count)]
                           for kind, count in graph.num_nodes.items() if always or random.random() < 0.8}  # fmt: skip
    elif times == "edge":
        graph.edge_time = {kind: [random.randrange(-2, 8) for _ in pairs]
                           for kind, pairs in graph.edges.items() if always or random.random() < 0.8}  # fmt: skip


def sort_by_time(graph: Parts) -> None:
    """Edges in the order of their times, or those of the neighbors that they lead to."""
    for kind, pairs in graph.edges.items():
        own, of_nodes = graph.edge_time.get(kind), graph.node_time.get(kind[0])
        if own is not None:
            order = sorted(range(len(pairs)), key=own.__getitem__)
            graph.edges[kind], graph.edge_time[kind] = [pairs[i] for i in order], [own[i] for i in order]
        elif of_nodes is not None:
            pairs.sort(key=lambda pair, of_nodes=of_nodes: of_nodes[pair[0]])  # type: ignore[misc]


def sort_by_end(graph: Parts, end: int | None) -> None:
    """Edges in the order of their sources (0) or targets (1), each node's as they were; None leaves all."""
    for kind, pairs in graph.edges.items() if end is not None else ():
        order = sorted(range(len(pairs)), key=lambda edge, pairs=pairs: pairs[edge][end])  # type: ignore[misc]
        for values in (graph.edges, graph.edge_time, graph.edge_weight):
            if kind in values:
                values[kind] = [values[kind][edge] for edge in order]  # type: ignore[index]


def make_one_type(random: Random, times: str = "", weighted: bool = False, ordered: bool = False) -> Parts:
    """Up to 14 nodes and 40 edges of one kind."""
    count = random.choice([1, 2, 5, 9, 14])
    edges = make_edges(random, count, count, random.choice([0, 6, 25, 40]))
    if len(edges) == count:
        # PyG could not tell rows of nodes from rows of edges.
        edges.pop()
    graph = Parts({NODES: count}, {LINKS: edges})
    add_times(random, graph, times, True)
    if ordered:
        sort_by_time(graph)
    if weighted:
        graph.edge_weight = {LINKS: [random.choice(WEIGHTS) for _ in graph.edges[LINKS]]}
    return graph


def make_types(random: Random, times: str = "", weighted: bool = False, reverses: bool = True, ordered: bool = False
               ) -> Parts:  # fmt: skip
    """Three types and up to five relations; without `reverses`, one of them has no way back."""
    counts = {kind: random.randint(1, 7) for kind in ("a", "b", "c")}
    names = [("a", "writes", "b"), ("b", "rev_writes", "a"), ("b", "cites", "b")]
    names += random.sample([("a", "knows", "a"), ("a", "likes", "b")], random.randint(0, 1 if reverses else 2))
    if not reverses:
        names.append(("c", "in", "a"))
    if not reverses or random.random() < 0.5:
        random.shuffle(names)
    if reverses:
        names = [name for name in names if name[1] != "likes"]
    graph = Parts(counts, {name: make_edges(random, counts[name[0]], counts[name[2]], 14) for name in names})
    add_times(random, graph, times, False)
    if ordered:
        sort_by_time(graph)
    if weighted:
        graph.edge_weight = {kind: [random.choice(WEIGHTS) for _ in pairs]
                             for kind, pairs in graph.edges.items() if random.random() < 0.8}  # fmt: skip
    return graph


def make_rows(random: Random, count: int, width: int) -> Tensor:
    """Rows of numbers that are exact in every stored dtype."""
    return torch.tensor([[random.choice(EXACT) for _ in range(width)] for _ in range(count)]).view(count, width)


def to_edge_index(pairs: list[tuple[int, int]], dtype: torch.dtype = torch.int64) -> Tensor:
    """Edges as PyG lists them, `[2, E]`."""
    return torch.tensor(pairs, dtype=dtype).reshape(-1, 2).t().contiguous()


def to_data(random: Random, graph: Parts, dtype: torch.dtype = torch.int64) -> Data:
    """The graph of one type with rows that are stored narrower, labels, and rows of edges."""
    (count,), (pairs,) = graph.num_nodes.values(), graph.edges.values()
    data = Data(edge_index=to_edge_index(pairs, dtype), num_nodes=count)
    data.x, data.y = make_rows(random, count, 5), torch.tensor([random.randrange(9) for _ in range(count)])
    data.edge_attr = torch.arange(len(pairs)).view(-1, 1) + torch.arange(3) / 4
    for name, parts, kind in (("time", graph.node_time, torch.int64), ("when", graph.edge_time, torch.int64),
                              ("weight", graph.edge_weight, torch.float32)):  # fmt: skip
        for values in parts.values():
            data[name] = torch.tensor(values, dtype=kind)
    return data


def to_hetero(random: Random, graph: Parts, dtype: torch.dtype = torch.int64) -> HeteroData:
    """The graph of several types, the last of them without rows."""
    data = HeteroData()
    for kind, count in graph.num_nodes.items():
        data[kind].num_nodes = count
        if kind != "c":
            data[kind].x = make_rows(random, count, 5)
        if kind in graph.node_time:
            data[kind].time = torch.tensor(graph.node_time[kind], dtype=torch.int64)
    for number, (kind, pairs) in enumerate(graph.edges.items()):
        data[kind].edge_index = to_edge_index(pairs, dtype)
        data[kind].edge_attr = 100 * number + torch.arange(len(pairs))
        if kind in graph.edge_time:
            data[kind].when = torch.tensor(graph.edge_time[kind], dtype=torch.int64)
        if kind in graph.edge_weight:
            data[kind].weight = torch.tensor(graph.edge_weight[kind], dtype=torch.float32)
    return data

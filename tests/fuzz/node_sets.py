"""Batches of sets of nodes with the edges among them, of neighborhoods by PageRank, and of walks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import torch

from pyg_direct import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    Node2Vec,
    PPRLoader,
    RandomNodeLoader,
)
from tests.fuzz.compare import assert_equal, assert_store
from tests.fuzz.graphs import LINKS, NODES, make_one_type, make_types, to_data, to_hetero
from tests.fuzz.neighbors import draw_seeds, rows_of
from tests.fuzz.space import Row, Space
from tests.fuzz.ways import RANKS, loading_options, read_loading, run_epochs, topology_options
from tests.reference.compress import compress
from tests.reference.draw import draw_below
from tests.reference.induced import induce
from tests.reference.ppr import find_neighbors
from tests.reference.walks import walk, weights_of

WALK_START, WALK_ANYWHERE = 2**62 + 4, 2**62 + 5
SAINT = {"GraphSAINTNodeSampler": GraphSAINTNodeSampler, "GraphSAINTEdgeSampler": GraphSAINTEdgeSampler,
         "GraphSAINTRandomWalkSampler": GraphSAINTRandomWalkSampler}  # fmt: skip
Rows = tuple[list[int], list[int], list[int]]


def space(device: str) -> Space:
    """The options of this subject."""
    options = {
        "via": ("RandomNodeLoader", "ClusterLoader", *SAINT, "PPRLoader", "Node2Vec"), "graph": ("data", "hetero"),
        "parts": ("one", "some", "many"), "seeds": ("all", "ids", "mask", "repeated", "empty"),
        "format": ("csr", "csc"), "ranks": tuple(RANKS), **loading_options(device),
        "topology": topology_options(device)["topology"],
        "leave": ("never", "early", "resume"), "epochs": ("1", "3"),
    }  # fmt: skip
    del options["hook"]
    rules = (
        (("ranks", "leave"), lambda ranks, leave: ranks == "none" or leave != "resume"),
        (("via", "graph"), lambda via, graph: via in ("RandomNodeLoader", "ClusterLoader") or graph == "data"),
        (("via", "seeds"), lambda via, seeds: via == "PPRLoader" or seeds == "all"),
        (("via", "format"), lambda via, form: via == "ClusterLoader" or form == "csr"),
        # One batch for two or three processes is none for some of them.
        (("via", "parts", "ranks"), lambda via, parts, ranks: via not in ("RandomNodeLoader", "ClusterLoader")
         or parts != "one" or ranks in ("none", "first")),
        (("via", "order"), lambda via, order: "SAINT" not in via or order == "given"),
        *((("via", name), lambda via, value, only=only: via != "Node2Vec" or value == only)
          for name, only in (("placement", "auto"), ("topology", "same"), ("store", "none"), ("cache", "none"))),
    )  # fmt: skip
    return Space(options, rules)


def run(row: Row, random: Random, device: str) -> int:
    """Check the batches of a loader."""
    options = read_loading({**row, "hook": "none"}, random, device)
    options = {name: value for name, value in options.items() if "transform" not in name}
    options["ranks"], options["uneven"] = RANKS[row["ranks"]]
    if row["via"] == "Node2Vec":
        options = {name: options[name] for name in ("device", "prefetch", "shuffle", "drop_last", "batch_size", "seed",
                                                    "ranks", "uneven")}  # fmt: skip
    else:
        options["topology_placement"] = None if row["topology"] == "same" else row["topology"]
    kinds = {"RandomNodeLoader": run_random, "ClusterLoader": run_clusters, "PPRLoader": run_ppr,
             "Node2Vec": run_walks}  # fmt: skip
    return kinds.get(row["via"], run_saint)(row, random, options)


def draw_graph(row: Row, random: Random, *, needs_edges: bool = False) -> tuple[Any, list[tuple[int, int]], int]:
    """(PyG's data, its edges, its nodes)."""
    while True:
        graph = make_one_type(random)
        if graph.edges[LINKS] or not needs_edges:
            data = to_data(random, graph, getattr(torch, row["ids"]))
            return data, graph.edges[LINKS], graph.num_nodes[NODES]


def compress_by(edges: list[tuple[int, int]], end: int, count: int) -> Rows:
    """Rows of the other ends of edges, by their sources (0) or targets (1)."""
    return compress([pair[end] for pair in edges], [pair[1 - end] for pair in edges], count)


def list_rows(rows: Rows) -> list[list[int]]:
    """The neighbors of each node."""
    indptr, indices, _ = rows
    return [indices[begin:end] for begin, end in pairwise(indptr)]


def expect(data: Any, rows: Rows, nodes: list[int]) -> dict[str, Any]:
    """What a batch of these nodes holds: their rows, and the edges among them, node after node."""
    found = induce(*rows, nodes)
    edge_ids = [edge for _, _, edge in found]
    return {**rows_of(data, nodes, ("edge_index", "num_nodes", "edge_attr")),
            **rows_of(data, edge_ids, ("edge_index", "num_nodes", "x", "y")), "num_nodes": len(nodes),
            "edge_index": [[source for source, _, _ in found], [target for _, target, _ in found]]}  # fmt: skip


def run_random(row: Row, random: Random, options: dict[str, Any]) -> int:
    """Parts of all nodes, in the order of the epoch."""
    if row["graph"] == "hetero":
        data, total, check_nodes = draw_types(row, random)
    else:
        data, edges, total = draw_graph(row, random)
    parts = {"one": 1, "some": random.randint(1, total), "many": total + random.randint(0, 3)}[row["parts"]]

    def check(batch: Any, positions: list[int], key: int) -> None:
        if row["graph"] == "hetero":
            check_nodes(batch, positions)
        else:
            assert_store("batch", batch, expect(data, compress_by(edges, 1, total), positions))

    own = {name: value for name, value in options.items() if name != "batch_size"}
    counted = {**options, "batch_size": math.ceil(total / parts)}
    return run_epochs(lambda: RandomNodeLoader(data, parts, **own), row, random, total, counted, check)


def draw_types(row: Row, random: Random) -> tuple[Any, int, Callable[[Any, list[int]], None]]:
    """(a graph with types, its nodes, what checks a batch of some of them, numbered type after type)."""
    graph = make_types(random)
    data, sizes = to_hetero(random, graph, getattr(torch, row["ids"])), graph.num_nodes
    begins = dict(zip(sizes, [sum(list(sizes.values())[:place]) for place in range(len(sizes))], strict=True))

    def check(batch: Any, nodes: list[int]) -> None:
        own = {kind: [node - begins[kind] for node in nodes if 0 <= node - begins[kind] < sizes[kind]]
               for kind in sizes}  # fmt: skip
        for kind, nodes in own.items():
            expected = {**rows_of(data[kind], nodes, ("num_nodes",)), "num_nodes": len(nodes)}
            assert_store(kind, batch[kind], {**expected, **({} if "num_nodes" in data[kind] else {"num_nodes": None})})
        for kind, pairs in graph.edges.items():
            sources, targets = own[kind[0]], own[kind[2]]
            found = [(sources.index(pair[0]), targets.index(pair[1]), edge) for edge, pair in enumerate(pairs)
                     if pair[0] in sources and pair[1] in targets]  # fmt: skip
            found.sort(key=lambda edge: edge[1])
            ids, ends = [edge for _, _, edge in found], [[edge[end] for edge in found] for end in (0, 1)]
            expected = {**rows_of(data[kind], ids, ("edge_index",)), "edge_index": ends}
            assert_store(str(kind), batch[kind], expected)

    return data, sum(sizes.values()), check


class Clusters(ClusterData):
    """Clusters that are given, of which some are empty."""

    def __init__(self, data: Any, given: list[int], num_parts: int, sparse_format: str) -> None:
        self._given = torch.tensor(given, dtype=torch.int64)
        super().__init__(data, num_parts, log=False, sparse_format=sparse_format)

    def _metis(self, edge_index: Any, num_nodes: int) -> Any:
        return self._given


def run_clusters(row: Row, random: Random, options: dict[str, Any]) -> int:
    """Clusters that are given, each node after the other."""
    if row["graph"] == "hetero":
        data, count, check_nodes = draw_types(row, random)
    else:
        data, _, count = draw_graph(row, random, needs_edges=True)
        data.edge_index = data.edge_index.long()
    parts = {"one": 1, "some": random.randint(1, count), "many": count + random.randint(0, 3)}[row["parts"]]
    given = [random.randrange(parts) for _ in range(count)]
    clusters = Clusters(data, given, parts, row["format"])
    partition = clusters.partition
    nodes_of, begins = partition.node_perm.tolist(), partition.partptr.tolist()
    rows = partition.indptr.tolist(), partition.index.tolist(), partition.edge_perm.tolist()

    def check(batch: Any, positions: list[int], key: int) -> None:
        places = [place for position in positions for place in range(begins[position], begins[position + 1])]
        if row["graph"] == "hetero":
            check_nodes(batch, [nodes_of[place] for place in places])
            return
        found = induce(*rows, places)
        ends = [[source for source, _, _ in found], [target for _, target, _ in found]]
        expected = {**rows_of(data, [nodes_of[place] for place in places], ("edge_index", "num_nodes", "edge_attr")),
                    **rows_of(data, [edge for _, _, edge in found], ("edge_index", "num_nodes", "x", "y")),
                    "num_nodes": len(places), "edge_index": ends if row["format"] == "csc" else ends[::-1]}  # fmt: skip
        assert_store("batch", batch, expected)

    return run_epochs(lambda: ClusterLoader(clusters, **options), row, random, parts, options, check)


def run_saint(row: Row, random: Random, options: dict[str, Any]) -> int:
    """Nodes that are drawn for each batch."""
    data, edges, count = draw_graph(row, random, needs_edges=True)
    rows = compress_by(edges, 1, count)
    in_order = [edges[edge] for edge in rows[2]]
    steps, size = {"one": 3, "some": 4, "many": 7}[row["parts"]], random.randint(1, 6)
    length = random.randint(0, 4)
    entering = [sum(target == node for _, target in edges) for node in range(count)]
    leaving = [sum(source == node for source, _ in edges) for node in range(count)]
    weights = [entering[source] + leaving[target] for source, target in in_order]
    # Where no edge leads on, all are equally likely.
    weights = weights if any(weights) else [1] * len(edges)

    def pick(total: int) -> int:
        """The edge that a draw among all weights falls on."""
        for place, weight in enumerate(weights):
            total -= weight
            if total < 0:
                return place
        raise AssertionError

    def draw_nodes(key: int) -> set[int]:
        if row["via"] == "GraphSAINTNodeSampler":
            return {in_order[draw_below(key, item, 0, len(edges))][0] for item in range(size)}
        if row["via"] == "GraphSAINTEdgeSampler":
            return {node for item in range(size) for node in in_order[pick(draw_below(key, item, 0, sum(weights)))]}
        forward = list_rows(compress_by(edges, 0, count))
        return {node for item in range(size)
                for node in walk(forward, draw_below(key, item, WALK_START, count), length, (1, 1, 1), key,
                                 item)}  # fmt: skip

    def check(batch: Any, positions: list[int], key: int) -> None:
        assert_store("batch", batch, expect(data, rows, sorted(draw_nodes(key))))

    own = {name: value for name, value in options.items() if name not in ("shuffle", "drop_last", "batch_size")}
    drawn = {"batch_size": size, "num_steps": steps, "log": False, **own}
    if row["via"] == "GraphSAINTRandomWalkSampler":
        drawn["walk_length"] = length
    return run_epochs(lambda: SAINT[row["via"]](data, **drawn), row, random, steps, {**options, "batch_size": 1}, check)


def run_ppr(row: Row, random: Random, options: dict[str, Any]) -> int:
    """Neighborhoods of seeds."""
    data, edges, count = draw_graph(row, random)
    rows = compress_by(edges, 1, count)
    given, ids = draw_seeds(row, random, count)
    most, alpha = {"one": 1, "some": 3, "many": 20}[row["parts"]], random.choice([0.05, 0.2, 0.7])
    walks, length = random.randint(1, 6), random.randint(1, 5)

    def check(batch: Any, positions: list[int], key: int) -> None:
        seeds = [ids[position] for position in positions]
        found = find_neighbors(list_rows(rows), seeds, most, alpha, walks, length, key)
        nodes = seeds + sorted({node for own in found for node, _ in own} - set(seeds))
        pairs = [(nodes.index(node), place) for place, own in enumerate(found) for node, _ in own]
        scores = [score / (walks << 20) for own in found for _, score in own]
        expected = expect(data, rows, nodes)
        more = {"n_id": nodes, "e_id": [edge for _, _, edge in induce(*rows, nodes)], "input_id": positions,
                "batch_size": len(seeds), "ppr_edge_index": [[a for a, _ in pairs], [b for _, b in pairs]],
                "ppr_weight": torch.tensor(scores, dtype=torch.float64).float()}  # fmt: skip
        assert_store("batch", batch, {**expected, **more})

    def make() -> Any:
        return PPRLoader(data, most, given, alpha=alpha, num_walks=walks, walk_length=length, **options)

    return run_epochs(make, row, random, len(ids), options, check)


def run_walks(row: Row, random: Random, options: dict[str, Any]) -> int:
    """Windows of walks beside those that lead anywhere."""
    data, edges, count = draw_graph(row, random)
    edges = sorted(edges)
    rows, window = list_rows(compress_by(edges, 0, count)), random.randint(1, 4)
    length, repeats, others = window + random.randint(0, 3), random.randint(1, 2), random.randint(1, 2)
    p, q = random.choice([(1.0, 1.0), (0.25, 4.0), (3.0, 0.5)])
    model = Node2Vec(data.edge_index, 4, length, window, repeats, p, q, others, num_nodes=count)

    def cut(walks: list[list[int]]) -> list[list[int]]:
        return [own[begin : begin + window] for begin in range(length - window + 1) for own in walks]

    def check(batch: Any, positions: list[int], key: int) -> None:
        near = [walk(rows, start, length - 1, weights_of(p, q), key, number)
                for number, start in enumerate(positions * repeats)]  # fmt: skip
        far = [[start, *(draw_below(key, number * (length - 1) + step, WALK_ANYWHERE, count)
                         for step in range(length - 1))]
               for number, start in enumerate(positions * (repeats * others))]  # fmt: skip
        for name, got, expected in zip(("walks", "others"), batch, (cut(near), cut(far)), strict=True):
            assert_equal(name, got, expected)

    return run_epochs(lambda: model.loader(**options), row, random, count, options, check)

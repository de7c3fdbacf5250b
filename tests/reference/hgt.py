"""HGT's sampling (Hu et al., WWW 2020, algorithm 2) node by node; neighbor lists are short enough to be read whole."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.reference.draw import draw
from tests.reference.general import Parts

BUDGET = 2**62 + 3
ONE = 2**40


def sample(graph: Parts, seeds: dict, num_samples: dict, key: int) -> tuple[dict, dict]:
    """(nodes of each type in order, edges of each relation as (source id, target's place, edge id))."""
    starts, start = {}, 0
    for kind, size in graph.num_nodes.items():
        starts[kind] = start
        start += -(-size // 1024) * 1024
    neighbors = {edge_type: {} for edge_type in graph.edges}
    for edge_type, pairs in graph.edges.items():
        for number, (source, target) in enumerate(pairs):
            neighbors[edge_type].setdefault(target, []).append((source, number))
    nodes = {kind: list(seeds.get(kind, [])) for kind in graph.num_nodes}
    front = {kind: sorted(set(ids)) for kind, ids in nodes.items()}
    budget = {kind: {} for kind in graph.num_nodes}
    for layer in range(max(len(own) for own in num_samples.values())):
        for edge_type in graph.edges:
            source_kind, _, target_kind = edge_type
            for target in front[target_kind]:
                listed = neighbors[edge_type].get(target, [])
                for source, _ in listed:
                    if source not in nodes[source_kind]:
                        budget[source_kind][source] = budget[source_kind].get(source, 0) + ONE // len(listed)
        for kind in graph.num_nodes:
            own = num_samples.get(kind, [])
            wanted = own[layer] if layer < len(own) else 0
            scores = {node: score(draw(key, layer, BUDGET), starts[kind] + node, share)
                      for node, share in budget[kind].items()}  # fmt: skip
            front[kind] = sorted(sorted(scores, key=lambda node: (scores[node], node))[:wanted])
            for node in front[kind]:
                del budget[kind][node]
            nodes[kind] += front[kind]
    edges = {edge_type: [(source, place, number) for place, target in enumerate(nodes[edge_type[2]])
                         for source, number in neighbors[edge_type].get(target, []) if source in nodes[edge_type[0]]]
             for edge_type in graph.edges}  # fmt: skip
    return nodes, edges


def score(key: int, item: int, share: int) -> float:
    """-log(uniform) / square of the budget."""
    uniform = float((draw(key, item, 0) >> 12) + Fraction(1, 2)) * 2.0**-52
    return -math.log(uniform) / (share / ONE) ** 2

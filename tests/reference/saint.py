"""GraphSAINT's chances and norms (Zeng et al., ICLR 2020, section 3), as PyG has them, by counting one by one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Edges = Sequence[tuple[int, int]]


def chances_of_sources(edges: Edges) -> dict[int, Fraction]:
    """Chance of each node to be the source of a random edge."""
    chances: dict[int, Fraction] = {}
    for source, _ in edges:
        chances[source] = chances.get(source, Fraction(0)) + Fraction(1, len(edges))
    return chances


def chances_of_edges(edges: Edges) -> list[Fraction]:
    """Chance of each edge, in proportion to the edges that enter its source and those that leave its target."""
    weights = [sum(end == source for _, end in edges) + sum(begin == target for begin, _ in edges)
               for source, target in edges]  # fmt: skip
    # If none leads on to another, all are equally likely.
    weights = weights if any(weights) else [1] * len(edges)
    return [Fraction(weight, sum(weights)) for weight in weights]


def norms(num_nodes: int, edges: Edges, batches: Sequence[tuple[Sequence[int], Sequence[int]]]
          ) -> tuple[list[float], list[float]]:  # fmt: skip
    """(norm of each node, norm of each edge) of batches, each (its nodes, the numbers of its edges)."""
    nodes = [sum(node in own for own, _ in batches) for node in range(num_nodes)]
    counts = [sum(edge in own for _, own in batches) for edge in range(len(edges))]
    of_edges = []
    for (source, _), count in zip(edges, counts, strict=True):
        if count > 0:
            of_edges.append(min(nodes[source] / count, 1e4))
        else:
            of_edges.append(1e4 if nodes[source] > 0 else 0.1)
    return [len(batches) / (count or 0.1) / num_nodes for count in nodes], of_edges

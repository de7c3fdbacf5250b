"""Random walks step by step, and the exact chances of a step of node2vec."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from tests.reference.draw import draw, draw_below

# Of the kernel: tries before all weights are added up, and the bits of a weight.
TRIES, BITS = 24, 31


def weights_of(p: float, q: float) -> tuple[int, int, int]:
    """Weights of the way back, of shared neighbors and of others in units of 2**-31 of the largest."""
    given = 1 / p, 1.0, 1 / q
    return tuple(max(1, round(weight / max(given) * 2**BITS)) for weight in given)


def weigh(rows: Sequence[Sequence[int]], before: int, node: int, weights: tuple[int, int, int]) -> int:
    """Weight of a neighbor on a walk that came from `before`."""
    back, near, far = weights
    return back if node == before else near if node in rows[before] else far


def step(rows: Sequence[Sequence[int]], node: int, before: int | None, weights: tuple[int, int, int], key: int,
         walk: int, number: int) -> int:  # fmt: skip
    """The node behind `node`, which has neighbors."""
    first, row = number * (2 * TRIES + 1), rows[node]
    if before is None or len(set(weights)) == 1:
        return row[draw_below(key, walk, first, len(row))]
    for turn in range(TRIES):
        found = row[draw_below(key, walk, first + 2 * turn, len(row))]
        if draw(key, walk, first + 2 * turn + 1) >> (64 - BITS) < weigh(rows, before, found, weights):
            return found
    left = draw_below(key, walk, first + 2 * TRIES, sum(weigh(rows, before, other, weights) for other in row))
    for found in row:
        left -= weigh(rows, before, found, weights)
        if left < 0:
            return found
    raise AssertionError("the weights add up to more than was drawn")


def walk(rows: Sequence[Sequence[int]], start: int, length: int, weights: tuple[int, int, int], key: int, number: int
         ) -> list[int]:  # fmt: skip
    """The nodes of walk `number`; one without neighbors keeps it."""
    nodes: list[int] = [start]
    for turn in range(length):
        node, before = nodes[-1], nodes[-2] if turn else None
        nodes.append(step(rows, node, before, weights, key, number, turn) if rows[node] else node)
    return nodes


def walk_along(relations: Sequence[Sequence[Sequence[int]]], start: int, key: int, number: int) -> list[int]:
    """The nodes of a walk through the rows of a relation for each step; -1 behind a node without neighbors."""
    nodes = [start]
    for turn, rows in enumerate(relations):
        row = rows[nodes[-1]] if nodes[-1] >= 0 else []
        nodes.append(row[draw_below(key, number, turn * (2 * TRIES + 1), len(row))] if row else -1)
    return nodes


def find_chances(
    rows: Sequence[Sequence[int]], before: int, node: int, p: Fraction, q: Fraction
) -> dict[int, Fraction]:
    """Chance of each neighbor of `node` to be next on a walk that came from `before` (node2vec, section 3.2.2)."""
    weight: dict[int, Fraction] = {}
    for other in rows[node]:
        own = 1 / p if other == before else Fraction(1) if other in rows[before] else 1 / q
        weight[other] = weight.get(other, Fraction(0)) + own
    total = sum(weight.values())
    return {other: own / total for other, own in weight.items()}

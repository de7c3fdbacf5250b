"""Chance of each node to be met by a batch, row by row and edge by edge."""

from __future__ import annotations

from collections.abc import Sequence


def spread_values(indptr: Sequence[int], indices: Sequence[int], values: Sequence[float]) -> list[float]:
    """Sum over the rows that list a node of their values, once for each listing."""
    sums = [0.0] * len(values)
    for row, value in enumerate(values):
        for node in indices[indptr[row] : indptr[row + 1]]:
            sums[node] += value
    return sums


def expected_reads(indptr: Sequence[int], indices: Sequence[int], seeds: Sequence[int], fanouts: Sequence[int],
                   batch_size: int) -> list[float]:  # fmt: skip
    """Chances, with different rows taken as independent; a hop expands the nodes that the last one met first."""
    num_nodes = len(indptr) - 1
    chance = []
    for node in range(num_nodes):
        spared = 1.0
        for seed in seeds:
            if seed == node:
                spared *= 1 - min(1.0, batch_size / len(seeds))
        chance.append(1 - spared)
    return follow_chances([(indptr, indices, 0, fanouts)], chance)


Lists = tuple[Sequence[int], Sequence[int], int, Sequence[int]]


def follow_chances(lists: Sequence[Lists], chance: list[float], replace: bool = False) -> list[float]:
    """Chances of nodes from their chances to be seeds; a list has row offsets, neighbors, its first node, fanouts."""
    expanded = list(chance)
    for hop in range(max(len(fanouts) for *_, fanouts in lists)):
        spared = [1.0] * len(chance)
        for indptr, indices, first, fanouts in lists:
            for row in range(len(indptr) - 1):
                listed = indices[indptr[row] : indptr[row + 1]]
                for node in listed:
                    pick = chance_of_pick(len(listed), fanouts[hop], replace)
                    spared[node] *= 1 - min(expanded[first + row] * pick, 1 - 1e-6)
        after = [1 - (1 - c) * s for c, s in zip(chance, spared, strict=True)]
        expanded = [a - c for a, c in zip(after, chance, strict=True)]
        chance = after
    return chance


def chance_of_pick(degree: int, fanout: int, replace: bool) -> float:
    """Chance of each of so many neighbors to be picked."""
    if fanout < 0:
        return 1.0
    return 1 - (1 - 1 / degree) ** fanout if replace else min(1.0, fanout / degree)


def expected_edge_reads(indptr: Sequence[int], indices: Sequence[int], eid: Sequence[int], seeds: Sequence[int],
                        fanouts: Sequence[int], batch_size: int) -> list[float]:  # fmt: skip
    """Chances of edges by id: a hop that expands a target for the first time picks each of its edges alike."""
    num_nodes, chance = len(indptr) - 1, [0.0] * len(indices)
    met_before = [0.0] * num_nodes
    for hop, fanout in enumerate(fanouts):
        met = expected_reads(indptr, indices, seeds, fanouts[:hop], batch_size)
        for row in range(num_nodes):
            degree = indptr[row + 1] - indptr[row]
            for at in range(indptr[row], indptr[row + 1]):
                chance[eid[at]] += (met[row] - met_before[row]) * (1.0 if fanout < 0 else min(1.0, fanout / degree))
        met_before = met
    return chance

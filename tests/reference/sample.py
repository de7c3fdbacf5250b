"""A whole batch: hop after hop, each node of the frontier with its picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.reference import labor
from tests.reference.neighbor import sample_neighbors
from tests.reference.relabel import relabel


@dataclass
class Batch:
    """As the package's `Sample`, in lists."""

    n_id: list[int]
    edge_index: list[list[int]]
    e_id: list[int]
    node_counts: list[int]
    edge_counts: list[int]


def sample(graph: tuple[list[int], list[int], list[int]], seeds: Sequence[int], fanouts: Sequence[int], key: int,
           replace: bool = False, expand_all: bool = False, sampling: str = "uniform",
           layer_dependency: bool = False) -> Batch:  # fmt: skip
    """The batch of `seeds` under `key`; `graph` is (indptr, indices, edge ids)."""
    indptr, indices, edge_ids = graph
    n_id = list(seeds)
    sources: list[int] = []
    targets: list[int] = []
    e_id: list[int] = []
    node_counts, edge_counts = [len(n_id)], [0]
    begin = 0
    for hop, fanout in enumerate(fanouts):
        if sampling == "labor":
            rows = labor.sample_neighbors(indptr, indices, n_id[begin:], fanout, key, hop, layer_dependency)
        else:
            rows = sample_neighbors(indptr, n_id[begin:], fanout, key, hop, replace)
        targets += [begin + row for row, positions in enumerate(rows) for _ in positions]
        positions = [position for row in rows for position in row]
        e_id += [edge_ids[position] for position in positions]
        # The nodes so far keep their local ids: they are the seeds of the next numbering.
        n_id, local = relabel(n_id, [indices[position] for position in positions])
        sources += local
        begin = 0 if expand_all else node_counts[-1]
        node_counts.append(len(n_id))
        edge_counts.append(len(sources))
    return Batch(n_id, [sources, targets], e_id, node_counts, edge_counts)

"""Parts of a graph by METIS, which cuts few edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pyg_direct.errors import needs_extra
from pyg_direct.progress import show_wait, tell_ahead

# How many times as many nodes as others a part may have before parts are made in another way.
_UNEVEN = 1.1

# Calls read the edges again: (sources, targets), integers over one id space of all node types.
Stream = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]


def assign_by_metis(stream: Stream, num_nodes: int, num_parts: int, seed: int = 0, *, progress: bool = False,
                    recursive: bool = False, what: str = "method='metis'") -> np.ndarray:  # fmt: skip
    """Choose the part of each node, int64 `[N]`, so that few edges are cut, by pymetis; the edges are held in memory.

    Parallel edges and both directions of an edge count as one edge of their number's weight.

    Args:
        num_parts: At least 1.
        what: Name of the feature that needs pymetis, for the message if it is not installed.
    """
    if num_parts == 1 or num_nodes == 0:
        return np.zeros(num_nodes, np.int64)
    if num_parts >= num_nodes:
        # METIS would put all of them into one.
        return np.arange(num_nodes)
    with needs_extra(what, "distributed"):
        import pymetis

    keys = [np.empty(0, np.int64)]
    for sources, targets in stream():
        a, b = sources.astype(np.int64), targets.astype(np.int64)
        kept = a != b
        keys += [a[kept] * num_nodes + b[kept], b[kept] * num_nodes + a[kept]]
    with show_wait("partition: sorting edges for metis", items=sum(map(len, keys)) if progress else 0):
        joined, weights = np.unique(np.concatenate(keys), return_counts=True)
        neighbors = joined % num_nodes
        offsets = np.concatenate([[0], np.cumsum(np.bincount(joined // num_nodes, minlength=num_nodes))])
    # It keeps the lock of the interpreter.
    tell_ahead(f"partition: metis over {num_nodes:,} nodes and {len(joined) // 2:,} edges",
               items=len(joined) if progress else 0)  # fmt: skip
    adjacency = pymetis.CSRAdjacency(offsets, neighbors)
    options = pymetis.Options(seed=seed)
    found = pymetis.part_graph(num_parts, adjacency, eweights=weights, options=options, recursive=recursive)[1]
    parts = np.asarray(found, np.int64)
    if not recursive and not is_even(parts, np.ones(num_nodes), num_parts):
        # With few nodes a part some are left empty, unless parts are halved again and again.
        halved = pymetis.part_graph(num_parts, adjacency, eweights=weights, options=options, recursive=True)[1]
        parts = min(parts, np.asarray(halved, np.int64), key=lambda own: int(np.bincount(own).max()))
    return parts


def is_even(parts: np.ndarray, sizes: np.ndarray, num_parts: int) -> bool:
    """Report whether no part has many more nodes than others."""
    return bool(np.bincount(parts, weights=sizes).max() <= int(_UNEVEN * sizes.sum() / num_parts) + 1)

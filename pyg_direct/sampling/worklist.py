"""The work list of a hop (see `kernels/worklist.py`), from the numbers of nodes to expand."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pyg_direct.kernels.worklist import (
    BATCH,
    COLUMNS,
    EDGES,
    FANOUT,
    FIRST,
    FLAGS,
    FRONT,
    KEY,
    LOCAL,
    RELATION,
    ROWS,
    SOURCE_BASE,
    SOURCE_START,
)


class Layout(Protocol):
    """Where the rows of a graph stand; what a work list reads of a `HeteroTopo`.

    Attributes:
        expanded, reached: Numbers of the types that each relation expands and leads to, int64 `[R]`.
        row_starts, edge_starts: Where the rows and the edges of each relation begin, int64 `[R + 1]`.
        type_starts: Where each type begins in the id space, and the end of the last, int64 `[T + 1]`.
    """

    expanded: np.ndarray
    reached: np.ndarray
    row_starts: np.ndarray
    edge_starts: np.ndarray
    type_starts: np.ndarray


def list_work(topo: Layout, flags: np.ndarray, fanouts: np.ndarray, counts: np.ndarray, known: np.ndarray,
              bases: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(relations with items, the work list) for nodes that stand type after type.

    Args:
        topo: The graph.
        flags: TIMED and WEIGHTED of each relation, int64 `[R]`.
        fanouts: Fanout of each relation, int64 `[R]`.
        counts: Nodes of each type, int64 `[T]`.
        known: Local id of the first of them, int64 `[T]`.
        bases: Where each type begins among the identities, int64 `[T]` at least.
        key: Unsigned 64-bit key of the batch.
    """
    return list_works(topo, flags, fanouts, counts[None], known[None], bases, np.array([key], np.uint64))


def list_works(topo: Layout, flags: np.ndarray, fanouts: np.ndarray, counts: np.ndarray, known: np.ndarray,
               bases: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """As `list_work` for nodes of several batches, batch after batch and type after type within each.

    Args:
        topo, flags, fanouts: As there.
        counts, known: As there, for each batch, int64 `[B, T]`.
        bases: As there, or for each batch, int64 `[B, T]`.
        keys: Key of each batch, uint64 `[B]`.

    Returns:
        (batch * R + relation of each entry, the work list).
    """
    items = counts[:, topo.expanded] * (fanouts != 0)
    found = np.flatnonzero(items)
    batches, relations = np.divmod(found, max(1, items.shape[1]))
    work = np.zeros((len(found) + 1, COLUMNS), np.int64)
    entries, expanded, reached = work[:-1], topo.expanded[relations], topo.reached[relations]
    np.cumsum(items.reshape(-1)[found], out=work[1:, FIRST])
    begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
    entries[:, RELATION], entries[:, FANOUT] = relations, fanouts[relations]
    entries[:, ROWS], entries[:, EDGES] = topo.row_starts[relations], topo.edge_starts[relations]
    entries[:, FRONT], entries[:, LOCAL] = begins[batches, expanded], known[batches, expanded]
    entries[:, FLAGS] = flags[relations]
    entries[:, SOURCE_START] = topo.type_starts[reached]
    entries[:, SOURCE_BASE] = bases[reached] if bases.ndim == 1 else bases[batches, reached]
    entries[:, KEY], entries[:, BATCH] = keys.view(np.int64)[batches], batches
    return found, work.reshape(-1)

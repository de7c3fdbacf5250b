"""Assignment of nodes to parts in one pass over the edges, in memory of order N (METIS is in `graph/metis.py`)."""

from __future__ import annotations

import numpy as np
import torch

from pyg_direct.graph.metis import Stream, is_even
from pyg_direct.kernels.sampling.remote_edges import cluster_edges_cpu, count_ties_cpu
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu

METHODS = ("hash", "range", "metis", "streaming")
# Communities of at most this share of a part's edge ends can be packed into equal parts.
_COMMUNITIES_A_PART = 8
# Passes over the edges that move whole communities to the part with most of their ties, and bytes for the ties.
_REFINEMENTS = 3
_TIES_BYTES = 1 << 30
# Communities processed at a time.
_COMMUNITIES_AT_ONCE = 1 << 20


def assign_by_stream(stream: Stream, num_nodes: int, num_edges: int, num_parts: int) -> np.ndarray:
    """Assign a part to each node, int64 `[N]`: communities found in one pass, packed into parts of equal numbers of
    nodes.

    After the two phases of 2PS (Mayer et al., ICDE 2022): streaming clustering, then clusters to parts, here also by
    their ties. Degrees count only the edges seen so far. If early edges make a community too large, the pass is
    repeated with all degrees, as in 2PS; communities that are still too large are cut. Memory is 32 bytes a node, and
    up to 1 GiB for ties.
    """
    if num_parts == 1 or num_nodes == 0:
        return np.zeros(num_nodes, np.int64)
    degree = np.zeros(num_nodes, np.int64)
    largest = max(1, 2 * num_edges // (num_parts * _COMMUNITIES_A_PART))
    labels, sizes = _cluster(stream, degree, largest)
    parts = _pack(sizes, num_parts)
    if not is_even(parts, sizes, num_parts):
        del labels, sizes, parts
        # Each edge is counted twice in the second pass.
        labels, sizes = _cluster(stream, degree, 2 * largest)
        parts = _pack(sizes, num_parts)
    del degree
    if not is_even(parts, sizes, num_parts):
        sizes = _cut(labels, sizes, -(-num_nodes // (num_parts * _COMMUNITIES_A_PART)))
        parts = _pack(sizes, num_parts)
    # In addition to the ties, up to four words of each community that moves.
    if len(sizes) * (num_parts + 4) * 8 <= _TIES_BYTES:
        for _ in range(_REFINEMENTS):
            ties = np.zeros((len(sizes), num_parts), np.int64)
            table = parts[labels]
            for sources, targets in stream():
                run_cpu(count_ties_cpu, sources, targets, table, labels, cpu_chunks(), ties)
            del table
            _move(parts, sizes, ties)
    return parts[labels]


def _cluster(stream: Stream, degree: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of each node's community, their sizes); `degree` has the counts so far, and is increased."""
    volume, community = degree.copy(), np.arange(len(degree))
    for sources, targets in stream():
        run_cpu(cluster_edges_cpu, sources, targets, degree, community, volume, largest)
    del volume
    return _number(community)


def _cut(labels: np.ndarray, sizes: np.ndarray, most: int) -> np.ndarray:
    """Cut communities of more than `most` nodes into pieces of consecutive nodes, in place; return their sizes."""
    order, place = np.argsort(labels, kind="stable"), np.arange(len(labels))
    place -= np.repeat(np.cumsum(sizes) - sizes, sizes)
    place //= most
    pieces = -(-sizes // most)
    place += np.repeat(np.cumsum(pieces) - pieces, sizes)
    labels[order] = place
    return np.bincount(labels)


def _number(community: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of each node's community among the non-empty ones, in place; their sizes)."""
    counts = np.bincount(community, minlength=len(community))
    sizes = counts[counts > 0]
    # `np.unique` would sort, with five times the memory; communities are named by nodes.
    numbers = np.cumsum(counts > 0, out=counts)
    numbers -= 1
    return np.take(numbers, community, out=community, mode="clip"), sizes


def _pack(sizes: np.ndarray, num_parts: int) -> np.ndarray:
    """Return the part of each community: the largest first, to the part with the fewest nodes."""
    parts, loads = np.zeros(len(sizes), np.int64), np.zeros(num_parts, np.int64)
    several = np.flatnonzero(sizes > 1)
    for item in several[np.argsort(-sizes[several], kind="stable")]:
        part = int(loads.argmin())
        parts[item] = part
        loads[part] += sizes[item]
    single, at = np.flatnonzero(sizes == 1), 0
    # Single nodes fill up the parts to equal loads.
    for part, room in enumerate(np.maximum(-(-sizes.sum() // num_parts) - loads, 0).tolist()):
        parts[single[at : at + room]] = part
        at += room
    return parts


def _move(parts: np.ndarray, sizes: np.ndarray, ties: np.ndarray) -> None:
    """Move communities to the part with most of their ties, as far as it has room; the largest gains first."""
    num_parts = ties.shape[1]
    loads = np.bincount(parts, weights=sizes, minlength=num_parts).astype(np.int64)
    capacity = int(1.03 * sizes.sum() / num_parts) + 1
    found = [
        _find_gains(parts[at : at + _COMMUNITIES_AT_ONCE], ties[at : at + _COMMUNITIES_AT_ONCE], at)
        for at in range(0, len(parts), _COMMUNITIES_AT_ONCE)
    ]
    candidates, gains, best = map(np.concatenate, zip(*found, strict=True))
    for at in torch.from_numpy(gains).argsort(descending=True, stable=True).tolist():
        item, part = candidates[at], best[at]
        if loads[part] + sizes[item] <= capacity:
            loads[parts[item]] -= sizes[item]
            loads[part] += sizes[item]
            parts[item] = part


def _find_gains(parts: np.ndarray, ties: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find (communities with most ties to another part, counted from `first`; their gain in ties; the part)."""
    gains = ties.max(1) - np.take_along_axis(ties, parts[:, None], 1)[:, 0]
    items = np.flatnonzero(gains > 0)
    return items + first, gains[items], ties[items].argmax(1)

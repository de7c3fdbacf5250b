"""Edges that consecutive snapshots share (PiPAD, section 4.1): the union of their edges with a bit for each snapshot.

Both forms of a group of snapshots follow from it: the overlap with the exclusive edges of each snapshot, or the union
under a mask. Unions nest, so that the unions of 2, 4 and 8 snapshots are made one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.errors import ArgumentError
from pyg_direct.kernels.snapshots import overlap as kernels
from pyg_direct.ops.run_kernel import cpu_chunks, run_cpu, threads_for

MAX_GROUP = 8
_KEYS_PER_BLOCK = 2**14
# Keys that one thread merges in the time of an item of other loops.
_KEYS_FOR_AN_ITEM = 8


class EdgeUnion(NamedTuple):
    """Edges of up to eight snapshots.

    Attributes:
        keys: target * N + source of each edge, int64 `[U]`, ascending.
        presence: Bit t is set if snapshot t has the edge, uint8 `[U]`.
        num_snapshots: S.
    """

    keys: Tensor
    presence: Tensor
    num_snapshots: int

    @classmethod
    def of(cls, keys: Tensor) -> EdgeUnion:
        """Make the union of one snapshot with these edges, ascending and unique."""
        return cls(keys, torch.ones(keys.numel(), dtype=torch.uint8, device=keys.device), 1)

    @property
    def full(self) -> int:
        """Return the presence of an edge that all snapshots have."""
        return (1 << self.num_snapshots) - 1

    def has(self, snapshot: int) -> Tensor:
        """Return the edges that a snapshot has as a mask, bool `[U]`."""
        return (self.presence >> snapshot & 1).bool()

    def narrow(self, low: int, high: int) -> EdgeUnion:
        """Return the union of snapshots [low, high) alone."""
        presence = self.presence >> low & ((1 << (high - low)) - 1)
        kept = presence != 0
        return EdgeUnion(self.keys[kept], presence[kept], high - low)


def merge_unions(first: EdgeUnion, second: EdgeUnion) -> EdgeUnion:
    """Merge the unions of two groups of snapshots; the snapshots of `second` follow those in `first`.

    Raises:
        ArgumentError: together they are more than eight.
    """
    total = first.num_snapshots + second.num_snapshots
    if total > MAX_GROUP:
        raise ArgumentError(f"a group must have at most {MAX_GROUP} snapshots, got {total}")
    if first.keys.is_cuda:
        keys, place = torch.unique(torch.cat([first.keys, second.keys]), return_inverse=True)
        # Keys of a list are unique, so adding bits equals setting them.
        bits = torch.cat([first.presence, second.presence << first.num_snapshots])
        presence = torch.zeros(keys.numel(), dtype=torch.uint8, device=keys.device).index_add_(0, place, bits)
        return EdgeUnion(keys, presence, total)
    most = max(first.keys.numel(), second.keys.numel())
    with threads_for(most // _KEYS_FOR_AN_ITEM):
        sizes = torch.empty(max(1, min(4 * cpu_chunks(), most // _KEYS_PER_BLOCK)), dtype=torch.int64, device="cpu")
        run_cpu(kernels.count_union_cpu, first.keys, second.keys, sizes)
        begins = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        num_keys = int(begins[-1])
        keys, presence = (torch.empty(num_keys, dtype=dtype, device="cpu") for dtype in (torch.int64, torch.uint8))
        run_cpu(kernels.merge_union_cpu, first.keys, first.presence, second.keys, second.presence, first.num_snapshots,
                begins, keys, presence)  # fmt: skip
    return EdgeUnion(keys, presence, total)


def unite(snapshots: Sequence[Tensor]) -> EdgeUnion:
    """Return the union of consecutive snapshots.

    Args:
        snapshots: Keys target * N + source of each of 1 to 8 snapshots, int64, ascending and unique, on one device.

    Raises:
        ArgumentError: no snapshot, or more than eight.
    """
    if not 1 <= len(snapshots) <= MAX_GROUP:
        raise ArgumentError(f"snapshots must be 1 to {MAX_GROUP} lists of edges, got {len(snapshots)}")
    unions = [EdgeUnion.of(keys) for keys in snapshots]
    while len(unions) > 1:
        pairs = [merge_unions(*unions[i : i + 2]) for i in range(0, len(unions) - 1, 2)]
        unions = pairs + unions[2 * len(pairs) :]
    return unions[0]


class OverlapStatistics(NamedTuple):
    """Overlap and change of consecutive snapshots.

    Attributes:
        overlap_rate: S * shared edges / edges of all snapshots, in [0, 1]; 1 if there are no edges.
        change_rate: For each snapshot but the first, the share of its edges that the one before lacks.
        num_shared, num_union: Edges that all snapshots have; edges that any snapshot has.
        num_edges: Edges of each snapshot.
    """

    overlap_rate: float
    change_rate: tuple[float, ...]
    num_shared: int
    num_union: int
    num_edges: tuple[int, ...]


def measure_overlap(union: EdgeUnion) -> OverlapStatistics:
    """Measure overlap and change of the snapshots of a union; waits for its device."""
    has = [union.has(t) for t in range(union.num_snapshots)]
    edges = [int(h.sum()) for h in has]
    shared = int((union.presence == union.full).sum())
    kept = [int((before & now).sum()) for before, now in itertools.pairwise(has)]
    change = tuple(1 - k / n if n else 0.0 for k, n in zip(kept, edges[1:], strict=True))
    rate = union.num_snapshots * shared / sum(edges) if sum(edges) else 1.0
    return OverlapStatistics(rate, change, shared, union.keys.numel(), tuple(edges))

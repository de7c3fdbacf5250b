"""Sparse matrices of all snapshots in arrays of one size, so that the matrices of a frame can be moved to fixed places.

Work that is captured once for the places of a frame is replayed for any frame that is moved there. Factors are
multiplied into the weights and diagonals are edges, so that a frame has a single structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.conv_operators import Factors
from pyg_direct.ops.local_ids.build_csr import repeat_each
from pyg_direct.ops.snapshots.aggregate import multiply_slices
from pyg_direct.ops.snapshots.slice_csr import SlicedCSR, count_slices, flag_rows, place_slices

# A snapshot that no frame has: its slices are skipped.
_NONE = 255
# Edges that are sorted at once, unless one snapshot has more. A sort takes some 64 bytes of memory for each edge, and
# on a CPU torch wakes all its threads for more.
_MOST_EDGES = {"cuda": 1 << 22, "cpu": 1 << 15}


class _Side(NamedTuple):
    """Edges of some consecutive snapshots by one of their ends, snapshot after snapshot.

    Attributes:
        times: These snapshots.
        time: Snapshot of each node that has edges, counted from the first of these, int64 `[R]`.
        node: The node, int64 `[R]`.
        counts: Its edges, int64 `[R]`.
        num_slices: Slices of each snapshot.
        others: The other end of each edge, int32 `[E]`.
        weight: fp32 or float64 `[E]`.
    """

    times: range
    time: Tensor
    node: Tensor
    counts: Tensor
    num_slices: list[int]
    others: Tensor
    weight: Tensor

    @classmethod
    def of(cls, times: range, ends: Tensor, num_nodes: int, others: Tensor, weight: Tensor) -> _Side:
        """Make it from ends given as snapshot * N + node, ascending; waits for their device."""
        ids, counts = torch.unique_consecutive(ends, return_counts=True)
        time = torch.div(ids, max(1, num_nodes), rounding_mode="floor")
        num_slices = ids.new_zeros(len(times)).index_add_(0, time, count_slices(counts))
        return cls(times, time, ids - time * num_nodes, counts, num_slices.tolist(), others.int(), weight)


def merge_factors(factors: Factors, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return targets, sources and weights of d + a * W * b, edges by target."""
    keys, weight = factors.keys, factors.weight
    rows = torch.div(keys, max(1, num_nodes), rounding_mode="floor")
    dtype = next((f.dtype for f in (weight, factors.row, factors.diagonal) if f is not None), torch.float32)
    weight = torch.ones(keys.numel(), dtype=dtype, device=keys.device) if weight is None else weight
    weight = weight if factors.row is None else weight * factors.row[rows]
    weight = weight if factors.column is None else weight * factors.column[keys - rows * num_nodes]
    if factors.diagonal is not None:
        loops = torch.arange(num_nodes, device=keys.device) * (num_nodes + 1)
        keys, order = torch.sort(torch.cat([keys, loops]), stable=True)
        weight = torch.cat([weight, factors.diagonal])[order]
        rows = torch.div(keys, max(1, num_nodes), rounding_mode="floor")
    return rows, keys - rows * num_nodes, weight


def _count_edges(factors: Factors, num_nodes: int) -> int:
    return factors.keys.numel() + (0 if factors.diagonal is None else num_nodes)


def _sort(factors: Sequence[Factors], times: range, num_nodes: int) -> tuple[_Side, _Side]:
    """Sort the edges of some snapshots by target and by source."""
    merged = [merge_factors(factors[time], num_nodes) for time in times]
    offsets = [number * num_nodes for number in range(len(times))]
    rows, cols, weight = (torch.cat(parts) for parts in zip(*merged, strict=True))
    targets, sources = (
        torch.cat([ends[side] + offset for ends, offset in zip(merged, offsets, strict=True)]) for side in (0, 1)
    )
    # Edges of a source stay by target.
    sources, order = torch.sort(sources, stable=True)
    return (_Side.of(times, targets, num_nodes, cols, weight),
            _Side.of(times, sources, num_nodes, rows[order], weight[order]))  # fmt: skip


def _cut(counts: Sequence[int], most: int) -> Iterator[range]:
    """Return ranges of consecutive snapshots that have at most `most` edges together; a larger snapshot is alone."""
    first = total = 0
    for time, count in enumerate(counts):
        if time > first and total + count > most:
            yield range(first, time)
            first, total = time, 0
        total += count
    yield range(first, len(counts))


def _spread(counts: Sequence[int], room: int, device: torch.device) -> Tensor:
    """Return the places of concatenated items in segments of one size, by the number of items of each."""
    gaps = [number * room - before for number, before in enumerate(accumulate(counts[:-1], initial=0))]
    total = sum(counts)
    each = torch.tensor([gaps, counts], device=device)
    return torch.arange(total, device=device) + repeat_each(each[0], each[1], total)


class Slots:
    """Matrices of T snapshots, and the matrices of `window` consecutive ones beside each other.

    Args:
        factors: Factors of each snapshot, in order, on the host or the device.
        num_nodes: N.
        window: W, at most `MOST`.
        device: Device of the matrices.

    Attributes:
        num_bytes: Memory of all arrays there.
        sent_bytes: Bytes copied from the host.
    """

    MOST = _NONE

    def __init__(self, factors: Sequence[Factors], num_nodes: int, window: int, device: torch.device) -> None:
        self._counts, times = [_count_edges(f, num_nodes) for f in factors], len(factors)
        made_at = factors[0].keys.device
        parts = _cut(self._counts, _MOST_EDGES[made_at.type])
        sides = list(zip(*(_sort(factors, part, num_nodes) for part in parts), strict=True))
        # One slice more than any snapshot has: it holds the unused edges of a snapshot's segment.
        self._num_slices = max(count for side in sides for part in side for count in part.num_slices) + 1
        self._num_edges = max(self._counts)
        rows = torch.zeros(2, times, self._num_slices, dtype=torch.int32, device=made_at)
        ends = torch.tensor(self._counts, dtype=torch.int32, device=made_at)
        offsets = ends.view(1, times, 1).repeat(2, 1, self._num_slices)
        others = torch.zeros(2, times, self._num_edges, dtype=torch.int32, device=made_at)
        # If all edges of a snapshot have weight one they are fp32 beside float64 ones.
        dtype = max((part.weight.dtype for part in sides[0]), key=lambda dtype: dtype.itemsize)
        weights = torch.zeros(2, times, self._num_edges, dtype=dtype, device=made_at)
        for number, side in enumerate(sides):
            for part in side:
                self._lay(part, rows[number], offsets[number], others[number], weights[number])
        self._all = [array.to(device) for array in (rows, others, weights, offsets)]
        rows, others, weights = (array.new_empty(2, window, array.shape[2]) for array in self._all[:3])
        shape = 2, window * self._num_slices + 1
        offsets = torch.full(shape, window * self._num_edges, dtype=torch.int32, device="cpu")
        self._here = rows, others, weights, offsets.to(device)
        self._base = torch.arange(window, dtype=torch.int32, device=device).unsqueeze(1) * self._num_edges
        snapshot = torch.arange(window, dtype=torch.uint8, device="cpu").unsqueeze(1).repeat(1, self._num_slices)
        snapshot[:, -1] = _NONE
        self._snapshot = snapshot.to(device)
        self.num_nodes, self.window = num_nodes, window
        self.num_bytes = sum(a.numel() * a.element_size() for a in (*self._all, *self._here, self._snapshot))
        self.sent_bytes = self.num_bytes if made_at.type == "cpu" else 0

    def _lay(self, part: _Side, rows: Tensor, offsets: Tensor, others: Tensor, weights: Tensor) -> None:
        """Write edges into the segments of their snapshots."""
        times, device = slice(part.times.start, part.times.stop), rows.device
        segment, first, has_several = place_slices(part.counts, sum(part.num_slices))
        before = torch.tensor([*accumulate(self._counts[times], initial=0)], device=device)
        place = _spread(part.num_slices, self._num_slices, device)
        rows[times].view(-1)[place] = flag_rows(part.node, has_several)[segment]
        offsets[times].view(-1)[place] = (first - before[part.time[segment]]).int()
        place = _spread(self._counts[times], self._num_edges, device)
        others[times].view(-1)[place] = part.others
        weights[times].view(-1)[place] = part.weight.to(weights.dtype)

    @staticmethod
    def count_bytes(factors: Sequence[Factors], num_nodes: int, window: int) -> int:
        """Return an estimate of `num_bytes`."""
        edges = max(_count_edges(f, num_nodes) for f in factors)
        numbers = (number for f in factors for number in (f.weight, f.row, f.column, f.diagonal) if number is not None)
        size = 4 + max((number.element_size() for number in numbers), default=4)
        return 2 * (len(factors) + window) * (size * edges + 9 * (num_nodes + edges // 32))

    def move(self, first: int) -> None:
        """Move snapshots [first, first + W) to their places."""
        part = slice(first, first + self.window)
        *arrays, offsets = self._all
        torch._foreach_copy_(self._here[:3], [array[:, part] for array in arrays])
        places = self._here[3][:, :-1].view(2, self.window, self._num_slices)
        torch.add(offsets[:, part], self._base, out=places)

    def multiply(self, x: Tensor, low: int = 0, transposed: bool = False) -> Tensor:
        """Aggregate rows `[N, W', F]` of the snapshots at places from `low` on, or with `transposed` their gradient."""
        side, part = int(transposed), slice(low, low + x.shape[1])
        rows, others, weights, offsets = self._here
        begin, end = low * self._num_slices, (low + x.shape[1]) * self._num_slices
        piece = SlicedCSR(rows[side, part].view(-1), offsets[side, begin : end + 1], others[side].view(-1),
                          self.num_nodes, self.window, weights[side].view(-1, 1),
                          self._snapshot[part].view(-1))  # fmt: skip
        return multiply_slices(x, piece, low)

"""Sparse matrices of all snapshots in arrays of one size, so that those of a frame can be put at fixed places.

What is captured once for the places of a frame is replayed for any frame that is moved there. Factors are multiplied
into the weights and diagonals are edges, so that one structure is all there is to a frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_direct.dynamic.operator import Factors
from pyg_direct.ops.sliced import SlicedCSR, slice_keys
from pyg_direct.ops.snapshots import multiply_slices

# A snapshot that no frame has: slices of it are passed over.
_NONE = 255


def merge_factors(factors: Factors, num_nodes: int) -> SlicedCSR:
    """d + a * W * b as one structure with weights."""
    keys = factors.keys
    weight = torch.ones(keys.numel(), device=keys.device) if factors.weight is None else factors.weight
    rows = torch.div(keys, max(1, num_nodes), rounding_mode="floor")
    weight = weight if factors.row is None else weight * factors.row[rows]
    weight = weight if factors.column is None else weight * factors.column[keys - rows * num_nodes]
    if factors.diagonal is not None:
        loops = torch.arange(num_nodes, device=keys.device) * (num_nodes + 1)
        keys, order = torch.sort(torch.cat([keys, loops]), stable=True)
        weight = torch.cat([weight, factors.diagonal])[order]
    return slice_keys(keys, num_nodes, weight.unsqueeze(1))


class Slots:
    """The matrices of T snapshots, and those of `window` consecutive ones beside each other.

    Args:
        factors: Of each snapshot, in order, on the host or the device.
        num_nodes: N.
        window: W, at most `MOST`.
        device: Where they lie.

    Attributes:
        num_bytes: Memory of all that lies there.
        sent_bytes: Copied from the host.
    """

    MOST = _NONE

    def __init__(self, factors: Sequence[Factors], num_nodes: int, window: int, device: torch.device) -> None:
        merged = [merge_factors(f, num_nodes) for f in factors]
        both = merged, [matrix.transpose() for matrix in merged]
        # One slice more than any snapshot has: it holds the room that the edges of a snapshot leave.
        self._num_slices = max(m.num_slices for side in both for m in side) + 1
        self._num_edges = max(m.num_edges for m in merged)
        times, made_at = len(merged), merged[0].cols.device
        rows = torch.zeros(2, times, self._num_slices, dtype=torch.int32, device=made_at)
        offsets = torch.empty(2, times, self._num_slices, dtype=torch.int32, device=made_at)
        # Sources of edges, and the bits of their weights.
        edges = torch.zeros(2, 2, times, self._num_edges, dtype=torch.int32, device=made_at)
        for side, matrices in enumerate(both):
            for time, matrix in enumerate(matrices):
                assert matrix.weight is not None, "merged structures have weights"
                rows[side, time, : matrix.num_slices] = matrix.rows
                offsets[side, time, : matrix.num_slices] = matrix.offsets[:-1]
                offsets[side, time, matrix.num_slices :] = matrix.num_edges
                edges[side, 0, time, : matrix.num_edges] = matrix.cols
                edges[side, 1, time, : matrix.num_edges] = matrix.weight.view(-1).view(torch.int32)
        self._all = [array.to(device) for array in (rows, edges, offsets)]
        rows, edges = (array.new_empty(*array.shape[:-2], window, array.shape[-1]) for array in self._all[:2])
        offsets = torch.full((2, window * self._num_slices + 1), window * self._num_edges, dtype=torch.int32)
        self._here = rows, edges, offsets.to(device)
        self._base = torch.arange(window, dtype=torch.int32, device=device).unsqueeze(1) * self._num_edges
        snapshot = torch.arange(window, dtype=torch.uint8).unsqueeze(1).repeat(1, self._num_slices)
        snapshot[:, -1] = _NONE
        self._snapshot = snapshot.to(device)
        self.num_nodes, self.window = num_nodes, window
        self.num_bytes = sum(a.numel() * a.element_size() for a in (*self._all, *self._here, self._snapshot))
        self.sent_bytes = self.num_bytes if made_at.type == "cpu" else 0

    @staticmethod
    def count_bytes(factors: Sequence[Factors], num_nodes: int, window: int) -> int:
        """About as much as `num_bytes` would be."""
        edges = max(f.keys.numel() + (0 if f.diagonal is None else num_nodes) for f in factors)
        return 2 * (len(factors) + window) * (8 * edges + 9 * (num_nodes + edges // 32))

    def move(self, first: int) -> None:
        """Put snapshots [first, first + W) in their places."""
        part = slice(first, first + self.window)
        rows, edges, offsets = self._all
        self._here[0].copy_(rows[:, part])
        self._here[1].copy_(edges[:, :, part])
        places = self._here[2][:, :-1].view(2, self.window, self._num_slices)
        torch.add(offsets[:, part], self._base, out=places)

    def multiply(self, x: Tensor, low: int = 0, transposed: bool = False) -> Tensor:
        """Aggregate rows `[N, W', F]` of the snapshots at places from `low` on, or with `transposed` their gradient."""
        side, part = int(transposed), slice(low, low + x.shape[1])
        rows, edges, offsets = self._here
        begin, end = low * self._num_slices, (low + x.shape[1]) * self._num_slices
        piece = SlicedCSR(rows[side, part].view(-1), offsets[side, begin : end + 1], edges[side, 0].view(-1),
                          self.num_nodes, self.window, edges[side, 1].view(torch.float32).view(-1, 1),
                          self._snapshot[part].view(-1))  # fmt: skip
        return multiply_slices(x, piece, low)

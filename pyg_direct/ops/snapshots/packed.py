"""Structures in few bytes, for sending: edge counts of each row instead of slices, sources in as many bytes as nodes
need.

Slices follow from the number of edges of each row, and only weights other than one are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_direct.ops.snapshots.slice_csr import Arrays, SlicedCSR, slice_counts

_BYTE, _TWO_BYTES, _THREE_BYTES = 2**8, 2**16, 2**24


@dataclass(frozen=True, eq=False)
class PackedCSR(Arrays):
    """Packed form of a `SlicedCSR` for sending.

    Attributes:
        counts: Edges of each row, or of each row in each snapshot if slices belong to snapshots, `[R]`. uint8, int16
            that holds the bits of an unsigned number, or int32.
        segments: Rows (row * S + snapshot) that `counts` belong to, ascending, int32 `[R]`; None if all have a count.
        low: Source of each edge, int32 `[nnz]`; or its lower two bytes, int16.
        high: Third byte of each source, uint8 `[nnz]`; None if there is none, or if `low` has all.
        places, values: Positions of weights other than one, int32, and these weights, of their dtype or uint8, `[k]`;
            `places` is None if `values` has all weights.
        weights: Weights of an edge: 0 if all are one, otherwise 1 or S.
        by_snapshot: True if slices belong to snapshots.
    """

    counts: Tensor
    segments: Tensor | None
    low: Tensor
    high: Tensor | None
    places: Tensor | None
    values: Tensor | None
    weights: int
    presence: Tensor | None
    num_rows: int
    num_snapshots: int
    num_slices: int
    by_snapshot: bool
    long_rows: tuple[int, int] | None

    @classmethod
    def of(cls, piece: SlicedCSR) -> PackedCSR:
        """Pack a structure."""
        segments = piece.segments()
        num_segments = piece.num_rows * (1 if piece.snapshot is None else piece.num_snapshots)
        counts = segments.new_zeros(num_segments).index_add_(0, segments, piece.offsets.diff().long())
        counts, listed = _choose_counts(counts)
        low, high = _split(piece.cols, piece.num_rows)
        places, values = _list_weights(piece.weight)
        return cls(counts, listed, low, high, places, values, 0 if piece.weight is None else piece.weight.shape[1],
                   piece.presence, piece.num_rows, piece.num_snapshots, piece.num_slices, piece.snapshot is not None,
                   piece.long_rows)  # fmt: skip

    def unpack(self) -> SlicedCSR:
        """Unpack the structure on the same device, without a wait for a GPU."""
        counts = _widen(self.counts).long()
        segments = self.segments
        segments = torch.arange(counts.numel(), device=counts.device) if segments is None else segments.long()
        cols = _widen(self.low) if self.high is None else _widen(self.low) | self.high.int() << 16
        return slice_counts(segments, counts, self.num_slices, cols, self.num_rows, self.num_snapshots,
                            self._make_weight(cols.numel()), self.by_snapshot, self.presence,
                            self.long_rows)  # fmt: skip

    def _make_weight(self, num_edges: int) -> Tensor | None:
        values = self.values
        if values is not None and values.dtype == torch.uint8:
            values = values.float()
        if values is None or self.places is None:
            return None if values is None else values.view(num_edges, self.weights)
        ones = values.new_ones(num_edges * self.weights)
        return ones.scatter_(0, self.places.long(), values).view(num_edges, self.weights)

    @property
    def num_edges(self) -> int:
        """Number of edges held."""
        return self.low.numel()

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.low.device

    @property
    def is_pinned(self) -> bool:
        """Report whether all of its arrays lie in page-locked memory."""
        return all(tensor.numel() == 0 or tensor.is_pinned() for tensor in self.list_arrays().values())

    def to(self, device: torch.device, non_blocking: bool = False) -> PackedCSR:
        """Copy to a device; return self if it is there."""
        return self if self.device == device else self.copy_arrays(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedCSR:
        """Return a copy in page-locked memory."""
        return self.copy_arrays(Tensor.pin_memory)

    def record_stream(self, stream: Any) -> None:
        """Keep freed memory until the work that a GPU stream has at that time is done."""
        for tensor in self.list_arrays().values():
            tensor.record_stream(stream)


def _choose_counts(counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the counts of all segments, or of non-empty segments with their numbers, whichever takes fewer bytes."""
    packed = _narrow(counts)
    has = counts.nonzero().squeeze(1)
    if has.numel() * (packed.element_size() + 4) >= packed.numel() * packed.element_size():
        return packed, None
    return packed[has], has.int()


def _narrow(numbers: Tensor) -> Tensor:
    """Return numbers in [0, 2**31) in the fewest bytes."""
    most = int(numbers.max()) if numbers.numel() else 0
    if most < _BYTE:
        return numbers.to(torch.uint8)
    return numbers.to(torch.int16) if most < _TWO_BYTES else numbers.int()


def _widen(numbers: Tensor) -> Tensor:
    """Return numbers that `_narrow` made as int32; int16 holds unsigned numbers."""
    return numbers.int() & (_TWO_BYTES - 1) if numbers.dtype == torch.int16 else numbers.int()


def _split(cols: Tensor, num_nodes: int) -> tuple[Tensor, Tensor | None]:
    """Split sources into two bytes and a third, or return them unchanged."""
    if num_nodes > _THREE_BYTES:
        return cols, None
    return cols.to(torch.int16), None if num_nodes <= _TWO_BYTES else (cols >> 16).to(torch.uint8)


def is_whole(weight: Tensor) -> bool:
    """Report whether weights are whole numbers that a byte holds; sums of 2**16 of them are exact in fp32."""
    return torch.equal(weight.to(torch.uint8).to(weight.dtype), weight)


def _list_weights(weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return positions and values of weights other than one, or all weights, whichever takes fewer bytes.

    Small whole weights, for example of edges that were given several times, are bytes.
    """
    if weight is None:
        return None, None
    flat = weight.reshape(-1)
    values = flat.to(torch.uint8) if is_whole(flat) else flat
    places = (flat != 1).nonzero().squeeze(1)
    if places.numel() * (values.element_size() + 4) >= values.numel() * values.element_size():
        return None, values
    return places.int(), values[places]

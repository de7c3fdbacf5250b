"""Matrices of snapshots as they are sent: without factors that the device makes of what is sent anyway.

The factors of a normalised convolution of edges without weights, or with small whole ones, as of edges that were given
several times, are the inverse roots of degrees, which are sums over these edges, and its diagonal is their square. That
this is so is seen from the numbers, which must be equal. Small whole weights are sent as bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.ops.sliced import SlicedCSR
from pyg_direct.ops.snapshots import SnapshotMatrices, multiply_snapshots


class Sent(NamedTuple):
    """Matrices on their way.

    Attributes:
        matrices: What is sent.
        makes_row: Whether `row`, which is also `column`, is the inverse root of a node's edges and one.
        makes_diagonal: Whether `diagonal` is the square of `row`.
        is_symmetric: Whether edges by source are known to be those by target, so that nobody asks again.
    """

    matrices: SnapshotMatrices
    makes_row: bool = False
    makes_diagonal: bool = False
    is_symmetric: bool = False

    @classmethod
    def least(cls, matrices: SnapshotMatrices) -> Sent:
        """Without what follows from the rest."""
        row, diagonal = matrices.row, matrices.diagonal
        makes_diagonal = row is not None and diagonal is not None and torch.equal(diagonal, row * row)
        makes_row = (
            row is not None
            and matrices.column is row
            and all(piece.weight is None or _is_whole(piece.weight) for piece in matrices.pieces)
            and torch.equal(row, _make_row(matrices))
        )
        kept = replace(
            matrices,
            pieces=tuple(map(_narrow, matrices.pieces)),
            _by_source=None,
            row=None if makes_row else row,
            column=None if makes_row else matrices.column,
            diagonal=None if makes_diagonal else diagonal,
        )
        return cls(kept, makes_row, makes_diagonal)

    @property
    def num_bytes(self) -> int:
        """What is sent."""
        return self.matrices.num_bytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.matrices.device

    def pin_memory(self) -> Sent:
        """A copy in page-locked memory of the host."""
        return self if self.matrices.is_pinned else self._replace(
            matrices=self.matrices.to(torch.device("cpu")).pin_memory()
        )  # fmt: skip

    def to(self, device: torch.device) -> Sent:
        """A copy on a device, or this where it is there; from page-locked memory nobody waits for it."""
        return self._replace(matrices=self.matrices.to(device, non_blocking=True))

    def record_stream(self, stream: Any) -> None:
        """As of a tensor."""
        self.matrices.record_stream(stream)

    def complete(self) -> SnapshotMatrices:
        """The matrices with all factors, where they are."""
        made = self.matrices
        if any(piece.weight is not None and piece.weight.dtype == torch.uint8 for piece in made.pieces):
            made = replace(made, pieces=tuple(map(_widen, made.pieces)))
        if self.makes_row:
            row = _make_row(made)
            made = replace(made, row=row, column=row)
        if self.makes_diagonal:
            assert made.row is not None, "a diagonal is left out for what rows are scaled with"
            made = replace(made, diagonal=made.row * made.row)
        return replace(made, _by_source=made.pieces) if self.is_symmetric else made


def _make_row(matrices: SnapshotMatrices) -> Tensor:
    """(1 + edges of each node in each snapshot) ** -0.5, fp32 `[N, S]`; numbers of edges are exact to 2**24."""
    bare = replace(matrices, row=None, column=None, diagonal=None)
    ones = torch.ones(bare.num_nodes, bare.num_snapshots, 1, device=bare.device)
    return (multiply_snapshots(ones, bare).squeeze(2) + 1).pow(-0.5)


def _is_whole(weight: Tensor) -> bool:
    """Whether weights are whole numbers that a byte holds; sums of 2**16 of them are exact."""
    return torch.equal(weight.to(torch.uint8).to(weight.dtype), weight)


def _narrow(piece: SlicedCSR) -> SlicedCSR:
    """A structure with its weights as bytes, where they can be."""
    weight = piece.weight
    return piece if weight is None or not _is_whole(weight) else replace(piece, weight=weight.to(torch.uint8))


def _widen(piece: SlicedCSR) -> SlicedCSR:
    """A structure with its weights as fp32."""
    return piece if piece.weight is None else replace(piece, weight=piece.weight.float())

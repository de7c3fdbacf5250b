"""Matrices of snapshots as they are sent: packed, and without factors that the device makes of what is sent anyway.

The factors of a normalised convolution of edges without weights, or with small whole ones, as of edges that were given
several times, are the inverse roots of degrees, which are sums over these edges, and its diagonal is their square. That
this is so is seen from the numbers, which must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_direct.ops.packed import PackedCSR, is_whole
from pyg_direct.ops.snapshots import SnapshotMatrices, multiply_snapshots


@dataclass(frozen=True, eq=False)
class Sent:
    """Matrices on their way.

    Attributes:
        pieces: Their structures.
        row, diagonal: As of `SnapshotMatrices`; None too where the device makes them.
        column: Likewise; None where it is `row`.
        num_nodes, num_snapshots, transpose: As of `SnapshotMatrices`.
        makes_row: Whether `row` is the inverse root of a node's edges and one.
        makes_diagonal: Whether `diagonal` is the square of `row`.
        is_alike: Whether `column` is `row`.
        is_symmetric: Whether edges by source are known to be those by target, so that nobody asks again.
    """

    pieces: tuple[PackedCSR, ...]
    row: Tensor | None
    column: Tensor | None
    diagonal: Tensor | None
    num_nodes: int
    num_snapshots: int
    transpose: str
    makes_row: bool
    makes_diagonal: bool
    is_alike: bool
    is_symmetric: bool = False

    @classmethod
    def of(cls, matrices: SnapshotMatrices) -> Sent:
        """Without what follows from the rest."""
        row, diagonal, is_alike = matrices.row, matrices.diagonal, matrices.column is matrices.row
        makes_diagonal = row is not None and diagonal is not None and torch.equal(diagonal, row * row)
        makes_row = (
            row is not None
            and row.dtype == torch.float32
            and is_alike
            and all(piece.weight is None or is_whole(piece.weight) for piece in matrices.pieces)
            and torch.equal(row, _make_row(matrices))
        )
        return cls(tuple(map(PackedCSR.of, matrices.pieces)), None if makes_row else row,
                   None if is_alike else matrices.column, None if makes_diagonal else diagonal, matrices.num_nodes,
                   matrices.num_snapshots, matrices.transpose, makes_row, makes_diagonal, is_alike,
                   matrices.is_symmetric)  # fmt: skip

    @property
    def _parts(self) -> tuple[PackedCSR | Tensor, ...]:
        return *self.pieces, *(f for f in (self.row, self.column, self.diagonal) if f is not None)

    @property
    def num_bytes(self) -> int:
        """What is sent."""
        return sum(p.num_bytes if isinstance(p, PackedCSR) else p.numel() * p.element_size() for p in self._parts)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.pieces[0].device

    @property
    def is_pinned(self) -> bool:
        """Whether it lies in page-locked memory."""
        return all(p.is_pinned if isinstance(p, PackedCSR) else p.numel() == 0 or p.is_pinned() for p in self._parts)

    def pin_memory(self) -> Sent:
        """A copy in page-locked memory of the host."""
        if self.is_pinned:
            return self
        return self._copy(lambda part: part.to(torch.device("cpu")).pin_memory())

    def to(self, device: torch.device) -> Sent:
        """A copy on a device, or this where it is there; from page-locked memory nobody waits for it."""
        return self if self.device == device else self._copy(lambda part: part.to(device, non_blocking=True))

    def _copy(self, copy: Callable[[Any], Any]) -> Sent:
        row, column, diagonal = (None if f is None else copy(f) for f in (self.row, self.column, self.diagonal))
        return replace(self, pieces=tuple(map(copy, self.pieces)), row=row, column=column, diagonal=diagonal)

    def record_stream(self, stream: Any) -> None:
        """As of a tensor."""
        for part in self._parts:
            part.record_stream(stream)

    def complete(self) -> SnapshotMatrices:
        """The matrices with all factors, where they are."""
        pieces = tuple(piece.unpack() for piece in self.pieces)
        column = self.row if self.is_alike else self.column
        made = SnapshotMatrices(pieces, self.row, column, self.diagonal, self.num_nodes, self.num_snapshots,
                                self.transpose, pieces if self.is_symmetric else None)  # fmt: skip
        if self.makes_row:
            row = _make_row(made)
            made = replace(made, row=row, column=row)
        if self.makes_diagonal:
            assert made.row is not None, "a diagonal is left out for what rows are scaled with"
            made = replace(made, diagonal=made.row * made.row)
        return made


def _make_row(matrices: SnapshotMatrices) -> Tensor:
    """(1 + edges of each node in each snapshot) ** -0.5, fp32 `[N, S]`; numbers of edges are exact to 2**24."""
    bare = replace(matrices, row=None, column=None, diagonal=None)
    ones = torch.ones(bare.num_nodes, bare.num_snapshots, 1, device=bare.device)
    return (multiply_snapshots(ones, bare).squeeze(2) + 1).pow(-0.5)

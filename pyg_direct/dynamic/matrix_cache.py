"""Matrices of groups of snapshots: on the device while a budget lasts, others only while their snapshots train.

Matrices are sent packed (`Sent`), without the factors that the device can compute from what is sent anyway. This
applies to normalised convolutions of edges without weights, or with small whole weights (edges that were given
several times). Their factors are the inverse roots of degrees, which are sums over these edges, and the diagonal is
the square of a factor. The numbers decide: they must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.copy_stream import Coming, CopyStream
from pyg_direct.dynamic.row_cache import Budget, Candidate
from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices, multiply_snapshots
from pyg_direct.ops.snapshots.packed import PackedCSR, is_whole


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


class MatrixCache:
    """Matrices by key, made when first asked for.

    Args:
        device: Where they are used.
        budget: Of what stays there.
        copies: Brings what was begun before it is asked for.

    Attributes:
        sent_bytes: What sending takes, by key.
        moved_bytes: Copied from host memory to the device so far; on a CPU, what a device of its own would be sent.
    """

    def __init__(self, device: torch.device, budget: Budget, copies: CopyStream) -> None:
        self._device, self._budget, self._copies = device, budget, copies
        self.sent_bytes: dict[Hashable, int] = {}
        self.moved_bytes = 0
        # Those that stay, and what the others are sent of; with a limit all, as one that stays may have to leave.
        self._here: dict[Hashable, SnapshotMatrices] = {}
        self._there: dict[Hashable, Sent] = {}
        # Those that stay packed, which more can, and are unpacked as they are asked for.
        self._packed: dict[Hashable, Sent] = {}
        # Those that the budget has no room for, on the device while their snapshots are being trained on: a frame asks
        # for them forwards and backwards, and so do the next ones.
        self._visiting: dict[Hashable, SnapshotMatrices] = {}
        # Those that were begun to be copied.
        self._coming: dict[Hashable, Coming[Sent]] = {}
        # The snapshots of the frame; None without frames.
        self._visited: range | None = None
        # What each takes on the device, as far as is known, of which snapshots it was asked for, as equal ones share
        # one, and those that were to be kept.
        self._held: dict[Hashable, int] = {}
        self._times: dict[Hashable, set[range]] = {}
        self._asked: dict[Hashable, set[range]] = {}
        # Those that came or were asked for since it was last counted what they take.
        self._used: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Memory of all of them, wherever they stay, each once."""
        away = (sent for key, sent in self._there.items() if key not in self._here)
        return sum(m.num_bytes for m in self._here.values()) + sum(sent.num_bytes for sent in away)

    @property
    def is_pinned(self) -> bool:
        """Whether all that is sent again and again lies in page-locked memory."""
        stay = self._here.keys() | self._packed.keys()
        return all(sent.is_pinned for key, sent in self._there.items() if key not in stay)

    def get(self, key: Hashable, times: range, make: Callable[[], SnapshotMatrices],
            keep: bool = True) -> SnapshotMatrices:  # fmt: skip
        """The matrices on the device; with `keep` they stay where the budget has room.

        Args:
            key: Their name.
            times: Of which snapshots they are.
            make: Makes them, on the host or the device.
            keep: Whether they may be asked for again.
        """
        known = self._times.setdefault(key, set())
        known.add(times)
        if keep:
            self._asked[key] = known
        self._used.add(key)
        if key in self._visiting:
            return self._visiting[key]
        if key in self._here:
            return self._here[key]
        if key not in self._there:
            made = make()
            self._held[key] = made.num_bytes
            if keep and self._budget.limit is None and self._budget.take(made.num_bytes):
                # It will not be sent again.
                self.moved_bytes += made.num_bytes if made.device.type == "cpu" else 0
                self._here[key] = made = made.to(self._device)
                return made
            self._there[key] = sent = Sent.of(made)
            self.sent_bytes[key] = sent.num_bytes
        stays = keep and key not in self._packed and self._budget.take(self._held[key])
        here = self._bring(key, keep and not stays)
        if stays:
            self._here[key] = here
            if self._budget.limit is None:
                del self._there[key]
        else:
            if self._visited is None:
                self._visiting.clear()
            self._visiting[key] = here
        return here

    def prefetch(self, key: Hashable, timeline: Timeline | None = None) -> None:
        """Begin to copy matrices that have been asked for before and are not on the device, beside what it computes."""
        is_there = any(key in some for some in (self._here, self._packed, self._visiting, self._coming))
        if is_there or key not in self._asked or not self._copies.is_apart:
            return
        sent = self._there[key]
        if sent.device.type == "cpu" and self._device.type == "cuda":
            # Else the host would wait, and the copy with it.
            self._there[key] = sent = sent.pin_memory()
        self._coming[key] = self._copies.begin(partial(sent.to, self._device), timeline)

    def _bring(self, key: Hashable, again: bool) -> SnapshotMatrices:
        """A copy on the device of what is elsewhere; `again` tells that it will be sent in every epoch."""
        if key in self._packed:
            return self._packed[key].complete()
        sent = self._there[key]
        is_sent = sent.device.type == "cpu"
        self.moved_bytes += self.sent_bytes[key] if is_sent else 0
        if again and self._device.type == "cuda":
            # Which nobody waits for from page-locked memory.
            self._there[key] = pinned = sent.pin_memory()
            sent = pinned if is_sent else sent
        coming = self._coming.pop(key, None)
        # What was packed or left out is made by the stream that computes.
        return (sent.to(self._device) if coming is None else coming.take(self._device)).complete()

    def drop(self, key: Hashable) -> None:
        """Let matrices go wherever they are, as nobody asks for them again."""
        self._weigh()
        if self._here.pop(key, None) is not None:
            self._budget.used -= self._held[key]
        if self._packed.pop(key, None) is not None:
            self._budget.used -= self.sent_bytes[key]
        known: dict[Hashable, Any]
        for known in (self._there, self._visiting, self._coming, self._times, self._asked, self._held, self.sent_bytes):
            known.pop(key, None)

    def visit(self, times: range) -> None:
        """Say which snapshots a frame has: until the next one, matrices of others leave the device if the budget has no
        room for them.
        """
        self._visited = times
        low, high = min(times[0], times[-1]), max(times[0], times[-1]) + 1
        self._weigh()

        def has(key: Hashable) -> bool:
            return any(seen.start < high and low < seen.stop for seen in self._times[key])

        self._visiting = {key: here for key, here in self._visiting.items() if has(key)}
        # Of a frame that did not follow.
        self._coming = {key: coming for key, coming in self._coming.items() if has(key)}

    def _weigh(self) -> None:
        """Count again what is on the device of those that were used: gradients add edges by source."""
        for key in self._used:
            if key in self._visiting:
                matrices = self._visiting[key]
                for known in (self._there, self._packed):
                    if matrices.is_symmetric and key in known:
                        known[key] = replace(known[key], is_symmetric=True)
            elif key in self._here:
                matrices = self._here[key]
                self._budget.used += matrices.num_bytes - self._held[key]
            else:
                continue
            self._held[key] = matrices.num_bytes
        self._used.clear()

    def list_candidates(self, count_entries: Callable[..., int]) -> list[Candidate]:
        """Those that may stay, packed; `count_entries` tells how often an epoch comes to some snapshots."""
        self._weigh()
        return [
            Candidate(key, self.sent_bytes[key], self.sent_bytes[key] * count_entries(*times))
            for key, times in self._asked.items()
        ]

    def list_unpacked(self, keys: Collection[Hashable], count_entries: Callable[..., int]) -> list[Candidate]:
        """What more those of `keys` take that stay unpacked, and that is then not made anew."""
        sizes = {key: self._held[key] - self.sent_bytes[key] for key in keys}
        return [Candidate(key, size, size * count_entries(*self._asked[key])) for key, size in sizes.items()]

    @property
    def device_bytes(self) -> int:
        """What of the budget those that stay take."""
        return sum(self._held[key] for key in self._here) + sum(self.sent_bytes[key] for key in self._packed)

    def keep_only(self, whole: Collection[Hashable], packed: Collection[Hashable]) -> None:
        """Let all others go, which are sent when they are asked for. Only with a limit."""
        for key in [key for key in self._here if key not in whole]:
            self._visiting[key] = self._here.pop(key)
            self._budget.used -= self._held[key]
            if self._device.type == "cuda":
                self._there[key] = self._there[key].pin_memory()
        for key in [key for key in self._packed if key not in packed]:
            del self._packed[key]
            self._budget.used -= self.sent_bytes[key]

    def bring(self, whole: Collection[Hashable], packed: Collection[Hashable]) -> None:
        """Let these stay; the budget has room for them."""
        for key in whole:
            if key not in self._here:
                visiting = self._visiting.pop(key, None)
                self._here[key] = self._bring(key, False) if visiting is None else visiting
                self._budget.used += self._held[key]
                self._used.add(key)
        for key in packed:
            if key not in self._packed:
                sent = self._there[key]
                self.moved_bytes += self.sent_bytes[key] if sent.device.type == "cpu" else 0
                self._packed[key] = sent.to(self._device)
                self._budget.used += self.sent_bytes[key]


def count_bytes(made: Any) -> int:
    """Memory of tensors and matrices in lists."""
    if isinstance(made, (list, tuple)):
        return sum(map(count_bytes, made))
    return made.num_bytes if isinstance(made, SnapshotMatrices) else made.numel() * made.element_size()

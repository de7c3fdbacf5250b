"""Caches of a sequence: on the device while a budget lasts, other entries in host memory, or only while they train.

`RowCache` holds aggregated features between epochs. Snapshots come in one order, epoch after epoch, so the least
recently used one is used soonest. The rows that were cached first therefore stay. Once the reads of an epoch are known,
`choose_kept` chooses the rows that stay under a limit. They are the rows that save the most bytes of copies per byte
held.

`MatrixCache` holds matrices of groups of snapshots. Matrices are sent packed (`Sent`), without the factors that the
device can compute from the sent arrays. This applies to normalized convolutions of edges without weights, or with small
whole weights (edges that were given several times). Their factors are the inverse roots of degrees, which are sums over
these edges, and the diagonal is the square of a factor. The numbers decide: they must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.overlapped_work import Coming, CopyStream, Timeline
from pyg_direct.ops.snapshots.aggregate import SnapshotMatrices, multiply_snapshots
from pyg_direct.ops.snapshots.slice_csr import PackedCSR, is_whole
from pyg_direct.runtime.cuda.device import free_bytes


class Candidate(NamedTuple):
    """Rows or matrices that may stay on the device.

    Attributes:
        held_bytes: Bytes that it takes there.
        saved_bytes: Bytes that need not be copied in an epoch if it stays.
    """

    key: Any
    held_bytes: int
    saved_bytes: int


def choose_kept(candidates: Iterable[Candidate], num_bytes: int) -> set[Hashable]:
    """Return the keys that stay in `num_bytes`: by bytes saved for each byte held, as long as there is room.

    Among equal ones the first come first. A candidate that saves nothing does not stay.
    """
    useful = [c for c in candidates if c.saved_bytes > 0]
    kept: set[Hashable] = set()
    for candidate in sorted(useful, key=lambda c: -c.saved_bytes / max(1, c.held_bytes)):
        if candidate.held_bytes <= num_bytes:
            num_bytes -= candidate.held_bytes
            kept.add(candidate.key)
    return kept


def choose_among(lists: Sequence[Sequence[Candidate]], num_bytes: int) -> tuple[list[list[Any]], int, int]:
    """Apply `choose_kept` to the candidates of several lists.

    Returns:
        Keys of each list that stay, bytes of room that remain, and bytes that are copied for those that do not stay.
    """
    candidates = [c._replace(key=(number, c.key)) for number, known in enumerate(lists) for c in known]
    chosen = choose_kept(candidates, num_bytes)
    kept = [[c.key for c in known if (number, c.key) in chosen] for number, known in enumerate(lists)]
    room = num_bytes - sum(c.held_bytes for c in candidates if c.key in chosen)
    return kept, room, sum(c.saved_bytes for c in candidates if c.key not in chosen)


def count_entries(frames: Sequence[range]) -> Callable[..., int]:
    """Return a function that counts how often snapshots enter a frame that the frame before lacks. An epoch starts
    again after its last frame.

    Args:
        frames: Snapshots of each frame, in the order of an epoch.

    Returns:
        A function of ranges of snapshots: it counts the frames that have any of all these while the frame before has
        none.
    """
    spans = [(min(f[0], f[-1]), max(f[0], f[-1]) + 1) for f in frames]

    def count(*ranges: range) -> int:
        inside = [any(low < times.stop and times.start < high for times in ranges) for low, high in spans]
        return sum(now and not before for now, before in zip(inside, [inside[-1], *inside], strict=False))

    return count


# Share of the free memory of a GPU that one kept object may take without a limit. Then the share that remains beside
# the passes' need, once that is known.
_SHARE = 0.5
_SPARE = 1 << 30


class Budget:
    """Bytes on the device that caches may take; None limits them only by the free memory of a GPU.

    Attributes:
        need: Bytes that the passes of a frame take beside the kept data; None until they have been measured.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None) -> None:
        self.limit, self.used, self._device = limit, 0, device
        self.need: int | None = None

    def take(self, num_bytes: int) -> bool:
        """Take so many more bytes if they fit; return False if they do not."""
        if self.limit is not None and self.used + num_bytes > self.limit:
            return False
        if self.limit is None and not self.has_room(num_bytes, _SHARE):
            return False
        self.used += num_bytes
        return True

    def has_room(self, num_bytes: int, share: float) -> bool:
        """Report whether a GPU's free memory has room for one more object. It may take a share of the free memory, or
        all but twice the passes' need, once that is known.
        """
        if self._device is None or self._device.type != "cuda":
            return True
        free = free_bytes(torch.cuda.current_device() if self._device.index is None else self._device.index)
        return num_bytes <= (share * free if self.need is None else free - 2 * self.need - _SPARE)


class RowCache:
    """Rows by key; rows beyond the budget are copied to the device when they are fetched, or begun before.

    Attributes:
        moved_bytes: Bytes copied from host memory to the device so far.
    """

    def __init__(self, device: torch.device, budget: Budget, copies: CopyStream | None = None) -> None:
        self.device, self.budget, self.moved_bytes = device, budget, 0
        self._copies = CopyStream(device) if copies is None else copies
        self._here: dict[Hashable, Tensor] = {}
        self._there: dict[Hashable, Tensor] = {}
        self._coming: dict[Hashable, Coming[Tensor]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._here or key in self._there

    def is_here(self, key: Hashable) -> bool:
        """Report whether rows are on the device."""
        return key in self._here

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.numel() * t.element_size() for t in self._here.values())

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory."""
        return sum(t.numel() * t.element_size() for t in self._there.values())

    def store(self, key: Hashable, rows: Tensor) -> None:
        """Keep rows that are on the device."""
        if self.budget.take(rows.numel() * rows.element_size()):
            self._here[key] = rows
        else:
            self._put_there(key, rows)

    def _put_there(self, key: Hashable, rows: Tensor) -> None:
        if self.device.type == "cuda":
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu")
            self._there[key] = host.copy_(rows)
        else:
            self._there[key] = rows

    def list_candidates(self, count_entries: Callable[[Any], int]) -> list[Candidate]:
        """List the rows of each key as candidates; `count_entries` returns how often an epoch copies others."""
        sizes = {key: rows.numel() * rows.element_size() for key, rows in (self._here | self._there).items()}
        return [Candidate(key, size, size * count_entries(key)) for key, size in sizes.items()]

    def keep_only(self, keys: Collection[Hashable]) -> None:
        """Make rows of other keys leave the device."""
        for key in [key for key in self._here if key not in keys]:
            rows = self._here.pop(key)
            self.budget.used -= rows.numel() * rows.element_size()
            self._put_there(key, rows)
            del rows
        if self.device.type == "cuda":
            self._part_from_gone()

    def _part_from_gone(self) -> None:
        """Copy rows that share a block of memory with rows that left: the block would stay as a whole."""
        held: Counter[int] = Counter()
        for rows in self._here.values():
            held[rows.untyped_storage().data_ptr()] += rows.numel() * rows.element_size()
        for key, rows in self._here.items():
            storage = rows.untyped_storage()
            if held[storage.data_ptr()] < storage.nbytes():
                self._here[key] = rows.clone()

    def bring(self, keys: Collection[Hashable]) -> None:
        """Make rows of these keys stay on the device; the budget has room for them."""
        for key in keys:
            if key in self._there:
                self._here[key] = rows = self.fetch(key)
                self.budget.used += rows.numel() * rows.element_size()
                del self._there[key]

    def prefetch(self, key: Hashable, timeline: Timeline | None = None) -> None:
        """Begin to copy rows that are not on the device, in parallel with its computation."""
        if key in self._there and key not in self._coming and self._copies.is_apart:
            copy = partial(self._there[key].to, self.device, non_blocking=True)
            self._coming[key] = self._copies.begin(copy, timeline)

    def fetch(self, key: Hashable) -> Tensor:
        """Return the rows, on the device."""
        if key in self._here:
            return self._here[key]
        host = self._there[key]
        self.moved_bytes += host.numel() * host.element_size()
        if key in self._coming:
            return self._coming.pop(key).take(self.device)
        return host.to(self.device, non_blocking=True)

    def gather(self, keys: Sequence[Hashable]) -> Tensor | None:
        """Gather rows of keys, `[T, ...]`, of which kept ones become parts; None unless all are on the device."""
        if not all(key in self._here for key in keys):
            return None
        together = torch.stack([self._here[key] for key in keys])
        self._here.update(zip(keys, together.unbind(0), strict=True))
        return together


@dataclass(frozen=True, eq=False)
class Sent:
    """Matrices in the form that is sent.

    Attributes:
        row, diagonal: As in `SnapshotMatrices`; also None if the device makes them.
        column: As in `SnapshotMatrices`; None if it is `row`.
        makes_row: True if `row` is the inverse root of a node's edges and one.
        makes_diagonal: True if `diagonal` is the square of `row`.
        is_alike: True if `column` is `row`.
        is_symmetric: True if edges by source are known to equal edges by target, so that this is not tested again.
    """

    pieces: tuple[PackedCSR, ...]
    row: Tensor | None
    column: Tensor | None
    diagonal: Tensor | None
    num_nodes: int
    num_snapshots: int
    makes_row: bool
    makes_diagonal: bool
    is_alike: bool
    is_symmetric: bool = False

    @classmethod
    def of(cls, matrices: SnapshotMatrices) -> Sent:
        """Pack matrices, without arrays that follow from the rest."""
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
                   matrices.num_snapshots, makes_row, makes_diagonal, is_alike,
                   matrices.is_symmetric)  # fmt: skip

    @property
    def _parts(self) -> tuple[PackedCSR | Tensor, ...]:
        return *self.pieces, *(f for f in (self.row, self.column, self.diagonal) if f is not None)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that are sent."""
        return sum(p.num_bytes if isinstance(p, PackedCSR) else p.numel() * p.element_size() for p in self._parts)

    @property
    def device(self) -> torch.device:
        """Device of the arrays."""
        return self.pieces[0].device

    @property
    def is_pinned(self) -> bool:
        """Report whether it lies in page-locked memory."""
        return all(p.is_pinned if isinstance(p, PackedCSR) else p.numel() == 0 or p.is_pinned() for p in self._parts)

    def pin_memory(self) -> Sent:
        """Return a copy in page-locked memory of the host."""
        if self.is_pinned:
            return self
        return self._copy(lambda part: part.to(torch.device("cpu")).pin_memory())

    def to(self, device: torch.device) -> Sent:
        """Copy to a device, without a wait from page-locked memory; return self if it is there."""
        return self if self.device == device else self._copy(lambda part: part.to(device, non_blocking=True))

    def _copy(self, copy: Callable[[Any], Any]) -> Sent:
        row, column, diagonal = (None if f is None else copy(f) for f in (self.row, self.column, self.diagonal))
        return replace(self, pieces=tuple(map(copy, self.pieces)), row=row, column=column, diagonal=diagonal)

    def record_stream(self, stream: Any) -> None:
        """Record a stream as for a tensor."""
        for part in self._parts:
            part.record_stream(stream)

    def complete(self) -> SnapshotMatrices:
        """Return the matrices with all factors, on the same device."""
        pieces = tuple(piece.unpack() for piece in self.pieces)
        column = self.row if self.is_alike else self.column
        made = SnapshotMatrices(pieces, self.row, column, self.diagonal, self.num_nodes, self.num_snapshots,
                                pieces if self.is_symmetric else None)  # fmt: skip
        if self.makes_row:
            row = _make_row(made)
            made = replace(made, row=row, column=row)
        if self.makes_diagonal:
            assert made.row is not None, "a diagonal is left out for what rows are scaled with"
            made = replace(made, diagonal=made.row * made.row)
        return made


def _make_row(matrices: SnapshotMatrices) -> Tensor:
    """Return (1 + edges of each node in each snapshot) ** -0.5, fp32 `[N, S]`; numbers of edges are exact to 2**24."""
    bare = replace(matrices, row=None, column=None, diagonal=None)
    ones = torch.ones(bare.num_nodes, bare.num_snapshots, 1, device=bare.device)
    return (multiply_snapshots(ones, bare).squeeze(2) + 1).pow(-0.5)


class MatrixCache:
    """Matrices by key, made at the first request.

    Args:
        budget: Budget of bytes that stay there.

    Attributes:
        sent_bytes: Bytes of sending, by key.
        moved_bytes: Bytes copied from host memory to the device so far; on a CPU, the bytes that a separate device
            would be sent.
    """

    def __init__(self, device: torch.device, budget: Budget, copies: CopyStream) -> None:
        self._device, self._budget, self._copies = device, budget, copies
        self.sent_bytes: dict[Hashable, int] = {}
        self.moved_bytes = 0
        # Matrices that stay, and packed forms from which the others are sent; with a limit all have one, because any
        # may have to leave.
        self._here: dict[Hashable, SnapshotMatrices] = {}
        self._there: dict[Hashable, Sent] = {}
        # Matrices that stay packed, so that more fit, and are unpacked on request.
        self._packed: dict[Hashable, Sent] = {}
        # Matrices beyond the budget, on the device while their snapshots are being trained on. A frame requests them
        # forward and backward, and so do the next ones.
        self._visiting: dict[Hashable, SnapshotMatrices] = {}
        # Matrices whose copies have begun.
        self._coming: dict[Hashable, Coming[Sent]] = {}
        # The snapshots of the frame; None without frames.
        self._visited: range | None = None
        # Known bytes of each on the device; the snapshots it was requested for, because equal ones share one; and the
        # matrices to be kept.
        self._held: dict[Hashable, int] = {}
        self._times: dict[Hashable, set[range]] = {}
        self._asked: dict[Hashable, set[range]] = {}
        # Matrices that came or were requested since their bytes were last counted.
        self._used: set[Hashable] = set()

    @property
    def num_bytes(self) -> int:
        """Memory of all of them on the host and the device, each once."""
        away = (sent for key, sent in self._there.items() if key not in self._here)
        return sum(m.num_bytes for m in self._here.values()) + sum(sent.num_bytes for sent in away)

    @property
    def is_pinned(self) -> bool:
        """Report whether all matrices that are sent again and again lie in page-locked memory."""
        stay = self._here.keys() | self._packed.keys()
        return all(sent.is_pinned for key, sent in self._there.items() if key not in stay)

    def get(self, key: Hashable, times: range, make: Callable[[], SnapshotMatrices],
            keep: bool = True) -> SnapshotMatrices:  # fmt: skip
        """Return the matrices on the device; with `keep` they stay if the budget has room.

        Args:
            make: Makes them, on the host or the device.
            keep: True if they may be requested again.
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
        """Begin to copy matrices that were requested before and are not on the device, beside its computation."""
        is_there = any(key in some for some in (self._here, self._packed, self._visiting, self._coming))
        if is_there or key not in self._asked or not self._copies.is_apart:
            return
        sent = self._there[key]
        if sent.device.type == "cpu" and self._device.type == "cuda":
            # Otherwise the host would wait, and the copy with it.
            self._there[key] = sent = sent.pin_memory()
        self._coming[key] = self._copies.begin(partial(sent.to, self._device), timeline)

    def _bring(self, key: Hashable, again: bool) -> SnapshotMatrices:
        """Return a copy on the device of matrices that are not there; `again` if every epoch will send it."""
        if key in self._packed:
            return self._packed[key].complete()
        sent = self._there[key]
        is_sent = sent.device.type == "cpu"
        self.moved_bytes += self.sent_bytes[key] if is_sent else 0
        if again and self._device.type == "cuda":
            # Without a wait, because it comes from page-locked memory.
            self._there[key] = pinned = sent.pin_memory()
            sent = pinned if is_sent else sent
        coming = self._coming.pop(key, None)
        # Packed or omitted arrays are made by the computing stream.
        return (sent.to(self._device) if coming is None else coming.take(self._device)).complete()

    def drop(self, key: Hashable) -> None:
        """Drop matrices from host and device, because they are not requested again."""
        self._weigh()
        if self._here.pop(key, None) is not None:
            self._budget.used -= self._held[key]
        if self._packed.pop(key, None) is not None:
            self._budget.used -= self.sent_bytes[key]
        known: dict[Hashable, Any]
        for known in (self._there, self._visiting, self._coming, self._times, self._asked, self._held, self.sent_bytes):
            known.pop(key, None)

    def visit(self, times: range) -> None:
        """Set the snapshots of a frame: matrices of others leave the device if the budget has no room for them."""
        self._visited = times
        low, high = min(times[0], times[-1]), max(times[0], times[-1]) + 1
        self._weigh()

        def has(key: Hashable) -> bool:
            return any(seen.start < high and low < seen.stop for seen in self._times[key])

        self._visiting = {key: here for key, here in self._visiting.items() if has(key)}
        # From a frame that did not follow.
        self._coming = {key: coming for key, coming in self._coming.items() if has(key)}

    def _weigh(self) -> None:
        """Count the bytes on the device again for used matrices: gradients add edges by source."""
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
        """List matrices that may stay, packed; `count_entries` returns how often an epoch comes to some snapshots."""
        self._weigh()
        return [
            Candidate(key, self.sent_bytes[key], self.sent_bytes[key] * count_entries(*times))
            for key, times in self._asked.items()
        ]

    def list_unpacked(self, keys: Collection[Hashable], count_entries: Callable[..., int]) -> list[Candidate]:
        """List the additional bytes of those among `keys` that stay unpacked, and so need not be unpacked again."""
        sizes = {key: self._held[key] - self.sent_bytes[key] for key in keys}
        return [Candidate(key, size, size * count_entries(*self._asked[key])) for key, size in sizes.items()]

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the budget that the staying matrices take."""
        return sum(self._held[key] for key in self._here) + sum(self.sent_bytes[key] for key in self._packed)

    def keep_only(self, whole: Collection[Hashable], packed: Collection[Hashable]) -> None:
        """Drop all other matrices, which are sent on request. Only with a limit."""
        for key in [key for key in self._here if key not in whole]:
            self._visiting[key] = self._here.pop(key)
            self._budget.used -= self._held[key]
            if self._device.type == "cuda":
                self._there[key] = self._there[key].pin_memory()
        for key in [key for key in self._packed if key not in packed]:
            del self._packed[key]
            self._budget.used -= self.sent_bytes[key]

    def bring(self, whole: Collection[Hashable], packed: Collection[Hashable]) -> None:
        """Make these stay; the budget has room for them."""
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
    """Return the memory of tensors and matrices in lists."""
    if isinstance(made, (list, tuple)):
        return sum(map(count_bytes, made))
    return made.num_bytes if isinstance(made, SnapshotMatrices) else made.numel() * made.element_size()

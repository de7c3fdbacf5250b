"""Cache of aggregated features between epochs: on the device while a budget lasts, the rest in host memory.

Snapshots come in one order, epoch after epoch, so the least recently used one is used soonest. The rows that were
cached first therefore stay. Once the reads of an epoch are known, `choose_kept` chooses the rows that stay under a
limit. They are the rows that save the most bytes of copies per byte held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_direct.dynamic.copy_stream import Coming, CopyStream
from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.runtime.cuda.device import free_bytes


class Candidate(NamedTuple):
    """Rows or matrices that may stay on the device.

    Attributes:
        key: Its name.
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
        """List the rows of each key as candidates; `count_entries` returns how often an epoch copies rows of a key that
        do not stay.
        """
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
        """Gather rows of some keys, `[T, ...]`, of which the kept ones become parts; None unless all are on the
        device.
        """
        if not all(key in self._here for key in keys):
            return None
        together = torch.stack([self._here[key] for key in keys])
        self._here.update(zip(keys, together.unbind(0), strict=True))
        return together

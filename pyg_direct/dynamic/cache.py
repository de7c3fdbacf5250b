"""Where aggregated features live between epochs: on the device while a budget lasts, the rest in host memory.

Snapshots come round in one order, epoch after epoch, so that whatever is used longest ago is used soonest: what is kept
stays, the first at first, until it is known what an epoch reads (`limit.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_direct.dynamic.copies import Coming, CopyStream
from pyg_direct.dynamic.limit import Candidate
from pyg_direct.dynamic.timeline import Timeline
from pyg_direct.runtime.device import free_bytes

# Of the free memory of a GPU, what one thing that is kept may take where nobody set a limit, and what is left besides
# what passes need once that is known.
_SHARE = 0.5
_SPARE = 1 << 30


class Budget:
    """Bytes on the device that caches may take; None is without a limit but the free memory of a GPU.

    Attributes:
        need: Bytes that the passes of a frame take beside what is kept; None until they have been measured.
    """

    def __init__(self, limit: int | None = None, device: torch.device | None = None) -> None:
        self.limit, self.used, self._device = limit, 0, device
        self.need: int | None = None

    def take(self, num_bytes: int) -> bool:
        """Whether so many bytes more fit; they are taken then."""
        if self.limit is not None and self.used + num_bytes > self.limit:
            return False
        if self.limit is None and not self.has_room(num_bytes, _SHARE):
            return False
        self.used += num_bytes
        return True

    def has_room(self, num_bytes: int, share: float) -> bool:
        """Whether a GPU's free memory has room for one thing more: a share of it, or all but twice what passes need,
        once that is known.
        """
        if self._device is None or self._device.type != "cuda":
            return True
        free = free_bytes(torch.cuda.current_device() if self._device.index is None else self._device.index)
        return num_bytes <= (share * free if self.need is None else free - 2 * self.need - _SPARE)


class RowCache:
    """Rows by key; those that do not fit the budget are copied to the device when they are fetched, or begun before.

    Attributes:
        moved_bytes: Copied from host memory to the device so far.
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
        """Whether rows are on the device."""
        return key in self._here

    @property
    def device_bytes(self) -> int:
        """Held on the device."""
        return sum(t.numel() * t.element_size() for t in self._here.values())

    @property
    def host_bytes(self) -> int:
        """Held in host memory."""
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
        """Rows of each key may stay; `count_entries` tells how often an epoch copies those of a key that do not."""
        sizes = {key: rows.numel() * rows.element_size() for key, rows in (self._here | self._there).items()}
        return [Candidate(key, size, size * count_entries(key)) for key, size in sizes.items()]

    def keep_only(self, keys: Collection[Hashable]) -> None:
        """Let rows of other keys leave the device."""
        for key in [key for key in self._here if key not in keys]:
            rows = self._here.pop(key)
            self.budget.used -= rows.numel() * rows.element_size()
            self._put_there(key, rows)
            del rows
        if self.device.type == "cuda":
            self._part_from_gone()

    def _part_from_gone(self) -> None:
        """Give rows memory of their own that lie in one piece with some that left: it would stay as a whole."""
        held: Counter[int] = Counter()
        for rows in self._here.values():
            held[rows.untyped_storage().data_ptr()] += rows.numel() * rows.element_size()
        for key, rows in self._here.items():
            storage = rows.untyped_storage()
            if held[storage.data_ptr()] < storage.nbytes():
                self._here[key] = rows.clone()

    def bring(self, keys: Collection[Hashable]) -> None:
        """Let rows of these keys stay on the device; the budget has room for them."""
        for key in keys:
            if key in self._there:
                self._here[key] = rows = self.fetch(key)
                self.budget.used += rows.numel() * rows.element_size()
                del self._there[key]

    def prefetch(self, key: Hashable, timeline: Timeline | None = None) -> None:
        """Begin to copy rows that are not on the device, beside what it computes."""
        if key in self._there and key not in self._coming and self._copies.is_apart:
            copy = partial(self._there[key].to, self.device, non_blocking=True)
            self._coming[key] = self._copies.begin(copy, timeline)

    def fetch(self, key: Hashable) -> Tensor:
        """The rows, on the device."""
        if key in self._here:
            return self._here[key]
        host = self._there[key]
        self.moved_bytes += host.numel() * host.element_size()
        if key in self._coming:
            return self._coming.pop(key).take(self.device)
        return host.to(self.device, non_blocking=True)

    def gather(self, keys: Sequence[Hashable]) -> Tensor | None:
        """Rows of some keys, `[T, ...]`, of which those kept become parts; None unless all are on the device."""
        if not all(key in self._here for key in keys):
            return None
        together = torch.stack([self._here[key] for key in keys])
        self._here.update(zip(keys, together.unbind(0), strict=True))
        return together

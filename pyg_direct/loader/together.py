"""Batches of a general sampler that are sampled in one call: its steps, and what they wait for, are shared by all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyg_direct.loader.drawn import Drawn
from pyg_direct.loader.pipeline import parts_of
from pyg_direct.loader.superbatch import Work, group_work

# Batches that are sampled in one call where nobody said how many, while a group takes no more than so many bytes, or
# than this share of the memory that is free: larger ones take a GPU longer than the host, and leave a CPU's caches.
MOST_BATCHES, GPU_ROOM, HOST_ROOM, _FREE_SHARE = 16, 256 << 20, 128 << 20, 1 / 16


class DrawnGroup(list[Drawn]):
    """The samples of a group, in order, as a pipeline hands them on."""

    def finish(self) -> DrawnGroup:
        """Nothing is left to wait for."""
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that the samples are read on `stream` too."""
        # Most of it is all batches'.
        for value in {id(value): value for sample in self for value in sample.tensors()}.values():
            if value.is_cuda:
                value.record_stream(stream)


class Together:
    """What a pipeline needs to work on groups of batches instead of batches; see `SuperBatch`.

    Args:
        size: Batches of a group.
        ask: Samples the batches of a group.
        read: Reads rows of all of them at once: samples -> a list.
        fetch: Makes a batch: (sample, number, seeds, its item of that list) -> batch.
        alone: Whether groups are made in the caller's thread, and no other's.
    """

    def __init__(self, size: int, ask: Callable[[Sequence[Work]], Sequence[Any]],
                 read: Callable[[Sequence[Drawn]], Sequence[Any]],
                 fetch: Callable[[Drawn, int, Any, Any], Any], alone: bool = False) -> None:  # fmt: skip
        self._size, self._ask, self._read, self._fetch_batch, self._is_alone = size, ask, read, fetch, alone

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """(number of the first, all) of `size` batches at a time; the last group may have fewer."""
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> DrawnGroup:
        """Sample a group."""
        with self._paused():
            return DrawnGroup(map(Drawn, self._ask(work)))

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """The batches of a group."""
        with self._paused():
            parts = zip(samples, work, self._read(samples), strict=True)
            return [self._fetch_batch(sample, *item, read) for sample, item, read in parts]

    def _paused(self) -> AbstractContextManager[None]:
        # Elsewhere the caller's thread may turn the collector off meanwhile, which ending a pause would undo.
        return pause_collector() if self._is_alone else nullcontext()


class GrowingTogether(Together):
    """Groups of 1, 2, 4, 8 and 16 batches, so that the first comes as soon as alone, as long as they are small.

    Args:
        room: The most bytes that a group may take.
        count_free: Bytes of memory that are free.
    """

    def __init__(self, room: int, count_free: Callable[[], int], *args: Any) -> None:
        super().__init__(1, *args)
        self._room, self._count_free, self._most, self._measured = room, count_free, MOST_BATCHES, 0

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """(number of the first, all) of a group."""
        while items := list(islice(work, min(self._size, self._most))):
            yield items[0][0], items
            self._size = min(2 * self._size, MOST_BATCHES)

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """The batches of a group; the first of each size tells how many may come together."""
        batches = super().fetch(samples, number, work)
        if len(batches) <= self._measured:
            return batches
        self._measured = len(batches)
        taken = max(1, count_bytes(batches) // len(batches))
        self._most = max(1, min(self._most, min(self._room, int(_FREE_SHARE * self._count_free())) // taken))
        return batches

    def split(self, work: Sequence[Work]) -> Iterator[tuple[int, list[Work]]]:
        """Each batch of a group as a group of its own, and all from now on: memory has run out."""
        self._most = 1
        return ((item[0], [item]) for item in work)


def count_bytes(batches: Sequence[Any]) -> int:
    """Memory that batches take, what they share once: as they note it (see `note_memory`), else by their tensors."""
    sizes: dict[int, int] = {}
    for batch in batches:
        memory = batch.__dict__.get("_memory")
        values = memory if memory is not None else (v for store in batch.stores for v in store.values())
        for value in values:
            for part in parts_of(value):
                if isinstance(part, Tensor) and part.layout is torch.strided:
                    storage = part.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@contextmanager
def pause_collector() -> Iterator[None]:
    """Keep Python's cyclic collector from running inside.

    It runs for every few hundred objects more, and a group of batches has thousands, none of them garbage: they would
    be taken for old ones, for whose number all objects of the process are searched every few hundred batches.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

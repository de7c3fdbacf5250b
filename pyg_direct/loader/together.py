"""Batches of a general sampler that are sampled in one call: its steps, and what they wait for, are shared by all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pyg_direct.loader.drawn import Drawn
from pyg_direct.loader.superbatch import Work, group_work


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

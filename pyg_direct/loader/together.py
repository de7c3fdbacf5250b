"""Batches of a general sampler that are sampled in one call: its steps, and what they wait for, are shared by all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """

    def __init__(self, size: int, ask: Callable[[Sequence[Work]], Sequence[Any]],
                 read: Callable[[Sequence[Drawn]], Sequence[Any]],
                 fetch: Callable[[Drawn, int, Any, Any], Any]) -> None:  # fmt: skip
        self._size, self._ask, self._read, self._fetch_batch = size, ask, read, fetch

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """(number of the first, all) of `size` batches at a time; the last group may have fewer."""
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> DrawnGroup:
        """Sample a group."""
        return DrawnGroup(map(Drawn, self._ask(work)))

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """The batches of a group."""
        parts = zip(samples, work, self._read(samples), strict=True)
        return [self._fetch_batch(sample, *item, read) for sample, item, read in parts]

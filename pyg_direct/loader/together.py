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
        for sample in self:
            sample.record_stream(stream)


class Together:
    """What a pipeline needs to work on groups of batches instead of batches; see `SuperBatch`.

    Args:
        size: Batches of a group.
        ask: Samples the batches of a group.
        fetch: Makes a batch: (sample, number, seeds) -> batch.
    """

    def __init__(self, size: int, ask: Callable[[Sequence[Work]], Sequence[Any]],
                 fetch: Callable[[Drawn, int, Any], Any]) -> None:  # fmt: skip
        self._size, self._ask, self._fetch_batch = size, ask, fetch

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """(number of the first, all) of `size` batches at a time; the last group may have fewer."""
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> DrawnGroup:
        """Sample a group."""
        return DrawnGroup(map(Drawn, self._ask(work)))

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """The batches of a group."""
        return [self._fetch_batch(sample, *item) for sample, item in zip(samples, work, strict=True)]

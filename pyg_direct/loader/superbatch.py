"""Super-batches: the rows that several batches in a row need are read over the link once, and given to each of them
from GPU memory. The batches are those that would come without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyg_direct.errors import PlacementWarning, warn
from pyg_direct.features.feature import Feature
from pyg_direct.loader.batches import Seeds
from pyg_direct.ops.gather import gather_rows
from pyg_direct.ops.union import Union, unite
from pyg_direct.runtime.device import free_bytes
from pyg_direct.sampling.plan import Pending
from pyg_direct.sampling.sample import Sample

Work = tuple[int, Seeds]
# Share of the free GPU memory that the rows of a group may take, in the union and in its batches.
_FREE_SHARE = 0.25


class SampledGroup(list[Sample]):
    """The samples of a group, in order."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell torch's allocator that the samples are read on `stream` too."""
        for sample in self:
            sample.record_stream(stream)


class PendingGroup:
    """The batches of a group on their way: the first is being sampled, the others follow in `finish`."""

    def __init__(self, submit: Callable[[int, Seeds], Pending | Sample], work: Sequence[Work]) -> None:
        self._submit, self._work = submit, work
        self._first = submit(*work[0])

    def finish(self) -> SampledGroup:
        """Sample the rest and wait for it."""
        pending = [self._first, *(self._submit(*item) for item in self._work[1:])]
        return SampledGroup(one.finish() for one in pending)


class SharedRows:
    """Rows of one feature for all ids of a union."""

    def __init__(self, feature: Feature, union: Union) -> None:
        self._union, self._rows = union, feature[union.ids]

    def read(self, ids: Tensor) -> Tensor:
        """Rows of ids of the union, as the feature would give them."""
        return gather_rows(self._rows, self._union.find(ids))


class SharedFetch:
    """Reads the rows of a group's batches once.

    Args:
        features: The features to share, by name: node attributes with one number of rows.
        most_bytes: GPU memory for the rows of a group; None is a share of what is free at the time. A group that
            needs more is fetched in parts.

    Attributes:
        num_rows_read: Rows read from the features so far, each of which reads as many.
    """

    def __init__(self, features: Mapping[str, Feature], most_bytes: int | None = None) -> None:
        self._features, self._most_bytes = dict(features), most_bytes
        self.num_rows_read = 0

    def __call__(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, dict[str, SharedRows]]]:
        """Each sample with the rows it shares with others, by name; none where it is better off alone."""
        if not self._features or not samples:
            yield from ((sample, {}) for sample in samples)
            return
        shape = next(iter(self._features.values())).shape
        row_bytes = sum(f.shape[1:].numel() * f.dtype.itemsize for f in self._features.values())
        for part in split_group([s.n_id.numel() for s in samples], shape[0], self._find_budget() // max(1, row_bytes)):
            yield from self._fetch(samples[part], shape[0])

    def _find_budget(self) -> int:
        if self._most_bytes is not None:
            return self._most_bytes
        index = next(iter(self._features.values())).device.index
        return int(_FREE_SHARE * free_bytes(index)) if index is not None else 2**62

    def _fetch(self, samples: Sequence[Sample], num_nodes: int) -> Iterator[tuple[Sample, dict[str, SharedRows]]]:
        if len(samples) == 1:
            self.num_rows_read += samples[0].n_id.numel()
            yield samples[0], {}
            return
        try:
            union = unite([sample.n_id for sample in samples], num_nodes)
            shared = {name: SharedRows(feature, union) for name, feature in self._features.items()}
        except torch.OutOfMemoryError:
            shared = None
        if shared is not None:
            self.num_rows_read += union.ids.numel()
            yield from ((sample, shared) for sample in samples)
            return
        warn(
            f"GPU memory ran out for the rows of {len(samples)} batches together; half as many are tried",
            PlacementWarning,
        )
        half = len(samples) // 2
        yield from self._fetch(samples[:half], num_nodes)
        yield from self._fetch(samples[half:], num_nodes)


class SuperBatch:
    """What a pipeline needs to work on groups of batches instead of batches.

    Args:
        size: Batches of a group.
        submit: Starts to sample a batch.
        fetch: Makes a batch: (sample, number, seeds, rows that were read already, by attribute) -> batch.
        shared: Reads the rows of a group.
    """

    def __init__(self, size: int, submit: Callable[[int, Seeds], Pending | Sample],
                 fetch: Callable[[Sample, int, Seeds, Mapping[str, SharedRows]], Any],
                 shared: SharedFetch) -> None:  # fmt: skip
        self._size, self._submit_batch, self._fetch_batch, self._shared = size, submit, fetch, shared

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """(number of the first, all) of `size` batches at a time; the last group may have fewer."""
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> PendingGroup:
        """Start to sample a group."""
        return PendingGroup(self._submit_batch, work)

    def fetch(self, samples: Sequence[Sample], number: int, work: Sequence[Work]) -> list[Any]:
        """The batches of a group."""
        return [self._fetch_batch(sample, *item, rows)
                for item, (sample, rows) in zip(work, self._shared(samples), strict=True)]  # fmt: skip


def group_work(work: Iterator[Work], size: int) -> Iterator[tuple[int, list[Work]]]:
    """(number of the first, all) of `size` batches at a time; the last group may have fewer."""
    while items := list(islice(work, size)):
        yield items[0][0], items


def split_group(counts: Sequence[int], num_nodes: int, most_rows: int) -> Iterator[slice]:
    """Consecutive parts, each with as many batches as `most_rows` hold, in their union and in each of them."""
    begin = total = 0
    for at, count in enumerate(counts):
        total += count
        if at > begin and min(total, num_nodes) + total > most_rows:
            yield slice(begin, at)
            begin, total = at, count
    yield slice(begin, len(counts))

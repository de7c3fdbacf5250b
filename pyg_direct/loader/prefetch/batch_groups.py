"""Super-batches: consecutive batches whose rows are read over the link once, and copied to each from GPU memory.

The batches equal those made without grouping. `Together` samples batches of a general sampler in one call, so they
share its steps and waits.

Of small graphs, a GPU makes up to 16 batches by one launch, on the stream of the program (`GraphGroups`). Such a launch
takes a few microseconds of a GPU, less than events between two streams take the host. So it is not worth
a side stream.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyg_direct.compiler.jit import pause_collector
from pyg_direct.errors import PlacementWarning, warn
from pyg_direct.features.feature import Feature
from pyg_direct.loader.batch_sampler import Seeds
from pyg_direct.loader.prefetch.drivers import hold_for, is_out_of_memory, parts_of
from pyg_direct.ops.local_ids.relabel_nodes import Union, unite
from pyg_direct.ops.rows.gather_rows import gather_rows
from pyg_direct.runtime.cuda.device import free_bytes
from pyg_direct.runtime.cuda.launch import current_stream
from pyg_direct.sampler.keyed_sampler import Drawn
from pyg_direct.sampling.captured_plan import Finished, Pending, PendingOutput
from pyg_direct.sampling.induced_plan import InducedGroup, PendingInducedGroup
from pyg_direct.sampling.sampling_options import Sample

Work = tuple[int, Seeds]
# Share of the free GPU memory for the rows of a group, in the union and in its batches.
_ROWS_SHARE = 0.25


class SampledGroup(list[Sample]):
    """Samples of a group, in order."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark the samples as used on `stream` for torch's allocator."""
        for sample in self:
            sample.record_stream(stream)


class PendingGroup:
    """Pending batches of a group: the first is being sampled, the others follow in `finish`."""

    def __init__(self, submit: Callable[[int, Seeds], Pending | Sample], work: Sequence[Work]) -> None:
        self._submit, self._work = submit, work
        self._first = submit(*work[0])

    def finish(self) -> SampledGroup:
        """Start the remaining batches and wait for all of them."""
        pending = [self._first, *(self._submit(*item) for item in self._work[1:])]
        return SampledGroup(one.finish() for one in pending)


class SharedRows:
    """Rows of one feature for all ids of a union."""

    def __init__(self, feature: Feature, union: Union) -> None:
        self._union, self._rows = union, feature[union.ids]

    def read(self, ids: Tensor) -> Tensor:
        """Return rows of ids of the union, as the feature would."""
        return gather_rows(self._rows, self._union.find(ids))


class SharedFetch:
    """Reader of the rows of a group's batches, each row once.

    Args:
        features: The features to share, by name: node attributes with one number of rows.
        most_bytes: GPU memory for the rows of a group; None is a share of the free memory. A group that needs more is
            fetched in parts.

    Attributes:
        num_rows_read: Rows read from each feature so far.
    """

    def __init__(self, features: Mapping[str, Feature], most_bytes: int | None = None) -> None:
        self._features, self._most_bytes = dict(features), most_bytes
        self.num_rows_read = 0

    def __call__(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, dict[str, SharedRows]]]:
        """Iterate over samples with their shared rows, by name; empty if the batch is faster alone."""
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
        return int(_ROWS_SHARE * free_bytes(index)) if index is not None else 2**62

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
    """Stages of a pipeline that works on groups of batches.

    Args:
        fetch: Makes a batch: (sample, number, seeds, rows that were read already, by attribute) -> batch.
    """

    def __init__(self, size: int, submit: Callable[[int, Seeds], Pending | Sample],
                 fetch: Callable[[Sample, int, Seeds, Mapping[str, SharedRows]], Any],
                 shared: SharedFetch) -> None:  # fmt: skip
        self._size, self._submit_batch, self._fetch_batch, self._shared = size, submit, fetch, shared

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """Group the work: (number of the first batch, all) of `size` batches at a time; the last group may have
        fewer.
        """
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> PendingGroup:
        """Start to sample a group."""
        return PendingGroup(self._submit_batch, work)

    def fetch(self, samples: Sequence[Sample], number: int, work: Sequence[Work]) -> list[Any]:
        """Make the batches of a group."""
        return [self._fetch_batch(sample, *item, rows)
                for item, (sample, rows) in zip(work, self._shared(samples), strict=True)]  # fmt: skip


def group_work(work: Iterator[Work], size: int) -> Iterator[tuple[int, list[Work]]]:
    """Group the work: (number of the first batch, all) of `size` batches at a time; the last group may have fewer."""
    while items := list(islice(work, size)):
        yield items[0][0], items


def split_group(counts: Sequence[int], num_nodes: int, most_rows: int) -> Iterator[slice]:
    """Split a group into consecutive parts; a part's union and its batches together have at most `most_rows` rows."""
    begin = total = 0
    for at, count in enumerate(counts):
        total += count
        if at > begin and min(total, num_nodes) + total > most_rows:
            yield slice(begin, at)
            begin, total = at, count
    yield slice(begin, len(counts))


# Default limits of a group: batches, bytes on a GPU and on a CPU, and share of the free memory. Larger batches take a
# GPU longer than the host, and exceed a CPU's caches.
MOST_BATCHES, GPU_ROOM, HOST_ROOM, _GROUP_SHARE = 16, 256 << 20, 128 << 20, 1 / 16


class DrawnGroup(list[Drawn]):
    """Samples of a group, in order, on their way through a pipeline."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Mark the samples as used on `stream` for torch's allocator."""
        # Batches share most of the memory.
        for value in {id(value): value for sample in self for value in sample.tensors()}.values():
            if value.is_cuda:
                value.record_stream(stream)


class Together:
    """Stages of a pipeline that samples groups of batches together; see `SuperBatch`.

    Args:
        submit: Starts to sample the batches of a group; `finish()` of its result returns their samples.
        read: Reads rows of all of them at once: samples -> a list.
        fetch: Makes a batch: (sample, number, seeds, its item of that list) -> batch.
        alone: True if groups are made only in the caller's thread.
    """

    def __init__(self, size: int, submit: Callable[[Sequence[Work]], PendingOutput | Finished],
                 read: Callable[[Sequence[Drawn]], Sequence[Any]],
                 fetch: Callable[[Drawn, int, Any, Any], Any], alone: bool = False) -> None:  # fmt: skip
        self._size, self._submit_group, self._read, self._fetch_batch, self._is_alone = size, submit, read, fetch, alone

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """Group the work: (number of the first batch, all) of `size` batches at a time; the last group may have
        fewer.
        """
        return group_work(work, self._size)

    def submit(self, number: int, work: Sequence[Work]) -> PendingOutput:
        """Start to sample a group."""
        with self._paused():
            return PendingOutput(self._submit_group(work), lambda outs: DrawnGroup(map(Drawn, outs)))

    def finish(self, pending: PendingOutput, number: int) -> DrawnGroup:
        """Wait for the samples of a group."""
        with self._paused():
            drawn: DrawnGroup = pending.finish()
            return drawn

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """Make the batches of a group."""
        with self._paused():
            parts = zip(samples, work, self._read(samples), strict=True)
            return [self._fetch_batch(sample, *item, read) for sample, item, read in parts]

    def _paused(self) -> AbstractContextManager[None]:
        # A group of batches has thousands of objects, none of them garbage. They would move to the old generation, and
        # its growth triggers a search of all objects every few hundred batches. In other threads, the caller may
        # disable the collector meanwhile, which the end of this pause would undo.
        return pause_collector() if self._is_alone else nullcontext()


class GrowingTogether(Together):
    """Groups of 1, 2, 4, 8 and 16 batches while they are small, so that the first batch has no extra latency.

    Args:
        room: Limit of bytes per group.
        count_free: Counts bytes of free memory.
    """

    def __init__(self, room: int, count_free: Callable[[], int], *args: Any) -> None:
        super().__init__(1, *args)
        self._room, self._count_free, self._most, self._measured = room, count_free, MOST_BATCHES, 0

    def group(self, work: Iterator[Work]) -> Iterator[tuple[int, list[Work]]]:
        """Group the work: (number of the first batch, all) of a group."""
        while items := list(islice(work, min(self._size, self._most))):
            yield items[0][0], items
            self._size = min(2 * self._size, MOST_BATCHES)

    def fetch(self, samples: Sequence[Drawn], number: int, work: Sequence[Work]) -> list[Any]:
        """Make the batches of a group; the first group of each size sets the limit of batches per group."""
        batches = super().fetch(samples, number, work)
        if len(batches) <= self._measured:
            return batches
        self._measured = len(batches)
        taken = max(1, count_bytes(batches) // len(batches))
        self._most = max(1, min(self._most, min(self._room, int(_GROUP_SHARE * self._count_free())) // taken))
        return batches

    def split(self, work: Sequence[Work]) -> Iterator[tuple[int, list[Work]]]:
        """Split a group into single batches, and all later ones, after memory has run out."""
        self._most = 1
        return ((item[0], [item]) for item in work)


class GrowingSets(GrowingTogether):
    """Groups of induced subgraphs, which are not samples with types; see `GrowingTogether`.

    Args:
        most: Limit of batches per group.
        submit: Starts to find the subgraphs of the batches of a group.
        read: Reads rows of all of them at once: subgraphs -> a list.
        fetch: Makes a batch: (subgraph, number, seeds, its item of that list) -> batch.
    """

    def __init__(self, room: int, count_free: Callable[[], int], most: int,
                 submit: Callable[[Sequence[Work]], PendingInducedGroup],
                 read: Callable[[InducedGroup], Sequence[Any]],
                 fetch: Callable[[Sample, int, Any, Any], Any]) -> None:  # fmt: skip
        super().__init__(room, count_free, submit, read, fetch, True)
        self._most, self._submit_sets = min(self._most, most), submit

    def submit(self, number: int, work: Sequence[Work]) -> Any:
        """Start to find the subgraphs of a group."""
        with self._paused():
            return self._submit_sets(work)


def count_bytes(batches: Sequence[Any]) -> int:
    """Count the memory of batches, shared tensors once: as noted by `note_memory`, otherwise by their tensors."""
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


# A batch and the tensors that own its memory.
Made = tuple[Any, list[Tensor]]
# Groups of 1, 4 and 16 batches, so that the first batch of an epoch has no extra latency.
_MOST_GRAPH_BATCHES, _GROWTH = 16, 4
# Limits of a group: bytes on the GPU, where larger batches take longer than the host, and share of the free memory.
_ROOM, _SHARE = 32 << 20, 1 / 16
# Seconds for which free memory is taken to stay: to ask the driver takes as long as to make several batches.
_LASTING = 1.0
# Of each GPU: the time of the last look, and the room that it found.
_ROOMS: dict[int, tuple[float, int]] = {}


class GraphGroups:
    """Iterator over (number, seeds, batch) of an epoch, whose batches are made in groups.

    Batches have memory of their own, and are dropped one by one. An error ahead of time is raised at its batch's turn.

    Args:
        make: Makes the first batches of a group, as many as take so many bytes, and at least one: (work, bytes) ->
            batches.
        device: The GPU.
    """

    def __init__(self, work: Iterator[Work], make: Callable[[Sequence[Work], int], list[Made]], device: torch.device
                 ) -> None:  # fmt: skip
        self._work, self._make, self._device = work, make, device
        self._waiting: deque[Work] = deque()
        self._ready: deque[tuple[Work, Any, list[Tensor]]] = deque()
        self._made_on: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._size, self._most, self._room = 1, _MOST_GRAPH_BATCHES, 0
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[int, Seeds, Any]]:
        return self

    def __next__(self) -> tuple[int, Seeds, Any]:
        """Return the next batch, which is ready on torch's current stream."""
        if not self._ready:
            self._fill()
        (number, seeds), batch, memory = self._ready.popleft()
        if self._device.type == "cuda":
            stream = current_stream(self._device.index)
            if stream is not self._made_on:
                assert self._event is not None
                self._event.wait(stream)
                hold_for(memory, stream)
        return number, seeds, batch

    def _fill(self) -> None:
        """Make the next group."""
        self._draw(min(self._size, self._most))
        if not self._waiting:
            error, self._error = self._error, None
            raise StopIteration if error is None else error
        while True:
            try:
                made = self._make(list(islice(self._waiting, self._most)), self._find_room())
                break
            except Exception as error:
                if min(len(self._waiting), self._most) == 1 or not is_out_of_memory(error):
                    raise
            # Outside of the handler nothing refers to tensors of the failing call.
            self._shrink()
        if self._device.type == "cuda":
            self._made_on = current_stream(self._device.index)
            self._event = torch.cuda.Event()
            self._event.record(self._made_on)
        self._ready += [(self._waiting.popleft(), *own) for own in made]
        self._size = min(self._size * _GROWTH, _MOST_GRAPH_BATCHES)

    def _draw(self, count: int) -> None:
        """Draw work until so many batches wait."""
        while self._error is None and len(self._waiting) < count:
            try:
                item = next(self._work, None)
            except Exception as error:
                self._error = error
                return
            if item is None:
                return
            self._waiting.append(item)

    def _find_room(self) -> int:
        """Find the bytes that a group may take."""
        if self._size > 1 and self._room == 0:
            self._room = _find_room_on(self._device.index) if self._device.type == "cuda" else _ROOM
        return self._room

    def _shrink(self) -> None:
        """Make smaller groups from now on, after memory has run out."""
        count = min(len(self._waiting), self._most)
        self._most = count // 2
        _ROOMS.clear()
        warn(f"GPU memory ran out for {count} batches of graphs together: at most {self._most} are made together from "
             "now on", PlacementWarning)  # fmt: skip
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _find_room_on(index: int) -> int:
    """Find the bytes that a group may take on a GPU."""
    found, room = _ROOMS.get(index, (-math.inf, 0))
    now = time.monotonic()
    if now - found >= _LASTING:
        room = max(1, min(_ROOM, int(_SHARE * free_bytes(index))))
        _ROOMS[index] = now, room
    return room

"""Times of the latest batches of a loader: when each was sampled, fetched, waited for and used.

Nothing of it is there unless `record` of a loader switches it on. Then a stage takes two looks at the clock; on a GPU
also two events, which are read when a report is asked for and which the host never waits for before. It waits for one
event an epoch, on a stream where nothing runs, to know where the GPU's clock stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from pyg_direct.features.feature import Feature
from pyg_direct.graph.placed_topology import ListReads
from pyg_direct.profiling import Origin
from pyg_direct.runtime.cuda.device import resolve_device
from pyg_direct.runtime.cuda.launch import current_stream

# What a batch goes through. It is sampled in two parts: started, and finished once its sizes are known.
START, FINISH, FETCH, WAIT = range(4)
# Names of the ranges in profiles.
RANGES = ("pyg_direct.sample", "pyg_direct.sample", "pyg_direct.fetch", "pyg_direct.wait")
_END = object()


class Stages(NamedTuple):
    """How a loader makes a batch.

    Attributes:
        submit: Starts to sample: (number, what it is made from) -> pending.
        finish: Waits for the sample: (pending, number) -> sample.
        fetch: Makes the batch: (sample, number, what it is made from) -> batch.
    """

    submit: Callable[..., Any]
    finish: Callable[[Any, int], Any]
    fetch: Callable[..., Any]


class BatchTimes:
    """Times of one batch, nanoseconds of `time.perf_counter_ns`.

    Attributes:
        number: Of the batch in its epoch; -1 where batches come from workers.
        spans: (begin, end) of each stage on the host; None for what was not seen.
        events: The same on the GPU; none on a CPU.
        used: When the batch after it was asked for; 0 before that.
        origin: What places events on the clock of the host; None on a CPU.
    """

    __slots__ = ("events", "number", "origin", "spans", "used")

    def __init__(self, number: int, origin: Origin | None) -> None:
        self.number, self.origin, self.used = number, origin, 0
        self.spans: list[tuple[int, int] | None] = [None, None, None, None]
        self.events: dict[int, tuple[Any, Any]] = {}


class Recorder:
    """Keeps the times of the last batches of a loader.

    Args:
        last: Batches to keep.
        device: The device of batches.
        nvtx: Push NVTX ranges too, on a GPU.

    Attributes:
        done: Batches that were handed out, oldest first.
        num_batches: All that were handed out so far.
        features: The features of the loader, by name, which count what they serve.
        reads: What sampling reads of lists in host memory; None where it reads none, or where that is not known.
        list_bytes: Bytes of lists that sampling read over the link so far, by arithmetic.
    """

    def __init__(self, last: int, device: torch.device, nvtx: bool = False) -> None:
        self.done: deque[BatchTimes] = deque(maxlen=last)
        self.num_batches = 0
        self.features: dict[str, Feature] = {}
        self.reads: ListReads | None = None
        self.list_bytes = 0
        self.nvtx = nvtx and device.type == "cuda"
        self._index = resolve_device(device).index if device.type == "cuda" else None
        self._spare: list[Any] = []
        # Nothing else runs on it, so that its events pass at once.
        self._idle = None if self._index is None else torch.cuda.Stream(self._index)

    def begin(self, attributes: Mapping[str, Any], reads: ListReads | None = None) -> EpochRecord:
        """The record of an epoch that begins; features among the attributes that are new count from now on, and lists
        in host memory what `reads` tells.
        """
        self.reads = reads
        before, self.features = self.features, {k: f for k, f in attributes.items() if isinstance(f, Feature)}
        for name, feature in self.features.items():
            if before.get(name) is not feature:
                feature.count_served()
        return EpochRecord(self, None if self._idle is None else Origin.record(self._idle))

    def stop(self) -> None:
        """Let the features count no more."""
        for feature in self.features.values():
            feature.count_served(False)

    def keep(self, times: BatchTimes) -> None:
        """Take in a batch that is handed out; the oldest one goes."""
        if len(self.done) == self.done.maxlen:
            for pair in self.done.popleft().events.values():
                self._spare.extend(pair)
        self.done.append(times)
        self.num_batches += 1

    def count_lists(self, made: Any) -> None:
        """Count what sampling read of lists for a batch, or for those of a group, by the numbers of nodes and edges of
        its hops, which the host knows.
        """
        if self.reads is None:
            return
        for batch in made if isinstance(made, list) else [made]:
            nodes, edges = (getattr(batch, f"num_sampled_{what}", None) for what in ("nodes", "edges"))
            if isinstance(nodes, list) and isinstance(edges, list):
                # Nodes of the last hop are not expanded.
                self.list_bytes += self.reads.sum_bytes(sum(nodes[:-1]), sum(edges))

    def mark(self) -> Any:
        """An event on the current stream of the GPU."""
        assert self._index is not None
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self._index))
        return event


class EpochRecord:
    """Notes the times of one epoch's batches; see `Recorder`."""

    def __init__(self, recorder: Recorder, origin: Origin | None) -> None:
        self._recorder, self._origin, self._nvtx = recorder, origin, recorder.nvtx
        # Batches on their way, in the order in which they are handed out.
        self._open: dict[int, BatchTimes] = {}

    def follow(self, work: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The same (number, what it is made from), noted in this order."""
        for item in work:
            self._open[item[0]] = BatchTimes(item[0], self._origin)
            yield item

    def around(self, stages: Stages) -> Stages:
        """The same stages, timed; any thread may call them."""

        def submit(number: int, item: Any) -> Any:
            return self._time(START, number, stages.submit, number, item)

        def finish(pending: Any, number: int) -> Any:
            return self._time(FINISH, number, stages.finish, pending, number)

        def fetch(sample: Any, number: int, *item: Any) -> Any:
            made = self._time(FETCH, number, stages.fetch, sample, number, *item)
            self._recorder.count_lists(made)
            return made

        return Stages(submit, finish, fetch)

    def _time(self, stage: int, number: int, call: Callable[..., Any], *args: Any) -> Any:
        times = self._open.get(number)
        if times is None:
            return call(*args)
        has_range = self._nvtx or profiler._is_profiler_enabled
        noted = self._enter(stage) if has_range else None
        begin = perf_counter_ns()
        first = self._recorder.mark() if self._origin is not None and stage != FINISH else None
        try:
            return call(*args)
        finally:
            times.spans[stage] = begin, perf_counter_ns()
            if first is not None:
                times.events[stage] = first, self._recorder.mark()
            if has_range:
                self._leave(noted)

    def hand_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches; how long each is waited for and used is noted."""
        times = None
        try:
            while True:
                noted = self._enter(WAIT)
                begin = perf_counter_ns()
                first = None if self._origin is None else self._recorder.mark()
                if times is not None:
                    times.used = begin
                try:
                    batch = next(batches, _END)
                finally:
                    end = perf_counter_ns()
                    last = None if first is None else self._recorder.mark()
                    self._leave(noted)
                if batch is _END:
                    return
                times = self._close()
                times.spans[WAIT] = begin, end
                if first is not None:
                    times.events[WAIT] = first, last
                self._recorder.keep(times)
                yield batch
                # Not kept while the next one is made.
                del batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _close(self) -> BatchTimes:
        number = next(iter(self._open), None)
        return BatchTimes(-1, self._origin) if number is None else self._open.pop(number)

    def _enter(self, stage: int) -> Any:
        """Begin a range, which shows in `torch.profiler` while that runs, and in NVTX if asked for."""
        if self._nvtx:
            torch.cuda.nvtx.range_push(RANGES[stage])
        if not profiler._is_profiler_enabled:
            return None
        noted = profiler.record_function(RANGES[stage])
        noted.__enter__()
        return noted

    def _leave(self, noted: Any) -> None:
        if noted is not None:
            noted.__exit__(None, None, None)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
